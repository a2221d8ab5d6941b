"""DP-FTRL (Kairouz et al. 2021)."""

from flower_dp.methods.method import ONE_NOISED_SUM, Method

METHOD = Method(
    name="dp-ftrl",
    strategy="flower_dp.strategies.dp_ftrl:DPFTRL",
    settings="flower_dp.apps.methods.dp_ftrl",
    defaults={
        **{name: value for name, value in ONE_NOISED_SUM.items() if name != "target_epsilon"},
        "noise_multiplier": 2.0,
        "noise": "blt",
        "num_buffers": 0,
        "bands": 0,
    },
    planner="flower_dp.planning.dp_ftrl",
    audit="flower_dp.audit.methods:correlated",
    cases={
        "dp-ftrl, BLT": {"noise": "blt"},
        "dp-ftrl, BISR": {"noise": "bisr"},
        "dp-ftrl, banded": {"noise": "banded", "bands": 2},
        "dp-ftrl, tree": {"noise": "tree"},
    },
    samplings=("minimum-separation",),
)

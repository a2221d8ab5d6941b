"""DP-FedAvg (McMahan et al. 2018)."""

import math

from flower_dp.methods.method import DISTRIBUTED, ONE_NOISED_SUM, SHARED_NOISE, Method

METHOD = Method(
    name="dp-fedavg",
    strategy="flower_dp.strategies.dp_fedavg:DPFedAvg",
    settings="flower_dp.apps.methods.client_level",
    defaults=ONE_NOISED_SUM,
    audit="flower_dp.audit.methods:noised_sum",
    cases={
        "dp-fedavg": {},
        "dp-fedavg, two rounds": {"noise_multiplier": 0.4 * math.sqrt(2), "rounds": 2},
        "dp-fedavg, stock clients": {"stock": True},
        "dp-fedavg, replace-one": {"noise_multiplier": 0.8, "relation": "replace-one"},
        # Sampling hides more, so an audit needs more runs; those of stock clients are quick.
        "dp-fedavg, Poisson": {"stock": True, "sampling": "poisson", "sampling_rate": 0.5},
        "dp-fedavg, fixed size": {"stock": True, "sampling": "fixed-size", "noise_multiplier": 0.8},
        "dp-fedavg, distributed": DISTRIBUTED,
        "dp-fedavg, distributed, replace-one": DISTRIBUTED | {"noise_multiplier": 2 * SHARED_NOISE, "relation": "replace-one"},
        "dp-fedavg, server adds no shares": DISTRIBUTED | {"server_completes_noise": False},
        "dp-fedavg, adaptive clip": {"clip_quantile": 0.5},
        "dp-fedavg, BLUR and LUS": {"blur_strength": 0.1},
    },
    canaries="clients",
    samplings=("poisson", "fixed-size", "full", "round-robin", "minimum-separation"),
)

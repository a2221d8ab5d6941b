"""DP-FedSAM and DP-FedSAM-top_k (Shi et al. 2023)."""

import math

from flower_dp.methods.method import LARGE_DELTA, ONE_NOISED_SUM, SHARED_NOISE, Method

_LOSSY: dict[str, float | str] = {"noise_multiplier": 0.5 * math.sqrt(2), "delta": LARGE_DELTA}

METHOD = Method(
    name="dp-fedsam",
    strategy="flower_dp.strategies.dp_fedsam:DPFedSAM",
    settings="flower_dp.apps.methods.client_level",
    defaults={**ONE_NOISED_SUM, "sam_radius": 0.05},
    audit="flower_dp.audit.methods:dp_fedsam",
    cases={
        "dp-fedsam": {"noise_multiplier": SHARED_NOISE, "sam_radius": 0.05},
        "dp-fedsam, central": {"placement": "central", "sam_radius": 0.05},
        "dp-fedsam, central top-k": _LOSSY | {"placement": "central", "noise_multiplier": 0.5, "keep_ratio": 0.5},
        # 4,000 trials show 79 +- 8 % of its epsilon, and 12,000 87 +- 3 %.
        "dp-fedsam, top-k of own updates": _LOSSY | {"keep_ratio": 0.5},
        "dp-fedsam, quantized": _LOSSY | {"quantization_levels": 10},
    },
    canaries="clients",
    samplings=("poisson", "fixed-size", "full", "round-robin", "minimum-separation"),
)

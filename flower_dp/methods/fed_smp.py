"""Fed-SMP (Hu et al. 2024)."""

import math

from flower_dp.methods.method import DISTRIBUTED, ONE_NOISED_SUM, SHARED_NOISE, Method

METHOD = Method(
    name="fed-smp",
    strategy="flower_dp.strategies.fed_smp:FedSMP",
    settings="flower_dp.apps.methods.client_level",
    defaults=ONE_NOISED_SUM,
    audit="flower_dp.audit.methods:noised_sum",
    cases={
        "fed-smp, rand-k": DISTRIBUTED | {"keep_ratio": 0.5},
        "fed-smp, top-k, two rounds": DISTRIBUTED
        | {"noise_multiplier": SHARED_NOISE * math.sqrt(2), "rounds": 2, "keep_ratio": 0.5, "mask": "top-k"},
    },
    canaries="clients",
    samplings=("poisson", "fixed-size", "full", "round-robin", "minimum-separation"),
)

"""Fed-SMP (Hu et al. 2024)."""

from flower_dp.methods.method import ONE_NOISED_SUM, Method

METHOD = Method(
    name="fed-smp",
    strategy="flower_dp.strategies.fed_smp:FedSMP",
    settings="flower_dp.apps.methods.client_level",
    defaults=ONE_NOISED_SUM,
    audit="flower_dp.audit.presets:client_level",
    canaries="clients",
    samplings=("poisson", "fixed-size", "full", "round-robin"),
)

"""DP-FedAvg (McMahan et al. 2018)."""

from flower_dp.methods.method import ONE_NOISED_SUM, Method

METHOD = Method(
    name="dp-fedavg",
    strategy="flower_dp.strategies.dp_fedavg:DPFedAvg",
    settings="flower_dp.apps.methods.client_level",
    defaults=ONE_NOISED_SUM,
    audit="flower_dp.audit.presets:client_level",
    canaries="clients",
    samplings=("poisson", "fixed-size", "full", "round-robin"),
)

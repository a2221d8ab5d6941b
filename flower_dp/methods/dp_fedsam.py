"""DP-FedSAM and DP-FedSAM-top_k (Shi et al. 2023)."""

from flower_dp.methods.method import Method

METHOD = Method(
    name="dp-fedsam",
    strategy="flower_dp.strategies.dp_fedsam:DPFedSAM",
    settings="flower_dp.apps.methods.dp_fedsam",
    audit="flower_dp.audit.presets:dp_fedsam",
    canaries="clients",
    samplings=("poisson", "fixed-size", "full", "round-robin"),
)

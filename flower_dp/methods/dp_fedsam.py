"""DP-FedSAM and DP-FedSAM-top_k (Shi et al. 2023)."""

from flower_dp.methods.method import ONE_NOISED_SUM, Method

METHOD = Method(
    name="dp-fedsam",
    strategy="flower_dp.strategies.dp_fedsam:DPFedSAM",
    settings="flower_dp.apps.methods.client_level",
    defaults={**ONE_NOISED_SUM, "sam_radius": 0.05},
    audit="flower_dp.audit.presets:dp_fedsam",
    canaries="clients",
    samplings=("poisson", "fixed-size", "full", "round-robin"),
)

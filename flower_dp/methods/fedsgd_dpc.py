"""FedSGD-DPC, Laplace and Gaussian."""

from flower_dp.methods.method import Method

METHOD = Method(
    name="fedsgd-dpc",
    strategy="flower_dp.strategies.fedsgd_dpc:FedSGDDPC",
    recipe="flower_dp.clients.fedsgd_dpc:FedSGDDPCRecipe",
    settings="flower_dp.apps.methods.fedsgd_dpc",
    planner="flower_dp.planning.fedsgd_dpc",
    audit="flower_dp.audit.presets:fedsgd_dpc",
    samplings=("round-robin",),
    reads=(),
)

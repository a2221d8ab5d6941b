"""FedSGD-DPC, Laplace and Gaussian."""

from flower_dp.methods.method import Method

METHOD = Method(
    name="fedsgd-dpc",
    strategy="flower_dp.strategies.fedsgd_dpc:FedSGDDPC",
    recipe="flower_dp.clients.fedsgd_dpc:FedSGDDPCRecipe",
    settings="flower_dp.apps.methods.fedsgd_dpc",
    defaults={"clip_norm": 0.5, "epsilon": 1.0, "mechanism": "laplace", "client_epsilons": ""},
    renamed={"sampling_rate": "record_sampling_rate"},
    planner="flower_dp.planning.fedsgd_dpc",
    audit="flower_dp.audit.presets:fedsgd_dpc",
    samplings=("round-robin",),
    reads=(),
)

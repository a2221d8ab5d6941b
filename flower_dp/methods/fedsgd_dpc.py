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
    audit="flower_dp.audit.methods:fedsgd_dpc",
    cases={
        "fedsgd-dpc, Laplace": {"mechanism": "laplace", "epsilon": 5.0},
        "fedsgd-dpc, Gaussian": {"mechanism": "gaussian"},
        "fedsgd-dpc, Gaussian, add-or-remove-one": {"mechanism": "gaussian", "relation": "add-or-remove-one"},
        "fedsgd-dpc, Gaussian, sampled records": {"mechanism": "gaussian", "record_sampling_rate": 0.5},
    },
    samplings=("round-robin",),
    reads=(),
)

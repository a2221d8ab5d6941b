"""DP-PASGD, and DP-SGD as its case of one local step."""

from flower_dp.methods.method import Method

METHOD = Method(
    name="dp-pasgd",
    strategy="flower_dp.strategies.dp_pasgd:DPPASGD",
    recipe="flower_dp.clients.dp_pasgd:DPPASGDRecipe",
    settings="flower_dp.apps.methods.dp_pasgd",
    defaults={
        "clip_norm": 1.0,
        "epsilon": 4.0,
        "delta": 1e-4,
        "num_local_steps": 10,
        "best_model_metric": "",
        "client_epsilons": "",
        "client_batch_sizes": "",
    },
    planner="flower_dp.planning.dp_pasgd",
    audit="flower_dp.audit.methods:dp_pasgd",
    cases={
        "dp-pasgd": {"num_local_steps": 3},
        "dp-pasgd, Poisson": {"num_local_steps": 1, "batch_sampling": "poisson"},
        "dp-sgd": {"num_local_steps": 1},
    },
    canaries="records",
    samplings=("full",),
    reads=("batch_size", "weight_decay"),
)

"""SCAFFOLD, with and without privacy."""

from flower_dp.methods.method import Method

METHOD = Method(
    name="scaffold",
    strategy="flower_dp.strategies.scaffold:Scaffold",
    recipe="flower_dp.clients.scaffold:ScaffoldRecipe",
    settings="flower_dp.apps.methods.dp_fedpaq",
    defaults={"epsilon": 4.0, "delta": 1e-4, "clip_norm": 1.0, "num_local_steps": 10},
    audit="flower_dp.audit.presets:scaffold",
    canaries="records",
    samplings=("full", "fixed-size", "round-robin"),
    reads=("batch_size",),
)

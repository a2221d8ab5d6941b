"""NbAFL, all clients or K of N (Wei et al. 2020)."""

from flower_dp.methods.method import TRAINING, Method

METHOD = Method(
    name="nbafl",
    strategy="flower_dp.strategies.nbafl:NbAFL",
    recipe="flower_dp.clients.nbafl:NbAFLRecipe",
    settings="flower_dp.apps.methods.nbafl",
    defaults={"clip_norm": 20.0, "paper_epsilon": 50.0, "delta": 0.01},
    planner="flower_dp.planning.nbafl",
    audit="flower_dp.audit.methods:nbafl",
    cases={"nbafl": {}},
    samplings=("full", "fixed-size"),
    reads=tuple(name for name in TRAINING if name not in ("training_engine", "lus_keep_ratio")),
)

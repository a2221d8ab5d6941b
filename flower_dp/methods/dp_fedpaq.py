"""Privacy-augmented FedPAQ, with and without QSGD."""

from flower_dp.methods.method import LARGE_DELTA, Method

METHOD = Method(
    name="dp-fedpaq",
    strategy="flower_dp.strategies.dp_fedpaq:DPFedPAQ",
    recipe="flower_dp.clients.dp_fedpaq:DPFedPAQRecipe",
    settings="flower_dp.apps.methods.dp_fedpaq",
    defaults={"epsilon": 4.0, "delta": 1e-4, "clip_norm": 1.0, "num_local_steps": 10},
    planner="flower_dp.planning.dp_fedpaq",
    audit="flower_dp.audit.methods:local_steps",
    cases={
        "dp-fedpaq": {},
        "dp-fedpaq, per-step": {"sensitivity": "per-step"},
        "dp-fedpaq, convex-glm": {"sensitivity": "convex-glm"},
        "dp-fedpaq, quantized": {"quantization_levels": 10, "epsilon": 2.9, "delta": LARGE_DELTA},
    },
    canaries="records",
    samplings=("full", "fixed-size", "round-robin"),
    reads=("batch_size",),
)

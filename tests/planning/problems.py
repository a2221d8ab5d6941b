"""A problem of each planner, as a mapping."""

from typing import Any

LAPLACE: dict[str, Any] = {
    "mechanism": "laplace",
    "num_clients": 10,
    "num_records": 6000,
    "dimension": 7840,
    "clip_norm": 300.0,
    "epsilon": 5.0,
    "strong_convexity": 0.5,
    "smoothness": 1.5,
    "gradient_bound": 10.0,
    "heterogeneity": 0.4,
    "initial_distance": 30.0,
}
GAUSSIAN: dict[str, Any] = LAPLACE | {
    "mechanism": "gaussian",
    "clip_norm": 10.0,
    "epsilon": 0.5,
    "delta": 1e-5,
    "sampling_rate": 0.01,
    "gradient_variance": 4.0,
    "noise_constant": 1.5,
    "max_rounds": 100,
}
NOISE: dict[str, Any] = {
    "num_clients": 50,
    "cohort_size": 20,
    "num_rounds": 25,
    "uplink_exposures": 1,
    "epsilon": 60.0,
    "delta": 0.01,
    "clip_norm": 20.0,
    "min_records": 100,
}
BOUND: dict[str, Any] = NOISE | {
    "smoothness": 1.0,
    "lipschitz": 0.5,
    "pl_constant": 0.8,
    "proximal": 3.0,
    "dissimilarity": 1.0,
    "initial_gap": 2.3,
    "max_rounds": 200,
}
# The experiment of the paper (c1 = 100, c2 = 1, delta = 1e-4, 16 devices) with made-up constants of the loss.
PASGD: dict[str, Any] = {
    "cost_per_aggregation": 100.0,
    "cost_per_step": 1.0,
    "max_cost": 1000.0,
    "epsilon": 4.0,
    "delta": 1e-4,
    "learning_rate": 0.05,
    "strong_convexity": 0.1,
    "smoothness": 1.0,
    "initial_gap": 0.69,
    "gradient_variance": 0.01,
    "dimension": 100,
    "batch_size": 256,
    "clip_norm": 1.0,
    "num_clients": 16,
}
# MNIST with logistic regression, 100 clients of 600 records, as in the paper; the constants are made up.
FEDPAQ: dict[str, Any] = {
    "bits_budget": 2e8,
    "num_iterations": 1000,
    "dimension": 7850,
    "num_clients": 100,
    "batch_size": 12,
    "num_records": 600,
    "epsilon": 10.0,
    "delta": 1e-4,
    "strong_convexity": 0.5,
    "smoothness": 5.0,
    "gradient_bound": 1.0,
    "gradient_variance": 1.0,
    "heterogeneity": 0.5,
    "initial_distance": 30.0,
}

"""Differentially private federated learning for Flower: strategies, clients, and a privacy statement for every run.

`app(model_fn=..., data_fn=...)` makes an app around your own model and data. `simulate(app)` runs an app on this machine or on a
Ray cluster. `RunFolder` and `record_run` write a run folder for your own app. Each name is imported at its first use.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["RunFolder", "__version__", "app", "record_run", "simulate"]


def __getattr__(name: str) -> Any:
    if name == "app":
        from flower_dp.running.apps import own_module  # noqa: PLC0415

        return own_module("user_app").app
    if name == "RunFolder":
        from flower_dp.running.run_folder import RunFolder  # noqa: PLC0415

        return RunFolder
    if name == "record_run":
        from flower_dp.running.run_recorder import record_run  # noqa: PLC0415

        return record_run
    if name == "simulate":
        from flower_dp.simulation.run import simulate  # noqa: PLC0415

        return simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

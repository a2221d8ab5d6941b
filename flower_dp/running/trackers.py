"""Writers for `on_round`: TensorBoard, MLflow and Weights & Biases. Each needs its own library, an extra of this package.

If the times of a run's rounds tell how many clients take part, and that number is secret, its lines have no `elapsed`. No writer
stores a time of such a run's rounds.
"""

import importlib
import math
import os
import time
from collections.abc import Mapping
from typing import Any

_NOT_DRAWN = ("round", "num-rounds")


class TensorBoard:
    """A writer of every round's numbers to a TensorBoard log; needs `flower-dp[tensorboard]`, and no torch.

    If the cohort is secret, all rounds have the time at which the run began.

    Args:
        folder: folder of the log, for one run. Under `flower-dp run` a relative folder is in the run folder.

    Example:
        >>> from flower_dp.core.sampling import FullSampling
        >>> from flower_dp.running.trackers import TensorBoard
        >>> from flower_dp.strategies import DPFedAvg
        >>> strategy = DPFedAvg(
        ...     clip_norm=0.5,
        ...     noise_multiplier=1.0,
        ...     sampling=FullSampling(),
        ...     num_clients=10,
        ...     delta=1e-4,
        ...     on_round=TensorBoard("tensorboard"),
        ... )
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.fspath(folder)

    def open(self) -> None:
        """Begin the log.

        Raises:
            ImportError: if TensorBoard is not installed.
        """
        summary = _library("tensorboard.summary", "tensorboard")
        self._began = time.time()
        self._log = summary.Writer(summary.DirectoryOutput(self._folder))

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of a round."""
        for name, value in numbers(line).items():
            self._log.add_scalar(name, value, line["round"], wall_time=self._began + line.get("elapsed", 0.0))
        self._log.flush()

    def close(self) -> None:
        """End the log."""
        self._log.close()


class MLflow:
    """A writer of every round's numbers to a run of MLflow; needs `flower-dp[mlflow]`.

    If the cohort is secret, all rounds have the time at which the run began, and the run ends at that time. An MLflow server of
    somebody else still sees when the numbers arrive.

    Args:
        experiment: name of the experiment, created if there is none.
        tracking_uri: URI of MLflow's server or database; None for MLflow's own default.
        run_name: name of the run; None for a name by MLflow.
    """

    def __init__(self, experiment: str = "flower-dp", *, tracking_uri: str | None = None, run_name: str | None = None) -> None:
        self._experiment, self._uri, self._name = experiment, tracking_uri, run_name

    def open(self) -> None:
        """Begin the run.

        Raises:
            ImportError: if MLflow is not installed.
            Exception: MLflow's own, if its server can't be reached.
        """
        self._mlflow = _library("mlflow", "mlflow")
        self._client = self._mlflow.MlflowClient(self._uri)
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(self._experiment)
        self._now = self._began = int(1000 * time.time())
        self._run = self._client.create_run(experiment, start_time=self._began, run_name=self._name).info.run_id

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of a round."""
        self._now = self._began + int(1000 * line.get("elapsed", 0.0))
        metric = self._mlflow.entities.Metric
        self._client.log_batch(
            self._run, [metric(name, value, self._now, line["round"]) for name, value in numbers(line).items()]
        )

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run, end_time=self._now)


class WandB:
    """A writer of every round's numbers to a run of Weights & Biases; needs `flower-dp[wandb]`.

    W&B stores the time of every row. So if the cohort is secret, all rows are written at the end of the run.

    Args:
        project: name of the project.
        init: further arguments of `wandb.init`, such as `entity`, `name`, `mode="offline"`. By default `settings` exclude the
            server's output and load, which tell more than the numbers of the rounds.
    """

    def __init__(self, project: str, **init: Any) -> None:
        self._init = {"project": project, "settings": {"console": "off", "x_disable_stats": True}} | init

    def open(self) -> None:
        """Begin the run.

        Raises:
            ImportError: if W&B is not installed.
            Exception: W&B's own, if its server can't be reached.
        """
        self._held: list[Mapping[str, Any]] = []
        self._run = _library("wandb", "wandb").init(**self._init)

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of a round, or keep them until the end."""
        if "elapsed" in line:
            self._run.log(numbers(line), step=line["round"])
        else:
            self._held.append(line)

    def close(self) -> None:
        """Write what was kept, and end the run."""
        for line in self._held:
            self._run.log(numbers(line), step=line["round"])
        self._run.finish()


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line; the epsilon of a run that is not private is not among them."""
    return {
        name: float(value)
        for name, value in line.items()
        if name not in _NOT_DRAWN and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _library(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is not installed: pip install 'flower-dp[{extra}]'") from error

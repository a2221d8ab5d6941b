"""Writers for `on_round`: TensorBoard, MLflow, Weights & Biases, each on its own library, an extra of this package.

A line without `elapsed` is of a run whose rounds' times tell how many clients take part, which is secret. No writer stores a time
of its rounds then.
"""

import importlib
import math
import os
import time
from collections.abc import Mapping
from typing import Any

_NOT_DRAWN = ("round", "num-rounds")


class TensorBoard:
    """Writes the numbers of every round to a TensorBoard log; needs `flower-dp[tensorboard]`, and no torch.

    Where the cohort is secret, all rounds have the time at which the run began.

    Args:
        folder: of the log; a relative one is in the run folder under `flower-dp run`. One run a folder.

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
            ImportError: TensorBoard is not installed.
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
    """Writes the numbers of every round to a run of MLflow; needs `flower-dp[mlflow]`.

    Where the cohort is secret, all rounds have the time at which the run began, and the run ends at that time. A server of MLflow
    that others run sees when the numbers arrive.

    Args:
        experiment: name of the experiment, created if there is none.
        tracking_uri: of MLflow's server or data base; None for MLflow's own default.
        run_name: None for a name of MLflow's.
    """

    def __init__(self, experiment: str = "flower-dp", *, tracking_uri: str | None = None, run_name: str | None = None) -> None:
        self._experiment, self._uri, self._name = experiment, tracking_uri, run_name

    def open(self) -> None:
        """Begin the run.

        Raises:
            ImportError: MLflow is not installed.
            Exception: as MLflow's, where it can't be reached.
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
    """Writes the numbers of every round to a run of Weights & Biases; needs `flower-dp[wandb]`.

    W&B stores the time of every row. So where the cohort is secret, all rows are written at the end of the run.

    Args:
        project: name of the project.
        init: further arguments of `wandb.init`, such as `entity`, `name`, `mode="offline"`. `settings` are by default without the
            server's output and load, which tell more than the numbers of the rounds.
    """

    def __init__(self, project: str, **init: Any) -> None:
        self._init = {"project": project, "settings": {"console": "off", "x_disable_stats": True}} | init

    def open(self) -> None:
        """Begin the run.

        Raises:
            ImportError: W&B is not installed.
            Exception: as W&B's, where it can't be reached.
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
    """Return the finite numbers of a line; an epsilon of a run that is not private is none."""
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

"""Measure seconds per round and accuracy of pfl-research for a job of benchmarks/rounds.py, which starts this by torchrun.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/pfl_rounds.py JOB ROUNDS DATA_DIR RESULT [SEED]

It needs `pip install pfl==0.6.0`. Each process trains its part of the cohort with one thread.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rounds import JOBS

from flower_dp.apps.tasks import load_task
from flower_dp.apps.tasks.models import make


class Classifier(nn.Module):
    """A model of the app with the loss and metrics that pfl needs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.network(inputs)

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor, eval: bool = False) -> torch.Tensor:  # noqa: A002
        """Return the mean cross-entropy."""
        self.train(not eval)
        return nn.functional.cross_entropy(self(inputs), labels)

    @torch.no_grad()
    def metrics(self, inputs: torch.Tensor, labels: torch.Tensor, eval: bool = True) -> dict[str, Any]:  # noqa: A002
        """Return the loss."""
        return {"loss": Weighted(float(self.loss(inputs, labels, eval)) * len(labels), len(labels))}


class Clock(TrainingProcessCallback):
    """A recorder of the times at which rounds end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_central_iteration(self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int) -> tuple[bool, Metrics]:
        """Record the time."""
        self.ends.append(time.time())
        return False, Metrics()


def main(name: str, num_rounds: int, data_dir: str, result: Path, seed: int = 0) -> None:
    """Run the job, and write the times at which its rounds ended and the accuracy of the last model."""
    torch.set_num_threads(1)
    (job,) = (job for job in JOBS if job.name == name)
    task = load_task("mnist", data_dir)
    dealt = job.dealt(task.train_labels, seed)
    images, labels = torch.from_numpy(task.train_inputs), torch.from_numpy(task.train_labels)

    def records(client: int) -> Dataset:
        rows = torch.from_numpy(dealt[client])
        rows = rows[torch.randperm(len(rows))]
        return Dataset((task.prepare(images[rows]), labels[rows]), user_id=client)

    network = Classifier(make(job.model, seed=seed))
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    clients = FederatedDataset(records, get_user_sampler("random", np.arange(job.num_clients)))
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(clipping_bound=0.5, relative_noise_stddev=0.9))
    clock = Clock()
    FederatedAveraging().run(
        backend=SimulatedBackend(training_data=clients, val_data=clients, postprocessors=[noise]),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=num_rounds, evaluation_frequency=10**9, train_cohort_size=job.cohort, val_cohort_size=0
        ),
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.1, local_batch_size=10),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
    )
    if pytorch_ops.distributed.global_rank == 0:
        with torch.no_grad():
            found = network(task.prepare(torch.from_numpy(task.test_inputs))).argmax(1)
        accuracy = (found == torch.from_numpy(task.test_labels)).double().mean().item()
        result.write_text(json.dumps({"ends": clock.ends, "accuracy": accuracy}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), *map(int, sys.argv[5:]))

"""The client: trains, clips, adds its noise, compresses; one client on a device, many on a simulation worker."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from flwr.app import Context
from torch import Tensor, nn

from flower_dp import wire
from flower_dp.clients import answering, participation
from flower_dp.clients.node_client import HostingClient
from flower_dp.clients.policy import ClientPolicy
from flower_dp.clients.reply.client_level import CLIENT_LEVEL
from flower_dp.clients.reply.evaluation import MetricRows, Metrics, loss_and_accuracy
from flower_dp.clients.reply.pipeline import ClientJob, Train, Trained
from flower_dp.clients.training import dry_run
from flower_dp.clients.training.devices import exact_device, is_accelerator
from flower_dp.clients.training.engines import ENGINES, choose_engine, local_updates, num_slots
from flower_dp.clients.training.recipe import FlatModel, Training
from flower_dp.clients.training.records import Records
from flower_dp.clients.training.training_rng import batch_seed
from flower_dp.core import checks
from flower_dp.wire import Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedUpdates:
    """Local training by an engine: a row is the trained model minus the global model.

    Attributes:
        training: recipe of local training.
        model: model to train.
        server_round: round number, from 1.
        training_engine: engine of `local_updates`.
        group_size: group size of `local_updates`.
    """

    training: Training
    model: FlatModel
    server_round: int
    training_engine: str
    group_size: int | None = None

    @property
    def rows_together(self) -> int:
        """The number of rows that are clipped at once: as many as the batched engine trains at once on a GPU."""
        device = self.model.device
        if self.training_engine != "batched" or not is_accelerator(exact_device(device)):
            return 1
        return num_slots(self.model.layout.size, device, self.group_size)

    def rows(self, vector: Tensor, jobs: Sequence[ClientJob]) -> Iterator[Trained]:
        """Yield every client's update and training loss, or its error, in order."""
        losses: list[Tensor] = []
        rows = local_updates(
            vector,
            [job.records for job in jobs],
            self.training,
            model=self.model,
            server_round=self.server_round,
            seeds=[job.seed for job in jobs],
            losses=losses,
            engine=self.training_engine,
            group_size=self.group_size,
        )
        for row in rows:
            yield row if isinstance(row, Exception) else (row, losses[-1])


class DPClient(HostingClient):
    """A Flower client for this package's strategies with client-level privacy, around a recipe of local training.

    It replies with the sum of its clients' updates. Each update is clipped to the L2 norm that the server names and the client's
    policy allows. Each then gets its own noise, if the server requests noise on clients, and is compressed after that. The client
    sends no record, no example count and, unless its policy allows it, no metric.

    Args:
        model: architecture without BatchNorm; its weights are overwritten.
        clients: records of every hosted client, by its stable name; a device hosts one.
        training: recipe of local training.
        policy: this client's own limits.
        device: device to train on; by default the GPU if this process has one, else the CPU.
        seed: seed of the order of records, never of the noise.
        noise_seed: seed of fixed noise, for tests only; the server learns of it, so that the run counts as not private.
        training_engine: "one_by_one" or, in a simulation, "batched" or "auto", the choice of `choose_engine`:
            `flower_dp.clients.training.engines`.
        group_size: number of clients that "batched" trains at once on a GPU, if so many models fit into its memory. A public
            number, such as this node's expected cohort size. None: at most 64.
        metrics: the model and one client's records -> its metrics, for private evaluation; by default `loss`, and `accuracy`
            if targets are classes.
        context: context of the node, with the account of the clients' participations in runs with a minimum separation. In other
            runs the client refuses to train if the node's config names a ledger, because it counts nothing there. `client_app`
            attaches it itself.

    Example:
        >>> import torch
        >>> from flower_dp.clients import ClientPolicy, DPClient, Training, TensorRecords
        >>> records = TensorRecords(inputs=torch.randn(20, 3), targets=torch.randint(0, 2, (20,)))
        >>> client = DPClient(
        ...     model=torch.nn.Linear(3, 2),
        ...     clients={"hospital-7": records},
        ...     training=Training(learning_rate=0.1),
        ...     policy=ClientPolicy(max_clip_norm=1.0, min_noise_multiplier=0.8),
        ... )
        >>> client.methods
        ('dp-fedavg', 'dp-fedsam', 'dp-ftrl', 'fed-smp', 'private-evaluation')
    """

    def __init__(
        self,
        *,
        model: nn.Module | FlatModel,
        clients: Mapping[str, Records],
        training: Training,
        policy: ClientPolicy | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        noise_seed: int | None = None,
        training_engine: str = "one_by_one",
        group_size: int | None = None,
        metrics: Metrics | None = None,
        context: Context | None = None,
    ) -> None:
        super().__init__(
            model=model, clients=clients, policy=policy, device=device, seed=seed, noise_seed=noise_seed, context=context
        )
        self.training = training
        checks.one_of("training_engine", training_engine, (*ENGINES, "auto"))
        self.training_engine = (
            choose_engine(self.model.module, self.model.device) if training_engine == "auto" else training_engine
        )
        if group_size is not None:
            checks.integer("group_size", group_size, at_least=1)
        self.group_size = group_size
        self.metrics = metrics or loss_and_accuracy(training.loss)

    def attach(self, context: Context) -> None:
        """Receive the context of the node, with its state and the settings of the device's owner."""
        self.context = context

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods with one noised sum of clipped updates, and private evaluation."""
        return (*CLIENT_LEVEL, wire.EVALUATION)

    def _unfit_reason(self, records: Records) -> str | None:
        return dry_run.of_training(self.model, records, self.training)

    def _work(self, vector: Tensor, instruction: Instruction) -> answering.NodeWork:
        """Return the work whose rows are updates, or vectors of metrics, each clipped and with its share of the noise, if any."""
        ask, number = instruction.ask, instruction.server_round
        train: Train = TrainedUpdates(
            training=self.training,
            model=self.model,
            server_round=number,
            training_engine=self.training_engine,
            group_size=self.group_size,
        )
        length = vector.numel()
        if ask.metrics is not None:
            train, length = MetricRows(model=self.model, metrics=self.metrics, bounds=ask.metrics), ask.metrics.num_counted
        own = [name for name in instruction.clients if name in self.clients]
        refused = participation.refusals(instruction, own, self.context)
        hosted, unknown = self._hosted(name for name in instruction.clients if name not in refused)
        refused |= unknown
        jobs = [
            ClientJob(
                name=name,
                records=records,
                seed=batch_seed(self.seed, number, name),
                secret=partial(answering.generator, self, instruction, name, on=vector),
                measured=instruction.report_metrics,
            )
            for name, records in hosted.items()
        ]
        return answering.shared_work(instruction, train=train, length=length, jobs=jobs, refused=refused)

"""The client: trains, clips, adds its noise, compresses; one client on a device, many on a simulation worker."""

import json
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from flwr.client import NumPyClient
from torch import Tensor, nn

from flower_dp import wire
from flower_dp.clients.account import refuse_ledger
from flower_dp.clients.policy import ClientPolicy
from flower_dp.clients.reasons import Declined, in_own_words, reading
from flower_dp.clients.registry import CLIENT_LEVEL
from flower_dp.clients.reply import client_level
from flower_dp.clients.reply.evaluation import MetricRows, Metrics, loss_and_accuracy
from flower_dp.clients.reply.pipeline import Job, Train, failure
from flower_dp.clients.reply.updates import LocalUpdates
from flower_dp.clients.reply.work import Work, add_up
from flower_dp.clients.training.draws import batch_seed
from flower_dp.clients.training.engines import ENGINES
from flower_dp.clients.training.recipe import FlatModel, LocalTraining
from flower_dp.clients.training.records import Records
from flower_dp.core import checks, noise
from flower_dp.core.noise import Generator
from flower_dp.wire import Answer, EvaluationAnswer, Instruction


class NodeClient(NumPyClient):
    """The common base of this package's clients: hosted clients, model, instruction and reply.

    It answers with one payload, the sum of its clients' rows. It sends no record, no example count and, unless its policy allows
    it, no metric. Subclasses list in `methods` the methods that they run, and return their pipelines from `_work`.

    Args:
        model: the architecture; its weights are overwritten. Without BatchNorm.
        clients: the records of every client that lives here, by its stable name; on a device one.
        policy: this client's own limits.
        device: where to train; by default the GPU if this process has one, else the CPU.
        seed: governs the order of records, never the noise.
        noise_seed: for tests only: fixed noise, of which the server is told, so that the run counts as not private.
        context: of the node, as `client_fn` receives it; `client_app` attaches it itself.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        clients: Mapping[str, Records],
        policy: ClientPolicy | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        noise_seed: int | None = None,
        context: Context | None = None,
    ) -> None:
        if not clients:
            raise ValueError("clients: a node must host at least one client")
        for name in clients:
            checks.line("clients: name", name)
        chosen = torch.device(device) if device else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = FlatModel(model, chosen)
        self.clients = clients
        self.policy = ClientPolicy() if policy is None else policy
        self.seed = seed
        self.context: Context | None = None
        self.noise_seed = noise_seed
        if context is not None:
            self.attach(context)

    @property
    @abstractmethod
    def methods(self) -> tuple[str, ...]:
        """Names of the methods that this client runs; it refuses the instructions of all others."""

    def generator(self, instruction: Instruction, name: str, *, on: Tensor | None = None) -> Generator:
        """Return a fresh generator for the noise of one client's reply.

        Every call takes new entropy from the operating system: the client holds no state that a copy of it, or another process,
        could repeat. With a `noise_seed`, for tests, it follows from seed, round and client.
        """
        return noise.noise_generator(self.noise_seed, instruction.server_round, name, on=on)

    def attach(self, context: Context) -> None:
        """Receive the context of the node, which has its state and what the device's owner has set; called before `fit`.

        Raises:
            Declined: if its config names a ledger and this client keeps no account: its replies would not be counted there.
        """
        refuse_ledger(context)
        self.context = context

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the names of the hosted clients and of the methods that they run."""
        with in_own_words("naming the clients"):
            return {wire.KEY: json.dumps({"clients": sorted(self.clients), "methods": list(self.methods)})}

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        """Return the payload arrays, 1 instead of an example count, and the answer that describes the payload.

        Args:
            parameters: the server's model, frozen arrays among them, in the order of this client's own.
            config: holds the instruction.

        Raises:
            Declined: if the server's instruction is missing, malformed or against this client's policy, or the model does not
                fit.
            RuntimeError: if anything else fails; only that leaves the device.
        """
        trained, beside = self._received(parameters, config)
        arrays, answer = self.answer(trained, config, beside)
        return arrays, 1, answer

    def answer(
        self, trained: Mapping[str, np.ndarray], config: Mapping[str, Any], beside: np.ndarray | None = None
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Return the payload arrays, and the answer that describes them.

        Args:
            trained: the arrays of the server's model that are trained, by name.
            config: holds the instruction.
            beside: a vector [d] that the server has sent beside the model, for methods that read one.

        Raises:
            Declined, RuntimeError: as `fit`.
        """
        with in_own_words("training"):
            return self._answer(trained, config, beside)

    def _answer(
        self, trained: Mapping[str, np.ndarray], config: Mapping[str, Any], beside: np.ndarray | None
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        with reading():
            instruction = wire.instruction_of(config)
        if instruction.method not in self.methods or instruction.method == wire.EVALUATION:
            raise Declined(f"method={instruction.method!r}: this client runs {', '.join(self.methods)}")
        self._check(instruction)
        vector = self._vector(trained)
        work = self._work(vector, instruction, _beside(beside, vector))
        made = add_up(vector, work)
        metrics = {}
        if instruction.report_metrics and self.policy.allow_metrics and made.losses:
            metrics["loss"] = float(torch.stack(made.losses).to(torch.float32).nan_to_num().sum(dtype=torch.float64))
            metrics |= _moments(made.norms)
        answer = Answer(
            refused=made.refused,
            payload=made.payload.header,
            payload_bytes=made.payload_bytes,
            seeded_noise=self.noise_seed is not None,
            metrics=metrics,
            restarted=tuple(name for name in work.restarted if name not in made.refused),
        )
        return list(made.payload.arrays), {wire.KEY: answer.to_json(instruction.clients)}

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Return 0 instead of a loss, 1 instead of an example count, and the answer to a private evaluation.

        Raises:
            Declined, RuntimeError: as `fit`.
        """
        trained, beside = self._received(parameters, config)
        if beside is not None:
            raise Declined("an evaluation: a vector came beside the model")
        return 0.0, 1, self.evaluation(trained, config)

    def evaluation(self, trained: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a private evaluation.

        Raises:
            Declined, RuntimeError: as `fit`.
        """
        with in_own_words("evaluation"):
            with reading():
                instruction = wire.instruction_of(config)
            if instruction.method != wire.EVALUATION:
                raise Declined(f"method={instruction.method!r}: a message to evaluate must be of {wire.EVALUATION!r}")
            answer = self._evaluation(trained, instruction)
            return {wire.KEY: answer.to_json(instruction.clients)}

    def _received(
        self, parameters: list[np.ndarray], config: Mapping[str, Any]
    ) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Return the arrays that are trained, by name, and the vector that was sent beside them, None for none."""
        with in_own_words("training"):
            with reading():
                frozen = wire.instruction_of(config).frozen
            trained = [array for position, array in enumerate(parameters) if position not in frozen]
            names = self.model.layout.names
            beside = trained.pop() if len(trained) == len(names) + 1 else None
            if len(trained) != len(names):
                raise Declined(f"the server's model has {len(trained)} arrays, this client's {len(names)}")
            return dict(zip(names, trained, strict=True)), beside

    def _vector(self, trained: Mapping[str, np.ndarray]) -> Tensor:
        """Return the server's model as a vector [d].

        Raises:
            Declined: if it is not this client's model.
        """
        layout = self.model.layout
        if set(trained) != set(layout.names):
            raise Declined(f"the server's model has arrays {sorted(trained)}, this client's {sorted(layout.names)}")
        with reading():
            return torch.from_numpy(layout.flatten(trained)).to(self.model.device)

    def _check(self, instruction: Instruction) -> None:
        """Refuse an instruction to train that the policy does not allow."""
        self.policy.check(instruction.ask)

    def _evaluation(self, trained: Mapping[str, np.ndarray], instruction: Instruction) -> EvaluationAnswer:
        """Return the answer of this node's clients to a private evaluation."""
        raise Declined("this client does not evaluate")

    @abstractmethod
    def _work(self, vector: Tensor, instruction: Instruction, beside: Tensor | None) -> Work:
        """Return the work of this node's clients; charge accounts before any record is read.

        `beside` is the vector [d] that came beside the model, None for none.
        """


class DPClient(NodeClient):
    """A Flower client for the strategies of this package with client-level privacy, around a recipe of local training.

    It answers with the sum of its clients' updates, each clipped to the L2 norm that the server names and its own policy allows,
    each with its own noise if the server asks for noise on clients, each compressed after that. It sends no record, no example
    count and, unless its policy allows it, no metric.

    Args:
        model: the architecture; its weights are overwritten. Without BatchNorm.
        clients: the records of every client that lives here, by its stable name; on a device one.
        training: the recipe of local training.
        policy: this client's own limits.
        device: where to train; by default the GPU if this process has one, else the CPU.
        seed: governs the order of records, never the noise.
        noise_seed: for tests only: fixed noise, of which the server is told, so that the run counts as not private.
        engine: "one_by_one", or "batched" in a simulation: `flower_dp.clients.training.engines`.
        metrics: the model and one client's records -> its metrics, for private evaluation; by default `loss`, and `accuracy`
            where targets are classes.
        context: of the node. With it the client refuses a node whose config names a ledger, for it keeps no account;
            `client_app` attaches it itself.

    Example:
        >>> import torch
        >>> from flower_dp.clients import ClientPolicy, DPClient, LocalTraining, TensorRecords
        >>> records = TensorRecords(inputs=torch.randn(20, 3), targets=torch.randint(0, 2, (20,)))
        >>> client = DPClient(
        ...     model=torch.nn.Linear(3, 2),
        ...     clients={"hospital-7": records},
        ...     training=LocalTraining(learning_rate=0.1),
        ...     policy=ClientPolicy(max_clip_norm=1.0, min_noise_multiplier=0.8),
        ... )
        >>> client.methods
        ('dp-fedavg', 'dp-fedsam', 'fed-smp', 'private-evaluation')
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        clients: Mapping[str, Records],
        training: LocalTraining,
        policy: ClientPolicy | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        noise_seed: int | None = None,
        engine: str = "one_by_one",
        metrics: Metrics | None = None,
        context: Context | None = None,
    ) -> None:
        super().__init__(
            model=model, clients=clients, policy=policy, device=device, seed=seed, noise_seed=noise_seed, context=context
        )
        self.training = training
        self.engine = checks.one_of("engine", engine, ENGINES)
        self.metrics = metrics or loss_and_accuracy(training.loss)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods with one noised sum of clipped updates, and private evaluation."""
        return (*CLIENT_LEVEL, wire.EVALUATION)

    def _evaluation(self, trained: Mapping[str, np.ndarray], instruction: Instruction) -> EvaluationAnswer:
        self.policy.check_evaluation(instruction.ask)
        bounds = instruction.bounds
        vector = self._vector(trained)
        rows = MetricRows(model=self.model, metrics=self.metrics, bounds=bounds)
        made = add_up(vector, self._sum(vector, instruction, rows, length=bounds.num_counted, purpose="evaluation of "))
        total = made.total.cpu().numpy()
        return EvaluationAnswer(refused=made.refused, total=total, seeded_noise=self.noise_seed is not None)

    def _work(self, vector: Tensor, instruction: Instruction, beside: Tensor | None) -> Work:
        if beside is not None:
            raise Declined(f"method={instruction.method!r}: uses the model only, but the server sent a second vector with it")
        train = LocalUpdates(training=self.training, model=self.model, server_round=instruction.server_round, engine=self.engine)
        return self._sum(vector, instruction, train, length=vector.numel())

    def _sum(self, vector: Tensor, instruction: Instruction, train: Train, *, length: int, purpose: str = "") -> Work:
        """Return the work whose rows are those of `train` [length], each clipped, with its share of the noise."""
        with reading():
            pipeline = client_level.pipeline(instruction.ask, train=train, length=length)
        refused = {name: "not hosted here" for name in instruction.clients if name not in self.clients}
        jobs = []
        for name in [name for name in instruction.clients if name not in refused]:
            try:
                records = self.clients[name]
            except Exception as error:
                refused[name] = failure(name, error).reason
                continue
            seed = batch_seed(self.seed, instruction.server_round, name)
            secret = partial(self.generator, instruction, f"{purpose}{name}", on=vector)
            jobs.append(Job(name=name, records=records, seed=seed, secret=secret, measured=instruction.report_metrics))
        return Work(groups=[(pipeline, jobs)], length=length, refused=refused)


def _moments(norms: list[Tensor]) -> dict[str, float]:
    """Return the sums of the norms of updates before the clip and of their squares; nothing where none were measured.

    The number of clipped updates is not told: a share of clipped clients would tell how many there are.
    """
    if not norms:
        return {}
    rows = torch.stack(norms)
    return {"update-norm": float(rows.sum()), "update-norm-squared": float((rows * rows).sum())}


def _beside(array: np.ndarray | None, vector: Tensor) -> Tensor | None:
    """Return the second vector that was sent with the model, in the same form as the model's vector [d].

    Raises:
        Declined: if it has another shape or type, or is not finite.
    """
    if array is None:
        return None
    if array.shape != tuple(vector.shape) or array.dtype != np.float32 or not np.isfinite(array).all():
        raise Declined(
            f"the vector that was sent with the model is {array.dtype} of shape {array.shape}: must be finite float32 of shape "
            f"{tuple(vector.shape)}"
        )
    return torch.from_numpy(np.array(array)).to(vector.device)

"""The server optimizer: any Flower strategy that moves the global model by the noised mean, which costs no epsilon."""

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flowers
from flwr.serverapp.strategy import Strategy

from flower_dp.core import checks
from flower_dp.core.vectors import Layout
from flower_dp.strategies.releases.left_out import RoundDiscarded

log = logging.getLogger("flwr")

_NOT_KEPT = object()
_RECORD = "ArrayRecord"
_PLAIN_RECORDS = ("arrays", "config")
# A grid with one node, to which nothing is ever sent: strategies ask a grid for its nodes.
_ONE_NODE: Any = SimpleNamespace(get_node_ids=lambda: [1])


class ServerOptimizer:
    """A Flower strategy whose `configure_train` and `aggregate_train` get one reply: the next model by the method.

    With `FedAdam`, `FedYogi` or `FedAdagrad` the difference between the global model and that reply is the pseudo-gradient; with
    `FedAvgM` it gets momentum. All inputs are already private, so the ledger does not change. A strategy that sends clients
    anything else, such as `FedProx`, is refused when a run starts: nothing of it would reach them.

    Args:
        strategy: a Flower strategy such as `flwr.serverapp.strategy.FedAdam(eta=0.01)`; every run starts with a new copy of it.

    Raises:
        ValueError: if `strategy` is not a Flower strategy with these two methods.

    Example:
        >>> from flwr.serverapp.strategy import FedAdam
        >>> from flower_dp.core.sampling import PoissonSampling
        >>> from flower_dp.strategies import DPFedAvg
        >>> strategy = DPFedAvg(
        ...     clip_norm=0.5,
        ...     noise_multiplier=1.0,
        ...     sampling=PoissonSampling(sampling_rate=0.1),
        ...     num_clients=100,
        ...     delta=1e-4,
        ...     server_optimizer=FedAdam(eta=0.01, beta_1=0.9, beta_2=0.99),
        ... )
    """

    def __init__(self, strategy: Strategy) -> None:
        if not isinstance(strategy, Strategy):
            raise checks.bad("server_optimizer", strategy, "a Flower strategy such as flwr.serverapp.strategy.FedAdam")
        self._fresh: Any = copy.deepcopy(strategy)
        # One pseudo-client represents all clients, so the strategy must not wait for more.
        for name, value in {"fraction_train": 1.0, "min_train_nodes": 1, "min_available_nodes": 1}.items():
            if hasattr(self._fresh, name):
                setattr(self._fresh, name, value)
        self._strategy: Any = copy.deepcopy(self._fresh)

    @property
    def name(self) -> str:
        """The strategy's name."""
        return type(self._fresh).__name__

    @property
    def state(self) -> dict[str, Any]:
        """The strategy's state between rounds: its attributes that are numbers, texts, arrays, or lists or dicts of arrays."""
        kept = {name: _stored_attribute(value) for name, value in vars(self._strategy).items()}
        return {name: value for name, value in kept.items() if value is not _NOT_KEPT}

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self._strategy = copy.deepcopy(self._fresh)
        for name, value in state.items():
            is_record = isinstance(value, Mapping) and set(value) == {_RECORD}
            setattr(self._strategy, name, _array_record(value[_RECORD]) if is_record else copy.deepcopy(value))

    def check(self, layout: Layout, model: np.ndarray) -> None:
        """Try one step with a copy, before any request.

        Args:
            layout: layout of the vectors.
            model: the initial global model [d].

        Raises:
            ValueError: if the strategy fails, as those that need the clients' losses do, or sends clients anything besides the
                model: only its `aggregate_train` has a part in the run.
        """
        copied = ServerOptimizer(self._fresh)
        try:
            sent = copied._extra_names(copied._message_to_client(1, layout, model))
        except Exception as error:
            raise self._unfit("configure_train", error) from error
        if sent:
            raise checks.BadValue(
                "server_optimizer",
                f"server_optimizer={self.name}: tells clients {', '.join(map(repr, sent))} in its messages, which never reach "
                "them; use a strategy that only aggregates, such as FedAdam, and pass clients' settings in train_config "
                "(in place of FedProx: ProximalTerm in the recipe of training)",
            )
        try:
            copied.step(1, layout, model, model)
        except RoundDiscarded:  # some strategies have no direction without an update
            pass
        except Exception as error:
            raise self._unfit("aggregate_train", error) from error

    def _unfit(self, method: str, error: Exception) -> ValueError:
        return ValueError(
            f"server_optimizer={self.name}: its {method} fails for one reply without a loss ({type(error).__name__}: "
            f"{checks.one_line(str(error), most=200)}); use a strategy that needs only the model of a reply, such as FedAdam"
        )

    def _message_to_client(self, server_round: int, layout: Layout, before: np.ndarray) -> Message:
        """Return the strategy's message to the one client."""
        message: Message
        with _quiet():
            (message, *_) = self._strategy.configure_train(server_round, _record(layout, before), ConfigRecord(), _ONE_NODE)
        return message

    def _extra_names(self, message: Message) -> list[str]:
        """Return the names of records and keys that a message sends clients besides the model and the round."""
        config, arrays = (getattr(self._strategy, f"{kind}record_key", kind) for kind in ("config", "array"))
        records = [name for name in message.content if name not in (config, arrays, *_PLAIN_RECORDS)]
        keys = [name for record in message.content.config_records.values() for name in record if name != "server-round"]
        return sorted({*records, *keys})

    def step(self, server_round: int, layout: Layout, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return the next global model [d].

        Args:
            server_round: number of the round, from 1.
            layout: layout of the vectors.
            before: the global model [d].
            after: the next model by the method [d], already private.

        Raises:
            RoundDiscarded: if the strategy gives no model, or one that is not finite.
        """
        strategy, message = self._strategy, self._message_to_client(server_round, layout, before)
        content: dict[str, Any] = {
            getattr(strategy, "arrayrecord_key", "arrays"): _record(layout, after),
            "metrics": MetricRecord({getattr(strategy, "weighted_by_key", "num-examples"): 1}),
        }
        with _quiet():
            arrays, _ = strategy.aggregate_train(server_round, [Message(RecordDict(content), reply_to=message)])
        if arrays is None:
            raise RoundDiscarded(f"the server optimizer {self.name} gave no model")
        vector: np.ndarray = layout.flatten({name: array.numpy() for name, array in arrays.items()})
        if not np.isfinite(vector).all():
            raise RoundDiscarded(f"the server optimizer {self.name} gave a model with NaN or infinite entries")
        return vector


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop the round's log lines of Flower's strategies, such as "Sampled 1 nodes": the node is the pseudo-client."""
    folder = str(Path(flowers.__file__).parent)

    def is_news(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or not record.pathname.startswith(folder)

    log.addFilter(is_news)
    try:
        yield
    finally:
        log.removeFilter(is_news)


def _record(layout: Layout, vector: np.ndarray) -> ArrayRecord:
    return _array_record(layout.unflatten(vector))


def _array_record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array, order="C")) for name, array in arrays.items()})


def _stored_attribute(value: Any) -> Any:
    """Return an attribute in its stored form, or `_NOT_KEPT` for one that is not state, such as a function."""
    if isinstance(value, ArrayRecord):
        return {_RECORD: {name: array.numpy() for name, array in value.items()}}
    if isinstance(value, dict):
        return dict(value) if all(isinstance(array, np.ndarray) for array in value.values()) else _NOT_KEPT
    if isinstance(value, list):
        return list(value) if all(isinstance(array, np.ndarray) for array in value) else _NOT_KEPT
    return value if value is None or isinstance(value, np.ndarray) or type(value) in (bool, int, float, str) else _NOT_KEPT

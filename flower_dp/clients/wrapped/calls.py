"""Results of another app as the `train` part of a pipeline: its trained model, or its metrics. NumPy only."""

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from flower_dp import wire
from flower_dp.clients.refusal_messages import contained
from flower_dp.clients.reply.pipeline import ClientJob, Train, Trained, changed, one_by_one
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.vectors import Array
from flower_dp.wire import Model, RecordNames

log = logging.getLogger("flwr")

# The maximum number of an app's metrics that are sent, if metrics are allowed, and the maximum length of a name.
_MAX_METRICS, _MAX_NAME = 16, 64
_EXAMPLE_COUNTS = ("num-examples", "num_examples")
TRAIN_STATUS, EVALUATE_STATUS = "fitres.status", "evaluateres.status"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppCall:
    """One message's call of the app's own function, which gets the model and the config that a stock server would send.

    Attributes:
        call: the app, or the next mod before it, as `keeping_account` returns it.
        message: message of the server.
        context: context of the node.
        record_names: record names that the message and the app use.
        status: name of the config record in which a `NumPyClient` reports its status.
    """

    call: ClientAppCallable
    message: Message
    context: Context
    record_names: RecordNames
    status: str

    def content(self) -> RecordDict:
        """Return the content of the app's reply.

        Raises:
            RuntimeError: if the app replies with an error.
            Exception: any error that the app raises.
        """
        reply = self.call(stock_message(self.message, self.record_names), self.context)
        if reply.has_error():
            raise RuntimeError(f"the app replied with error {reply.error.code}")
        status = reply.content.config_records.get(self.status)
        if status is not None and status.get("code") != 0:
            raise RuntimeError(f"the app replied with status {status.get('code')!r}")
        return reply.content


@dataclass(frozen=True, slots=True, kw_only=True)
class AppTraining:
    """The app's own train function; a row is the model in its reply, and nothing else of the reply is used.

    Attributes:
        app: call of the app.
        model: model of the server.
        metrics: numbers in the app's last reply, without example counts. They are not private.
    """

    app: AppCall
    model: Model
    metrics: dict[str, float] = field(default_factory=dict, init=False)

    def rows(self, vector: Array, jobs: Sequence[ClientJob]) -> Iterator[Trained]:
        """Yield the trained weights [d], float32, and 0 as the loss, or the app's error."""
        return one_by_one(jobs, lambda _: (self._train(), np.zeros(())))

    def _train(self) -> np.ndarray:
        content = self.app.content()
        trained = self.model.read(wire.arrays_of(content))
        self.metrics.clear()
        self.metrics.update(_numbers(content))
        return trained


@dataclass(frozen=True, slots=True, kw_only=True)
class AppUpdates:
    """Training whose row is the trained model minus the global model, as it was received.

    Attributes:
        train: training that gives weights, as float32 NumPy arrays.
    """

    train: Train

    def rows(self, vector: Array, jobs: Sequence[ClientJob]) -> Iterator[Trained]:
        """Yield every client's update [d] and training loss, or its error."""

        @np.errstate(over="ignore", invalid="ignore")  # the clip refuses values that are not finite
        def update(weights: Array) -> Array:
            return weights - vector

        return changed(self.train.rows(vector, jobs), update)


def names_to_evaluate(content: RecordDict) -> RecordNames | None:
    """Return the record names of a message with an instruction to evaluate; None for any other message."""
    for record_names in (wire.MESSAGE_API.to_evaluate, wire.NUMPY_CLIENT.to_evaluate):
        if wire.KEY in content.config_records.get(record_names.config, {}):
            return record_names
    return None


def metrics_of(app: AppCall) -> dict[str, float]:
    """Return the numbers in the reply of the app's own evaluate function, by name.

    Raises:
        RuntimeError: if the app replies with an error.
        Exception: any error that the app raises.
    """
    return wire.reported_metrics(app.content())


@dataclass(frozen=True, slots=True, kw_only=True)
class AppMetrics:
    """The app's own evaluate function, as the `train` part of a pipeline; it uses only the metrics of the app's reply."""

    app: AppCall
    bounds: MetricBounds

    def rows(self, vector: Array, jobs: Sequence[ClientJob]) -> Iterator[Trained]:
        """Yield the client's vector [metrics + 1], float64 and of norm at most 1, and 0 as the loss; or the app's error."""
        return one_by_one(jobs, lambda _: (self.bounds.counted(metrics_of(self.app)), np.zeros(())))


@dataclass(frozen=True, slots=True, kw_only=True)
class AppContribution:
    """The one contribution of a client under local DP: the app's metrics, clipped.

    If the app fails, or lacks a metric, the contribution is zero and the reply is noise alone. So no record decides whether the
    client replies.
    """

    app: AppCall
    bounds: MetricBounds

    def __call__(self, vector: Array, job: ClientJob) -> np.ndarray:
        """Return the contribution [1, dimension], float64."""
        try:
            with contained():
                metrics = metrics_of(self.app)
            return self.bounds.centered(np.asarray([[metrics[name] for name in self.bounds.bounds]]))
        except Exception as error:
            log.error("Evaluation failed: the reply is noise alone", exc_info=error)
            return np.zeros((1, len(self.bounds.bounds)))


def record_names_of(content: RecordDict) -> RecordNames:
    """Return the record names of a train message.

    Raises:
        ValueError: if its config is not exactly one record of a name that apps read.
    """
    matching = [names for names in (wire.MESSAGE_API, wire.NUMPY_CLIENT) if names.config in content.config_records]
    if len(matching) != 1 or len(content.config_records) != 1:
        names = sorted(content.config_records)[:8]
        raise ValueError(f"config records={names}: must be one, 'config' or 'fitins.config'")
    return matching[0]


def stock_message(message: Message, record_names: RecordNames) -> Message:
    """Return the message as a stock server sends it: copies of model and config, without this package's instruction."""
    arrays = wire.arrays_of(message.content)
    config = message.content.config_records[record_names.config]
    copied = {
        name: FlowerArray(dtype=array.dtype, shape=tuple(array.shape), stype=array.stype, data=array.data)
        for name, array in arrays.items()
    }
    stock = copy.copy(message)
    stock.content = RecordDict(
        {
            record_names.arrays: ArrayRecord(copied),
            record_names.config: ConfigRecord({name: value for name, value in config.items() if name != wire.KEY}),
        }
    )
    return stock


def _numbers(content: RecordDict) -> dict[str, float]:
    """Return the numbers in a reply's metric records, or those that a `NumPyClient` returned, without huge ones."""
    numbers: dict[str, float] = {}
    records: list[MetricRecord | ConfigRecord] = [*content.metric_records.values()]
    if (returned := content.config_records.get("fitres.metrics")) is not None:
        records.append(returned)
    for record in records:
        for name, value in record.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= wire.LARGEST_METRIC
            if is_number and name not in _EXAMPLE_COUNTS and not name.startswith("fitres.") and len(name) <= _MAX_NAME:
                numbers[name] = float(value)  # type: ignore[arg-type]
    return dict(sorted(numbers.items())[:_MAX_METRICS])

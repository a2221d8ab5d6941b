"""An app around a user's own model and data, with all methods and settings of flower-dp's app, and a run folder."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import nn

from flower_dp.apps.app_functions import named
from flower_dp.apps.client_parts import training_of
from flower_dp.apps.device_settings import hosted, own_settings, sets_anything
from flower_dp.apps.methods import ParsedRunConfig, defaults
from flower_dp.apps.records import config_of
from flower_dp.apps.settings import FUNCTIONS, Settings
from flower_dp.apps.vector_store import Kept, kept_of
from flower_dp.clients import FlatModel, Records, as_records, client_app, model_arrays
from flower_dp.clients.node_client import HostingClient
from flower_dp.clients.training.attributes import evaluating
from flower_dp.clients.training.devices import default_device
from flower_dp.clients.training.losses import Loss
from flower_dp.clients.training.records import OnDevice
from flower_dp.running.modules import BUILT
from flower_dp.running.run_recorder import record_run
from flower_dp.strategies import DPStrategy
from flower_dp.strategies.rules import OnRound

ModelFn = Callable[[], nn.Module]
DataFn = Callable[[int, int], Any]
EvaluateFn = Callable[..., Mapping[str, float] | None]
_CPU = torch.device("cpu")
_TAKES = {
    "model-fn": "() -> torch.nn.Module",
    "data-fn": "(client, num_clients) -> that client's data",
    "evaluate-fn": "(model) -> metrics by name",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Apps:
    """The two apps that a pyproject.toml names under [tool.flwr.app.components].

    Attributes:
        server: ServerApp that runs the strategy and writes the run folder.
        client: ClientApp that hosts clients.
    """

    server: ServerApp
    client: ClientApp

    def num_clients(self, run_config: Mapping[str, Any]) -> Any:
        """Return the number of clients of a run with these settings; each node hosts at least one of them."""
        return {**defaults(), **run_config}["num-clients"]


def _functions(
    given: Mapping[str, Callable[..., Any] | None], run_config: Mapping[str, Any], node_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the functions of a run by key: those given, else those that its settings name as "module:function".

    A device with settings of its own accepts from the run-config only functions that the app itself names.

    Raises:
        ValueError: if a function is missing, can't be imported, or is not the app's own, naming the key.
    """
    alone = sets_anything(node_config)
    functions = {
        key: function or named(key, str(run_config.get(key, "")), trusted=key in node_config, default_alone=alone)
        for key, function in given.items()
    }
    for key in FUNCTIONS[:2]:
        if functions[key] is None:
            raise ValueError(f"{key}: is missing; give {key.replace('-', '_')}, or set {key}='module:function'")
    return functions


def app(
    *,
    model_fn: ModelFn | None = None,
    data_fn: DataFn | None = None,
    evaluate_fn: EvaluateFn | None = None,
    loss: Loss = nn.functional.cross_entropy,
    on_round: OnRound | None = None,
) -> Apps:
    """Return a ServerApp and a ClientApp around your own model and data.

    The run-config may have the settings of flower-dp's own app, such as `method`, `num-rounds` and `dp-fedavg.clip-norm`. Missing
    settings get its defaults. A node hosts the clients i with i mod num-partitions = partition-id.

    If `model_fn`, `data_fn` or `evaluate_fn` is None, the app takes the function that the run-config names under `model-fn`,
    `data-fn` or `evaluate-fn`, as "module:function".

    Args:
        model_fn: function that makes the model, called after torch is seeded with the run's `seed`. The model must not have
            BatchNorm layers (`flower_dp.clients.fix_batchnorm` replaces them).
        data_fn: function from a client (0, 1, ...) and the number of clients to that client's data. The data are a pair of inputs
            and targets (tensors or NumPy arrays; inputs may be a dict of them by the names of the model's arguments), a map-style
            torch data set of such pairs, or `flower_dp.clients.Records`. Methods with local placement (such as fedsgd-dpc and
            nbafl) treat the number of records as public, and call the function for all clients, on the server too.
        evaluate_fn: function from the global model to metrics on public data, called for the initial model and after the rounds
            that `test-every` sets. A parameter `round` receives the round's number. A parameter `epsilon` receives the epsilon
            spent so far, infinite without privacy. Without a function there are no metrics.
        loss: function from model outputs and targets to the mean loss of a batch.
        on_round: function called on the server with the public numbers of every round, as the strategies' argument of this name.

    Raises:
        ValueError: for invalid settings, naming them, when a run starts.

    Example:
        >>> import flower_dp, torch
        >>> app = flower_dp.app(
        ...     model_fn=lambda: torch.nn.Linear(3, 2),
        ...     data_fn=lambda client, num_clients: (torch.randn(20, 3), torch.randint(0, 2, (20,))),
        ... )
        >>> type(app.server).__name__, type(app.client).__name__
        ('ServerApp', 'ClientApp')
    """
    given = dict(zip(FUNCTIONS, (model_fn, data_fn, evaluate_fn), strict=True))
    for key, function in given.items():
        if function is not None and (isinstance(function, nn.Module) or not callable(function)):
            raise ValueError(f"{key.replace('-', '_')}: is a {type(function).__name__}: must be a function {_TAKES[key]}")
    server = ServerApp()
    BUILT.add(server)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        run, functions = ParsedRunConfig.of(context.run_config, own_model=True), _functions(given, context.run_config, {})
        settings = run.settings
        training_of(settings)
        clients = _Clients(functions["data-fn"], settings.client_names(), settings.client_names())
        strategy = run.strategy(clients.sizes)
        model = FlatModel(_model(functions["model-fn"], settings.seed)).module  # refuses a model that no client can train
        record_run(
            strategy,
            grid,
            model_arrays(model),
            num_rounds=settings.num_rounds,
            config=context.run_config,
            name=f"{settings.method}-seed{settings.seed}",
            path=settings.path_of("output_dir"),
            evaluate_fn=_evaluation(functions["evaluate-fn"], model, strategy, settings),
            on_round=on_round,
            model=model,
            resume=settings.resume,
            timeout=settings.round_timeout,
        )

    return Apps(server=server, client=client_app(partial(client_of, model_fn, data_fn, loss)))


def client_of(model_fn: ModelFn | None, data_fn: DataFn | None, loss: Loss, context: Context) -> HostingClient:
    """Return a node's client; each process makes it once and keeps it during a run.

    Raises:
        ValueError: if the node-config does not say which clients the node hosts; or as `app`.
    """
    hosted(context.node_config)
    kept = kept_of(context.run_config, model_fn, data_fn, loss)
    return kept.once(config_of(context.node_config), lambda: _client(kept, model_fn, data_fn, loss, context))


def _client(kept: Kept, model_fn: ModelFn | None, data_fn: DataFn | None, loss: Loss, context: Context) -> HostingClient:
    node = dict(context.node_config)
    part, parts = hosted(node)
    config = own_settings({**defaults(), **context.run_config}, node)
    run = ParsedRunConfig.of(config, own_model=True)
    functions = _functions(
        {"model-fn": model_fn, "data-fn": data_fn}, config, node
    )  # only the server evaluates with `evaluate_fn`
    names = run.settings.client_names()
    if part >= len(names):
        raise ValueError(f"num-clients={len(names)}: leaves partition-id={part} of num-partitions={parts} without a client")
    clients = _Clients(functions["data-fn"], names, names[part::parts], default_device())
    everyone = _Clients(functions["data-fn"], names, names)
    seed = run.settings.seed
    model = kept.once((functions["model-fn"], seed), lambda: FlatModel(_model(functions["model-fn"], seed), default_device()))
    sizes = partial(kept.once, (functions["data-fn"], len(names)), everyone.sizes)
    return run.client(model, clients, sizes, loss)


class _Clients(Mapping[str, Records]):
    """The clients' records by name; `data_fn` reads a client's data at the first access."""

    def __init__(self, data_fn: DataFn, names: list[str], hosted: list[str], device: torch.device = _CPU) -> None:
        self._data_fn, self._on_device = data_fn, OnDevice(device)
        self._indices = {name: index for index, name in enumerate(names)}
        self._hosted = dict.fromkeys(hosted)
        self._read: dict[str, Records] = {}

    def __getitem__(self, name: str) -> Records:
        if name not in self._hosted:
            raise KeyError(name)
        if name not in self._read:
            self._read[name] = self._on_device(as_records(self._data_fn(self._indices[name], len(self._indices))))
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hosted)

    def __len__(self) -> int:
        return len(self._hosted)

    def sizes(self) -> dict[str, int]:
        """Return every client's number of records."""
        return {name: len(records) for name, records in self.items()}


def _model(model_fn: ModelFn, seed: int) -> nn.Module:
    """Return the model, the same for every call; torch's global random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: Any = model_fn()
    if not isinstance(model, nn.Module):
        raise ValueError(f"model_fn: returned a {type(model).__name__}: must be a torch.nn.Module")
    return model


def _evaluation(
    evaluate_fn: EvaluateFn | None, model: nn.Module, strategy: DPStrategy, settings: Settings
) -> Callable[[int, ArrayRecord], MetricRecord | None] | None:
    if evaluate_fn is None:
        return None
    keywords, every = _keywords_of(evaluate_fn), settings.test_every

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round != settings.num_rounds and not (every and server_round % every == 0):
            return None
        numbers = {"round": server_round, "epsilon": strategy.line_of(server_round)["epsilon"]}
        # Not strict: frozen parameters and buffers are not in the arrays.
        model.load_state_dict(arrays.to_torch_state_dict(), strict=False)
        with evaluating(model), torch.inference_mode():
            metrics = evaluate_fn(model, **{name: numbers[name] for name in keywords})
        return MetricRecord({**_numbers(metrics)})

    return evaluate


def _numbers(metrics: Any) -> dict[str, float]:
    """Return the metrics of an `evaluate_fn` as plain numbers by name."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ValueError(f"it returned a {type(metrics).__name__}: must be a dict of numbers by name, or None")
    numbers = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ValueError(f"its metric {name!r}: the name must be a string")
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: torch's, for a tensor with several numbers
            raise ValueError(f"its metric {name!r} is a {type(value).__name__}: must be one number") from None
    return numbers


def _keywords_of(evaluate_fn: EvaluateFn) -> list[str]:
    """Return the names among `round` and `epsilon` that a function takes by keyword, after the model."""
    try:
        _model, *others = inspect.signature(evaluate_fn).parameters.values()
    except ValueError:  # no signature (some functions in C), or no parameter, which the call will report
        return []
    keywords = {
        parameter.name for parameter in others if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in others)
    return [name for name in ("round", "epsilon") if takes_all or name in keywords]

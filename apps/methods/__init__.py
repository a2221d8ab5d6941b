"""The methods of the app: one module each, found by its name, with its own table of settings.

A module `dp_fedsam` is the method `dp-fedsam` and the table `[tool.flwr.app.config.dp-fedsam]`. It has the members of `Method`.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from torch import nn

from apps.evaluation import Evaluation
from apps.parts import Sizes
from apps.settings import TRAINING, Settings, key_of, read
from apps.tasks import TASKS, Task, load_task
from apps.tasks import module_of as task_module
from apps.tasks.models import make
from flower_dp.clients import Records
from flower_dp.clients.client import NodeClient
from flower_dp.core import checks
from flower_dp.planning.planner import Data, Inputs
from flower_dp.strategies import DPStrategy

METHODS = tuple(sorted(key_of(module.name) for module in pkgutil.iter_modules(__path__)))


class Method(Protocol):
    """The members of a method's module. A method with a planner also has `planning(settings, own, data, given)`.

    Attributes:
        Own: the dataclass of its own settings, with their defaults.
        READS: the settings of local training that it reads.
        UNSET: arguments of its strategy, its recipe and their parts that no setting changes, as `Class.argument`; those of all
            methods are in `apps.parts`.
        OTHER_DEFAULTS: arguments to which the app by default passes something else than the default of the signature.
    """

    Own: type[Any]
    READS: tuple[str, ...]
    UNSET: tuple[str, ...]
    OTHER_DEFAULTS: tuple[str, ...]

    def strategy(self, settings: Settings, own: Any, sizes: Sizes) -> DPStrategy:
        """Return the server's side."""

    def client(self, settings: Settings, own: Any, model: nn.Module, clients: Mapping[str, Records], sizes: Sizes) -> NodeClient:
        """Return the client of one node, around the records of the clients that the node hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's settings: the common ones, those of its method and those of its task."""

    settings: Settings
    method: Method
    own: Any
    of_task: Any

    @classmethod
    def of(cls, run_config: Mapping[str, Any]) -> "Run":
        """Read a run-config.

        Raises:
            ValueError: for an unknown or missing key, a value of the wrong kind, or a setting that the method does not read,
                naming it.
        """
        kinds = {name: module_of(name).Own for name in METHODS} | {name: task_module(name).Own for name in TASKS}
        tables: dict[str, dict[str, Any]] = {name: {} for name in [*kinds, "evaluation"]}
        common = {}
        for key, value in run_config.items():
            prefix, dot, rest = key.partition(".")
            if dot and prefix in tables:
                tables[prefix][rest] = value
            else:
                common[key] = value
        evaluation = read(Evaluation, tables.pop("evaluation"), "evaluation.")
        settings = replace(read(Settings, common), evaluation=evaluation)
        checks.one_of("method", settings.method, METHODS)
        settings.check()
        own = {name: read(kinds[name], table, f"{name}.") for name, table in tables.items()}
        _refuse_unread(settings, own)
        return cls(settings=settings, method=module_of(settings.method), own=own[settings.method], of_task=own[settings.task])

    def task(self) -> Task:
        """Return the task's records.

        Raises:
            ValueError: if they cannot be read.
        """
        return load_task(self.settings.task, self.settings.data_dir, self.of_task)

    def model(self) -> nn.Module:
        """Return a new model, the same for every call."""
        module = task_module(self.settings.task)
        return make(
            self.settings.model,
            bias=self.settings.model_bias,
            seed=self.settings.seed,
            num_features=module.num_features(self.of_task),
            num_classes=len(module.CLASSES),
        )

    def strategy(self, sizes: Sizes) -> DPStrategy:
        """Return the server's strategy; only methods that treat every client's number of records as public call `sizes`."""
        return self.method.strategy(self.settings, self.own, sizes)

    def client(self, model: nn.Module, clients: Mapping[str, Records], sizes: Sizes) -> NodeClient:
        """Return the client of one node."""
        return self.method.client(self.settings, self.own, model, clients, sizes)

    def planning(self, data: Data, given: Mapping[str, object]) -> Inputs:
        """Return the keys of the method's planning problem that the settings give; none if the method has no planner."""
        fill = getattr(self.method, "planning", None)
        inputs: Inputs = fill(self.settings, self.own, data, given) if fill else Inputs(values={})
        return inputs


def module_of(name: str) -> Method:
    """Return a method's module."""
    module: Any = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    return module  # type: ignore[no-any-return]


def _refuse_unread(settings: Settings, own: Mapping[str, Any]) -> None:
    """Refuse a setting that the user has set and neither method nor task uses: it would be ignored silently."""
    method = settings.method
    reads = {name: module_of(name).READS for name in METHODS}
    for name in TRAINING:
        if settings.is_set(name) and name not in reads[method]:
            readers = ", ".join(other for other in METHODS if name in reads[other])
            raise ValueError(f"{key_of(name)}={getattr(settings, name)!r}: is not read by method={method!r}, but by {readers}")
    for other, table in own.items():
        kind, chosen = ("method", method) if other in METHODS else ("task", settings.task)
        for field in fields(table):
            value = getattr(table, field.name)
            if other != chosen and value != field.default:
                raise ValueError(
                    f"{other}.{key_of(field.name)}={value!r}: is not read by {kind}={chosen!r}; settings of "
                    f"that are under {chosen}."
                )

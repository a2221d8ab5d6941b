"""Read a run-config: common settings, the method's table and the task's table; make the strategy and the client from them.

A method's table, such as `[tool.flwr.app.config.dp-fedsam]`, has a setting for every plain argument of its strategy that no
common setting gives. Its module here makes the arguments that several settings decide together.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass, replace
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from flower_dp.apps.settings import DEALT, FUNCTIONS, Evaluation, Settings, key_of, read, sampled
from flower_dp.apps.strategy_arguments import Sizes
from flower_dp.apps.tasks import TASKS, load_task
from flower_dp.apps.tasks import module_of as task_module
from flower_dp.core import checks
from flower_dp.methods import METHODS, TRAINING, Method
from flower_dp.planning.planner import Data, Inputs
from flower_dp.running.values import Value
from flower_dp.strategies import DPStrategy

if TYPE_CHECKING:
    from torch import nn

    from flower_dp.apps.tasks import Task
    from flower_dp.clients import FlatModel, Records
    from flower_dp.clients.node_client import HostingClient
    from flower_dp.clients.training.losses import Loss


# Arguments whose values come from the data.
_OF_DATA = ("num_records", "min_records")
_PLAIN = (float, int, str, bool)
# Settings of flower-dp's own models and data; not `seed`, which a user's own initial model needs too.
NOT_READ = ("model", "model-bias", *(key for key in DEALT if key != "seed"))


class Parameter(NamedTuple):
    """A plain argument of a strategy: its type without None, its default (None if it has none), and whether it may be None."""

    kind: type
    default: Any
    optional: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRunConfig:
    """A run's settings: the common ones, those of its method and those of its task."""

    settings: Settings
    method: Method
    own: Any
    of_task: Any

    @classmethod
    def of(cls, run_config: Mapping[str, Any], *, own_model: bool = False) -> "ParsedRunConfig":
        """Read a run-config.

        Tables of methods that were not chosen are ignored.

        Args:
            run_config: all settings of the app.
            own_model: whether the app has a user's own model and data; its run-config may leave out settings with a default.

        Raises:
            SettingsError: for all unknown or missing keys, values of the wrong type, and settings that the method does not read.
        """
        findings = checks.ErrorCollector()
        if own_model:
            for key in NOT_READ:
                if (value := run_config.get(key, defaults()[key])) != defaults()[key]:
                    why = "an app with its own model and data does not read this setting; remove it"
                    findings.errors.append(checks.refusal(key, value, why))
            ignored = {*FUNCTIONS, *NOT_READ}
            run_config = defaults() | {key: value for key, value in run_config.items() if key not in ignored}
        tables: dict[str, dict[str, Any]] = {name: {} for name in (*METHODS, *TASKS, "private-evaluation")}
        common = {}
        for key, value in run_config.items():
            prefix, dot, rest = key.partition(".")
            if dot and prefix in tables:
                tables[prefix][rest] = value
            else:
                common[key] = value
        evaluation = read(Evaluation, tables["private-evaluation"], findings, "private-evaluation.")
        settings = replace(read(Settings, common, findings), evaluation=evaluation)
        settings.check(findings)
        task, name = settings.task, settings.method
        of_task = read(task_module(task).Own, tables[task], findings, f"{task}.") if task in TASKS else None
        with findings.collect_errors():
            checks.one_of("method", name, tuple(METHODS))
        if name not in METHODS:
            findings.raise_if_any()
        method = METHODS[name]
        own = read(table_of(name), tables[name], findings, f"{name}.")
        settings = sampled(settings, method.samplings, findings)
        _find_unread(settings, findings)
        for key, value in run_config.items():
            table, dot, _ = key.partition(".")
            if dot and table in TASKS and table != task and value != defaults().get(key, value):
                why = f"is not read by task={task!r}, whose settings begin with '{task}.'"
                findings.errors.append(checks.refusal(key, value, why))
        findings.raise_if_any()
        return cls(settings=settings, method=method, own=own, of_task=of_task)

    def task(self) -> "Task":
        """Return the task's records.

        Raises:
            ValueError: if the records cannot be read.
        """
        return load_task(self.settings.task, self.settings.data_dir, self.of_task)

    def model(self) -> "nn.Module":
        """Return a new model, the same for every call."""
        from flower_dp.apps.tasks.models import make  # noqa: PLC0415 - torch takes a second

        module = task_module(self.settings.task)
        return make(
            self.settings.model,
            bias=self.settings.model_bias,
            seed=self.settings.seed,
            num_features=module.num_features(self.of_task),
            num_classes=len(module.CLASSES),
        )

    def strategy(self, sizes: Sizes) -> DPStrategy:
        """Return the server's strategy. Only methods that treat every client's number of records as public call `sizes`."""
        strategy: DPStrategy = self.method.load("strategy")(
            **self._arguments(sizes),
            report_client_metrics=self.settings.report_client_metrics,
            ledger=self.settings.path_of("server_ledger"),
        )
        return strategy

    def client(
        self, model: "FlatModel | nn.Module", clients: "Mapping[str, Records]", sizes: Sizes, loss: "Loss | None" = None
    ) -> "HostingClient":
        """Return the client of one node, with the records of the clients that it hosts; `loss` is a user's own."""
        from flower_dp.apps import client_parts  # noqa: PLC0415 - torch takes a second

        if self.method.recipe:
            arguments = self._arguments(sizes)
            return client_parts.local_client(self.settings, self.method.load("recipe"), arguments, model, clients, sizes, loss)
        rules: Any = self.strategy(sizes).rules
        radius = getattr(self.own, "sam_radius", 0.0)
        return client_parts.client_level_client(self.settings, rules, model, clients, radius, loss)

    def _arguments(self, sizes: Sizes) -> dict[str, Any]:
        """Return the arguments of strategy and recipe."""
        plain = {}
        for name, parameter in _parameters(self.method.load("strategy")).items():
            if (setting := self.method.renamed.get(name, name)) in table_of(self.method.name).__dataclass_fields__:
                value = getattr(self.own, setting)
                plain[name] = None if parameter.optional and not value else value
        made: dict[str, Any] = self.method.load("settings").arguments(self.settings, self.own, sizes)
        return plain | made

    def planning(self, data: Data, given: Mapping[str, object]) -> Inputs:
        """Return the keys of the method's planning problem that the settings give; empty without a planner."""
        fill = getattr(self.method.load("settings"), "planning", None)
        inputs: Inputs = fill(self.settings, self.own, data, given) if fill else Inputs(values={})
        return inputs


@cache
def defaults() -> dict[str, Value]:
    """Return all settings of the app with their defaults, by run-config key. The result is shared: do not change it."""
    tables: dict[str, type[Any]] = {"": Settings, "private-evaluation.": Evaluation}
    tables |= {f"{name}.": table_of(name) for name in METHODS} | {f"{name}.": task_module(name).Own for name in TASKS}
    return {
        prefix + key_of(setting.name): setting.default
        for prefix, table in tables.items()
        for setting in fields(table)
        if setting.default is not MISSING
    }


@cache
def table_of(name: str) -> type[Any]:
    """Return the dataclass of a method's own settings, with their defaults.

    The table has one setting for every plain argument of the strategy that neither a common setting nor the data give. An
    argument that is a dataclass gives its fields. The default is that of `Method.defaults`, else that of the signature, with 0,
    "" or False for None.
    """
    method, settings = METHODS[name], {}
    for argument, parameter in _parameters(method.load("strategy"), flat=True).items():
        setting = method.renamed.get(argument, argument)
        if setting not in (*Settings.__dataclass_fields__, *_OF_DATA):
            default = method.defaults.get(setting, parameter.default)
            settings[setting] = (parameter.kind, parameter.kind() if default is None else default)
    settings |= {setting: (type(default), default) for setting, default in method.defaults.items() if setting not in settings}
    columns = [(setting, kind, field(default=default)) for setting, (kind, default) in settings.items()]
    return make_dataclass(name, columns, frozen=True, kw_only=True)


@cache
def _parameters(kind: Callable[..., Any], *, flat: bool = False) -> dict[str, Parameter]:
    """Return the plain keyword arguments of a class; with `flat` also the fields of arguments that are dataclasses."""
    hints, parameters = get_type_hints(vars(kind)["__init__"]), dict[str, Parameter]()
    for name, parameter in inspect.signature(kind).parameters.items():
        hint = hints.get(name)
        if flat and isinstance(hint, type) and is_dataclass(hint):
            parameters |= _parameters(hint, flat=True)
            continue
        kinds = [str if get_origin(one) is Literal else one for one in get_args(hint) or (hint,)]
        plain = next((one for one in _PLAIN if one in kinds), str if get_origin(hint) is Literal else None)
        if plain is not None:
            default = None if parameter.default is parameter.empty else parameter.default
            parameters[name] = Parameter(plain, default, NoneType in kinds)
    return parameters


def _find_unread(settings: Settings, findings: checks.ErrorCollector) -> None:
    """Collect settings of training that were set although the method does not read them: it would ignore them silently."""
    for name in TRAINING:
        if settings.is_set(name) and name not in METHODS[settings.method].reads:
            readers = ", ".join(other for other, method in METHODS.items() if name in method.reads)
            why = f"is not read by method={settings.method!r}, but by {readers}"
            findings.errors.append(checks.refusal(key_of(name), getattr(settings, name), why))

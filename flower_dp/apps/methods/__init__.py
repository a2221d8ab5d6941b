"""The settings of methods: one module each, with its own table, `[tool.flwr.app.config.dp-fedsam]` for example."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from flower_dp.apps.evaluation import Evaluation
from flower_dp.apps.parts import Sizes
from flower_dp.apps.settings import Settings, key_of, read, sampled
from flower_dp.apps.tasks import TASKS, load_task
from flower_dp.apps.tasks import module_of as task_module
from flower_dp.core import checks
from flower_dp.methods import METHODS, TRAINING
from flower_dp.planning.planner import Data, Inputs
from flower_dp.strategies import DPStrategy

if TYPE_CHECKING:
    from torch import nn

    from flower_dp.apps.tasks import Task
    from flower_dp.clients import Records
    from flower_dp.clients.node_client import NodeClient


class Module(Protocol):
    """The members of a method's module. A method with a planner also has `planning(settings, own, data, given)`.

    Attributes:
        Own: the dataclass of its own settings, with their defaults.
    """

    Own: type[Any]

    def strategy(self, settings: Settings, own: Any, sizes: Sizes) -> DPStrategy:
        """Return the server's side."""

    def client(
        self, settings: Settings, own: Any, model: "nn.Module", clients: "Mapping[str, Records]", sizes: Sizes
    ) -> "NodeClient":
        """Return the client of one node, around the records of the clients that the node hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's settings: the common ones, those of its method and those of its task."""

    settings: Settings
    method: Module
    own: Any
    of_task: Any

    @classmethod
    def of(cls, run_config: Mapping[str, Any]) -> "Run":
        """Read a run-config.

        The tables of methods that were not chosen are not looked at.

        Raises:
            SettingsError: for unknown or missing keys, values of the wrong kind, and settings that the method does not read, all
                of them at once.
        """
        tables: dict[str, dict[str, Any]] = {name: {} for name in (*METHODS, *TASKS, "evaluation")}
        common = {}
        for key, value in run_config.items():
            prefix, dot, rest = key.partition(".")
            if dot and prefix in tables:
                tables[prefix][rest] = value
            else:
                common[key] = value
        findings = checks.Findings()
        evaluation = read(Evaluation, tables["evaluation"], findings, "evaluation.")
        settings = replace(read(Settings, common, findings), evaluation=evaluation)
        settings.check(findings)
        task, name = settings.task, settings.method
        of_task = read(task_module(task).Own, tables[task], findings, f"{task}.") if task in TASKS else None
        with findings.noted():
            checks.one_of("method", name, tuple(METHODS))
        if name not in METHODS:
            findings.refuse()
        method = module_of(name)
        own = read(method.Own, tables[name], findings, f"{name}.")
        settings = sampled(settings, METHODS[name].samplings, findings)
        _find_unread(settings, findings)
        for other in TASKS:
            _find_unread_of_task(other, tables[other], task, findings)
        findings.refuse()
        return cls(settings=settings, method=method, own=own, of_task=of_task)

    def task(self) -> "Task":
        """Return the task's records.

        Raises:
            ValueError: if they cannot be read.
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
        """Return the server's strategy; only methods that treat every client's number of records as public call `sizes`."""
        return self.method.strategy(self.settings, self.own, sizes)

    def client(self, model: "nn.Module", clients: "Mapping[str, Records]", sizes: Sizes) -> "NodeClient":
        """Return the client of one node."""
        return self.method.client(self.settings, self.own, model, clients, sizes)

    def planning(self, data: Data, given: Mapping[str, object]) -> Inputs:
        """Return the keys of the method's planning problem that the settings give; none if the method has no planner."""
        fill = getattr(self.method, "planning", None)
        inputs: Inputs = fill(self.settings, self.own, data, given) if fill else Inputs(values={})
        return inputs


def module_of(name: str) -> Module:
    """Return a method's module."""
    module: Module = METHODS[name].load("settings")
    return module


def _find_unread(settings: Settings, findings: checks.Findings) -> None:
    """Find settings of training that the user has set and the method does not use: they would be ignored silently."""
    for name in TRAINING:
        if settings.is_set(name) and name not in METHODS[settings.method].reads:
            readers = ", ".join(other for other, method in METHODS.items() if name in method.reads)
            findings.lines.append(
                f"{key_of(name)}={getattr(settings, name)!r}: is not read by method={settings.method!r}, but by {readers}"
            )


def _find_unread_of_task(name: str, table: Mapping[str, Any], chosen: str, findings: checks.Findings) -> None:
    """Find settings of a task that is not the chosen one."""
    for field in fields(task_module(name).Own) if name != chosen else ():
        value = table.get(key_of(field.name), field.default)
        if value != field.default:
            findings.lines.append(
                f"{name}.{key_of(field.name)}={value!r}: is not read by task={chosen!r}; settings of that are under {chosen}."
            )

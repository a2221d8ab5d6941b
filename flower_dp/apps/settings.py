"""The run-config's common settings, read and checked once; every method has its own table (`flower_dp.apps.methods`).

TOML has no null, so 0 and "" mean "not set" where the documentation says so.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flower_dp.apps.tasks import MODELS, TASKS, module_of
from flower_dp.apps.tasks.partitions import PARTITIONS
from flower_dp.core.checks import BadValue, ErrorCollector, bad, integer, number, one_of, refusal
from flower_dp.running.values import SETTINGS_PAGE, suggestion_for

T = TypeVar("T")
SAMPLINGS = ("poisson", "fixed-size", "full", "round-robin", "minimum-separation")
# Metrics that the app's clients compute of the global model on their own records.
METRICS = ("loss", "accuracy")
# Keys that name an app's functions, as "module:function"; flower-dp's own app does not have them.
FUNCTIONS = ("model-fn", "data-fn", "evaluate-fn")
# Settings that decide which records of a task's data a client has.
DEALT = (
    *("task", "data-dir", "partition", "dirichlet-alpha", "classes-per-client", "records-per-client"),
    *("validation-ratio", "test-ratio", "seed"),
)
# Settings that only some samplings read.
SAMPLED = {
    "sampling_rate": ("poisson",),
    "cohort_size": ("fixed-size", "round-robin", "minimum-separation"),
    "min_separation": ("minimum-separation",),
    "max_participations": ("minimum-separation",),
}
# Keys that decide the cohorts.
SAMPLING_KEYS = ("sampling", *(name.replace("_", "-") for name in SAMPLED))
# Values that turn a setting off, where that is not the default.
_OFF = {"momentum": 0.0, "learning_rate_decay": 0.0, "sampling_rate": 0.0}


def _checked(default: T, check: Callable[..., Any], **bounds: Any) -> T:
    """Define a setting: its default, and the check of its value."""
    made: T = field(default=default, metadata={"check": partial(check, **bounds)})
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Private evaluation on the clients: the table `private-evaluation`."""

    every: int = _checked(0, integer, at_least=0)
    metrics: str = "accuracy=1"
    noise_multiplier: float = _checked(4.0, number, at_least=0)
    sampling_rate: float = _checked(0.0, number, at_least=0, at_most=1)
    epsilon: float = _checked(0.0, number, at_least=0)

    def check(self, findings: ErrorCollector) -> None:
        """Collect invalid values, and values that nothing reads."""
        before = len(findings.errors)
        _check_each(self, findings, "private-evaluation.")
        with findings.collect_errors():
            self.bounds()
        if not self.every and len(findings.errors) == before:
            for setting in fields(self):
                with findings.collect_errors():
                    self.refuse(setting.name, "is read with private-evaluation.every above 0 only")

    def refuse(self, name: str, why: str) -> None:
        """Refuse a setting that was set although nothing reads it.

        Raises:
            BadValue: if its value is not the default.
        """
        if (value := getattr(self, name)) != default_of(self, name):
            raise refusal(f"private-evaluation.{key_of(name)}", value, why)

    def bounds(self) -> dict[str, float]:
        """Return the public upper bound of every metric by name.

        Raises:
            BadValue: if the text is not a list of metrics of the app's clients, each with a bound.
        """
        bounds: dict[str, float] = {}
        for part in self.metrics.split(","):
            name, _, text = (word.strip() for word in part.partition("="))
            try:
                bound = float(text)
            except ValueError:
                bound = math.nan
            if name not in METRICS or name in bounds or not 0 < bound < math.inf:
                wanted = "comma-separated metrics, each once and with its upper bound above 0, such as 'loss=5,accuracy=1'"
                raise bad("private-evaluation.metrics", self.metrics, f"{wanted}; the metrics are {', '.join(METRICS)}")
            bounds[name] = bound
        return bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A run's common settings, one field per run-config key (`-` for `_`); `evaluation` is the table `private-evaluation`."""

    task: str = "mnist"
    method: str = "dp-fedsam"
    model: str = "logistic"
    model_bias: bool = True
    data_dir: str = ""
    num_clients: int = _checked(1000, integer, at_least=1, at_most=10**8)  # the server and every node hold the names of all
    partition: str = _checked("iid", one_of, valid=PARTITIONS)
    dirichlet_alpha: float = 0.3
    classes_per_client: int = 2
    records_per_client: int = 0
    validation_ratio: float = _checked(0.0, number, at_least=0, below=1)
    test_ratio: float = _checked(0.0, number, at_least=0, below=1)
    num_rounds: int = _checked(150, integer, at_least=0)
    sampling: str = ""
    sampling_rate: float = 0.1
    cohort_size: int = 0
    min_separation: int = _checked(0, integer, at_least=0)
    max_participations: int = _checked(0, integer, at_least=0)
    local_epochs: int = _checked(1, integer, at_least=1)
    batch_size: int = _checked(4, integer, at_least=1)
    learning_rate: float = _checked(0.15, number, above=0)
    learning_rate_decay: float = _checked(0.0005, number, at_least=0, below=1)
    momentum: float = _checked(0.5, number, at_least=0, below=1)
    weight_decay: float = _checked(0.0, number, at_least=0)
    proximal_mu: float = _checked(0.0, number, at_least=0)
    blur_strength: float = _checked(0.0, number, at_least=0)
    blur_bound: float = _checked(0.0, number, at_least=0)
    lus_keep_ratio: float = _checked(1.0, number, above=0, at_most=1)
    optimizer: str = "sgd"
    training_engine: str = _checked("auto", one_of, valid=("auto", "batched", "one-by-one"))
    report_client_metrics: bool = False
    test_every: int = _checked(1, integer, at_least=0)
    round_timeout: float = _checked(600.0, number, above=0)
    seed: int = _checked(0, integer, at_least=0, at_most=2**63 - 1)  # of torch, and of a number in a message
    output_dir: str = ""
    resume: bool = False
    server_ledger: str = ""
    evaluation: Evaluation = field(default_factory=Evaluation)

    def check(self, findings: ErrorCollector) -> None:
        """Collect values that are invalid for every method."""
        _check_each(self, findings)
        with findings.collect_errors():
            one_of("model", self.model, MODELS)
        with findings.collect_errors():
            one_of("task", self.task, TASKS)
            if self.model in MODELS and self.model not in (fit := module_of(self.task).MODELS):
                raise refusal("model", self.model, f"does not fit task={self.task!r}; must be one of {', '.join(fit)}")
        if bool(self.blur_strength) != bool(self.blur_bound) and min(self.blur_strength, self.blur_bound) >= 0:
            wanted = "must be above 0 with blur-strength" if self.blur_strength else "is read with blur-strength above 0 only"
            findings.errors.append(refusal("blur-bound", self.blur_bound, wanted))
        # Held-out records are not protected, so no client may train on a record that any client holds out.
        if self.validation_ratio < 1 and self.test_ratio < 1 <= self.validation_ratio + self.test_ratio:
            why = f"with test-ratio={self.test_ratio} leaves no record to train on; their sum must be below 1"
            findings.errors.append(refusal("validation-ratio", self.validation_ratio, why))
        if self.partition == "sample" and self.holds_out:
            why = (
                "clients share records, so one would train on records that another holds out; set validation-ratio=0 and "
                "test-ratio=0, or another partition"
            )
            findings.errors.append(refusal("partition", self.partition, why))
        self.evaluation.check(findings)
        if 0 < self.num_rounds < (every := self.evaluation.every):
            findings.errors.append(refusal("private-evaluation.every", every, f"must be at most num-rounds={self.num_rounds}"))

    @property
    def holds_out(self) -> bool:
        """Whether clients hold records out for validation or test."""
        return bool(self.validation_ratio or self.test_ratio)

    def is_set(self, name: str) -> bool:
        """Return whether a setting has neither its default nor the value that turns it off."""
        default = default_of(self, name)
        return getattr(self, name) not in (default, _OFF.get(name, default))

    @property
    def run_name(self) -> str:
        """A short name for the run's folder."""
        return f"{self.task}-{self.method}-{self.model}-seed{self.seed}"

    def client_names(self) -> list[str]:
        """The names of all clients, the same in every run."""
        width = len(str(self.num_clients - 1))
        return [f"client-{index:0{width}d}" for index in range(self.num_clients)]

    def path_of(self, name: str) -> Path | None:
        """Return a setting that is a path; None if it is not set."""
        return Path(path).expanduser() if (path := getattr(self, name)) else None


def sampled(settings: Settings, samplings: tuple[str, ...], findings: ErrorCollector) -> Settings:
    """Return settings whose sampling is one of a method's samplings, by default the first one.

    Collects an unfit sampling, and settings that the sampling does not read. Round-robin without a cohort size takes all clients.
    """
    sampling = settings.sampling or samplings[0]
    if sampling not in samplings:
        with findings.collect_errors():
            one_of("sampling", sampling, samplings)
        sampling = samplings[0]
    for name, readers in SAMPLED.items():
        if settings.is_set(name) and sampling not in readers:
            why = f"is not read with sampling={sampling!r}, but with {' or '.join(readers)}"
            findings.errors.append(refusal(key_of(name), getattr(settings, name), why))
    size = settings.cohort_size or (settings.num_clients if sampling == "round-robin" else 0)
    return replace(settings, sampling=sampling, cohort_size=size)


def default_of(own: Any, name: str) -> Any:
    """Return the default of a setting of a table."""
    return type(own).__dataclass_fields__[name].default


def key_of(name: str) -> str:
    """Return a field's run-config key."""
    return name.replace("_", "-")


def _check_each(own: Any, findings: ErrorCollector, prefix: str = "") -> None:
    for setting in fields(own):
        with findings.collect_errors():
            if "check" in setting.metadata:
                setting.metadata["check"](prefix + key_of(setting.name), getattr(own, setting.name))


def read(kind: type[T], table: Mapping[str, Any], findings: ErrorCollector, prefix: str = "") -> T:
    """Return a dataclass of settings from a table with one entry per field; a field that is a table gets its default.

    Collects unknown keys, missing keys and values of the wrong type; their fields get the defaults.
    """
    known = {key_of(field.name): field.type for field in fields(kind) if not is_dataclass(field.type)}  # type: ignore[arg-type]
    keys = dict.fromkeys(prefix + key for key in known)
    for key in [prefix + key for key in table if key not in known]:
        hint = suggestion_for(key, keys, "", otherwise=SETTINGS_PAGE)
        findings.errors.append(refusal(key, table[key.removeprefix(prefix)], f"unknown setting; {hint}"))
    values = {}
    for key, wanted in known.items():
        with findings.collect_errors():
            if key not in table:
                raise BadValue(prefix + key, f"{prefix}{key}: is missing from the run-config")
            values[key.replace("-", "_")] = _typed(prefix + key, table[key], wanted)
    return kind(**values)


def _typed(key: str, value: Any, kind: Any) -> Any:
    """Return the value in its key's type; a whole number is also a float."""
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise bad(key, value, f"of type {kind.__name__}")
    return value

"""The run-config's common settings, read and checked once; every method has its own table (`flower_dp.apps.methods`).

Every key has a documented default in `[tool.flwr.app.config]` of pyproject.toml; TOML knows no null, so 0 and "" mean "not set"
where it says so there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from flower_dp.apps.evaluation import Evaluation
from flower_dp.apps.tasks import MODELS, TASKS, module_of
from flower_dp.apps.tasks.partitions import PARTITIONS
from flower_dp.core import checks

T = TypeVar("T")
SAMPLINGS = ("poisson", "fixed-size", "full", "round-robin")
ENGINES = ("auto", "batched", "one-by-one")
# The server and every node hold the names of all of them.
_MOST_CLIENTS = 10**8
_MOST_SEED = 2**63 - 1  # of torch, and of a number in a message
# Values that turn a setting off, where that is not the default.
_OFF = {"momentum": 0.0, "learning_rate_decay": 0.0, "sampling_rate": 0.0}
_BOUNDS: dict[str, dict[str, float]] = {
    "learning_rate": {"above": 0},
    "learning_rate_decay": {"at_least": 0, "below": 1},
    "momentum": {"at_least": 0, "below": 1},
    "weight_decay": {"at_least": 0},
    "proximal": {"at_least": 0},
    "blur_strength": {"at_least": 0},
    "blur_bound": {"at_least": 0},
    "update_keep_ratio": {"above": 0, "at_most": 1},
}
# Settings of some samplings alone.
SAMPLED = {"sampling_rate": ("poisson",), "cohort_size": ("fixed-size", "round-robin")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A run's common settings, one field a run-config key (`-` for `_`); `evaluation` is a table of its own."""

    task: str = "mnist"
    method: str = "dp-fedsam"
    model: str = "logistic"
    model_bias: bool = True
    data_dir: str = ""
    num_clients: int = 1000
    partition: str = "iid"
    dirichlet_alpha: float = 0.3
    classes_per_client: int = 2
    records_per_client: int = 0
    validation_ratio: float = 0.0
    test_ratio: float = 0.0
    num_rounds: int = 150
    sampling: str = ""
    sampling_rate: float = 0.1
    cohort_size: int = 0
    local_epochs: int = 1
    batch_size: int = 4
    learning_rate: float = 0.15
    learning_rate_decay: float = 0.0005
    momentum: float = 0.5
    weight_decay: float = 0.0
    proximal: float = 0.0
    blur_strength: float = 0.0
    blur_bound: float = 0.0
    update_keep_ratio: float = 1.0
    optimizer: str = "sgd"
    engine: str = "auto"
    report_client_metrics: bool = False
    evaluate_every: int = 1
    round_timeout: float = 600.0
    seed: int = 0
    output_dir: str = ""
    resume: bool = False
    server_ledger: str = ""
    evaluation: Evaluation = field(default_factory=Evaluation)

    def check(self, findings: checks.Findings) -> None:
        """Find values that are invalid for every method."""
        with findings.noted():
            checks.one_of("task", self.task, TASKS)
            if self.model not in (fit := module_of(self.task).MODELS):
                checks.one_of("model", self.model, MODELS)
                raise ValueError(f"model={self.model!r}: does not fit task={self.task!r}, which has {', '.join(fit)}")
        for name, valid in (("partition", PARTITIONS), ("engine", ENGINES)):
            with findings.noted():
                checks.one_of(name, getattr(self, name), valid)
        with findings.noted():
            checks.integer("num-clients", self.num_clients, at_least=1, at_most=_MOST_CLIENTS)
        for name, most in (("num_rounds", None), ("evaluate_every", None), ("seed", _MOST_SEED)):
            with findings.noted():
                checks.integer(key_of(name), getattr(self, name), at_least=0, at_most=most)
        self._check_training(findings)
        with findings.noted():
            checks.number("round-timeout", self.round_timeout, above=0)
        with findings.noted():
            self._check_split()
        self.evaluation.check(findings)
        if 0 < self.num_rounds < self.evaluation.every:
            findings.lines.append(f"evaluation.every={self.evaluation.every}: num-rounds={self.num_rounds} has no such round")

    def _check_training(self, findings: checks.Findings) -> None:
        """Find settings of local training that make no sense; the recipe checks them again, when torch is there."""
        for name in ("local_epochs", "batch_size"):
            with findings.noted():
                checks.integer(key_of(name), getattr(self, name), at_least=1)
        for name, bounds in _BOUNDS.items():
            with findings.noted():
                checks.number(key_of(name), getattr(self, name), **bounds)
        if bool(self.blur_strength) != bool(self.blur_bound) and self.blur_strength >= 0:
            wanted = "must be above 0 with blur-strength" if self.blur_strength else "is read with blur-strength above 0 only"
            findings.lines.append(f"blur-bound={self.blur_bound:g}: {wanted}")

    def _check_split(self) -> None:
        """Check the settings of held-out records: they are not protected, so no client may train on another's."""
        checks.number("validation-ratio", self.validation_ratio, at_least=0, below=1)
        checks.number("test-ratio", self.test_ratio, at_least=0, below=1)
        if self.validation_ratio + self.test_ratio >= 1:
            raise ValueError(
                f"validation-ratio={self.validation_ratio}: with test-ratio={self.test_ratio} leaves nothing to train on"
            )
        if self.partition == "sample" and self.holds_out:
            raise ValueError(
                f"partition='sample': clients share records; with validation-ratio={self.validation_ratio} or "
                f"test-ratio={self.test_ratio} one would train on what another has held out"
            )

    @property
    def holds_out(self) -> bool:
        """Whether clients hold records out for validation or test."""
        return bool(self.validation_ratio or self.test_ratio)

    def is_set(self, name: str) -> bool:
        """Tell whether a setting has another value than its default and than the one that turns it off."""
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

    def output_path(self) -> Path | None:
        """The run's folder; None for a new one in the default place."""
        return Path(self.output_dir).expanduser() if self.output_dir else None

    def ledger_path(self) -> Path | None:
        """The server's ledger, which several runs share; None for none."""
        return Path(self.server_ledger).expanduser() if self.server_ledger else None


def sampled(settings: Settings, samplings: tuple[str, ...], findings: checks.Findings) -> Settings:
    """Return settings whose sampling is one of a method's: its first one if none was chosen. Find what that does not read.

    A cohort of round-robin sampling whose size was not set has all clients.
    """
    sampling = settings.sampling or samplings[0]
    if sampling not in samplings:
        with findings.noted():
            checks.one_of("sampling", sampling, samplings)
        sampling = samplings[0]
    for name, readers in SAMPLED.items():
        if settings.is_set(name) and sampling not in readers:
            value, others = getattr(settings, name), " or ".join(readers)
            findings.lines.append(f"{key_of(name)}={value!r}: is not read with sampling={sampling!r}, but with {others}")
    size = settings.cohort_size or (settings.num_clients if sampling == "round-robin" else 0)
    return replace(settings, sampling=sampling, cohort_size=size)


def default_of(own: Any, name: str) -> Any:
    """Return the default of a setting of a table."""
    return type(own).__dataclass_fields__[name].default


def key_of(name: str) -> str:
    """Return a field's run-config key."""
    return name.replace("_", "-")


def read(kind: type[T], table: Mapping[str, Any], findings: checks.Findings, prefix: str = "") -> T:
    """Return a dataclass of settings from a table with one entry a field; a field that is a table itself has its default.

    An unknown or missing key or a value of the wrong kind is a finding, and the field has its default then.
    """
    known = {key_of(field.name): field.type for field in fields(kind) if not is_dataclass(field.type)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            findings.lines.append(f"{prefix}{key}={table[key]!r}: unknown key; known are {', '.join(sorted(known))}")
    values = {}
    for key, wanted in known.items():
        if key not in table:
            findings.lines.append(f"{prefix}{key}: is missing from the run-config")
            continue
        with findings.noted():
            values[key.replace("-", "_")] = _typed(prefix + key, table[key], wanted)
    return kind(**values)


def _typed(key: str, value: Any, kind: Any) -> Any:
    """Return the value as its key's type; a whole number is also a float."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{key}={value!r}: must be of type {kind.__name__}")
    return value

"""The run-config's common settings, read and checked once; every method has its own table (`apps.methods`).

Every key has a documented default in `[tool.flwr.app.config]` of pyproject.toml; TOML knows no null, so 0 and "" mean "not set"
where it says so there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from apps.evaluation import Evaluation
from apps.tasks import TASKS, module_of
from apps.tasks.models import MODELS
from apps.tasks.partitions import PARTITIONS
from flower_dp.core import checks

T = TypeVar("T")
SAMPLINGS = ("poisson", "fixed-size", "full", "round-robin")
ENGINES = ("batched", "one-by-one")
# Settings of local training: every method says which of them it reads.
TRAINING = (
    "local_epochs",
    "batch_size",
    "momentum",
    "weight_decay",
    "proximal",
    "blur_strength",
    "blur_bound",
    "update_keep_ratio",
    "optimizer",
    "engine",
)
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
    sampling: str = "poisson"
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
    engine: str = "batched"
    report_client_metrics: bool = False
    evaluate_every: int = 1
    round_timeout: float = 600.0
    seed: int = 0
    output_dir: str = ""
    evaluation: Evaluation = field(default_factory=Evaluation)

    def check(self) -> None:
        """Refuse values that are invalid for every method.

        Raises:
            ValueError: naming key and value.
        """
        checks.one_of("task", self.task, TASKS)
        checks.one_of("model", self.model, MODELS)
        if self.model not in (fit := module_of(self.task).MODELS):
            raise ValueError(f"model={self.model!r}: does not fit task={self.task!r}, which has {', '.join(fit)}")
        checks.one_of("partition", self.partition, PARTITIONS)
        checks.one_of("sampling", self.sampling, SAMPLINGS)
        checks.one_of("engine", self.engine, ENGINES)
        self._check_split()
        checks.integer("num-clients", self.num_clients, at_least=1)
        checks.integer("num-rounds", self.num_rounds, at_least=0)
        checks.integer("evaluate-every", self.evaluate_every, at_least=0)
        checks.integer("seed", self.seed, at_least=0)
        checks.number("round-timeout", self.round_timeout, above=0)
        self.evaluation.check()
        if 0 < self.num_rounds < self.evaluation.every:
            raise ValueError(f"evaluation.every={self.evaluation.every}: num-rounds={self.num_rounds} has no such round")
        for name, samplings in SAMPLED.items():
            if self.is_set(name) and self.sampling not in samplings:
                value, kinds = getattr(self, name), " or ".join(samplings)
                raise ValueError(f"{key_of(name)}={value!r}: is not read with sampling={self.sampling!r}, but with {kinds}")

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
        """Tell whether a setting has another value than its default."""
        return bool(getattr(self, name) != type(self).__dataclass_fields__[name].default)

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


def key_of(name: str) -> str:
    """Return a field's run-config key."""
    return name.replace("_", "-")


def read(kind: type[T], table: Mapping[str, Any], prefix: str = "") -> T:
    """Return a dataclass of settings from a table with one entry a field; a field that is a table itself has its default.

    Raises:
        ValueError: for an unknown or missing key or a value of the wrong kind, naming it.
    """
    known = {key_of(field.name): field.type for field in fields(kind) if not is_dataclass(field.type)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise ValueError(f"{prefix}{key}={table[key]!r}: unknown key; known are {', '.join(sorted(known))}")
    if missing := sorted(set(known) - set(table)):
        raise ValueError(f"{prefix}{missing[0]}: is missing from the run-config")
    return kind(**{key.replace("-", "_"): _typed(prefix + key, table[key], wanted) for key, wanted in known.items()})


def _typed(key: str, value: Any, kind: Any) -> Any:
    """Return the value as its key's type; a whole number is also a float."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{key}={value!r}: must be of type {kind.__name__}")
    return value

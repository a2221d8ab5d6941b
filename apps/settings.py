"""The run-config, read and checked once; `apps.methods` makes parts of it.

Every key has a documented default in `[tool.flwr.app.config]` of pyproject.toml; TOML knows no null, so 0 and "" mean "not set"
where it says so there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from apps.tasks import TASKS
from apps.tasks.models import MODELS
from apps.tasks.partitions import PARTITIONS
from flower_dp.core import checks
from flower_dp.privacy.fedsgd_dpc import MECHANISMS
from flower_dp.strategies.local_level import AGGREGATIONS

_CLIENT_LEVEL = ("noise_multiplier", "target_epsilon", "relation", "sampling_rate")
_LOCAL = ("epsilon", "num_replies", "aggregation")
_TRAINING = ("local_epochs", "batch_size", "momentum", "weight_decay", "proximal")
# What each method reads besides the settings that are read whatever the method.
READS: dict[str, tuple[str, ...]] = {
    "dp-fedavg": (*_CLIENT_LEVEL, *_TRAINING),
    "dp-fedsam": (*_CLIENT_LEVEL, *_TRAINING, "placement", "trusted_server", "min_reply_ratio", "keep_ratio", "sam_radius"),
    "fedsgd-dpc": (
        *_LOCAL,
        "client_epsilons",
        "mechanism",
        "record_sampling_rate",
        "strong_convexity",
        "smoothness",
        "noise_constant",
        "relation",
    ),
    "nbafl": (*_LOCAL, *_TRAINING, "uplink_exposures"),
}
METHODS = tuple(READS)
# Clients below which num_clients^-1.1 is no delta that anybody would choose.
_FEWEST_FOR_DEFAULT_DELTA = 100
SAMPLINGS = ("poisson", "fixed-size", "full", "round-robin")
ENGINES = ("batched", "one-by-one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A run's settings, one field a run-config key (`-` for `_`)."""

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
    num_rounds: int = 150
    sampling: str = "poisson"
    sampling_rate: float = 0.1
    cohort_size: int = 0
    clip_norm: float = 0.5
    noise_multiplier: float = 0.9
    delta: float = 0.0
    target_epsilon: float = 8.0
    relation: str = ""
    placement: str = ""
    trusted_server: bool = True
    min_reply_ratio: float = 0.0
    keep_ratio: float = 1.0
    epsilon: float = 1.0
    client_epsilons: str = ""
    mechanism: str = "laplace"
    record_sampling_rate: float = 1.0
    num_replies: int = 0
    aggregation: str = "data-size"
    strong_convexity: float = 0.0
    smoothness: float = 0.0
    noise_constant: float = 0.0
    uplink_exposures: int = 0
    local_epochs: int = 1
    batch_size: int = 4
    learning_rate: float = 0.15
    learning_rate_decay: float = 0.0005
    momentum: float = 0.5
    weight_decay: float = 0.0
    sam_radius: float = 0.05
    proximal: float = 0.0
    engine: str = "batched"
    report_client_metrics: bool = False
    evaluate_every: int = 1
    round_timeout: float = 600.0
    seed: int = 0
    output_dir: str = ""

    @classmethod
    def of(cls, run_config: Mapping[str, Any]) -> "Settings":
        """Read a run-config.

        Raises:
            ValueError: for an unknown or missing key or a value of the wrong kind, naming it.
        """
        known = {field.name.replace("_", "-"): field.type for field in fields(cls)}
        for key in run_config:
            if key not in known:
                raise ValueError(f"{key}={run_config[key]!r}: unknown key; known are {', '.join(sorted(known))}")
        if missing := sorted(set(known) - set(run_config)):
            raise ValueError(f"{missing[0]}: is missing from the run-config")
        settings = cls(**{key.replace("-", "_"): _typed(key, run_config[key], kind) for key, kind in known.items()})
        checks.one_of("task", settings.task, TASKS)
        checks.one_of("method", settings.method, METHODS)
        checks.one_of("model", settings.model, MODELS)
        checks.one_of("partition", settings.partition, PARTITIONS)
        checks.one_of("sampling", settings.sampling, SAMPLINGS)
        checks.one_of("mechanism", settings.mechanism, MECHANISMS)
        checks.one_of("aggregation", settings.aggregation, AGGREGATIONS)
        checks.one_of("engine", settings.engine, ENGINES)
        checks.integer("num-clients", settings.num_clients, at_least=1)
        checks.integer("num-rounds", settings.num_rounds, at_least=0)
        checks.integer("evaluate-every", settings.evaluate_every, at_least=0)
        checks.integer("seed", settings.seed, at_least=0)
        checks.integer("num-replies", settings.num_replies, at_least=0)
        checks.integer("uplink-exposures", settings.uplink_exposures, at_least=0)
        checks.number("target-epsilon", settings.target_epsilon, at_least=0)
        checks.number("delta", settings.delta, at_least=0, below=1)
        checks.number("round-timeout", settings.round_timeout, above=0)
        settings._refuse_unread()
        return settings

    def _refuse_unread(self) -> None:
        """Refuse a setting that somebody has set and the method does not read: it would be dropped without a word."""
        common = {field.name for field in fields(self)} - {name for names in READS.values() for name in names}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default and field.name not in common and field.name not in READS[self.method]:
                readers = ", ".join(method for method, names in READS.items() if field.name in names)
                key = field.name.replace("_", "-")
                raise ValueError(f"{key}={value!r}: is not read by method={self.method!r}, but by {readers}; leave it out")
        wanted = {"sampling_rate": ("poisson",), "cohort_size": ("fixed-size", "round-robin")}
        for name, samplings in wanted.items():
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default and self.sampling not in samplings:
                key = name.replace("_", "-")
                raise ValueError(
                    f"{key}={value!r}: is not read with sampling={self.sampling!r}, but with {' or '.join(samplings)}"
                )

    @property
    def run_name(self) -> str:
        """A short name for the run's folder."""
        return f"{self.task}-{self.method}-{self.model}-seed{self.seed}"

    @property
    def effective_delta(self) -> float:
        """The delta of client-level methods: as set, or num_clients^-1.1.

        Raises:
            ValueError: if it is not set and there are too few clients for the default to be a guarantee.
        """
        default = float(self.num_clients**-1.1)
        if not self.delta and self.noise_multiplier and self.num_clients < _FEWEST_FOR_DEFAULT_DELTA:
            raise ValueError(
                f"delta: num-clients={self.num_clients} gives {default:.3g} by default, which is no guarantee; set delta, "
                f"far below 1/{self.num_clients}"
            )
        return self.delta or default

    def budgets(self) -> dict[str, float]:
        """Every client's epsilon by name, from `client-epsilons` or else `epsilon`; infinite for no noise.

        Raises:
            ValueError: if a value is no number, or their count isn't the number of clients.
        """
        names = self.client_names()
        if not self.client_epsilons:
            return dict.fromkeys(names, self.epsilon)
        try:
            values = [float(text) for text in self.client_epsilons.split(",")]
        except ValueError:
            raise ValueError(f"client-epsilons={self.client_epsilons!r}: must be numbers with commas between them") from None
        if len(values) != len(names):
            raise ValueError(f"client-epsilons: has {len(values)} numbers; num-clients={len(names)} needs one for each")
        return dict(zip(names, values, strict=True))

    def client_names(self) -> list[str]:
        """The names of all clients, the same in every run."""
        width = len(str(self.num_clients - 1))
        return [f"client-{index:0{width}d}" for index in range(self.num_clients)]

    def output_path(self) -> Path | None:
        """The run's folder; None for a new one in the default place."""
        return Path(self.output_dir).expanduser() if self.output_dir else None


def _typed(key: str, value: Any, kind: Any) -> Any:
    """Return the value as its key's type; a whole number is also a float."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{key}={value!r}: must be of type {kind.__name__}")
    return value

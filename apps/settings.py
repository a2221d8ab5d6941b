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
from flower_dp import checks
from flower_dp.strategies.local_level import AGGREGATIONS
from flower_dp.terms import MECHANISMS

METHODS = ("dp-fedavg", "dp-fedsam", "fedsgd-dpc", "nbafl")
SAMPLINGS = ("poisson", "fixed-size", "full", "round-robin")
ENGINES = ("batched", "one-by-one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A run's settings, one field a run-config key (`-` for `_`)."""

    task: str
    method: str
    model: str
    model_bias: bool
    data_dir: str
    num_clients: int
    partition: str
    dirichlet_alpha: float
    classes_per_client: int
    records_per_client: int
    num_rounds: int
    sampling: str
    sampling_rate: float
    cohort_size: int
    clip_norm: float
    noise_multiplier: float
    delta: float
    target_epsilon: float
    relation: str
    placement: str
    trusted_server: bool
    keep_ratio: float
    epsilon: float
    client_epsilons: str
    mechanism: str
    record_sampling_rate: float
    num_replies: int
    aggregation: str
    strong_convexity: float
    smoothness: float
    noise_constant: float
    uplink_exposures: int
    local_epochs: int
    batch_size: int
    learning_rate: float
    learning_rate_decay: float
    momentum: float
    weight_decay: float
    sam_radius: float
    proximal: float
    engine: str
    report_client_metrics: bool
    evaluate_every: int
    round_timeout: float
    seed: int
    output_dir: str

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
        return settings

    @property
    def run_name(self) -> str:
        """A short name for the run's folder."""
        return f"{self.task}-{self.method}-{self.model}-seed{self.seed}"

    @property
    def effective_delta(self) -> float:
        """The delta of client-level methods: as set, or num_clients^-1.1."""
        return self.delta or float(self.num_clients**-1.1)

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

"""The one-run audit of a run of flower-dp's app, with real data, real training, and canaries among clients or records."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord

from flower_dp import wire
from flower_dp.audit import one_run, one_run_clients
from flower_dp.audit.one_run_records import RecordScores, Replies, planted
from flower_dp.clients import FlatModel, ScaffoldRecipe, client_app, model_arrays
from flower_dp.core import checks, sampling
from flower_dp.methods import METHODS
from flower_dp.running import apps, values
from flower_dp.simulation.local_grid import LocalGrid
from flower_dp.strategies import DPStrategy

_MODELS = "the initial model and the model of every round; it knows all other clients' data"
_REPLIES = "every client's replies, and the model of every round"


def audit_run(
    run_config: Mapping[str, values.Value], *, num_canaries: int, confidence: float = 0.95, seed: int | None = None
) -> one_run.OneRunAudit:
    """Run the settings once in this process, with canaries in place of clients or records, and bound epsilon from below.

    The canaries are clients if the noise is on the sum of updates, and records if every message is private. The sizes of
    population and clients do not change, so the claim is that of the run without canaries.

    Args:
        run_config: every setting of flower-dp's app, by flat key.
        num_canaries: number of canaries, from 2 to the number of clients, or records.
        confidence: confidence of the bound, in (0, 1).
        seed: seed of places, canaries and coins, never of noise or sampling; None for the operating system's entropy.

    Raises:
        ValueError: for invalid settings, a method or relation without canaries, or more canaries than clients or records.

    Example:
        >>> from flower_dp.audit.one_run_audit import audit_run
        >>> from flower_dp.running import apps
        >>> def go():
        ...     run = apps.resolve("mnist-dp-fedavg", ["num-rounds=20"])
        ...     print(audit_run({**run.app.defaults, **run.overrides}, num_canaries=500).lower_bound)
    """
    checks.integer("num_canaries", num_canaries, at_least=2)
    checks.number("confidence", confidence, above=0, below=1)
    run = apps.own_module("methods").ParsedRunConfig.of(run_config)
    canaries = METHODS[run.settings.method].canaries
    if not canaries:
        others = ", ".join(name for name, method in METHODS.items() if method.canaries)
        raise ValueError(f"method={run.settings.method!r}: has no canaries; must be one of {others}")
    clients = apps.own_module("records").deal(apps.own_module("records").config_of(run_config)).clients
    strategy: DPStrategy = run.strategy(lambda: {name: len(records) for name, records in clients.items()})
    choices, plant = one_run.coins(num_canaries, seed), _clients if canaries == "clients" else _records
    planted = plant(run, strategy, clients, choices, np.random.default_rng(seed))
    strategy.start(planted.grid, model_arrays(run.model()), num_rounds=run.settings.num_rounds, evaluate_fn=planted.watch)
    missing = replace(strategy.missing, declined=0)  # absent canaries decline
    if missing.total:
        raise ValueError(f"the run lacks updates, so it is not the run to audit: {missing}")
    statement = strategy.statement
    words: dict[str, Any] = {"unit": planted.unit, "sees": planted.sees, "relation": statement.relation}
    words |= {"claimed": statement.epsilon, "delta": statement.delta, "confidence": confidence}
    return one_run.OneRunAudit.of(planted.scores, choices, **words)


class _Planted(NamedTuple):
    """Clients with canaries among them, and the auditor's observation and scores of their run."""

    grid: LocalGrid
    watch: Callable[[int, ArrayRecord], None]
    scores: Callable[[], np.ndarray]
    unit: str
    sees: str


def _clients(run: Any, strategy: DPStrategy, clients: Any, choices: np.ndarray, rng: np.random.Generator) -> _Planted:
    rules: Any = strategy.rules
    like = run.client(run.model(), clients, dict)
    canaries = one_run_clients.ClientCanaries.drawn(
        tuple(clients), choices, relation=rules.release.relation, dimension=like.model.layout.size, rng=rng
    )
    client = one_run_clients.CanaryClient(like, canaries.updates(rules.clip_norms[1]))
    models: list[np.ndarray] = []

    def watch(server_round: int, arrays: ArrayRecord) -> None:
        models.append(wire.Model.of(arrays).vector)

    cohort = rules.release.expected_cohort_size
    # The auditor may know the other clients' updates if their parts in a round reveal nothing of a canary's part.
    apart = isinstance(rules.release.sampler, sampling.PoissonSampling | sampling.FullSampling)

    def scores() -> np.ndarray:
        clips = [report.numbers.get("clip-norm", rules.clip_norms[0]) for report in strategy.rounds]
        others = [client.others.get(number, 0.0) / clip if apart else 0.0 for number, clip in enumerate(clips, start=1)]
        scales = [clip / cohort for clip in clips]
        return canaries.score(models, others=others, scales=scales, sampling_rate=cohort / strategy.num_clients)

    return _Planted(LocalGrid(client_app(lambda context: client), 1), watch, scores, "client", _MODELS)


def _records(run: Any, strategy: DPStrategy, clients: Any, choices: np.ndarray, rng: np.random.Generator) -> _Planted:
    labels, clip_norm = sorted(set(run.task().train_labels.tolist())), run.own.clip_norm
    canaries = planted(clients, choices, labels=labels, clip_norm=clip_norm, rng=rng)
    sizes = {name: len(records) for name, records in clients.items()}
    records_by_node = {name: {name: canaries[name].records if name in canaries else records} for name, records in clients.items()}
    hosts = [run.client(run.model(), hosted, lambda: sizes) for hosted in records_by_node.values()]
    grid = LocalGrid(client_app(lambda context: hosts[int(context.node_config["partition-id"])]), len(hosts))
    model, recipe = FlatModel(run.model()), hosts[0].recipe
    names, drift = dict(zip(grid.get_node_ids(), clients, strict=True)), isinstance(recipe, ScaffoldRecipe)
    replies = Replies(names=names, drift=recipe.steps if drift else None)
    seen = RecordScores(canaries=canaries, model=model, loss=recipe.loss, clip_norm=clip_norm, scores=np.zeros(len(choices)))
    sent = [wire.Model.of(model_arrays(run.model())).vector]

    def watch(server_round: int, arrays: ArrayRecord) -> None:
        for name, row in replies.rows(grid.exchanged).items():
            seen.see(sent[-1], name, row)
        grid.exchanged.clear()
        sent[:] = [wire.Model.of(arrays).vector]

    return _Planted(grid, watch, lambda: seen.scores, "record", _REPLIES)

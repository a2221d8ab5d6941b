"""The warnings and stops of a run: too much noise, arrays that nobody trains, clients that never send a usable update."""

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

from flower_dp import wire
from flower_dp.core.root_logger import SHOWN
from flower_dp.core.vectors import Layout
from flower_dp.privacy.statement import PrivacyStatement, delta_warnings
from flower_dp.strategies.population.client_manager import KnownClients
from flower_dp.strategies.releases.release import RoundRequest
from flower_dp.strategies.releases.replies import CollectedReplies
from flower_dp.strategies.rules import MethodRules, evaluation_of
from flower_dp.strategies.run_state import RunFacts, RunState
from flower_dp.strategies.server_optimizer import ServerOptimizer

log = logging.getLogger("flwr")

# Names in one line of the log.
_MOST_NAMED = 5
# Rounds in a row, and clients asked in them, that end a run if no update is usable. `_SILENT_CLIENTS`, the higher number, counts
# once updates have come before, since devices may be away for a while.
_FRUITLESS_ROUNDS, _FRUITLESS_CLIENTS, _SILENT_CLIENTS = 3, 10, 30


def log_summary(rules: MethodRules, optimizer: ServerOptimizer | None) -> None:
    """Log the method, its sampling and the server optimizer."""
    sampling = rules.releases[0].sampling
    expected = sampling.expected_cohort_size(rules.about.num_clients)
    log.info("%s: %s, %g of %s clients expected a round", rules.about.title, sampling, expected, rules.about.num_clients)
    if optimizer is not None:
        log.info("Server optimizer %s: it works on the noised mean and costs no epsilon", optimizer.name)


def run_fingerprint(rules: MethodRules, layout: Layout, optimizer: ServerOptimizer | None, num_rounds: int) -> dict[str, str]:
    """Return the fingerprint that a resumed run must match. The cost of its charges is compared separately, with the charges."""
    evaluation = evaluation_of(rules)
    shapes = hashlib.sha256(repr([layout.names, layout.shapes, layout.dtypes]).encode()).hexdigest()
    return {
        "method": rules.about.title,
        "num_clients": str(rules.about.num_clients),
        "num_rounds": str(num_rounds),
        "delta": str(rules.about.delta),
        "sampling": str(rules.releases[0].sampling),
        "evaluation": "none" if evaluation is None else f"every {evaluation.plan.every} rounds",
        "server_optimizer": "none" if optimizer is None else optimizer.name,
        "model": f"{len(layout.names)} arrays of {layout.size} parameters ({shapes[:12]})",
    }


def log_start(rules: MethodRules, known_clients: KnownClients, model: wire.Model, facts: RunFacts) -> None:
    """Log before the first round the number of clients, the norms of noise and updates, and warnings of delta and the model."""
    dimension = model.layout.size
    _log_shared(model)
    log.info("%s parameters, %s clients on %s nodes", dimension, len(known_clients.names), len(set(known_clients.nodes)))
    # Of a run without charges: delta needs no accounting, which would take seconds when a run with many charges resumes.
    for line in delta_warnings(rules.statement(RunState(), facts).assumptions):
        log.warning("%s", line, extra=SHOWN)
    noise, signal = rules.noise_and_signal_norms(dimension)
    log.info("Round 1: the noise on the mean has norm %.3g, the mean itself at most %.3g", noise, signal)
    if noise > signal and not getattr(rules.releases[0], "noise_cancels", False):
        log.warning(
            "Noise on the mean is %.1f times the largest possible noiseless mean, so one round teaches little. Try more clients "
            "per round, less noise, a smaller model, or more rounds within the budget.",
            noise / signal,
            extra=SHOWN,
        )


def _log_shared(model: wire.Model) -> None:
    """Warn of trained arrays with the same values: a model's `state_dict` repeats shared (tied) weights for each layer.

    Every copy would be trained, clipped and noised separately, and clients would load only the last one.
    """
    names: dict[tuple[Any, ...], list[str]] = {}
    for name, array in model.layout.unflatten(model.vector).items():
        if array.size and (array != array.flat[0]).any():  # constant arrays are equal by their initialization
            names.setdefault((array.shape, hashlib.sha256(array.tobytes()).digest()), []).append(name)
    for same in names.values():
        if len(same) > 1:
            log.warning(
                "Arrays %s have the same values: if the model shares them (tied weights), each gets its own noise and a part "
                "of the clip norm, and clients use only one of them. Send it once: start with "
                "flower_dp.clients.model_arrays(model), let clients return named_parameters(), and load with strict=False.",
                ", ".join(map(repr, same[:_MOST_NAMED])),
            )


def log_statement(statement: PrivacyStatement) -> None:
    """Log the statement of a run, however it ended: what was released before a failure stays released."""
    for line in str(statement).splitlines():
        log.info("%s", line)


def warn_of_unchanged_arrays(now: RoundRequest, collected: CollectedReplies) -> None:
    """Warn of arrays that no reply changes, although they get noise.

    It reads sums without noise, which only a trusted server has, and writes only to the server's log.
    """
    if not collected.clients or now.ask.placement != "central":
        return
    same = [name for name, array in now.layout.unflatten(collected.total[: now.layout.size]).items() if not array.any()]
    if same and len(same) < len(now.layout.names):
        log.warning(
            "Round %s: no reply changes %s, which get noise; name in frozen_arrays what is constant in all rounds "
            "(the first matrix of a LoRA adapter is not: it moves once the second one does)",
            now.server_round,
            ", ".join(map(repr, same)),
        )


def check_usable_updates(state: RunState, num_clients: int, *, ended: bool = False) -> None:
    """Fail a run in which no client sends a usable update any more: it would only spend its budget.

    Raises:
        RuntimeError: after enough rounds in a row without one, or at the end of a short run without any.
    """
    asked, first = state.unanswered, not any(report.replies for report in state.rounds)
    enough = _are_fruitless([report.cohort_size for report in asked], num_clients, first=first)
    if not asked or not (enough or (ended and first)):
        return
    rounds = f"the {'first' if first else 'last'} {len(asked)} rounds" if enough else "any round"
    kept = "" if first else "; they stay charged, and the model is that before them: resume the run when clients reply again"
    raise RuntimeError(f"no client has sent a usable update in {rounds}; the last reason: {state.refusal}{kept}")


def evaluation_stop_reason(state: RunState, num_clients: int) -> str | None:
    """Return why a run has no private evaluations any more; None while it has.

    They end after as many unanswered evaluations as unanswered rounds end a run: more would only spend the budget. Training
    continues.
    """
    asked = state.unanswered_evaluations
    if not _are_fruitless(asked, num_clients, first=not state.evaluations):
        return None
    return f"no client has answered the last {len(asked)} private evaluations: they stay charged, and the run has no more of them"


def _are_fruitless(asked: Sequence[int], num_clients: int, *, first: bool) -> bool:
    """Return whether enough clients did not reply, in enough rounds in a row.

    Args:
        asked: cohort size of each of these rounds.
        num_clients: number of clients.
        first: whether no client has replied before.
    """
    tries = min(_FRUITLESS_CLIENTS if first else _SILENT_CLIENTS, _FRUITLESS_ROUNDS * num_clients)
    return len(asked) >= _FRUITLESS_ROUNDS and sum(asked) >= tries

"""The steps of a run: functions from one state to the next. They send and write nothing; a `Session` makes their effects."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from flower_dp import wire
from flower_dp.core.noise import Generator
from flower_dp.privacy.charges import Charge, Charges
from flower_dp.strategies import diagnostics
from flower_dp.strategies.evaluation import Evaluation
from flower_dp.strategies.population.client_manager import KnownClients
from flower_dp.strategies.releases.left_out import RoundDiscarded
from flower_dp.strategies.releases.release import Release, RoundRequest
from flower_dp.strategies.releases.replies import CollectedReplies
from flower_dp.strategies.rules import MethodRules, ModelUpdate, evaluation_of
from flower_dp.strategies.run_state import RoundReport, RunState

# Fields that return to their earlier value after rounds without a reply. Charges and drawn noise stay.
_GOES_BACK = ("rounds", "model", "own", "optimizer")


def open_round(
    release: Release,
    state: RunState,
    server_round: int,
    *,
    size: int,
    model: wire.Model,
    cohort: dict[int, tuple[str, ...]],
    known_clients: KnownClients,
    run: str,
    rng: Generator,
) -> tuple[RunState, Charge, RoundRequest]:
    """Return the state after a round's request, the round's charge, and the request. It has no effects.

    Args:
        release: the release that is requested.
        state: the state after the cohort was drawn.
        server_round: number of the round, from 1.
        size: length of a client's update, or of its metrics.
        model: the model that is sent.
        cohort: the cohort, by node.
        known_clients: the known clients.
        run: the run's id.
        rng: new generator for noise that is drawn ahead.

    Raises:
        ValueError: if the method can't run with a model of this size.
    """
    started = time.monotonic()
    names = tuple(name for names in cohort.values() for name in names)
    charge = release.charge(state.charges, server_round, names)
    ask, begun, after = release.ask(state, size, names, rng)
    if state.model is not None and np.array_equal(state.model, model.vector):
        model = replace(model, vector=state.model)  # so that memory holds one copy of the previous model
    now = RoundRequest(
        server_round=server_round,
        method=release.name,
        ask=ask.with_run_id(run),
        length=ask.row_length(size),
        model=model,
        asked=cohort,
        begun=begun,
        started=started,
        stock=not known_clients.hosting,
    )
    num_known = max(state.num_known, len(known_clients.names))
    return replace(state.with_release(release.name, after).charged_with(charge), num_known=num_known), charge, now


def learnt(
    rules: MethodRules, state: RunState, now: RoundRequest, collected: CollectedReplies, rng: Generator
) -> tuple[RunState, ModelUpdate | None]:
    """Return the state after a round, and the model update; None for a round that is left out, although it was charged."""
    try:
        made = rules.next_model(state, now, collected, rng)
    except RoundDiscarded as why:
        return state.happened(f"round {now.server_round} was left out: {why}"), None
    collected.total = collected.total[:0].copy()  # frees the sum, which is as large as the model
    after = replace(state, own=made.own, releases={**state.releases, **made.releases})
    for charge in made.charges:
        after = after.charged_with(charge)
    return after, made


def reported(
    rules: MethodRules, release: Release, state: RunState, now: RoundRequest, collected: CollectedReplies, vector: np.ndarray
) -> RunState:
    """Return the state with a round's report and model."""
    numbers = dict(rules.public_metrics(state, now))
    report = RoundReport(
        server_round=now.server_round,
        cohort_size=now.cohort_size,
        replies=len(collected.clients),
        bytes_down=now.bytes_down,
        bytes_up=collected.num_bytes,
        bytes_per_client=_bytes_per_client(now, collected),
        seconds=time.monotonic() - now.started,
        epsilon=state.reported_epsilon(numbers.pop("epsilon")),
        cohort_is_secret=release.cohort_is_secret,
        numbers=numbers,
    )
    return replace(
        state,
        rounds=(*state.rounds, report),
        missing=state.missing + collected.missing,
        model=vector,
        refusal=next(iter(collected.refused.values()), state.refusal),
    )


def _bytes_per_client(now: RoundRequest, collected: CollectedReplies) -> float:
    """Return the mean bytes that one client reports to send alone, if epsilon rests on every single message.

    Otherwise return the bytes of a dense update: the real number may depend on data that a noised sum hides, or reveal the size
    of a secret cohort.
    """
    ask = now.ask
    lossy = ask.placement == "distributed" and (ask.keep_ratio < 1 or ask.quantization_levels)
    if ask.placement == "local" or (lossy and collected.clients):
        return collected.payload_bytes / len(collected.clients) if collected.clients else 0.0
    kept = now.length
    if ask.mask is not None:
        size = now.length - ask.row_length(0)
        kept += len(ask.mask.indices(size)) - size
    return 4.0 * kept


def evaluated(
    rules: MethodRules, evaluation: Evaluation, state: RunState, now: RoundRequest, collected: CollectedReplies, rng: Generator
) -> tuple[RunState, dict[str, float] | RoundDiscarded]:
    """Return the state after a private evaluation, and value and standard error of every metric, or why nothing was released."""
    server_round, secret = now.server_round, evaluation.cohort_is_secret
    in_vain = 0 if collected.clients or secret else now.cohort_size
    result: dict[str, float] | RoundDiscarded
    try:
        result = noised = evaluation.result(state, now, collected, rng)
        state = replace(state, evaluations={**state.evaluations, server_round: noised})
    except RoundDiscarded as why:
        result = why
        state = state.happened(f"the evaluation of round {server_round} was charged, and released nothing: {why}")
        # If the cohort is secret, the noised count decides: whether any client replied would reveal who is in the cohort.
        in_vain = why.in_vain if secret else in_vain
    if in_vain:
        state = replace(state, unanswered_evaluations=(*state.unanswered_evaluations, in_vain))
    elif now.cohort_size or secret:
        state = replace(state, unanswered_evaluations=())
    if ended := diagnostics.evaluation_stop_reason(state, rules.about.num_clients):
        ended += ", as far as their noised results tell" if secret else ""
        state = state.happened(ended)
    return state, result


def resumed(rules: MethodRules, state: RunState, beyond: Iterable[tuple[str, int]]) -> RunState:
    """Return a state with its later charges: they stay charged, become incidents, and are not released a second time.

    Args:
        rules: the method's rules.
        state: an earlier state.
        beyond: release and round of every later charge of the run.
    """
    charged, rounds = dict(state.charged), {release.name: list[int]() for release in rules.releases}
    for name, server_round in beyond:
        charged[name] = charged.get(name, 0) + 1
        rounds.get(name, []).append(server_round)
    state = replace(state, charged=charged)
    for name, numbers in rounds.items():
        what = "the evaluation of " if name == wire.EVALUATION else ""
        for first, last in _ranges(numbers):
            which = f"round {first} was" if first == last else f"rounds {first} to {last} were"
            state = state.happened(f"{what}{which} charged and not finished")
    return state


def gone_back(state: RunState, to: RunState, *, evaluates: bool) -> RunState:
    """Return the state that continues from an earlier one. Later charges stay charged; their noise is in no model.

    Args:
        state: the current state.
        to: the earlier state.
        evaluates: whether private evaluations continue; evaluations that have ended stay ended, as the statement says.
    """
    names = (*_GOES_BACK, *["unanswered_evaluations"] * evaluates)
    releases = dict(to.releases)
    for name, noise in state.secret.items():  # noise that was drawn must not be drawn a second time
        releases[name] = replace(releases.get(name, state.releases[name]), noise=noise)
    return replace(state, releases=releases, **{name: getattr(to, name) for name in names})


def check_resumable(rules: MethodRules, charges: Charges) -> None:
    """Refuse to resume charges of another strategy: with other noise, for example, they would get another cost.

    Raises:
        ValueError: naming the release.
    """
    for release in rules.releases:
        last, fingerprint = charges.last.get(("", release.name)), release.charge(Charges(), 1, ()).fingerprint
        if last is not None and last.fingerprint != fingerprint:
            raise ValueError(
                f"state: the charges of {release.name} are for {last.fingerprint}, and this strategy releases {fingerprint}"
            )
    training = rules.releases[0].name
    known = {release.name for release in rules.releases} | {wire.EVALUATION}
    if (other := sorted(set(charges.numbers()) - known)) and not charges.number(training):
        raise ValueError(
            f"state: {other[0]} was charged, and this strategy releases {training}: its charges would not count here"
        )
    if charges.number(wire.EVALUATION) and evaluation_of(rules) is None:
        raise ValueError("state: private evaluations were charged, and this strategy has none; pass the same evaluation=...")


def _ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last number of every range without a gap."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges

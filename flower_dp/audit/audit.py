"""An audit: many runs of a case with and without the unit, and what they prove of epsilon."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flower_dp.audit import estimate, tradeoffs
from flower_dp.audit.case import Case, TrialRunner, quiet
from flower_dp.core import checks, dp_events
from flower_dp.privacy import accounting, charges, events
from flower_dp.privacy.statement import PrivacyStatement

CONFIDENCE = 0.999
TRIALS = 2000
_MOST_POINTS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What the run's own statement claims, and the events that its accountant proves it from.

    Attributes:
        unit: a `client` or a `record`.
        relation: neighboring relation.
        epsilon: the statement's, at `delta`.
        delta: the statement's.
        accountant: what proves it.
        event: all that the ledger was charged.
    """

    unit: str
    relation: events.Relation
    epsilon: float
    delta: float
    accountant: str
    event: dp_events.DpEvent

    @classmethod
    def of(cls, statement: PrivacyStatement, ledger: charges.History) -> "Claim":
        """Return the claim of a statement and the ledger behind it."""
        said = {name: getattr(statement, name) for name in ("unit", "relation", "epsilon", "delta", "accountant")}
        return cls(**said, event=ledger.event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The result of an audit.

    Attributes:
        label: of the case.
        claim: what the method claims.
        lower: epsilon is at least this, at the claim's delta, with the audit's confidence and under the estimator's condition.
        estimator: what gives it.
        strength: the number that it gives first, such as a mu.
        largest: `lower` of a test without any error on so many trials: a claim above it can't be refuted by them.
        confidence: of `lower`. A method that keeps its claim is taken for one that breaks it with probability
            1 - confidence at most.
        trials: runs without the unit, and as many with it.
        errors: of the test that was chosen, on the trials that did not choose it.
        points: rates of false positives and false negatives of that statistic [k x 2], for every threshold, on the same trials.
        seconds: that it took.
    """

    label: str
    claim: Claim
    lower: float
    estimator: tradeoffs.Estimator
    strength: float
    largest: float
    confidence: float
    trials: int
    errors: estimate.Errors
    points: tuple[tuple[float, float], ...]
    seconds: float

    @property
    def ratio(self) -> float:
        """The lower bound in parts of the claimed epsilon."""
        if self.claim.epsilon > 0:
            return self.lower / self.claim.epsilon
        return math.inf if self.lower > 0 else 0.0

    @property
    def violation(self) -> bool:
        """Whether the trials refute the claim."""
        return self.lower > self.claim.epsilon

    @property
    def could_refute(self) -> bool:
        """Whether so many trials could have refuted the claim, had the test made no error."""
        return self.largest > self.claim.epsilon


def audit(
    case: Case, *, trials: int = TRIALS, confidence: float = CONFIDENCE, progress: Callable[[int], object] = lambda done: None
) -> Audit:
    """Audit one case: runs on the real way from client to server, with fresh noise, and a lower bound of epsilon from them.

    Args:
        case: the method, its neighboring inputs and what is seen.
        trials: runs without the unit, and as many with it.
        confidence: of the lower bound.
        progress: is told after every two runs how many of `trials` are done.

    Returns:
        The audit; `violation` says whether it refutes the claim of the method's own statement.

    Raises:
        ValueError: for fewer than 20 trials, a confidence outside (0, 1), or a case without privacy.

    Example:
        >>> from flower_dp.audit import CASES, audit
        >>> found = audit(CASES["dp-fedavg"], trials=40, confidence=0.99)
        >>> found.violation
        False
    """
    checks.integer("trials", trials, at_least=20)
    checks.number("confidence", confidence, above=0, below=1)
    started = time.monotonic()
    with quiet():
        runs = TrialRunner(case)
        found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for done in range(1, trials + 1):
            for present in (False, True):
                found[present].append(runs.run(present=present))
            progress(done)
        claim = Claim.of(runs.statement, runs.ledger)
    if not math.isfinite(claim.epsilon):
        raise ValueError(f"{case.label}: claims no privacy, so there is nothing to audit")
    of = {name: [np.array([one[name] for one in found[present]]) for present in (False, True)] for name in found[True][0]}
    scores: dict[str, estimate.Scores] = {name: (absent, present) for name, (absent, present) in of.items()}
    estimator = estimator_of(case, claim)
    errors = estimate.errors_of(scores, estimator, confidence=confidence)
    strength = estimate.lower_bound(errors, estimator, confidence=confidence)
    faultless = estimate.lower_bound(replace(errors, false_positives=0, false_negatives=0), estimator, confidence=confidence)
    return Audit(
        label=case.label,
        claim=claim,
        lower=estimator.epsilon(strength),
        estimator=estimator,
        strength=strength,
        largest=estimator.epsilon(faultless),
        confidence=confidence,
        trials=trials,
        errors=errors,
        points=_points(scores[errors.statistic], errors),
        seconds=time.monotonic() - started,
    )


def estimator_of(case: Case, claim: Claim) -> tradeoffs.Estimator:
    """Return the sharpest estimator that is valid for what was claimed: by its events, never by what was measured."""
    leaves = events.flatten_event(claim.event)
    if case.post_processed or not leaves:
        return tradeoffs.HockeyStick(delta=claim.delta)
    if all(isinstance(leaf, dp_events.GaussianDpEvent) for leaf, _ in leaves):
        return tradeoffs.GaussianTradeoff(delta=claim.delta)
    (leaf, count), (inner, rate) = leaves[0], events.unwrap_sampling(leaves[0][0])
    if len(leaves) == count == 1:
        if isinstance(leaf, dp_events.LaplaceDpEvent) and claim.delta == 0:
            return tradeoffs.LaplaceTradeoff()
        if isinstance(inner, dp_events.GaussianDpEvent):
            both = isinstance(leaf, dp_events.PoissonSampledDpEvent) and claim.relation == "replace-one"
            return tradeoffs.SampledGaussianTradeoff(delta=claim.delta, rate=rate, replaced=both)
    return tradeoffs.HockeyStick(delta=claim.delta)


def claimed_tradeoff(claim: Claim, false_positives: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the least rate of false negatives [k] that the claim allows at rates of false positives [k].

    It is the largest of max(0, 1 - delta - e^epsilon FPR, e^-epsilon (1 - delta - FPR)) over pairs (epsilon, delta) that the
    accountant proves (Wasserman and Zhou 2010, Theorem 2.4; Dong, Roth and Su 2022, Proposition 2.5).
    """
    rates_ = np.asarray(false_positives, np.float64)
    found = np.zeros_like(rates_)
    deltas = [0.0] if claim.delta == 0 else np.unique(np.concatenate([np.geomspace(1e-6, 0.1, 25), np.linspace(0.1, 0.98, 23)]))
    for delta in deltas:
        epsilon = accounting.epsilon(claim.event, delta=float(delta), relation=claim.relation, grid=1e-3).epsilon
        found = np.maximum(found, 1 - delta - math.exp(min(epsilon, 700.0)) * rates_)
        found = np.maximum(found, math.exp(-epsilon) * (1 - delta - rates_))
    return found


def _points(scores: estimate.Scores, chosen: estimate.Errors) -> tuple[tuple[float, float], ...]:
    absent, present = ((-one if chosen.falling else one)[-chosen.trials :] for one in scores)
    places = np.unique(np.concatenate([absent, present]))
    places = places[np.linspace(0, len(places) - 1, min(len(places), _MOST_POINTS)).astype(int)]
    wrong = 1 - np.searchsorted(np.sort(absent), places, side="right") / len(absent)
    missed = np.searchsorted(np.sort(present), places, side="right") / len(present)
    return tuple(zip(wrong.tolist(), missed.tolist(), strict=True))

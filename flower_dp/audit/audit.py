"""An audit: many runs of a case with and without the unit, and the lower bound on epsilon that these runs prove."""

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
_MAX_POINTS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The claim of a run's own statement, and the events from which the accountant proves that claim.

    Attributes:
        unit: unit of privacy, `client` or `record`.
        relation: neighboring relation.
        epsilon: epsilon of the statement, at `delta`.
        delta: delta of the statement.
        accountant: accountant that proves epsilon.
        event: composition of all charges on the ledger.
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
        fields = {name: getattr(statement, name) for name in ("unit", "relation", "epsilon", "delta", "accountant")}
        return cls(**fields, event=ledger.event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The result of an audit.

    Attributes:
        label: label of the case.
        claim: claim of the method.
        lower: lower bound on epsilon, at the claim's delta, with the audit's confidence and under the estimator's condition.
        estimator: estimator that gives the bound.
        strength: strength that the estimator finds first, such as a mu.
        largest: `lower` of a test without any error on the same number of trials: the trials can't refute a claim above it.
        confidence: confidence of `lower`. A method that keeps its claim is reported as a violation with probability
            1 - confidence at most.
        trials: number of runs without the unit, and of runs with it.
        errors: errors of the chosen test, on the trials that did not choose it.
        points: rates of false positives and false negatives [k x 2] of that statistic, for every threshold, on the same trials.
        seconds: duration of the audit.
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
        """The lower bound divided by the claimed epsilon."""
        if self.claim.epsilon > 0:
            return self.lower / self.claim.epsilon
        return math.inf if self.lower > 0 else 0.0

    @property
    def violation(self) -> bool:
        """Whether the trials refute the claim."""
        return self.lower > self.claim.epsilon

    @property
    def could_refute(self) -> bool:
        """Whether this number of trials could have refuted the claim if the test had made no error."""
        return self.largest > self.claim.epsilon


def audit(
    case: Case, *, trials: int = TRIALS, confidence: float = CONFIDENCE, progress: Callable[[int], object] = lambda done: None
) -> Audit:
    """Audit one case: run real clients, messages and server, with fresh noise, and prove a lower bound on epsilon from the runs.

    Args:
        case: method, neighboring inputs and view of the adversary.
        trials: number of runs without the unit, and of runs with it, >= 20.
        confidence: confidence of the lower bound, in (0, 1).
        progress: function called after every two runs with the number of `trials` done.

    Returns:
        The audit. `violation` is whether it refutes the claim of the method's own statement.

    Raises:
        ValueError: for fewer than 20 trials, a confidence outside (0, 1), or a case without privacy.

    Example:
        >>> from flower_dp.audit import CASES, audit
        >>> result = audit(CASES["dp-fedavg"], trials=40, confidence=0.99)
        >>> result.violation
        False
    """
    checks.integer("trials", trials, at_least=20)
    checks.number("confidence", confidence, above=0, below=1)
    started = time.monotonic()
    with quiet():
        runs = TrialRunner(case)
        statistics: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for done in range(1, trials + 1):
            for present in (False, True):
                statistics[present].append(runs.run(present=present))
            progress(done)
        claim = Claim.of(runs.statement, runs.ledger)
    if not math.isfinite(claim.epsilon):
        raise ValueError(f"{case.label}: claims no privacy, so there is nothing to audit")
    scores: dict[str, estimate.Scores] = {
        name: (np.array([run[name] for run in statistics[False]]), np.array([run[name] for run in statistics[True]]))
        for name in statistics[True][0]
    }
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
    """Return the sharpest estimator that is valid for a claim, chosen by the claim's events, never by measurements."""
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
    """Return the smallest rate of false negatives [k] that the claim allows at rates of false positives [k].

    This rate is the maximum over all pairs (epsilon, delta) that the accountant proves of:

        max(0, 1 - delta - e^epsilon FPR, e^-epsilon (1 - delta - FPR))

    See Wasserman and Zhou 2010, Theorem 2.4; Dong, Roth and Su 2022, Proposition 2.5.
    """
    rates = np.asarray(false_positives, np.float64)
    least = np.zeros_like(rates)
    deltas = [0.0] if claim.delta == 0 else np.unique(np.concatenate([np.geomspace(1e-6, 0.1, 25), np.linspace(0.1, 0.98, 23)]))
    for delta in deltas:
        epsilon = accounting.epsilon(claim.event, delta=float(delta), relation=claim.relation, grid=1e-3).epsilon
        least = np.maximum(least, 1 - delta - math.exp(min(epsilon, 700.0)) * rates)
        least = np.maximum(least, math.exp(-epsilon) * (1 - delta - rates))
    return least


def _points(scores: estimate.Scores, chosen: estimate.Errors) -> tuple[tuple[float, float], ...]:
    absent, present = ((-values if chosen.falling else values)[-chosen.trials :] for values in scores)
    thresholds = np.unique(np.concatenate([absent, present]))
    thresholds = thresholds[np.linspace(0, len(thresholds) - 1, min(len(thresholds), _MAX_POINTS)).astype(int)]
    wrong = 1 - np.searchsorted(np.sort(absent), thresholds, side="right") / len(absent)
    missed = np.searchsorted(np.sort(present), thresholds, side="right") / len(present)
    return tuple(zip(wrong.tolist(), missed.tolist(), strict=True))

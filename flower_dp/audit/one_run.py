"""The one-run audit: a lower bound on epsilon from the number of random choices that can be guessed from one run.

Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run". Each of m canaries is one of two contributions,
chosen by its own fair coin. An auditor guesses the coins from the releases of one run, and may abstain. If the run is
(epsilon, delta)-differentially private in every single coin, few of many guesses are right. `docs/audit.md` has the theorem.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
from scipy import optimize, stats

from flower_dp.audit.estimate import largest_refuted
from flower_dp.core import checks

# Candidates for the part of the canaries on which either guess is made; one is chosen before the run.
_PARTS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
# The smallest delta, and the largest epsilon, for which the Gaussian mechanism of a claim is computed. With an infinite epsilon
# all canaries would be guessed, also those that were never sampled.
_MIN_DELTA, _MAX_EPSILON = 1e-9, 8.0


def p_value(num_correct: int, *, num_guesses: int, num_canaries: int, epsilon: float, delta: float) -> float:
    """Return a bound on the probability of so many right guesses under (epsilon, delta)-differential privacy.

    Theorem 5.2 and Corollary 5.4: the number of right guesses is at most W + F in distribution. W is binomial with `num_guesses`
    trials of probability q = e^epsilon / (1 + e^epsilon). F is independent of W, with mean at most 2 m delta. So:

        P[W + F >= v] <= P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i

    Args:
        num_correct: number of right guesses (paper: v).
        num_guesses: number of guesses, fixed before the run (paper: r).
        num_canaries: number of coins (paper: m).
        epsilon: epsilon of the tested guarantee.
        delta: delta of the tested guarantee.

    Raises:
        ValueError: naming an invalid argument.
    """
    checks.integer("num_canaries", num_canaries, at_least=1)
    checks.integer("num_guesses", num_guesses, at_least=0, at_most=num_canaries)
    checks.integer("num_correct", num_correct, at_least=0, at_most=num_guesses)
    checks.number("epsilon", epsilon, at_least=0)
    checks.number("delta", delta, at_least=0, at_most=1)
    right = 1 / (1 + math.exp(-epsilon))
    p = float(stats.binom.sf(num_correct - 1, num_guesses, right))
    if delta and num_correct:
        below = stats.binom.pmf(np.arange(num_correct - 1, -1, -1), num_guesses, right)  # P[W = v - 1], P[W = v - 2], ...
        p += 2 * num_canaries * delta * float(np.max(np.cumsum(below) / np.arange(1, num_correct + 1)))
    return min(p, 1.0)


def epsilon_lower_bound(num_correct: int, *, num_guesses: int, num_canaries: int, delta: float, confidence: float) -> float:
    """Return the epsilon below which the run is not (epsilon, delta)-differentially private, with this confidence.

    With probability at least `confidence` over coins and run, this bound is at most the true epsilon at this delta. The bound
    is 0 if the guesses show nothing.

    Args:
        num_correct: number of right guesses.
        num_guesses: number of guesses.
        num_canaries: number of coins.
        delta: delta of the guarantee.
        confidence: confidence of the bound, in (0, 1), such as 0.95.

    Raises:
        ValueError: naming an invalid argument.

    Example:
        >>> from flower_dp.audit.one_run import epsilon_lower_bound
        >>> round(epsilon_lower_bound(75, num_guesses=100, num_canaries=1000, delta=1e-4, confidence=0.95), 3)
        0.673
    """
    checks.number("confidence", confidence, above=0, below=1)

    p = partial(p_value, num_correct, num_guesses=num_guesses, num_canaries=num_canaries, delta=delta)
    return largest_refuted(lambda epsilon: p(epsilon=epsilon) < 1 - confidence)


def guesses_of_each(num_canaries: int, *, epsilon: float, delta: float, confidence: float) -> int:
    """Return the number of canaries to guess "in", and to guess "out", that maximizes the expected bound.

    The number must not depend on the run. It is the best one for the claim's own Gaussian mechanism: every canary's score would
    be normal with std 1, with a mean that is mu larger for "in". This mu gives (epsilon, delta).

    Args:
        num_canaries: number of canaries, >= 2.
        epsilon: epsilon of the claim; may be infinite.
        delta: delta of the claim.
        confidence: confidence of the bound.
    """
    checks.integer("num_canaries", num_canaries, at_least=2)
    shift = _gaussian_shift(min(epsilon, _MAX_EPSILON), max(delta, _MIN_DELTA))

    def expected(each: int) -> tuple[float, float]:
        part = each / num_canaries
        threshold = optimize.brentq(lambda t: (stats.norm.sf(t - shift) + stats.norm.sf(t)) / 2 - part, -10.0, 10.0 + shift)
        right = int(each * stats.norm.sf(threshold - shift) / part)
        bound = epsilon_lower_bound(right, num_guesses=2 * each, num_canaries=num_canaries, delta=delta, confidence=confidence)
        # The second number decides if so few canaries can show nothing.
        return bound, -p_value(right, num_guesses=2 * each, num_canaries=num_canaries, epsilon=0.0, delta=delta)

    choices = sorted({max(1, int(part * num_canaries)) for part in _PARTS})
    return max(choices, key=expected)


def _gaussian_shift(epsilon: float, delta: float) -> float:
    """Return the mu of the Gaussian mechanism that is exactly (epsilon, delta)-private (Dong, Roth, Su 2022, Corollary 2.13)."""

    def excess(mu: float) -> float:
        return float(stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu) - delta)

    return float(optimize.brentq(excess, 1e-6, 100.0)) if excess(1e-6) < 0 else 1e-6


def guess(scores: np.ndarray, each: int) -> np.ndarray:
    """Return +1 for the `each` highest scores, -1 for the `each` lowest, and 0, no guess, for the others.

    Args:
        scores: scores of the canaries [m]; the higher, the likelier "in".
        each: number of guesses of either kind, at most m / 2.
    """
    checks.integer("each", each, at_least=0, at_most=len(scores) // 2)
    order = np.argsort(scores, kind="stable")
    guesses = np.zeros(len(scores), np.int64)
    guesses[order[:each]] = -1
    guesses[order[len(scores) - each :]] = 1
    return guesses


def coins(num_canaries: int, seed: int | None) -> np.ndarray:
    """Return a fair coin [m], +1 or -1, for every canary, from a separate generator, never that of a run's noise.

    Args:
        num_canaries: number of canaries.
        seed: seed of the coins; None for the operating system's entropy.
    """
    flips: np.ndarray = 2 * np.random.default_rng(None if seed is None else (seed, 1)).integers(0, 2, num_canaries) - 1
    return flips


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRunAudit:
    """The result of one run with canaries.

    Attributes:
        claimed: epsilon of the run's statement; infinite for a run without privacy.
        delta: delta of both epsilons.
        unit: unit of privacy that a canary is, `client` or `record`.
        relation: neighboring relation of the claim, under which the two values of a coin are neighbors.
        sees: view of the auditor.
        num_canaries: number of coins.
        num_guesses: number of guesses.
        num_correct: number of right guesses.
        confidence: confidence of the bound.
    """

    claimed: float
    delta: float
    unit: str
    relation: str
    sees: str
    num_canaries: int
    num_guesses: int
    num_correct: int
    confidence: float

    @classmethod
    def of(
        cls,
        scores: Callable[[], np.ndarray],
        choices: np.ndarray,
        *,
        claimed: float,
        delta: float,
        confidence: float,
        **words: str,
    ) -> "OneRunAudit":
        """Guess by scores, after choosing the number of guesses from the claim alone.

        Args:
            scores: function that computes the canaries' scores [m].
            choices: coins [m].
            claimed: epsilon of the claim.
            delta: delta of the claim.
            confidence: confidence of the bound.
            words: unit, relation, sees.
        """
        each = guesses_of_each(len(choices), epsilon=claimed, delta=delta, confidence=confidence)
        guesses = guess(scores(), each)
        return cls(
            claimed=claimed,
            delta=delta,
            num_canaries=len(choices),
            num_guesses=int(np.count_nonzero(guesses)),
            num_correct=int(np.count_nonzero(guesses * choices > 0)),
            confidence=confidence,
            **words,
        )

    @property
    def lower_bound(self) -> float:
        """The epsilon below which the run is not private at `delta`, with the confidence."""
        return epsilon_lower_bound(
            self.num_correct,
            num_guesses=self.num_guesses,
            num_canaries=self.num_canaries,
            delta=self.delta,
            confidence=self.confidence,
        )

    @property
    def largest(self) -> float:
        """The lower bound if all guesses were right: this number of canaries can't refute a claim above it."""
        return replace(self, num_correct=self.num_guesses).lower_bound

    @property
    def could_refute(self) -> bool:
        """Whether this number of canaries could have refuted the claim if all guesses had been right."""
        return self.largest > self.claimed

    @property
    def refuted(self) -> bool:
        """Whether the claim is false, with the confidence."""
        return self.lower_bound > self.claimed

    def to_dict(self) -> dict[str, object]:
        """Return the numbers as JSON-ready values; an infinite claim is None."""
        bounds = {"lower_bound": self.lower_bound, "largest": self.largest, "refuted": self.refuted}
        return asdict(self) | bounds | {"claimed": self.claimed if math.isfinite(self.claimed) else None}

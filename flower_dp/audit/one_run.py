"""The one-run audit: a lower bound on epsilon from how many of many random choices can be guessed from one run.

Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run". Each of m canaries is one of two contributions,
chosen by a fair coin of its own. An auditor guesses the coins from what one run releases, and abstains from some. If the run is
(epsilon, delta)-differentially private in every single coin, few of many guesses are right. `docs/audit.md` states it.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
from scipy import optimize, stats

from flower_dp.audit.estimate import largest_refuted
from flower_dp.core import checks

# Parts of the canaries on which either guess is made, of which one is chosen before the run.
_PARTS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
# The smallest delta, and the largest epsilon, for which the Gaussian mechanism of a claim is computed. With an infinite one all
# would be guessed, also canaries that were never sampled.
_LEAST_DELTA, _MOST_EPSILON = 1e-9, 8.0


def p_value(num_correct: int, *, num_guesses: int, num_canaries: int, epsilon: float, delta: float) -> float:
    """Return a bound on the probability of so many right guesses under (epsilon, delta)-differential privacy.

    Theorem 5.2 and Corollary 5.4: the number of right guesses is at most W + F in distribution, where W is binomial with
    `num_guesses` trials of probability q = e^epsilon / (1 + e^epsilon), and F is independent of W with mean at most 2 m delta. So
    P[W + F >= v] <= P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i.

    Args:
        num_correct: how many guesses are right (paper: v).
        num_guesses: how many guesses are made; fixed before the run (paper: r).
        num_canaries: how many coins there are (paper: m).
        epsilon: of the guarantee that is tested.
        delta: of it.

    Raises:
        ValueError: for a value that makes no sense, naming it.
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

    With probability at least `confidence` over coins and run it is at most the true epsilon at this delta; 0 if the guesses show
    nothing.

    Args:
        num_correct: how many guesses are right.
        num_guesses: how many guesses are made.
        num_canaries: how many coins there are.
        delta: of the guarantee.
        confidence: such as 0.95, in (0, 1).

    Raises:
        ValueError: as `p_value`.

    Example:
        >>> from flower_dp.audit.one_run import epsilon_lower_bound
        >>> round(epsilon_lower_bound(75, num_guesses=100, num_canaries=1000, delta=1e-4, confidence=0.95), 3)
        0.673
    """
    checks.number("confidence", confidence, above=0, below=1)

    p = partial(p_value, num_correct, num_guesses=num_guesses, num_canaries=num_canaries, delta=delta)
    return largest_refuted(lambda epsilon: p(epsilon=epsilon) < 1 - confidence)


def guesses_of_each(num_canaries: int, *, epsilon: float, delta: float, confidence: float) -> int:
    """Return on how many canaries to guess "in", and on as many "out", so that the expected bound is largest.

    It must not depend on the run. It is the number that would be best for the claim's own Gaussian mechanism, that is, if every
    canary's score were normal with std 1 and a mean that is mu larger for "in", where mu gives (epsilon, delta).

    Args:
        num_canaries: how many there are, at least 2.
        epsilon: the claim; may be infinite.
        delta: of the claim.
        confidence: of the bound.
    """
    checks.integer("num_canaries", num_canaries, at_least=2)
    shift = _gaussian_shift(min(epsilon, _MOST_EPSILON), max(delta, _LEAST_DELTA))

    def expected(each: int) -> tuple[float, float]:
        part = each / num_canaries
        threshold = optimize.brentq(lambda t: (stats.norm.sf(t - shift) + stats.norm.sf(t)) / 2 - part, -10.0, 10.0 + shift)
        right = int(each * stats.norm.sf(threshold - shift) / part)
        bound = epsilon_lower_bound(right, num_guesses=2 * each, num_canaries=num_canaries, delta=delta, confidence=confidence)
        # The second number counts where so few canaries can show nothing.
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
        scores: of the canaries [m]; the higher, the likelier "in".
        each: at most m / 2.
    """
    checks.integer("each", each, at_least=0, at_most=len(scores) // 2)
    order = np.argsort(scores, kind="stable")
    made = np.zeros(len(scores), np.int64)
    made[order[:each]] = -1
    made[order[len(scores) - each :]] = 1
    return made


def coins(num_canaries: int, seed: int | None) -> np.ndarray:
    """Return a fair coin [m] of every canary, +1 or -1: from a generator of its own, never that of a run's noise.

    Args:
        num_canaries: how many.
        seed: None for the operating system's entropy.
    """
    made: np.ndarray = 2 * np.random.default_rng(None if seed is None else (seed, 1)).integers(0, 2, num_canaries) - 1
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRunAudit:
    """What one run with canaries shows.

    Attributes:
        claimed: the epsilon that the run's statement gives; infinite for a run without privacy.
        delta: of both epsilons.
        unit: what a canary is, `client` or `record`.
        relation: the claim's neighboring relation, by which the two values of a coin are neighbors.
        sees: what the auditor sees.
        num_canaries: how many coins there were.
        num_guesses: on how many it guessed.
        num_correct: how many guesses were right.
        confidence: of the bound.
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
        """Guess by scores, after the number of guesses was chosen from the claim alone.

        Args:
            scores: computes the canaries' scores [m].
            choices: the coins [m].
            claimed: epsilon of the claim.
            delta: of the claim.
            confidence: of the bound.
            words: unit, relation, sees.
        """
        each = guesses_of_each(len(choices), epsilon=claimed, delta=delta, confidence=confidence)
        made = guess(scores(), each)
        return cls(
            claimed=claimed,
            delta=delta,
            num_canaries=len(choices),
            num_guesses=int(np.count_nonzero(made)),
            num_correct=int(np.count_nonzero(made * choices > 0)),
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
        """The lower bound if all guesses were right: a claim above it can't be refuted by so many canaries."""
        return replace(self, num_correct=self.num_guesses).lower_bound

    @property
    def could_refute(self) -> bool:
        """Whether so many canaries could have refuted the claim, had all guesses been right."""
        return self.largest > self.claimed

    @property
    def refuted(self) -> bool:
        """Whether the claim is false, with the confidence."""
        return self.lower_bound > self.claimed

    def to_dict(self) -> dict[str, object]:
        """Return the numbers as JSON-ready values; an infinite claim is None."""
        found = {"lower_bound": self.lower_bound, "largest": self.largest, "refuted": self.refuted}
        return asdict(self) | found | {"claimed": self.claimed if math.isfinite(self.claimed) else None}

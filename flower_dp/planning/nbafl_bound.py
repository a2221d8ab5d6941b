"""NbAFL's problem and its convergence bounds as functions of the number of rounds T and the cohort size K.

Wei et al. 2020, Theorem 2 (all clients) and Theorem 3 (K of N). Both bound the expected excess loss after T rounds, and
both are defined only for a range of their constants: outside it the functions return NaN and `why_not_...` returns the reason.
"""

import math
from dataclasses import dataclass

import numpy as np

from flower_dp.core import checks
from flower_dp.planning.problem import Floats, Reader
from flower_dp.privacy.nbafl import gaussian_c, log_argument, sampled_log

METHOD = "nbafl"
BOUND_KEYS = ("smoothness", "lipschitz", "pl_constant", "proximal", "dissimilarity", "initial_gap", "max_rounds")


def best_proximal(*, smoothness: float, dissimilarity: float) -> float:
    """Return the proximal coefficient mu that makes P of Theorem 2 least: rho (B^2 + 2B), where P = 1 - l/mu.

    lambda_2 = -1/mu + rho B (1 + B/2)/mu^2 is a parabola in 1/mu with its minimum there; for P < 1 at all mu must
    exceed half of it.
    """
    rho, b = checks.number("smoothness", smoothness, above=0), checks.number("dissimilarity", dissimilarity, at_least=1)
    return rho * (b**2 + 2 * b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The values that determine the noise. Comments on the fields give the paper's letters."""

    num_clients: int  # N
    cohort_size: int  # K
    num_rounds: int  # T
    uplink_exposures: int  # L
    epsilon: float
    delta: float
    clip_norm: float  # C
    min_records: int  # m


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The convergence bounds on E[F(w(T))] - F*: Theorem 2 for all clients, Theorem 3 for K of N."""

    problem: Problem
    smoothness: float  # rho
    lipschitz: float  # beta
    pl_constant: float  # l
    proximal: float  # mu
    dissimilarity: float  # B
    initial_gap: float  # Theta
    max_rounds: int

    def contraction(self) -> float:
        """Return P = 1 + 2 l lambda_2 of Theorem 2."""
        mu, rho, b = self.proximal, self.smoothness, self.dissimilarity
        return 1 + 2 * self.pl_constant * (-1 / mu + rho * b / mu**2 + rho * b**2 / (2 * mu**2))

    def cohort_contraction(self, cohort_size: int | Floats) -> Floats:
        """Return Q of Theorem 3, elementwise."""
        mu, rho, b = self.proximal, self.smoothness, self.dissimilarity
        k = np.asarray(cohort_size, dtype=np.float64)
        inner = rho * b**2 / 2 + rho * b + rho * b**2 / k + 2 * rho * b**2 / np.sqrt(k) + mu * b / np.sqrt(k) - mu
        return np.asarray(1 + 2 * self.pl_constant / mu**2 * inner)

    def all_clients(self, num_rounds: int | Floats) -> Floats:
        """Return Theorem 2's bound at T, elementwise; not a number where P is outside (0, 1)."""
        rounds, p = np.asarray(num_rounds, dtype=np.float64), self.contraction()
        if not 0 < p < 1:
            return np.full(rounds.shape, np.nan)
        mu, rho, b = self.proximal, self.smoothness, self.dissimilarity
        noise, n, epsilon = self._noise(), self.problem.num_clients, self.problem.epsilon
        kappa_1 = (1 / mu + rho * b / mu) * self.lipschitz * noise / (1 - p) * math.sqrt(2 / (n * math.pi))
        kappa_0 = rho / 2 * noise**2 / ((1 - p) * n)
        with np.errstate(over="ignore", invalid="ignore"):
            price = kappa_1 * rounds / epsilon + kappa_0 * (rounds / epsilon) ** 2
            return np.asarray(p**rounds * self.initial_gap - np.expm1(rounds * math.log(p)) * price)

    def sampled_clients(self, cohort_size: int | Floats, num_rounds: int) -> Floats:
        """Return Theorem 3's bound at K, elementwise; not a number where the logarithm or Q does not allow it."""
        k, q = np.asarray(cohort_size, dtype=np.float64), self.cohort_contraction(cohort_size)
        mu, rho, b, n = self.proximal, self.smoothness, self.dissimilarity, self.problem.num_clients
        alpha_0 = 2 * rho * k / n + rho
        alpha_1 = 1 + 2 * rho * b / mu + 2 * rho * b * np.sqrt(k) / (mu * n)
        with np.errstate(all="ignore"):
            noise = self._noise() / (-k * sampled_log(n, k, num_rounds, self.problem.epsilon))
            price = noise * alpha_1 * self.lipschitz * math.sqrt(2 / math.pi) + noise**2 * alpha_0
            bound = q**num_rounds * self.initial_gap + (1 - q**num_rounds) / (1 - q) * price
        return np.asarray(np.where((q > 0) & (q < 1), bound, np.nan))

    def why_not_all(self) -> str:
        """Return why Theorem 2 gives no bound."""
        least = best_proximal(smoothness=self.smoothness, dissimilarity=self.dissimilarity) / 2
        return _vacuous("P", self.contraction(), f"P < 1 needs proximal > rho B (1 + B/2) = {least:.6g}")

    def why_not_sampled(self, cohort_size: int, num_rounds: int) -> str:
        """Return why Theorem 3 gives no bound at (K, T)."""
        n, epsilon = self.problem.num_clients, self.problem.epsilon
        argument = log_argument(num_clients=n, cohort_size=cohort_size, num_rounds=num_rounds, epsilon=epsilon)
        if argument <= 0 and cohort_size < n:
            least = n * -math.expm1(-epsilon / num_rounds)
            formula = f"log argument 1 - N/K + (N/K) e^(-epsilon/T) = {argument:.4g} <= 0"
            return f"{formula} (T={num_rounds} and this epsilon need K > {least:.6g})"
        root, rho, b = math.sqrt(cohort_size), self.smoothness, self.dissimilarity
        hint = f"Q < 1 needs K > B^2 = {b**2:.6g}"
        if root > b:
            least = rho * (b**2 / 2 + b + b**2 / cohort_size + 2 * b**2 / root) / (1 - b / root)
            hint = f"Q < 1 needs proximal > {least:.6g} at this K"
        return _vacuous("Q", float(self.cohort_contraction(cohort_size)), hint)

    def _noise(self) -> float:
        """Return c C / m."""
        return gaussian_c(self.problem.delta) * self.problem.clip_norm / self.problem.min_records


def read_problem(read: Reader) -> Problem:
    """Read the values of a problem that determine the noise."""
    num_clients, num_rounds = read.integer("num_clients"), read.integer("num_rounds")
    return Problem(
        num_clients=num_clients,
        cohort_size=read.integer("cohort_size", at_most=num_clients),
        num_rounds=num_rounds,
        uplink_exposures=read.integer("uplink_exposures", at_most=num_rounds),
        epsilon=read.number("epsilon", above=0),
        delta=read.number("delta", above=0, below=1),
        clip_norm=read.number("clip_norm", above=0),
        min_records=read.integer("min_records", at_most=10**12),
    )


def read_bounds(read: Reader, problem: Problem) -> Bounds:
    """Read the bound's constants from a problem; all of them must be given."""
    smoothness = read.number("smoothness", above=0)
    return Bounds(
        problem=problem,
        smoothness=smoothness,
        lipschitz=read.number("lipschitz", above=0),
        # A rho-smooth function satisfies the Polyak-Lojasiewicz condition for no l above rho, and by Jensen's
        # inequality no average of squared gradients is below the square of the average: B >= 1.
        pl_constant=read.number("pl_constant", above=0, at_most=smoothness),
        proximal=read.number("proximal", above=0),
        dissimilarity=read.number("dissimilarity", at_least=1),
        initial_gap=read.number("initial_gap", at_least=0),
        max_rounds=read.integer("max_rounds"),
    )


def _vacuous(letter: str, value: float, hint: str) -> str:
    if 0 < value < 1:
        return "the bound leaves the range of floating-point numbers"
    return f"{letter} = {value:.6g} is outside (0, 1), so the bound says nothing; {hint}"

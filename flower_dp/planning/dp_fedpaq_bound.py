"""DP-FedPAQ's problem and its convergence bound as a function of local steps E, cohort size M and quantization levels s.

Mohammadi, Bai, Fan, Song, Yi, Liu: Differential Privacy Meets Federated Learning under Communication Constraints, Theorem 1
(eq. 19) and eq. 12. The bound is on the expected squared distance to the optimum after T iterations.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flower_dp.planning.problem import LARGEST_COUNT, Floats, ProblemError, Reader, finite, keys_of

METHOD = "dp-fedpaq"
# Up to here the 2 s + 1 values of a coordinate fit into 16 bits.
MAX_LEVELS = 2**15 - 1
_NORM_BITS = 32
# The key that an error names if a term of the bound overflows.
_KEY_OF_TERM = {
    "start": "initial_distance",
    "quantization": "gradient_bound",
    "batch sampling": "gradient_variance",
    "heterogeneity": "heterogeneity",
    "local drift": "heterogeneity",
    "noise": "epsilon",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A checked problem. Comments on the fields give the paper's letters."""

    bits_budget: float  # B, of all uplink messages
    num_iterations: int  # T
    dimension: int  # d
    num_clients: int  # N
    batch_size: int  # b
    num_records: tuple[int, ...]  # n_i
    epsilon: Floats  # epsilon_i, a round
    delta: float  # a round
    strong_convexity: float  # mu
    smoothness: float  # L
    gradient_bound: float  # G
    gradient_variance: float  # sigma^2, of a batch of one
    heterogeneity: float  # lambda
    initial_distance: float  # D_0, squared
    num_local_steps: int | None  # E, if fixed
    cohort_size: int | None  # M, if fixed
    quantization_levels: int | None  # s, if fixed
    max_quantization_levels: int

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> "Problem":
        """Read and check a problem.

        Raises:
            ProblemError: naming the key that is unknown, missing or impossible.
        """
        read = Reader(values=values, method=METHOD)
        read.refuse_unknown(keys_of(cls))
        num_clients, num_iterations = read.integer("num_clients"), read.integer("num_iterations")
        num_records = read.per_client_integer("num_records", num_clients)
        batch_size = read.integer("batch_size", at_most=min(num_records))
        most = read.optional_integer("max_quantization_levels")
        convexity = read.number("strong_convexity", above=0)
        levels = read.optional_integer("quantization_levels", at_most=LARGEST_COUNT if most is None else most)
        problem = cls(
            bits_budget=read.number("bits_budget", above=0),
            num_iterations=num_iterations,
            dimension=read.integer("dimension", at_most=10**15),
            num_clients=num_clients,
            batch_size=batch_size,
            num_records=num_records,
            epsilon=read.per_client("epsilon", num_clients, above=0),
            delta=read.number("delta", above=0, below=1),
            strong_convexity=convexity,
            smoothness=read.number("smoothness", at_least=convexity),
            gradient_bound=read.number("gradient_bound", above=0),
            gradient_variance=read.number("gradient_variance", at_least=0),
            heterogeneity=read.number("heterogeneity", at_least=0),
            initial_distance=read.number("initial_distance", at_least=0),
            num_local_steps=read.optional_integer(
                "num_local_steps", at_most=min(num_iterations, min(num_records) // batch_size, LARGEST_COUNT)
            ),
            cohort_size=read.optional_integer("cohort_size", at_most=num_clients),
            quantization_levels=levels,
            max_quantization_levels=max(MAX_LEVELS if most is None else most, levels or 1),
        )
        problem._check()
        return problem

    def local_steps(self) -> range:
        """Return the E that the data and the noise formula allow: E <= T, and delta n_i <= E b <= n_i for every client."""
        if self.num_local_steps is not None:
            return range(self.num_local_steps, self.num_local_steps + 1)
        return range(self._least_local_steps(), self._most_local_steps() + 1)

    def num_rounds(self, num_local_steps: int) -> int:
        """Return K = floor(T / E)."""
        return self.num_iterations // num_local_steps

    def message_bits(self, levels: float | Floats) -> Floats:
        """Return beta = d log2(2 s + 1) + 32, the bits of a message with s levels, elementwise."""
        return np.asarray(self.dimension * np.log2(2 * np.asarray(levels, dtype=np.float64) + 1) + _NORM_BITS)

    def bits_used(self, num_rounds: int, cohort_size: float | Floats, levels: float | Floats) -> Floats:
        """Return K M beta (eq. 12), elementwise."""
        return np.asarray(num_rounds * np.asarray(cohort_size, dtype=np.float64) * self.message_bits(levels))

    def cohorts(self, num_rounds: int) -> tuple[Floats, Floats]:
        """Return the levels s that the budget allows, and the largest cohort at each: a larger one has a lower bound."""
        fixed = self.quantization_levels
        levels = np.arange(1.0, self.max_quantization_levels + 1) if fixed is None else np.asarray([float(fixed)])
        with np.errstate(over="ignore"):
            cohort = np.minimum(np.floor(self.bits_budget / (num_rounds * self.message_bits(levels))), self.num_clients)
            # Rounding may be one off in either direction.
            cohort -= self.bits_used(num_rounds, cohort, levels) > self.bits_budget
            more = np.minimum(cohort + 1, self.num_clients)
            cohort = np.where(self.bits_used(num_rounds, more, levels) <= self.bits_budget, more, cohort)
        allowed = cohort >= (self.cohort_size or 1)
        return levels[allowed], cohort[allowed] if self.cohort_size is None else np.full(allowed.sum(), float(self.cohort_size))

    def smallest_bits_budget(self) -> int:
        """Return the least whole bits_budget for which a point is feasible: with the fewest rounds, clients and levels."""
        rounds = self.num_rounds(self.local_steps()[-1])
        return math.ceil(self.bits_used(rounds, self.cohort_size or 1, self.quantization_levels or 1))

    def variance(self, levels: float | Floats) -> Floats:
        """Return q = min(d / s^2, sqrt(d) / s) of QSGD, E||Q(x) - x||^2 <= q ||x||^2, elementwise."""
        s = np.asarray(levels, dtype=np.float64)
        return np.minimum(self.dimension / s**2, math.sqrt(self.dimension) / s)

    def bound(self, steps: float | Floats, cohort: float | Floats, levels: float | Floats) -> Floats:
        """Return Theorem 1's bound (eq. 19) at (E, M, s), elementwise."""
        return np.asarray(sum(self._terms(steps, cohort, levels).values()))

    def scaled_bound(self, steps: float | Floats, cohort: float | Floats, levels: float | Floats) -> Floats:
        """Return the bound with the noise term over mu^2, elementwise.

        Distances don't change when the loss is multiplied by a number. All terms of eq. 19 agree with that but the last one, of
        the noise, which lacks the 1/mu^2 that its step size brings in.
        """
        terms = self._terms(steps, cohort, levels)
        return np.asarray(sum(terms.values()) + terms["noise"] * (self.strong_convexity**-2 - 1))

    def parts(self, steps: int, cohort: int, levels: int) -> dict[str, float]:
        """Return the named terms whose sum is the bound."""
        return {name: float(term) for name, term in self._terms(steps, cohort, levels).items()}

    def _terms(self, steps: float | Floats, cohort: float | Floats, levels: float | Floats) -> dict[str, Floats]:
        e, m = np.asarray(steps, dtype=np.float64), np.asarray(cohort, dtype=np.float64)
        q, t, n, b = self.variance(levels), self.num_iterations, self.num_clients, self.batch_size
        mu, square, spread = self.strong_convexity, np.float64(self.gradient_bound) ** 2, np.float64(self.heterogeneity) ** 2
        drift = 128 * math.e * spread / m * (e - 1) + 128 * square * (e - 1) ** 2
        return {
            "start": 16 * e**2 / t**2 * self.initial_distance,
            "quantization": 16 / mu**2 * (2 / m + 1 / n) * q * square * e / t,
            "batch sampling": 16 / mu**2 * self.gradient_variance / b * (4 * math.e / m + 1 / n) / t,
            "heterogeneity": 48 * self.smoothness * spread / (mu**3 * t) + 0 * m,
            "local drift": drift / (mu**2 * t),
            "noise": 4096 * self.dimension * square * b**2 * (1 + q) * self._noise(e) * e**3 / (m * t),
        }

    def _noise(self, steps: Floats) -> Floats:
        """The mean over clients of ln(1.25 E b / (n_i delta)) / (n_i epsilon_i)^2."""
        records = np.asarray(self.num_records, dtype=np.float64)
        weights = (records * self.epsilon) ** -2.0
        return np.asarray(
            np.log(1.25 * steps * self.batch_size / self.delta) * np.mean(weights) - np.mean(weights * np.log(records))
        )

    def _most_local_steps(self) -> int:
        return min(self.num_iterations, min(self.num_records) // self.batch_size, LARGEST_COUNT)

    def _least_local_steps(self) -> int:
        """The noise formula needs delta / gamma <= 1, gamma = E b / n_i: at a smaller gamma, its delta is no probability."""
        return max(math.ceil(self.delta * max(self.num_records) / self.batch_size), 1)

    def _check(self) -> None:
        least, most = self._least_local_steps(), self.num_local_steps or self._most_local_steps()
        if least > most:
            raise ProblemError(
                "delta",
                f"delta={self.delta!r}: the noise formula needs delta <= E b / n_i, the part of a client's records that a round"
                f" draws; that is num_local_steps >= {least}, and the problem allows {most}",
            )
        with np.errstate(all="ignore"):
            cube = np.float64(self.strong_convexity) ** 3
            finite("strong_convexity", float(self.smoothness / cube), "smoothness / strong_convexity^3")
            terms = self._terms(most, 1, 1)
            for name, key in _KEY_OF_TERM.items():
                finite(key, float(terms[name]), f"the term of the {name}")

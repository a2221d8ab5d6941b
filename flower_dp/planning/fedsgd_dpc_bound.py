"""FedSGD-DPC's problem and its convergence bounds as functions of the number of rounds T and the cohort size b.

Zhou et al., Sections V-B (Laplace) and VI-B (Gaussian). Both bound the expected squared distance to the optimum after T
rounds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flower_dp.planning.problem import Floats, ProblemError, Reader, finite, keys_of

METHOD = "fedsgd-dpc"
# Beyond this many rounds a float64 no longer counts exactly, and no one trains that long.
LONGEST = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class LaplaceBound:
    """U(T, b) = (C1/b + C2 b T^2 + C3) / (T + gamma), Section V-B: convex in T and in b, but not jointly."""

    shift: float
    """gamma = 2 smoothness / strong_convexity."""
    sampling_term: float
    """C1: falls with the cohort."""
    noise_term: float
    """C2: grows with the cohort and with T^2."""
    fixed_term: float
    """C3: start and heterogeneity, less the part of C1 that a full cohort does not pay."""

    def value(self, num_rounds: float | Floats, cohort_size: float | Floats) -> Floats:
        """Return U(T, b), elementwise."""
        rounds, cohort = np.asarray(num_rounds, dtype=np.float64), np.asarray(cohort_size, dtype=np.float64)
        total = self.sampling_term / cohort + self.noise_term * cohort * rounds**2 + self.fixed_term
        return np.asarray(total / (rounds + self.shift))

    def best_num_rounds(self, cohort_size: float | Floats) -> Floats:
        """Return the continuous T* = sqrt(gamma^2 + (C1/b + C3)/(C2 b)) - gamma for fixed b (eq. 6), elementwise."""
        cohort = np.asarray(cohort_size, dtype=np.float64)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            # C1/b + C3 >= gamma Y0 >= 0 on paper; rounding may leave it a little below zero at b = N.
            gain = np.maximum(self.sampling_term / cohort + self.fixed_term, 0.0)
            ratio = np.where(gain > 0, gain / (self.noise_term * cohort), 0.0)
            # The same as sqrt(gamma^2 + ratio) - gamma, without the cancellation.
            best = ratio / (np.sqrt(self.shift**2 + ratio) + self.shift)
        return np.where(np.isfinite(ratio), best, np.inf)

    def best_cohort_size(self, num_rounds: float, num_clients: int) -> float:
        """Return the continuous b* = sqrt(C1/C2) / T for fixed T, brought into [1, N]."""
        if num_rounds == 0 or self.noise_term == 0:
            return float(num_clients)
        return min(max(math.sqrt(self.sampling_term / self.noise_term) / num_rounds, 1.0), float(num_clients))


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianBound:
    """U(T, b) = E1/(b (T + gamma)) + E2/(T + gamma) + E3, Section VI-B: monotone in T, falling with b."""

    shift: float
    """gamma = 2 smoothness / strong_convexity."""
    sampling_term: float
    """E1 = (8 G^2/mu^2) N/(N - 1); the paper prints mu_2 for mu^2."""
    fixed_term: float
    """E2: start, heterogeneity and mini-batch variance, less what E1 and E3 count too much."""
    noise_floor: float
    """E3: what is left as T grows."""

    def value(self, num_rounds: float | Floats, cohort_size: float | Floats) -> Floats:
        """Return U(T, b), elementwise."""
        rounds, cohort = np.asarray(num_rounds, dtype=np.float64), np.asarray(cohort_size, dtype=np.float64)
        return np.asarray((self.sampling_term / cohort + self.fixed_term) / (rounds + self.shift) + self.noise_floor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A checked problem. Comments on the fields give the paper's letters."""

    mechanism: str
    num_clients: int  # N
    num_records: tuple[int, ...]  # d_i
    dimension: int  # p
    clip_norm: float  # xi_1 (L1) or xi_2 (L2)
    epsilon: Floats  # epsilon_i
    delta: Floats | None  # delta_i
    strong_convexity: float  # mu
    smoothness: float  # lambda
    gradient_bound: float  # G
    heterogeneity: float  # Gamma
    initial_distance: float  # Y_0, squared
    cohort_size: int | None  # b
    num_rounds: int | None  # T
    max_rounds: int | None
    sampling_rate: float | None  # q
    gradient_variance: Floats | None  # Lambda_i^2
    noise_constant: float | None  # c_2

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> "Problem":
        """Read and check a problem.

        Raises:
            ProblemError: naming the key that is unknown, missing or impossible.
        """
        read = Reader(values=values, method=METHOD)
        read.refuse_unknown(keys_of(cls))
        mechanism = read.word("mechanism", ("laplace", "gaussian"))
        # The bound divides by N - 1.
        num_clients = read.integer("num_clients", at_least=2)
        gaussian = mechanism == "gaussian"
        strong_convexity = read.number("strong_convexity", above=0)
        max_rounds = read.optional_integer("max_rounds", at_most=LONGEST)
        num_rounds = read.optional_integer("num_rounds", at_most=LONGEST)
        if max_rounds is not None and num_rounds is not None and num_rounds > max_rounds:
            raise ProblemError("num_rounds", f"num_rounds={num_rounds}: must be <= max_rounds={max_rounds}")
        if gaussian and num_rounds is None and max_rounds is None:
            raise ProblemError(
                "max_rounds",
                "max_rounds: missing; the Gaussian bound has no best number of rounds: give max_rounds or num_rounds",
            )
        problem = cls(
            mechanism=mechanism,
            num_clients=num_clients,
            num_records=read.per_client_integer("num_records", num_clients),
            dimension=read.integer("dimension", at_most=LONGEST),
            clip_norm=read.number("clip_norm", above=0),
            epsilon=read.per_client("epsilon", num_clients, above=0),
            # Keys that only the Gaussian mechanism uses are checked also for the Laplace mechanism.
            delta=read.per_client("delta", num_clients, above=0, below=1) if gaussian or read.has("delta") else None,
            strong_convexity=strong_convexity,
            smoothness=read.number("smoothness", at_least=strong_convexity),
            gradient_bound=read.number("gradient_bound", at_least=0),
            heterogeneity=read.number("heterogeneity", at_least=0),
            initial_distance=read.number("initial_distance", at_least=0),
            cohort_size=read.optional_integer("cohort_size", at_most=num_clients),
            num_rounds=num_rounds,
            max_rounds=max_rounds,
            sampling_rate=read.number("sampling_rate", above=0, at_most=1) if gaussian or read.has("sampling_rate") else None,
            gradient_variance=read.per_client("gradient_variance", num_clients, at_least=0)
            if gaussian or read.has("gradient_variance")
            else None,
            noise_constant=read.number("noise_constant", above=0) if gaussian or read.has("noise_constant") else None,
        )
        problem._refuse_overflow()
        return problem

    @property
    def shift(self) -> float:
        """The gamma of Theorem 3: 2 lambda / mu."""
        return 2 * self.smoothness / self.strong_convexity

    def bound(self) -> LaplaceBound | GaussianBound:
        """Return the bound U(T, b) with its constants gathered as in Section V-B or VI-B."""
        start, heterogeneity, spread = self._start(), self._heterogeneity(), self._spread()
        sampling, n = spread * self.num_clients / (self.num_clients - 1), self.num_clients
        if self.mechanism == "laplace":
            return LaplaceBound(
                shift=self.shift,
                sampling_term=sampling,
                noise_term=self._noise(),
                fixed_term=start + heterogeneity - spread / (n - 1),
            )
        floor = self._noise()
        fixed = start + heterogeneity + self._batch_variance() - spread / (n - 1) - self.shift * floor
        return GaussianBound(shift=self.shift, sampling_term=sampling, fixed_term=fixed, noise_floor=floor)

    def parts(self, num_rounds: int, cohort_size: int) -> dict[str, float]:
        """Return the named terms whose sum is the bound at (T, b), in the order of Theorems 3 and 4."""
        growth = cohort_size * num_rounds**2 if self.mechanism == "laplace" else num_rounds
        n = self.num_clients
        parts = {
            "start": self._start(),
            "heterogeneity": self._heterogeneity(),
            "client sampling": self._spread() * (n - cohort_size) / (cohort_size * (n - 1)),
            "batch sampling": self._batch_variance(),
            "noise": self._noise() * growth,
        }
        return {name: part / (num_rounds + self.shift) for name, part in parts.items()}

    def _start(self) -> float:
        return self.shift * self.initial_distance

    def _heterogeneity(self) -> float:
        return 8 * self.smoothness * self.heterogeneity / self.strong_convexity**2

    def _spread(self) -> float:
        return 8 * (self.gradient_bound / self.strong_convexity) ** 2

    def _batch_variance(self) -> float:
        if self.mechanism == "laplace" or self.gradient_variance is None or self.sampling_rate is None:
            return 0.0
        records = np.asarray(self.num_records, dtype=np.float64)
        scale = self.strong_convexity * float(np.sum(records))
        return 4 * float(np.sum(records * self.gradient_variance)) / (self.sampling_rate * scale**2)

    def _noise(self) -> float:
        """The factor of b T^2 (Laplace, C2) or of T (Gaussian, E3)."""
        unit = self.dimension * (self.clip_norm / (self.strong_convexity * sum(self.num_records))) ** 2
        if self.mechanism == "laplace":
            return 32 * unit * float(np.sum(self.epsilon**-2.0)) / self.num_clients
        if self.delta is None or self.noise_constant is None:
            raise ProblemError("delta", "delta: the Gaussian mechanism needs delta and noise_constant")
        return 4 * self.noise_constant**2 * unit * float(np.sum(-np.log(self.delta) * self.epsilon**-2.0))

    def _refuse_overflow(self) -> None:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            try:
                finite("strong_convexity", self.shift, "smoothness / strong_convexity")
                finite("initial_distance", self._start(), "the term of the start")
                finite("heterogeneity", self._heterogeneity(), "the term of the heterogeneity")
                finite("gradient_bound", self._spread(), "the term of the gradients")
                finite("gradient_variance", self._batch_variance(), "the term of the batches")
                finite("epsilon", self._noise(), "the term of the noise")
            except (OverflowError, ZeroDivisionError) as error:
                raise ProblemError(
                    "strong_convexity",
                    "strong_convexity: the bound leaves the range of floating-point numbers; rescale it",
                ) from error

"""DP-FedPAQ's noise: how far one record moves a client's update, the terms of one client, and the paper's formula.

The unit of privacy is one record, under local DP: the client adds the full noise to every message. In round k a client draws E b
of its n records without replacement and splits them into E mini-batches. It takes E steps of size eta_k along means of clipped
gradients: x_E - x_k = -(eta_k / b) u, where u is the sum of the E b clipped gradients. Noise is added to u, so neither the step
size nor its decay changes a guarantee: sensitivity and noise of the update follow eta_k together.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from flower_dp.core import checks, noise
from flower_dp.core.sampling import FixedSizeSampling
from flower_dp.privacy.client_terms import ClientTerms, budget, least_gaussian_multiplier, own_release
from flower_dp.privacy.mechanisms import Gaussian

# Proofs of an update's sensitivity, under replace-one.
SENSITIVITIES = ("clip-update", "per-step", "convex-glm")
# Formulas for the noise.
CALIBRATIONS = ("exact", "paper")
# If nothing bounds the whole sum (`convex-glm`), rounding adds to half of the distance of two neighbors' sums, in clip norms:
# to the lattice, which is that much finer, at most 2^-21, and float64 steps at most _STEPS (`longest_weights`), 2^-18 in all; to
# float32 2^-24 a record, and float64 sums of n records n 2^-52 a record.
_ROUNDING = 2.0**-18
_STEPS = 2.0**-19
_ROUNDING_A_RECORD = 2.0**-22
_FINER = 2.0**-12
_FLOAT64 = 2.0**-52
# Numbers beyond it could leave float64's range in a step.
_MODERATE = 2.0**200
# Part of the clients whose budget may be spent before the run ends, if their number of replies is not given.
_SPENT_EARLY = 0.01
# Beyond this base epsilon 2 gamma epsilon is no bound of the amplified one (the paper's eq. 16).
_LARGEST_AMPLIFIED = 1.256


@dataclass(frozen=True, slots=True, kw_only=True)
class FedPAQSteps:
    """The local steps of a client in one round, as public numbers that both sides know.

    Attributes:
        learning_rate: step size of round 1 (paper: eta_0).
        num_local_steps: steps a round, each on its own mini-batch (paper: E).
        batch_size: records of a mini-batch (paper: b).
        clip_norm: L2 bound on the gradient of one record (paper: C).
        sensitivity: proof of how far an update moves if one record is replaced by another:
            `clip-update`: the whole update is clipped to `update_clip_norm` (S): 2 S, for any model;
            `per-step`: 2 eta C (E - 1 + 1 / b), for any model: the record is in one mini-batch alone, and moves its mean by
            2 C / b; every later step is at most eta C long, whatever its direction (2 E eta C in all, or less);
            `convex-glm`: 2 eta C / b, for a linear model with one score a record, a convex loss and eta <= 2 / smoothness:
            such steps bring no two models further apart, and the record is in one of them alone.
        update_clip_norm: L2 bound S of the whole update in round 1, for `clip-update` only; it shrinks as the step size does.
        smoothness: smoothness of a record's loss in the weights, for `convex-glm` only; features are scaled down to keep it.
        decay_iterations: local steps after which the step size is half as large: eta_k = eta_0 / (1 + k E / decay_iterations),
            k = 0, 1, ... (paper: 100); None for a constant one.

    Raises:
        ValueError: for a value out of range, naming field and value.

    Example:
        >>> from flower_dp.privacy.dp_fedpaq import FedPAQSteps
        >>> steps = FedPAQSteps(learning_rate=0.1, num_local_steps=10, batch_size=12, clip_norm=1.0, sensitivity="per-step")
        >>> round(steps.update_sensitivity(1), 4), round(steps.update_sensitivity(11), 4)
        (1.8167, 0.9083)
    """

    learning_rate: float
    num_local_steps: int
    batch_size: int
    clip_norm: float
    sensitivity: str = "clip-update"
    update_clip_norm: float | None = None
    smoothness: float | None = None
    decay_iterations: float | None = 100.0

    def __post_init__(self) -> None:
        checks.number("learning_rate", self.learning_rate, above=0)
        checks.integer("num_local_steps", self.num_local_steps, at_least=1)
        checks.integer("batch_size", self.batch_size, at_least=1)
        checks.number("clip_norm", self.clip_norm, above=0)
        checks.one_of("sensitivity", self.sensitivity, SENSITIVITIES)
        if self.decay_iterations is not None:
            checks.number("decay_iterations", self.decay_iterations, above=0)
        for field, owner in (("update_clip_norm", "clip-update"), ("smoothness", "convex-glm")):
            value = getattr(self, field)
            if self.sensitivity == owner:
                checks.number(field, value, above=0)
            elif value is not None:
                raise checks.refusal(field, value, f"is read with sensitivity={owner!r} only; must be None")
        longest = self.num_local_steps * self.learning_rate * self.clip_norm
        if self.update_clip_norm is not None and self.update_clip_norm > longest * (1 + 1e-9):
            most = f"num_local_steps x learning_rate x clip_norm = {longest:g}, which no update is longer than"
            raise checks.bad("update_clip_norm", self.update_clip_norm, f"at most {most}; or use sensitivity='per-step'")
        if self.smoothness is not None and self.learning_rate > 2 / self.smoothness:
            most = f"2 / smoothness = {2 / self.smoothness:g}"
            raise checks.bad("learning_rate", self.learning_rate, f"at most {most} for sensitivity='convex-glm'")

    @property
    def num_records(self) -> int:
        """Records that a client draws for a round: E b."""
        return self.num_local_steps * self.batch_size

    def step_size(self, server_round: int) -> float:
        """Return eta_k of round 1, 2, ..., k = round - 1."""
        if self.decay_iterations is None:
            return self.learning_rate
        return self.learning_rate / (1 + (server_round - 1) * self.num_local_steps / self.decay_iterations)

    @property
    def sum_norm(self) -> float:
        """Half of the distance that one replaced record can move u, the sum of the clipped gradients of a round."""
        if self.update_clip_norm is not None:
            return self.update_clip_norm * self.batch_size / self.learning_rate
        if self.sensitivity == "per-step":
            return ((self.num_local_steps - 1) * self.batch_size + 1) * self.clip_norm
        return self.clip_norm * (1 + _ROUNDING + self.num_records * _ROUNDING_A_RECORD)

    def longest_weights(self, step_size: float, *, columns: int) -> float:
        """Return the largest norm of weights, at the start and every step of a round, with which `convex-glm` holds in float64.

        The proof is about real numbers, and the server chooses where steps begin. With weights of norm up to Y, a step of eta
        along a sum of b gradients is computed with two errors. The gradients' is at most
        a = b (m L Y + 16 sqrt(L)) 2^-52; each score takes m additions in a row (`block_of`), and its slope has
        smoothness L. That of the subtraction, r, is at most 2^-52 Y, and those of all E steps together at most (E + 4) 2^-52 Y.

        Steps without errors bring no two models further apart. (For n columns a record's features exceed their bound by less than
        2^-52 (2 n + 16) of it; the distance grows by no more.) So errors add up. The sum of a neighbor's gradients is b / eta
        times how far its model has moved. The sums of two neighbors are apart by at most:
        2 C + 2 [C (5 n + 32) E 2^-52 + E a + 2 (b / eta) sum of r]. For every Y up to the result the bracket is at most 2^-19 C,
        which the sensitivity contains. The result is 0, or less, if there is no such Y.

        Args:
            step_size: step size of the round, whose number comes from the server.
            columns: number of features, and one more for a bias.
        """
        smoothness = self.smoothness or 0.0
        if not all(1 / _MODERATE < number < _MODERATE for number in (step_size, smoothness, self.clip_norm)):
            return 0.0
        steps, records = self.num_local_steps, self.num_records
        in_a_row = 2 * block_of(columns) + 4
        fixed = self.clip_norm * (5 * columns + 32) * steps + 16 * records * math.sqrt(smoothness)
        grows = records * in_a_row * smoothness + 2 * (self.batch_size / step_size) * (steps + 4)
        return (_STEPS / _FLOAT64 * self.clip_norm - fixed) / grows

    @property
    def longest_sum(self) -> float:
        """The largest norm of u."""
        return self.sum_norm if self.update_clip_norm is not None else self.num_records * self.clip_norm

    def lattice_step(self, noise_scale: float, dimension: int) -> float:
        """Return the step of the lattice of u [dimension] and its noise."""
        finer = _FINER if self.sensitivity == "convex-glm" else 1.0
        # Single records are rounded to it as well, under `per-step` and `clip-update` alike.
        return noise.lattice_step(noise_scale, clip_norm=finer * self.clip_norm, dimension=dimension)

    def update_factor(self, server_round: int) -> float:
        """Return the factor that turns u into an update."""
        return -self.step_size(server_round) / self.batch_size

    def update_sensitivity(self, server_round: int) -> float:
        """Return how far one replaced record can move the update of a round."""
        return 2 * self.sum_norm * -self.update_factor(server_round)

    @property
    def proof(self) -> str:
        """Proof of the sensitivity, as text."""
        bounds = {
            "clip-update": "the whole update is clipped: 2 S, any model",
            "per-step": "one step differs by 2 eta C / b, and E - 1 later ones by 2 eta C each at most, any model",
            "convex-glm": "steps on convex losses of a linear model with one score bring models no further apart: 2 eta C / b",
        }
        return f"The sensitivity of an update is proved by {self.sensitivity!r}: {bounds[self.sensitivity]}."


def block_of(columns: int) -> int:
    """Return how many columns of a score are added up in one block: sums of blocks have the fewest additions in a row."""
    return math.isqrt(max(columns - 1, 0)) + 1


@lru_cache(maxsize=4096)
def update_terms(
    *, steps: FedPAQSteps, epsilon: float, delta: float, num_replies: int, num_records: int, calibration: str = "exact"
) -> ClientTerms:
    """Return the terms of DP-FedPAQ: each reply is the noised update of E local steps, quantized after that.

    All `num_replies` replies together are (epsilon, delta)-differentially private for each record, under replace-one. Every reply
    takes its own E b of the client's records at random, which nobody else knows. The accounting claims amplification by sampling
    without replacement (`flower_dp.privacy.fixed_size`), with a sensitivity of twice the norm.

    With `calibration="paper"` that does not hold: epsilon and delta are the paper's, of one reply. The noise is that of its
    eq. 17, which composes nothing and is not proved for most values (`violated_conditions`). In ledgers and statements alike, the
    cost of the replies follows from the noise, and may be many times epsilon.

    The release is u, the sum of E b clipped gradients: `noise_scale` x eta_k / b is the noise on the update.

    Args:
        steps: local steps of a round.
        epsilon: budget of all replies, > 0; math.inf means no noise, and no privacy.
        delta: in (0, 1).
        num_replies: largest number of replies that the client will send.
        num_records: the client's public data size.
        calibration: `exact`: the least noise that numerical composition proves enough for all replies; `paper`: eq. 17's, where
            epsilon and delta are of one reply.

    Raises:
        ValueError: for a value out of range, naming it; if the client has fewer than E b records.

    Example:
        >>> from flower_dp.privacy.dp_fedpaq import FedPAQSteps, update_terms
        >>> steps = FedPAQSteps(learning_rate=0.1, num_local_steps=2, batch_size=4, clip_norm=1.0, sensitivity="per-step")
        >>> terms = update_terms(steps=steps, epsilon=1.0, delta=1e-5, num_replies=1, num_records=8)
        >>> round(terms.release.mechanism.noise_multiplier, 2)  # no amplification: the classical 2 x 3.73
        7.46
    """
    size = checks.integer("num_records", num_records, at_least=1)
    if size < steps.num_records:
        takes = f"a round takes num_local_steps x batch_size = {steps.num_records} of a client's records, without replacement"
        raise ValueError(f"num_records={size}: {takes}; use fewer steps or smaller batches")
    checks.one_of("calibration", calibration, CALIBRATIONS)
    sampler = FixedSizeSampling(cohort_size=steps.num_records)
    replies = checks.integer("num_replies", num_replies, at_least=1)
    checks.number("delta", delta, above=0, below=1)
    if calibration == "paper":
        multiplier = 2 * paper_noise_ratio(epsilon=epsilon, sampled_part=steps.num_records / size, delta=delta)
    else:
        multiplier = least_gaussian_multiplier(
            sampler, epsilon=budget(epsilon), delta=delta, num_releases=replies, relation="replace-one", num_units=size
        )
    description, mechanism = "the noised update of some local steps, in every reply", Gaussian(noise_multiplier=multiplier)
    release = own_release(description, mechanism, sampler, clip_norm=steps.sum_norm, num_units=size)
    # Eq. 17 bounds one reply, if that: nobody has proved that all replies cost no more than this epsilon.
    return ClientTerms(release=release, num_replies=replies, epsilon=epsilon if calibration == "exact" else math.inf)


def expected_replies(num_rounds: int, cohort_size: int, num_clients: int, *, at_random: bool) -> int:
    """Return the number of replies that a client's budget should cover in a run.

    In a fixed order (round robin, or all clients) no client replies more than ceil(M K / N) times. At random, a client would
    exceed the result with a probability of at most 1 %; the server then requests no more replies from it.
    """
    mean = num_rounds * cohort_size / num_clients
    if not at_random or cohort_size == num_clients:
        return max(1, math.ceil(mean - 1e-9))
    from scipy.stats import binom  # noqa: PLC0415  (slow to import)

    return max(1, int(binom.isf(_SPENT_EARLY, num_rounds, cohort_size / num_clients)))


def paper_noise_ratio(*, epsilon: float, sampled_part: float, delta: float) -> float:
    """Return sigma / Delta of one round by eq. 17: 2 gamma sqrt(2 ln(1.25 gamma / delta)) / epsilon; 0 for an infinite epsilon.

    Args:
        epsilon: epsilon of the round.
        sampled_part: gamma = E b / n.
        delta: delta of the round.

    Raises:
        ValueError: if 1.25 gamma <= delta: the formula has no value then; or for a value out of range.
    """
    return _paper_factor(sampled_part, delta) / budget(epsilon)


def paper_epsilon(*, noise_std: float, sensitivity: float, sampled_part: float, delta: float) -> float:
    """Return the paper's epsilon of one round: 2 gamma Delta sqrt(2 ln(1.25 gamma / delta)) / sigma (eq. 17).

    Args:
        noise_std: std sigma of the noise on the update.
        sensitivity: sensitivity Delta of the update.
        sampled_part: gamma = E b / n.
        delta: delta of the round.

    Raises:
        ValueError: if 1.25 gamma <= delta: the formula has no value then; or for a value out of range.
    """
    checks.number("noise_std", noise_std, above=0)
    return _paper_factor(sampled_part, delta) * sensitivity / noise_std


def _paper_factor(sampled_part: float, delta: float) -> float:
    checks.number("delta", delta, above=0, below=1.25 * checks.number("sampled_part", sampled_part, above=0, at_most=1))
    return 2 * sampled_part * math.sqrt(2 * math.log(1.25 * sampled_part / delta))


def violated_conditions(epsilon: float, sampled_part: float) -> list[str]:
    """Return the violated conditions of the paper's epsilon of one round: limits of the two formulas that it joins."""
    base = epsilon / (2 * sampled_part)
    faults = []
    if base > _LARGEST_AMPLIFIED:
        bounds = f"2 gamma epsilon bounds the amplified one up to a base epsilon of {_LARGEST_AMPLIFIED}"
        faults.append(f"{bounds}, which is {base:.4g} here")
    if base >= 1:
        faults.append(f"the classical Gaussian formula needs a base epsilon < 1, which is {base:.4g} here")
    return faults

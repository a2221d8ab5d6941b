"""DP-FedPAQ: noised updates of local steps on clipped gradients, in a few bits a coordinate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np

from flower_dp.core import checks, compression
from flower_dp.core.noise import Generator
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, RoundRobinSampling, Sampler
from flower_dp.privacy.client_terms import Terms, per_client, values_in
from flower_dp.privacy.dp_fedpaq import FedPAQSteps, expected_replies, paper_epsilon, update_terms, violated_conditions
from flower_dp.privacy.statement import PaperEpsilon, PrivacyStatement
from flower_dp.strategies.control import Control, Honest
from flower_dp.strategies.releases.books import ClientBooks, PerClient, Population, check_count
from flower_dp.strategies.releases.left_out import RoundLeftOut
from flower_dp.strategies.releases.limits import Limits
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.rules import Options, Round, RunFacts
from flower_dp.strategies.statements.local import local_facts, state
from flower_dp.strategies.strategy import DPStrategy
from flower_dp.wire import Ask

_SAMPLERS = (FullSampling, FixedSizeSampling, RoundRobinSampling)
# The norm of a Gaussian vector exceeds its mean by more standard deviations than this with probability e^-50, which is 2e-22.
_NORM_DEVIATIONS = 10.0


class DPFedPAQRules:
    """The rules of DP-FedPAQ; its arguments are those of `DPFedPAQ`, and three more that `Scaffold` sets.

    Args:
        name: the method's name on the wire.
        title: the method's name for people.
        control: a vector that is sent with the model; None for none.
    """

    stock_refusal = "stock clients add no noise of their own; use flower_dp.clients.LocalDPClient"
    secret_cohort = False
    open_population = False

    def __init__(
        self,
        *,
        steps: FedPAQSteps,
        sampling: Sampler,
        num_clients: int,
        num_records: int | Sequence[int] | Mapping[str, int],
        epsilon: float | PerClient,
        delta: float,
        quantization_levels: int | None = 10,
        num_replies: int | Sequence[int] | Mapping[str, int] | None = None,
        name: str = "dp-fedpaq",
        title: str = "DP-FedPAQ",
        control: Control | None = None,
    ) -> None:
        self.name, self.title, self.control = name, title, control
        if not isinstance(steps, FedPAQSteps):
            raise ValueError(f"steps={steps!r}: must be a flower_dp.privacy.dp_fedpaq.FedPAQSteps")
        self.steps = steps
        if not isinstance(sampling, _SAMPLERS):
            words = ", ".join(kind.__name__ for kind in _SAMPLERS)
            raise ValueError(f"sampling={sampling!r}: must be one of {words}; the server sees who takes part, so none amplifies")
        self.sampling = sampling
        self.quantization_levels = None if quantization_levels is None else compression.check_levels(quantization_levels)
        population = Population(num_clients=num_clients, num_records=num_records, num_replies=num_replies, aggregation="uniform")
        self.books = ClientBooks(population, relation="replace-one", delta=checks.number("delta", delta, above=0, below=1))
        self.cohort_size = sampling.largest_cohort(num_clients)
        self._epsilon = epsilon
        check_count("epsilon", epsilon, num_clients)
        self.begin()
        for size in values_in(num_records):  # refuses impossible values, without a calibration
            update_terms(steps=steps, epsilon=math.inf, delta=delta, num_replies=1, num_records=size)
        for budget in values_in(epsilon):
            self._terms(budget, steps.num_records, 1)

    @property
    def clip_norm(self) -> float:
        """Bound of the sum of clipped gradients that noise is added to: half of what one replaced record can change."""
        return self.steps.sum_norm

    @property
    def num_clients(self) -> int:
        """How many clients there are."""
        return self.books.population.num_clients

    @property
    def delta(self) -> float:
        """The delta of every budget."""
        return self.books.delta

    def begin(self) -> None:
        """Forget the last run."""
        self.books.begin()
        self._planned_rounds: int | None = None
        if self.control is not None:
            self.control.begin()

    def plan(self, num_rounds: int) -> None:
        """Remember the number of rounds, which determines how often a client replies."""
        self._planned_rounds = num_rounds

    def open(self, names: tuple[str, ...]) -> None:
        """Open a ledger for every client, on the terms of its own budget."""
        budgets = per_client("epsilon", self._epsilon, names)
        rounds = self._planned_rounds
        at_random = isinstance(self.sampling, FixedSizeSampling)
        most = None if rounds is None else expected_replies(rounds, self.cohort_size, self.num_clients, at_random=at_random)
        self.books.open(names, most, lambda name, size, replies: self._terms(budgets[name], size, replies))

    def _terms(self, epsilon: float, num_records: int, num_replies: int) -> Terms:
        return update_terms(steps=self.steps, epsilon=epsilon, delta=self.delta, num_replies=num_replies, num_records=num_records)

    def why_stop(self, server_round: int, cohort_size: int | None) -> str | None:
        """Return that every budget is spent, if so."""
        return self.books.why_stop()

    def with_budget(self, chosen: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
        """Return the drawn clients whose budget covers one more reply."""
        return self.books.with_budget(chosen, names)

    def charge(self, server_round: int, names: tuple[str, ...]) -> None:
        """Charge one reply to each client."""
        self.books.charge(names)

    def ask(self, length: int, names: tuple[str, ...]) -> Ask:
        """Return terms, weights of 1 (a row that is sent alone is sent as it was quantised), and SCAFFOLD's control variate."""
        vectors = {} if self.control is None else {"control": self.control.vector(length)}
        return replace(self.books.ask(names, clip_norm=self.clip_norm, weight_of=lambda _: 1.0), vectors=vectors)

    def limits(self, now: Round) -> Limits:
        """Return a bound on the norm of an honest sum of rows; the server does not clip rows that carry their own noise."""
        size, factor = now.layout.size, -self.steps.update_factor(now.server_round)
        ratio = 1.0 if self.quantization_levels is None else compression.qsgd_norm_ratio(size, self.quantization_levels)

        divisor, honest = self._divisor(now.server_round), self._honest(size)

        def row(name: str) -> float:
            noise = self.books.terms[name].release.noise_scale * (math.sqrt(size) + _NORM_DEVIATIONS)
            longest = factor * (self.steps.longest_sum + noise)
            return longest if self.control is None else divisor * self.control.longest(longest / divisor, honest=honest)

        return Limits(length=size, honest_norm=lambda names: ratio * sum(row(name) for name in names))

    def _honest(self, size: int) -> Honest:
        """Return how long noised mean gradients [size] of honest clients are, from public numbers: clip norm and noises."""
        stds = [terms.release.noise_scale for terms in self.books.terms.values()]
        deviations = math.sqrt(size) + _NORM_DEVIATIONS

        def gradient(std: float) -> float:
            return (self.steps.longest_sum + std * deviations) / self.steps.num_records

        # Clients that have not replied yet count as zero in the mean.
        return Honest(single=gradient(max(stds)), mean=gradient(math.hypot(*stds) / self.num_clients))

    def _divisor(self, server_round: int) -> float:
        """Return the ratio of an update to the mean gradient: E eta."""
        return self.steps.num_local_steps * self.steps.step_size(server_round)

    def combine(self, now: Round, collected: Collected, rng: Generator) -> np.ndarray:
        """Return the model moved by the mean of the received messages.

        Raises:
            RoundLeftOut: if there are none.
        """
        if not collected.clients:
            raise RoundLeftOut("no client has answered")
        if self.control is not None:
            divisor, honest = self._divisor(now.server_round), self._honest(now.layout.size)
            self.control.learn(collected, divisor=divisor, num_clients=self.num_clients, honest=honest)
        return np.asarray(now.vector + collected.total / len(collected.clients))

    def noise_and_signal(self, dimension: int) -> tuple[float, float]:
        """Return the norms of the noise on the mean of updates, and of the longest update; without what quantisation adds."""
        factor = -self.steps.update_factor(1)
        variances = [terms.release.noise_std**2 for terms in self.books.terms.values()]
        noise = math.sqrt(sum(variances) / len(variances) / self.cohort_size * dimension)
        return factor * noise, factor * self.steps.longest_sum

    def bytes_per_client(self, now: Round, collected: Collected) -> float:
        """Return the mean size of a client's own message; it reveals nothing, since messages are private."""
        return collected.payload_bytes / len(collected.clients) if collected.clients else 0.0

    @property
    def charges(self) -> object:
        """How many replies were charged to each client, and what happened to their vectors."""
        replies = [ledger.num_charges for ledger in self.books.ledgers.values()]
        return (self.books.num_rounds, self.books.num_unasked, self._incidents(), *replies)

    @property
    def epsilon(self) -> float:
        """An upper bound of the largest cost of a client."""
        return self.books.epsilon

    # Statement

    def _incidents(self) -> tuple[str, ...]:
        return () if self.control is None else self.control.incidents

    def explain(self, facts: RunFacts) -> PrivacyStatement:
        """Return the statement: the worst client, and the distribution over clients."""
        steps = self.steps
        replies = sorted({terms.num_replies for terms in self.books.terms.values()}) or [0]
        most = f"{replies[-1]}" if len(replies) == 1 else f"{replies[0]} to {replies[-1]}"
        sizes = self.books.num_records.values()
        whole = bool(sizes) and all(size == steps.num_records for size in sizes)
        each = f"all records, {steps.num_records}" if whole else f"{steps.num_records} records at random, without replacement"
        local = local_facts(self.title, self.books, self.sampling, facts)
        secret = ("only the client knows which of its records it takes",) if local.counts_sampling else ()
        return state(
            local,
            message_std=self._message_std(),
            noise=self._noise_numbers(),
            paper=self._paper(facts),
            sampling=f"{self.sampling}: at most {most} replies a client; {each} in each",
            assumptions=(steps.proof, *secret),
            incidents=self._incidents(),
        )

    def _message_std(self) -> float:
        """The least std of the noise on a number that a client sends: on its update, before that is quantised."""
        stds = [terms.release.noise_std for terms in self.books.terms.values()]
        # Steps shrink from round to round, and the noise on an update with them.
        return -self.steps.update_factor(max(1, self.books.num_rounds)) * min(stds, default=0.0)

    def _noise_numbers(self) -> dict[str, float]:
        steps = self.steps
        numbers = {"clip_norm": steps.clip_norm}
        if steps.update_clip_norm is not None:
            numbers["update_clip_norm"] = steps.update_clip_norm
        numbers["update_sensitivity_of_round_1"] = steps.update_sensitivity(1)
        releases = [terms.release for terms in self.books.terms.values()]
        for word, pick in (("least", min), ("largest", max)) if releases else ():
            numbers[f"{word}_noise_multiplier"] = pick(release.mechanism.noise_multiplier for release in releases)
            scales = [-steps.update_factor(1) * release.noise_scale for release in releases]
            numbers[f"{word}_noise_std_of_an_update_of_round_1"] = pick(scales)
        if self.quantization_levels is not None:
            numbers["quantization_levels"] = self.quantization_levels
        return numbers

    def _paper(self, facts: RunFacts) -> PaperEpsilon | None:
        """The paper's epsilon of one round, added up over the replies of the client whom it costs most."""
        worst: tuple[float, float, float, int] | None = None
        for name, ledger in self.books.ledgers.items():
            release, replies = self.books.terms[name].release, ledger.num_charges
            part = self.steps.num_records / self.books.num_records[name]
            if not replies:
                continue
            if not release.noise_scale or 1.25 * part <= self.delta / replies:
                return None
            each = paper_epsilon(
                noise_std=release.noise_scale, sensitivity=release.sensitivity, sampled_part=part, delta=self.delta / replies
            )
            worst = max(worst or (0.0, 0.0, 0.0, 0), (replies * each, each, part, replies))
        if worst is None:
            return None
        total, each, part, replies = worst
        faults = violated_conditions(each, part)
        if facts.seeded_noise:
            faults.append("noise came from a fixed seed")
        note = (
            f"epsilon and delta of a round ({each:.4g}, {self.delta / replies:.3g}), added up over {replies} replies: the paper "
            "composes nothing"
        )
        return PaperEpsilon(
            epsilon=total,
            formula="2 gamma Delta sqrt(2 ln(1.25 gamma / delta)) / sigma a round, DP-FedPAQ eq. 17",
            valid=not faults,
            reason="; ".join([*faults, note]),
        )


class DPFedPAQ(DPStrategy):
    """DP-FedPAQ (the paper's Algorithm 2), for clients whose recipe is `flower_dp.clients.DPFedPAQRecipe` with the same numbers.

    In each round M of N clients draw E b of their n_i records without replacement, take E local steps on means of b clipped
    gradients, add Gaussian noise from their own budget to the update, round it at random and without bias to a few levels
    (QSGD), and send that. The model moves by the mean of the received messages.

    All replies of a client together are (epsilon_i, delta)-differentially private for each of its records under replace-one,
    against everyone who sees them. `FedPAQSteps.sensitivity` names the proof of an update's sensitivity to one record. The
    client's own choice of records amplifies; the choice of clients does not, since the server sees it.

    Args:
        steps: the parameters that both sides know: step size, E, b, clip norm, and how the sensitivity is proved.
        sampling: who takes part in a round: `FixedSizeSampling` (the paper's), `RoundRobinSampling` or `FullSampling`.
        num_clients: number of clients (paper: N).
        num_records: public data sizes: one number, a sequence in the order of the clients' names, or by name.
        epsilon: budget of each client: one number, a sequence or a mapping; math.inf: no noise, not private.
        delta: of every budget.
        quantization_levels: levels above 0 of what clients send (paper: s); None: float32.
        num_replies: the most replies of a client. By default as many as the rounds need (round robin, or all clients); with
            `FixedSizeSampling` a number that a client exceeds with a probability of 1 %, after which it is not asked.
        options: those of every strategy: see `Options`.

    Raises:
        ValueError: for a value that makes no sense, naming field and value.

    Example:
        >>> from flower_dp.core.sampling import FixedSizeSampling
        >>> from flower_dp.privacy.dp_fedpaq import FedPAQSteps
        >>> from flower_dp.strategies import DPFedPAQ
        >>> steps = FedPAQSteps(learning_rate=0.1, num_local_steps=2, batch_size=4, clip_norm=1.0, update_clip_norm=0.1)
        >>> strategy = DPFedPAQ(
        ...     steps=steps, sampling=FixedSizeSampling(cohort_size=10), num_clients=100, num_records=80, epsilon=4.0, delta=1e-5
        ... )
        >>> steps.update_sensitivity(1)
        0.2
    """

    rules: DPFedPAQRules

    def __init__(
        self,
        *,
        steps: FedPAQSteps,
        sampling: Sampler,
        num_clients: int,
        num_records: int | Sequence[int] | Mapping[str, int],
        epsilon: float | PerClient,
        delta: float,
        quantization_levels: int | None = 10,
        num_replies: int | Sequence[int] | Mapping[str, int] | None = None,
        **options: Unpack[Options],
    ) -> None:
        rules = DPFedPAQRules(
            steps=steps,
            sampling=sampling,
            num_clients=num_clients,
            num_records=num_records,
            epsilon=epsilon,
            delta=delta,
            quantization_levels=quantization_levels,
            num_replies=num_replies,
        )
        super().__init__(rules, **options)

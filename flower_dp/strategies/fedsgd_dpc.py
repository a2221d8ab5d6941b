"""FedSGD-DPC (Zhou et al.): local gradients with noise by each client's own budget, round robin."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Unpack

from flower_dp.core import checks
from flower_dp.core.noise import Generator
from flower_dp.core.sampling import RoundRobinSampling
from flower_dp.privacy.charges import Charges
from flower_dp.privacy.client_terms import ClientTerms, values_in
from flower_dp.privacy.events import Relation
from flower_dp.privacy.fedsgd_dpc import gaussian_noise_variance, gradient_terms
from flower_dp.privacy.mechanisms import Laplace
from flower_dp.privacy.statement import PaperEpsilon, PrivacyStatement
from flower_dp.strategies.evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.local_level import (
    LocalRules,
    least_and_largest,
    local_statement,
    most_replies,
    relies_on_secret_sampling,
)
from flower_dp.strategies.releases.client_ledgers import ClientFacts, ClientLedgers, PerClient, Population
from flower_dp.strategies.releases.release import RoundRequest
from flower_dp.strategies.releases.replies import CollectedReplies
from flower_dp.strategies.rules import ModelUpdate, StrategyOptions
from flower_dp.strategies.run_state import RunFacts, RunState
from flower_dp.strategies.strategy import DPStrategy

_FORMULAS = {
    "laplace": "pure epsilons of all replies added up, Zhou et al. Theorem 1",
    "gaussian": "c2 C sqrt(R log(1/delta)) / (n std), Zhou et al. Theorem 2, eq. 5",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The server's step sizes; `FedSGDDPC` describes the attributes."""

    learning_rate: float | None
    learning_rate_decay: float
    strong_convexity: float | None
    smoothness: float | None

    def __post_init__(self) -> None:
        checks.number("learning_rate_decay", self.learning_rate_decay, at_least=0, below=1)
        theory = self.strong_convexity is not None or self.smoothness is not None
        if self.learning_rate is not None:
            checks.number("learning_rate", self.learning_rate, above=0)
            if theory:
                raise checks.bad(
                    "learning_rate", self.learning_rate, "None with strong_convexity and smoothness, which set the step"
                )
        elif not theory:
            raise checks.bad("learning_rate", None, "given, or else strong_convexity and smoothness, which set the step")
        else:
            mu = checks.number("strong_convexity", self.strong_convexity, above=0)
            checks.number("smoothness", self.smoothness, at_least=mu)

    def at(self, server_round: int) -> float:
        """Return the step size eta_t of round 1, 2, ..., t = round - 1."""
        if self.learning_rate is not None:
            return self.learning_rate * float((1 - self.learning_rate_decay) ** (server_round - 1))
        mu, smoothness = float(self.strong_convexity or 0), float(self.smoothness or 0)
        return 2 / mu / (server_round - 1 + 2 * smoothness / mu)


class FedSGDDPCRules(LocalRules):
    """The rules of FedSGD-DPC.

    Args:
        population: the clients.
        terms: `gradient_terms` with the arguments that all clients share.
        steps: the server's step sizes.
        cohort_size: clients per round.
        delta: delta of every budget.
        noise_constant: c2 of the paper's epsilon; None: not known.
        evaluation: settings of private evaluations; None for none.
    """

    def __init__(
        self,
        population: Population,
        terms: partial[ClientTerms],
        steps: StepSizes,
        *,
        cohort_size: int,
        delta: float,
        noise_constant: float | None,
        evaluation: PrivateEvaluation | LocalEvaluation | None = None,
    ) -> None:
        for budget in values_in(population.epsilon):  # refuses impossible values
            terms(epsilon=budget, num_records=1, num_replies=1)
        release = terms(epsilon=math.inf, num_records=1, num_replies=1).release
        self.mechanism = "laplace" if isinstance(release.mechanism, Laplace) else "gaussian"
        self.sampling_rate, self.step_size = release.expected_cohort_size, steps.at
        self.noise_constant = None if noise_constant is None else checks.number("noise_constant", noise_constant, above=0)

        def terms_of(client: ClientFacts) -> ClientTerms:
            return terms(epsilon=client.epsilon, num_records=client.num_records, num_replies=client.num_replies)

        books = ClientLedgers(
            population,
            relation=release.relation,
            delta=delta,
            terms_of=terms_of,
            most_replies=lambda rounds: -(-rounds * cohort_size // population.num_clients),
        )
        super().__init__(
            f"FedSGD-DPC ({self.mechanism.capitalize()})",
            books,
            name="fedsgd-dpc",
            sampling=RoundRobinSampling(cohort_size=cohort_size),
            clip_norm=release.clip_norm,
            evaluation=evaluation,
        )

    def next_model(self, state: RunState, now: RoundRequest, collected: CollectedReplies, rng: Generator) -> ModelUpdate:
        """Return the model moved by the step size times the sum; a client's row is minus its noised gradient."""
        return ModelUpdate(vector=now.vector + self.step_size(now.server_round) * collected.total)

    def noise_and_signal_norms(self, dimension: int) -> tuple[float, float]:
        """Return the norms of step 1 times the noise, and times the longest mean of gradients."""
        # Every client is in this part of the rounds.
        part = self.cohort_size / self.about.num_clients
        noise = math.sqrt(part * dimension * sum(std**2 for std in self._stds()))
        return self.step_size(1) * noise, self.step_size(1) * self.clip_norm

    def _stds(self) -> list[float]:
        """Return the std of the noise on a number that each client sends: on its weighted mean gradient."""
        releases = {name: terms.release for name, terms in self.books.terms.items()}
        return [self.weight(name) * release.noise_std / release.expected_cohort_size for name, release in releases.items()]

    def weight(self, name: str) -> float:
        """Return the weight of a client's row: N/b times its share."""
        return self.books.share(name) * self.about.num_clients / self.cohort_size

    def statement(self, state: RunState, facts: RunFacts) -> PrivacyStatement:
        """Return the statement: the worst client, and the distribution over clients."""
        books, charges = self.books, state.charges
        batch = "all records" if self.sampling_rate == 1 else f"every record with probability {self.sampling_rate:g}"
        scale = "noise_scale_of_a_mean_gradient"
        return local_statement(
            self,
            state,
            facts,
            message_std=min(self._stds(), default=0.0),
            noise={
                "clip_norm": self.clip_norm,
                **least_and_largest(books, scale, lambda release: release.noise_scale / release.expected_cohort_size),
            },
            paper=_paper(self, charges, facts),
            sampling=f"{self.training.sampling}: {most_replies(books)}; {batch} in each",
            assumptions=("Only the client knows which records are in a batch.",)
            if relies_on_secret_sampling(self, charges)
            else (),
        )


def _paper(rules: FedSGDDPCRules, charges: Charges, run: RunFacts) -> PaperEpsilon | None:
    """Return the paper's epsilon for the noise and the replies of the run, of the client whom it costs most."""
    values = []
    for name, ledger in rules.ledgers(charges).items():
        release, replies = rules.books.terms[name].release, ledger.num_charges
        scale, num_records = release.noise_scale / release.expected_cohort_size, rules.books.num_records[name]
        if not scale:
            return None
        if not replies:
            continue
        if rules.mechanism == "laplace":
            values.append(2 * rules.clip_norm * replies / (num_records * scale))
        elif rules.noise_constant is not None:
            variance = gaussian_noise_variance(
                rules.clip_norm, num_records, 1.0, replies, delta=rules.about.delta, noise_constant=rules.noise_constant
            )
            values.append(math.sqrt(variance) / scale)
    if not values:
        return None
    if run.seeded_noise:
        reason = "noise came from a fixed seed"
    elif rules.mechanism == "laplace":
        reason = "for replace-one, with the true number of replies instead of the expected one"
    else:
        reason = f"c2 = {rules.noise_constant:g} was given by the user; the constant of the proof has no published value"
    return PaperEpsilon(
        epsilon=max(values),
        formula=_FORMULAS[rules.mechanism],
        valid=rules.mechanism == "laplace" and not run.seeded_noise,
        reason=reason,
    )


class FedSGDDPC(DPStrategy):
    """FedSGD-DPC, for clients whose recipe is `flower_dp.clients.FedSGDDPCRecipe` with the same numbers.

    In each round b clients, round robin, send a noised mean of clipped per-record gradients g_i + w_i. The model moves to
    theta - eta_t (N/b) sum (n_i/n) (g_i + w_i). This is the paper's Algorithm 1 for *updates*, theta_i - theta = -eta_t (g_i +
    w_i); the step size is the server's, so it costs no privacy. Clients that don't reply count as zeros: b does not shrink.

    Every client replies at most R = ceil(b T / N) times. Its noise makes all R replies together (epsilon_i, delta)-differentially
    private for each of its records. The paper calibrates to the *expected* number of replies of random selection, which some
    clients then exceed.

    Args:
        mechanism: `laplace` (pure, delta 0) or `gaussian`.
        num_clients: number of clients (paper: N).
        cohort_size: clients per round (paper: b).
        num_records: public data sizes (paper: n_i): one number, a sequence in the order of the clients' names, or by name.
        clip_norm: bound on one record's gradient, L1 for Laplace (paper: xi_1), L2 for Gaussian.
        epsilon: epsilon budget of each client: one number, a sequence or a mapping; math.inf: no noise, not private.
        learning_rate: step size of round 1; or None, with the two constants of the theory's schedule.
        delta: 0 for Laplace, in (0, 1) for Gaussian.
        learning_rate_decay: fraction by which the step size shrinks every round, in [0, 1).
        strong_convexity: mu of eta_t = (2/mu) / (t + gamma), t = 0, 1, ...
        smoothness: lambda of gamma = 2 lambda / mu.
        aggregation: `data-size` or `uniform`.
        sampling_rate: fraction of a client's records in a batch (paper: q), Gaussian only.
        relation: neighboring relation; replace-one in the paper. Under add-or-remove-one the noise is about half as large.
        num_replies: maximum replies of a client (R), if not ceil(b T / N): one number, a sequence or a mapping.
        noise_constant: the paper's c2, which has no published value; it gives the Gaussian `paper_epsilon`.
        options: options of every strategy: see `StrategyOptions`.

    Raises:
        ValueError: if a value is invalid; the message names field and value.

    Example:
        >>> from flower_dp.strategies import FedSGDDPC
        >>> strategy = FedSGDDPC(
        ...     mechanism="laplace",
        ...     num_clients=10,
        ...     cohort_size=5,
        ...     num_records=600,
        ...     clip_norm=1.0,
        ...     epsilon=1.0,
        ...     learning_rate=0.1,
        ... )
        >>> strategy.statement.unit, strategy.statement.delta
        ('record', 0.0)
    """

    rules: FedSGDDPCRules

    def __init__(
        self,
        *,
        mechanism: str,
        num_clients: int,
        cohort_size: int,
        num_records: int | Sequence[int] | Mapping[str, int],
        clip_norm: float,
        epsilon: float | PerClient,
        learning_rate: float | None = None,
        delta: float = 0.0,
        learning_rate_decay: float = 0.0,
        strong_convexity: float | None = None,
        smoothness: float | None = None,
        aggregation: str = "data-size",
        sampling_rate: float = 1.0,
        relation: Relation = "replace-one",
        num_replies: int | Sequence[int] | Mapping[str, int] | None = None,
        noise_constant: float | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        steps = StepSizes(
            learning_rate=learning_rate,
            learning_rate_decay=learning_rate_decay,
            strong_convexity=strong_convexity,
            smoothness=smoothness,
        )
        population = Population(
            num_clients=num_clients, num_records=num_records, num_replies=num_replies, epsilon=epsilon, aggregation=aggregation
        )
        terms = partial(
            gradient_terms, mechanism=mechanism, clip_norm=clip_norm, delta=delta, sampling_rate=sampling_rate, relation=relation
        )
        rules = FedSGDDPCRules(
            population,
            terms,
            steps,
            cohort_size=cohort_size,
            delta=delta,
            noise_constant=noise_constant,
            evaluation=options.get("evaluation"),
        )
        super().__init__(rules, **options)

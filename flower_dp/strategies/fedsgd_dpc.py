"""FedSGD-DPC (Zhou et al.): local gradients with noise by each client's own budget, round robin."""

import math
from collections.abc import Mapping, Sequence
from typing import Unpack

import numpy as np

from flower_dp.core import checks
from flower_dp.core.noise import Generator
from flower_dp.core.sampling import RoundRobinSampling
from flower_dp.privacy.client_terms import Terms, per_client, values_in
from flower_dp.privacy.events import Relation
from flower_dp.privacy.fedsgd_dpc import MECHANISMS, gradient_terms
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.local_evaluation import OwnEvaluation
from flower_dp.strategies.private_evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.releases.books import BooksState, ClientBooks, PerClient, Population, TermsOf, check_count
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.releases.round import Round
from flower_dp.strategies.rules import Options
from flower_dp.strategies.run_state import RunFacts
from flower_dp.strategies.statements.fedsgd_dpc import statement_of
from flower_dp.strategies.strategy import DPStrategy


class FedSGDDPCRules:
    """The rules of FedSGD-DPC; its arguments are those of `FedSGDDPC`."""

    name = "fedsgd-dpc"
    stock_refusal = "stock clients add no noise of their own; use flower_dp.clients.LocalDPClient"

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
    ) -> None:
        self.mechanism = checks.one_of("mechanism", mechanism, MECHANISMS)
        self.title = f"FedSGD-DPC ({mechanism.capitalize()})"
        self.clip_norm = checks.number("clip_norm", clip_norm, above=0)
        self.sampling_rate = checks.number("sampling_rate", sampling_rate, above=0, at_most=1)
        self.cohort_size = checks.integer("cohort_size", cohort_size, at_least=1)
        self.noise_constant = None if noise_constant is None else checks.number("noise_constant", noise_constant, above=0)
        self._check_steps(learning_rate, strong_convexity, smoothness)
        self._learning_rate = learning_rate
        self._learning_rate_decay = checks.number("learning_rate_decay", learning_rate_decay, at_least=0, below=1)
        self._strong_convexity, self._smoothness = strong_convexity, smoothness
        self._epsilon = epsilon
        check_count("epsilon", epsilon, num_clients)
        population = Population(
            num_clients=num_clients, num_records=num_records, num_replies=num_replies, aggregation=aggregation
        )
        self.books = ClientBooks(
            population,
            name=self.name,
            sampling=RoundRobinSampling(cohort_size=cohort_size),
            clip_norm=self.clip_norm,
            relation=relation,
            delta=delta,
            terms_of=self._terms_of,
            most_replies=lambda rounds: -(-rounds * cohort_size // num_clients),
            weight_of=self.weight,
        )
        self.num_clients, self.delta = num_clients, self.books.delta
        self.training = self.books.training
        self.evaluation: OwnEvaluation | None = None
        self.training.sampling.expected_cohort(num_clients)
        for budget in values_in(epsilon):
            self._agreed(budget, 1, 1)

    @property
    def state(self) -> BooksState:
        """All that these rules need to go on."""
        return self.books.state

    @state.setter
    def state(self, state: BooksState) -> None:
        self.books.state = state

    def evaluate(self, plan: PrivateEvaluation | LocalEvaluation) -> None:
        """Make private evaluation a second release of this method's rounds."""
        self.evaluation = OwnEvaluation.of(plan, self.books, self.title)

    def plan(self, num_rounds: int) -> None:
        """Remember the number of rounds, which determines how often a client replies."""
        self.books.plan(num_rounds)

    def open(self, names: tuple[str, ...]) -> None:
        """Open a ledger for every client, on the terms of its own budget."""
        self.books.open(names)

    def why_stop(self, server_round: int, cohort_size: int | None) -> str | None:
        """Return that every budget is spent, if so."""
        return self.books.why_stop()

    def learn(self, now: Round, collected: Collected, rng: Generator) -> np.ndarray:
        """Return the model moved by the step size times the sum; a client's row is minus its noised gradient."""
        return np.asarray(now.vector + self.step_size(now.server_round) * collected.total)

    def noise_and_signal(self, dimension: int) -> tuple[float, float]:
        """Return the norms of step 1 times the noise, and times the longest mean of gradients."""
        # Every client is in this part of the rounds.
        part = self.cohort_size / self.num_clients
        stds = [
            self.weight(name) * terms.release.noise_std / terms.release.expected_cohort
            for name, terms in self.books.terms.items()
        ]
        noise = math.sqrt(part * dimension * sum(std**2 for std in stds))
        return self.step_size(1) * noise, self.step_size(1) * self.clip_norm

    def numbers(self, now: Round) -> dict[str, float]:
        """Return further public numbers of the last round: none."""
        return {}

    def weight(self, name: str) -> float:
        """Return the weight of a client's row: N/b times its share."""
        return self.books.share(name) * self.num_clients / self.cohort_size

    @property
    def epsilon(self) -> float:
        """An upper bound of the largest cost of a client."""
        return self.books.epsilon

    def step_size(self, server_round: int) -> float:
        """Return the step size eta_t of round 1, 2, ..., t = round - 1."""
        if self._learning_rate is not None:
            return self._learning_rate * float((1 - self._learning_rate_decay) ** (server_round - 1))
        mu, smoothness = float(self._strong_convexity or 0), float(self._smoothness or 0)
        return 2 / mu / (server_round - 1 + 2 * smoothness / mu)

    def _terms_of(self, names: Sequence[str]) -> TermsOf:
        budgets = per_client("epsilon", self._epsilon, names)
        return lambda name, size, replies: self._agreed(budgets[name], size, replies)

    def _agreed(self, epsilon: float, num_records: int, num_replies: int) -> Terms:
        return gradient_terms(
            mechanism=self.mechanism,
            clip_norm=self.clip_norm,
            epsilon=epsilon,
            delta=self.delta,
            num_replies=num_replies,
            num_records=num_records,
            sampling_rate=self.sampling_rate,
            relation=self.books.relation,
        )

    @staticmethod
    def _check_steps(learning_rate: float | None, strong_convexity: float | None, smoothness: float | None) -> None:
        if learning_rate is not None:
            checks.number("learning_rate", learning_rate, above=0)
            if strong_convexity is not None or smoothness is not None:
                raise ValueError(
                    f"learning_rate={learning_rate!r}: must be None with strong_convexity and smoothness, which set the step"
                )
            return
        if strong_convexity is None and smoothness is None:
            raise ValueError("learning_rate=None: must be given, or else strong_convexity and smoothness, which set the step")
        mu = checks.number("strong_convexity", strong_convexity, above=0)
        checks.number("smoothness", smoothness, at_least=mu)

    def statement(self, facts: RunFacts) -> PrivacyStatement:
        """Return the statement: the worst client, and the distribution over clients."""
        return statement_of(self, facts)


class FedSGDDPC(DPStrategy):
    """FedSGD-DPC, for clients whose recipe is `flower_dp.clients.FedSGDDPCRecipe` with the same numbers.

    In each round b clients, round robin, send a noised mean of clipped per-record gradients g_i + w_i, and the model moves to
    theta - eta_t (N/b) sum (n_i/n) (g_i + w_i) (the paper's Algorithm 1 for *updates*: theta_i - theta = -eta_t (g_i + w_i);
    the step size is the server's, it costs no privacy). Clients that don't answer count as zeros: b does not shrink.

    Every client replies at most R = ceil(b T / N) times, and its noise makes all R replies together (epsilon_i, delta)
    differentially private for each of its records. The paper calibrates to the *expected* number of replies of random
    selection, which some clients then exceed.

    Args:
        mechanism: `laplace` (pure, delta 0) or `gaussian`.
        num_clients: number of clients (paper: N).
        cohort_size: clients a round (paper: b).
        num_records: public data sizes (paper: n_i): one number, a sequence in the order of the clients' names, or by name.
        clip_norm: bound on one record's gradient, L1 for Laplace (paper: xi_1), L2 for Gaussian.
        epsilon: budget of each client: one number, a sequence or a mapping; math.inf: no noise, not private.
        learning_rate: step size of round 1; or None, with the two constants of the theory's schedule.
        delta: 0 for Laplace, in (0, 1) for Gaussian.
        learning_rate_decay: the step size shrinks by this part every round.
        strong_convexity: mu of eta_t = (2/mu) / (t + gamma), t = 0, 1, ...
        smoothness: lambda of gamma = 2 lambda / mu.
        aggregation: `data-size` or `uniform`.
        sampling_rate: part of a client's records in a batch (paper: q), Gaussian only.
        relation: neighbouring relation; replace-one in the paper. Under add-or-remove-one the noise is about half as large.
        num_replies: the most replies of a client (R), if not ceil(b T / N): one number, a sequence or a mapping.
        noise_constant: the paper's c2, which has no published value; gives the Gaussian `paper` epsilon.
        options: those of every strategy: see `Options`.

    Raises:
        ValueError: for a value that makes no sense, naming field and value.

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
        **options: Unpack[Options],
    ) -> None:
        rules = FedSGDDPCRules(
            mechanism=mechanism,
            num_clients=num_clients,
            cohort_size=cohort_size,
            num_records=num_records,
            clip_norm=clip_norm,
            epsilon=epsilon,
            learning_rate=learning_rate,
            delta=delta,
            learning_rate_decay=learning_rate_decay,
            strong_convexity=strong_convexity,
            smoothness=smoothness,
            aggregation=aggregation,
            sampling_rate=sampling_rate,
            relation=relation,
            num_replies=num_replies,
            noise_constant=noise_constant,
        )
        super().__init__(rules, **options)

"""What the contract suite knows of every method: one entry each, in `METHODS`.

A new method is one more entry. Its formulas are written down here a second time, from the papers, and not taken from the package.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from flower_dp.clients import (
    BLUR,
    LUS,
    DPClient,
    DPFedPAQRecipe,
    DPPASGDRecipe,
    FedSGDDPCRecipe,
    LocalDPClient,
    NbAFLRecipe,
    ScaffoldRecipe,
    Training,
)
from flower_dp.core import dp
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling, Sampler
from flower_dp.privacy import accounting
from flower_dp.privacy.charges import History
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.privacy.events import Relation
from flower_dp.strategies import (
    DPPASGD,
    AdaptiveClip,
    DPFedAvg,
    DPFedPAQ,
    DPFedSAM,
    DPStrategy,
    FedSGDDPC,
    FedSMP,
    NbAFL,
    PrivateEvaluation,
    Scaffold,
)

NUM_RECORDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The settings that the suite varies.

    Attributes:
        num_clients: how many clients there are; all of them are asked in every round, but for a `sampling_rate`.
        num_rounds: rounds of the run.
        clip_norm: of whatever the method clips.
        delta: for methods that have one.
        sampling_rate: every client takes part with this probability (Poisson), for methods that can.
        target_epsilon: for methods that have one.
        num_replies: what the clients' budgets pay for, in methods in which they have budgets; None: every round.
        noise_seed: of the server.
    """

    num_clients: int = 4
    num_rounds: int = 3
    clip_norm: float = 0.5
    delta: float = 1e-3
    sampling_rate: float | None = None
    target_epsilon: float | None = None
    num_replies: int | None = None
    noise_seed: int | None = None

    @property
    def replies(self) -> int:
        return self.num_rounds if self.num_replies is None else self.num_replies


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What every round charges to some ledgers of a run in which every client takes part in every round.

    Attributes:
        ledgers: the ledgers of a strategy.
        event: what is charged in each round.
        rounds_late: rounds that may go by between a message and the charge: 1 where the model that the *next* round sends is charged.
    """

    ledgers: Callable[[Any], Sequence[History]]
    event: Callable[[Words], dp.DpEvent]
    rounds_late: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method, with one kind of clients.

    Attributes:
        label: the entry's name in the tests.
        name: the method's name on the wire.
        title: the method's name in the statement.
        strategy: makes the strategy.
        client: words, model=, clients=, noise_seed= -> a node's client; None: stock clients of Flower.
        stock: whether stock clients can take part.
        unit: what the statement protects.
        relation: neighbouring relation.
        delta: the delta of the statement.
        charges: everything that a round charges; the dearest of them is the epsilon of the statement.
        noise: std of each coordinate of the model's increment, where no update has any, by how many clients were heard.
        reach: the largest norm of the increment of round 1 without any noise.
        message_noise: std of each coordinate of what one client sends, where its update is zero; 0: it adds no noise.
        laplace: whether the noise of a client is Laplace noise; else all noise is Gaussian.
        server_noise: std of each coordinate of the noise in the increment that the server itself has added, by how many were heard.
        fewest: with fewer replies a round is charged, but not released.
        replaces_model: whether a round puts a new model in the place of the last one, and does not add to it.
        carries_noise: whether a round's messages have noise of earlier rounds in them as well.
        num_extra: entries of a message behind those of the update.
        exact: whether sums are exact, so that hosting changes no bit; else models agree up to the rounding of float32.
        poisson: whether the method takes a Poisson sampler.
        target: whether it takes a target epsilon; else clients have budgets, of which they keep accounts.
        numbers: numbers in the statement.
        sampling: words of the statement on who takes part.
        variant: whether other entries stand for it in tests of code that it shares with them.
    """

    label: str
    name: str
    title: str
    strategy: Callable[[Words], DPStrategy]
    client: Callable[..., Any] | None
    stock: bool
    unit: str
    relation: str
    delta: Callable[[Words], float]
    charges: tuple[Charge, ...]
    noise: Callable[[Words, int], float]
    reach: Callable[[Words], float]
    message_noise: Callable[[Words], float]
    laplace: bool = False
    server_noise: Callable[[Words, int], float]
    fewest: int = 1
    replaces_model: bool = False
    carries_noise: bool = False
    num_extra: int = 0
    exact: bool
    poisson: bool
    target: bool
    numbers: Callable[[Words], Mapping[str, float]]
    sampling: Callable[[Words], str]
    variant: bool = False

    def epsilon(self, arguments: Words, num_rounds: int) -> float:
        """The epsilon of so many rounds, in closed form."""
        return max(
            closed_epsilon(charge.event(arguments), num_rounds, self.relation, self.delta(arguments)) for charge in self.charges
        )

    def excess(self, num_clients: int) -> float:
        """The excess kurtosis of a sum of the noise of so many clients."""
        return 3 / num_clients if self.laplace else 0.0


# Closed forms


def gaussian_delta(multiplier: float, epsilon: float) -> float:
    """The delta of a Gaussian release with noise std / sensitivity (Balle and Wang 2018, Theorem 8)."""
    from scipy import stats

    half = 1 / (2 * multiplier)
    return float(
        stats.norm.cdf(half - epsilon * multiplier) - math.exp(epsilon + stats.norm.logcdf(-half - epsilon * multiplier))
    )


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    from scipy import optimize

    return float(optimize.brentq(function, low, high, xtol=1e-12))


@lru_cache(maxsize=256)
def closed_epsilon(event: dp.DpEvent, num_rounds: int, relation: str, delta: float) -> float:
    """The epsilon of plain releases in every round: R Gaussians are one with 1/sqrt(R) of the multiplier, pure epsilons add up."""
    if isinstance(event, dp.SelfComposedDpEvent):
        return closed_epsilon(event.event, event.count * num_rounds, relation, delta)
    multiplier = event.noise_multiplier / (2 if relation == "replace-one" else 1)
    if isinstance(event, dp.LaplaceDpEvent):
        return num_rounds / multiplier
    return _root(lambda e: gaussian_delta(multiplier / math.sqrt(num_rounds), e) - delta, 0, 500)


@lru_cache(maxsize=256)
def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """The least noise std / sensitivity that gives (epsilon, delta)."""
    return _root(lambda z: gaussian_delta(z, epsilon) - delta, 0.1, 1000)


# Methods with one noised sum

NOISE_MULTIPLIER = 4.0
TRAINING = Training(learning_rate=0.1, batch_size=4)
BLURS = replace(TRAINING, regularizers=(BLUR(strength=1.0, bound=0.01),), sparsifier=LUS(keep_ratio=0.5))


def client_level(cls: type[DPStrategy], **own: Any) -> Callable[[Words], DPStrategy]:
    def make(arguments: Words) -> DPStrategy:
        sampling = PoissonSampling(sampling_rate=arguments.sampling_rate) if arguments.sampling_rate else FullSampling()
        common = {
            "clip_norm": arguments.clip_norm,
            "noise_multiplier": NOISE_MULTIPLIER,
            "sampling": sampling,
            "num_clients": arguments.num_clients,
            "delta": arguments.delta,
            "target_epsilon": arguments.target_epsilon,
            "noise_seed": arguments.noise_seed,
        }
        return cls(**common | own)

    return make


def dp_client(arguments: Words, **node: Any) -> DPClient:
    return DPClient(**{"device": "cpu"} | node, training=TRAINING)


def blurs_client(arguments: Words, **node: Any) -> DPClient:
    return DPClient(**{"device": "cpu"} | node, training=BLURS)


def charged_to_all(multiplier: Callable[[Words], float]) -> tuple[Charge, ...]:
    """Participants know their own share of the noise, if they have one; outsiders do not."""
    return (
        Charge(
            ledgers=lambda strategy: [strategy.rules.ledger(strategy.charges)],
            event=lambda arguments: dp.GaussianDpEvent(multiplier(arguments)),
        ),
        Charge(
            ledgers=lambda strategy: [strategy.rules.outside_ledger(strategy.charges)],
            event=lambda arguments: dp.GaussianDpEvent(NOISE_MULTIPLIER),
        ),
    )


def client_level_numbers(arguments: Words) -> dict[str, float]:
    std = NOISE_MULTIPLIER * arguments.clip_norm
    return {
        "clip_norm": arguments.clip_norm,
        "noise_multiplier": NOISE_MULTIPLIER,
        "noise_std_of_the_sum": std,
        "noise_std_of_the_mean": std / arguments.num_clients,
    }


# Andrew et al. 2021: z_delta with sigma_b = z, the default in small cohorts; noise of std z_delta C on every coordinate.
Z_DELTA = (NOISE_MULTIPLIER**-2 - (2 * NOISE_MULTIPLIER) ** -2) ** -0.5


def joint(arguments: Words) -> Words:
    """The same words, with the norm of update and indicator together as the clip norm."""
    return replace(arguments, clip_norm=arguments.clip_norm * Z_DELTA / NOISE_MULTIPLIER)


def adaptive(cls: type[DPStrategy], **own: Any) -> Callable[[Words], DPStrategy]:
    """An adaptive clip norm without room to move, so that all rounds have the same noise."""

    def make(arguments: Words) -> DPStrategy:
        clip = AdaptiveClip(initial=arguments.clip_norm, smallest=arguments.clip_norm, largest=arguments.clip_norm)
        return client_level(cls, **own | {"clip_norm": clip})(arguments)

    return make


def adaptive_numbers(arguments: Words) -> dict[str, float]:
    of_both = client_level_numbers(joint(arguments))
    return of_both | {
        "clip_norm": arguments.clip_norm,
        "joint_norm": of_both["clip_norm"],
        "initial_clip_norm": arguments.clip_norm,
    }


def noise_of_the_mean(arguments: Words, heard: int) -> float:
    return NOISE_MULTIPLIER * arguments.clip_norm / arguments.num_clients


def shares(arguments: Words) -> int:
    """How many clients must answer where nobody tops up the noise of the others: 3 of 4."""
    return math.ceil(0.75 * arguments.num_clients)


CLIENT_LEVEL: dict[str, Any] = {
    "unit": "client",
    "relation": "add-or-remove-one",
    "delta": lambda arguments: arguments.delta,
    "exact": True,
    "poisson": True,
    "target": True,
    "numbers": client_level_numbers,
    "reach": lambda arguments: arguments.clip_norm,
    "sampling": lambda arguments: f"{arguments.num_clients} of {arguments.num_clients} clients expected a round",
}
CENTRAL: dict[str, Any] = CLIENT_LEVEL | {
    "stock": True,
    "charges": charged_to_all(lambda arguments: NOISE_MULTIPLIER),
    "noise": noise_of_the_mean,
    "message_noise": lambda arguments: 0.0,
    "server_noise": noise_of_the_mean,
}


# Methods with noise of each client's own

EPSILON = 1.0
STEP_SIZE = 0.25


def fedsgd_dpc(mechanism: str) -> dict[str, Any]:
    """Both mechanisms of FedSGD-DPC; all clients are asked in every round (b = N), and weigh the same."""

    def delta(arguments: Words) -> float:
        return 0.0 if mechanism == "laplace" else arguments.delta

    def multiplier(arguments: Words) -> float:
        """Noise scale / clip norm of the sum of gradients, under replace-one, for all replies together."""
        if mechanism == "laplace":
            return 2 * arguments.replies / EPSILON  # Theorem 1
        return 2 * math.sqrt(arguments.replies) * gaussian_multiplier(EPSILON, arguments.delta)

    def strategy(arguments: Words) -> DPStrategy:
        return FedSGDDPC(
            mechanism=mechanism,
            num_clients=arguments.num_clients,
            cohort_size=arguments.num_clients,
            num_records=NUM_RECORDS,
            clip_norm=arguments.clip_norm,
            epsilon=EPSILON,
            delta=delta(arguments),
            learning_rate=STEP_SIZE,
            num_replies=arguments.num_replies,
            noise_seed=arguments.noise_seed,
        )

    def client(arguments: Words, **node: Any) -> LocalDPClient:
        recipe = FedSGDDPCRecipe(
            mechanism=mechanism,
            clip_norm=arguments.clip_norm,
            epsilon=EPSILON,
            delta=delta(arguments),
            num_replies=arguments.replies,
        )
        return LocalDPClient(**{"device": "cpu"} | node, recipe=recipe)

    def message_noise(arguments: Words) -> float:
        """Of the mean over the records, with the client's weight 1/N on it."""
        std = multiplier(arguments) * arguments.clip_norm * (math.sqrt(2) if mechanism == "laplace" else 1)
        return std / NUM_RECORDS / arguments.num_clients

    def numbers(arguments: Words) -> dict[str, float]:
        scale = multiplier(arguments) * arguments.clip_norm / NUM_RECORDS
        return {
            "clip_norm": arguments.clip_norm,
            "least_noise_multiplier": multiplier(arguments),
            "largest_noise_multiplier": multiplier(arguments),
            "least_noise_scale_of_a_mean_gradient": scale,
            "largest_noise_scale_of_a_mean_gradient": scale,
        }

    event = dp.LaplaceDpEvent if mechanism == "laplace" else dp.GaussianDpEvent
    return {
        "name": "fedsgd-dpc",
        "title": f"FedSGD-DPC ({mechanism.capitalize()})",
        "strategy": strategy,
        "client": client,
        "stock": False,
        "unit": "record",
        "relation": "replace-one",
        "delta": delta,
        "charges": (
            Charge(
                ledgers=lambda strategy: list(strategy.rules.ledgers(strategy.charges).values()),
                event=lambda arguments: event(multiplier(arguments)),
            ),
        ),
        "noise": lambda arguments, heard: STEP_SIZE * math.sqrt(heard) * message_noise(arguments),
        "reach": lambda arguments: STEP_SIZE * arguments.clip_norm,
        "message_noise": message_noise,
        "laplace": mechanism == "laplace",
        "server_noise": lambda arguments, heard: 0.0,
        "exact": False,
        "poisson": False,
        "target": False,
        "numbers": numbers,
        "sampling": lambda arguments: f"at most {arguments.replies} replies a client; all records in each",
    }


NBAFL_EPSILON = 0.2


def nbafl_unit(arguments: Words) -> float:
    """The noise of one exposure, c (2 C / m) / epsilon (Wei et al. 2020, Section III-A); L is 1 here, so it is sigma_U."""
    return math.sqrt(2 * math.log(1.25 / arguments.delta)) * 2 * arguments.clip_norm / NUM_RECORDS / NBAFL_EPSILON


def nbafl_rounds(arguments: Words) -> float:
    """Theorem 1: with sigma_D, a broadcast of N clients has noise of std sigma_U T / N, or of that of the clients alone."""
    return max(float(arguments.num_rounds), math.sqrt(arguments.num_clients))


def nbafl_strategy(arguments: Words) -> DPStrategy:
    return NbAFL(
        num_clients=arguments.num_clients,
        num_records=NUM_RECORDS,
        clip_norm=arguments.clip_norm,
        paper_epsilon=NBAFL_EPSILON,
        delta=arguments.delta,
        uplink_exposures=1,
        num_replies=arguments.replies,
        noise_seed=arguments.noise_seed,
    )


def nbafl_client(arguments: Words, **node: Any) -> LocalDPClient:
    recipe = NbAFLRecipe(
        training=TRAINING,
        clip_norm=arguments.clip_norm,
        paper_epsilon=NBAFL_EPSILON,
        delta=arguments.delta,
        uplink_exposures=1,
        min_records=NUM_RECORDS,
        num_replies=arguments.replies,
    )
    return LocalDPClient(**{"device": "cpu"} | node, recipe=recipe)


NBAFL_CHARGES = (
    Charge(
        ledgers=lambda strategy: list(strategy.rules.ledgers(strategy.charges).values()),
        event=lambda arguments: dp.GaussianDpEvent(nbafl_unit(arguments) / arguments.clip_norm),
    ),
    # A client's part in an average is C / heard, and the noise on it grows as 1 / heard: the multiplier is the same for any.
    Charge(
        ledgers=lambda strategy: list(strategy.rules.broadcast_ledgers(strategy.charges, "outsiders").values()),
        event=lambda arguments: dp.GaussianDpEvent(nbafl_unit(arguments) * nbafl_rounds(arguments) / arguments.clip_norm),
        rounds_late=1,
    ),
    Charge(
        ledgers=lambda strategy: list(strategy.rules.broadcast_ledgers(strategy.charges, "participants").values()),
        event=lambda arguments: dp.GaussianDpEvent(
            nbafl_unit(arguments) * math.sqrt(nbafl_rounds(arguments) ** 2 - 1) / arguments.clip_norm
        ),
        rounds_late=1,
    ),
)


PASGD_STEP_SIZE = 0.25
PASGD_BATCH = 4


def dp_pasgd(num_local_steps: int) -> dict[str, Any]:
    """All clients take so many noised steps in every round (tau); with one step the method is DP-SGD."""

    def words_of(arguments: Words) -> dict[str, Any]:
        """What both sides must agree on."""
        return {
            "batch_size": PASGD_BATCH,
            "clip_norm": arguments.clip_norm,
            "epsilon": EPSILON,
            "delta": arguments.delta,
            "num_steps": arguments.replies * num_local_steps,
            "num_local_steps": num_local_steps,
            "learning_rate": PASGD_STEP_SIZE,
        }

    def strategy(arguments: Words) -> DPStrategy:
        return DPPASGD(**words_of(arguments), num_clients=arguments.num_clients, noise_seed=arguments.noise_seed)

    def client(arguments: Words, **node: Any) -> LocalDPClient:
        return LocalDPClient(**{"device": "cpu"} | node, recipe=DPPASGDRecipe(**words_of(arguments)))

    def multiplier(arguments: Words) -> float:
        """Noise std / clip norm of the sum of a batch; a replaced record moves the sum by twice the clip norm in every step."""
        return 2 * math.sqrt(arguments.replies * num_local_steps) * gaussian_multiplier(EPSILON, arguments.delta)

    def of_a_mean(arguments: Words) -> float:
        return multiplier(arguments) * arguments.clip_norm / PASGD_BATCH

    def message_noise(arguments: Words) -> float:
        """Of the movement of the weights: the steps' noises add up."""
        return PASGD_STEP_SIZE * math.sqrt(num_local_steps) * of_a_mean(arguments)

    def event(arguments: Words) -> dp.DpEvent:
        one = dp.GaussianDpEvent(multiplier(arguments))
        return one if num_local_steps == 1 else dp.SelfComposedDpEvent(one, num_local_steps)

    return {
        "name": "dp-pasgd",
        "strategy": strategy,
        "client": client,
        "stock": False,
        "unit": "record",
        "relation": "replace-one",
        "delta": lambda arguments: arguments.delta,
        "charges": (Charge(ledgers=lambda strategy: list(strategy.rules.ledgers(strategy.charges).values()), event=event),),
        "noise": lambda arguments, heard: message_noise(arguments) / math.sqrt(heard),
        "reach": lambda arguments: num_local_steps * PASGD_STEP_SIZE * arguments.clip_norm,
        "message_noise": message_noise,
        "server_noise": lambda arguments, heard: 0.0,
        "exact": False,
        "poisson": False,
        "target": False,
        "numbers": lambda arguments: {
            "clip_norm": arguments.clip_norm,
            "least_noise_multiplier": multiplier(arguments),
            "largest_noise_multiplier": multiplier(arguments),
            "least_noise_std_of_a_mean_gradient": of_a_mean(arguments),
            "largest_noise_std_of_a_mean_gradient": of_a_mean(arguments),
        },
        "sampling": lambda arguments: (
            f"all clients of {arguments.num_clients} in every round, at most {arguments.replies * num_local_steps} local "
            f"steps of one client, {num_local_steps} a round"
        ),
    }


def local_steps(
    cls: type[DPStrategy] = DPFedPAQ, recipe_cls: Any = DPFedPAQRecipe, name: str = "dp-fedpaq", title: str = "DP-FedPAQ"
) -> dict[str, Any]:
    """DP-FedPAQ without quantisation, whose noise is Gaussian then; a round takes all records, so nothing is amplified.

    SCAFFOLD's guarantee and noise are the same. Its corrections add up to zero over all clients, and a first message has none.
    """
    num_steps = 2
    batch = NUM_RECORDS // num_steps

    def steps(arguments: Words) -> FedPAQSteps:
        return FedPAQSteps(
            learning_rate=STEP_SIZE,
            num_local_steps=num_steps,
            batch_size=batch,
            clip_norm=arguments.clip_norm,
            sensitivity="per-step",
            decay_iterations=None,
        )

    def multiplier(arguments: Words) -> float:
        return 2 * math.sqrt(arguments.replies) * gaussian_multiplier(EPSILON, arguments.delta)

    def message_noise(arguments: Words) -> float:
        """Half of 2 eta C (E - 1 + 1 / b) times the multiplier."""
        return multiplier(arguments) * (num_steps - 1 + 1 / batch) * STEP_SIZE * arguments.clip_norm

    def strategy(arguments: Words) -> DPStrategy:
        return cls(
            steps=steps(arguments),
            sampling=FullSampling(),
            num_clients=arguments.num_clients,
            num_records=NUM_RECORDS,
            epsilon=EPSILON,
            delta=arguments.delta,
            quantization_levels=None,
            num_replies=arguments.num_replies,
            noise_seed=arguments.noise_seed,
        )

    def client(arguments: Words, **node: Any) -> LocalDPClient:
        recipe = recipe_cls(
            steps=steps(arguments),
            epsilon=EPSILON,
            delta=arguments.delta,
            num_replies=arguments.replies,
            quantization_levels=None,
        )
        return LocalDPClient(**{"device": "cpu"} | node, recipe=recipe)

    return {
        "name": name,
        "title": title,
        "strategy": strategy,
        "client": client,
        "stock": False,
        "unit": "record",
        "relation": "replace-one",
        "delta": lambda arguments: arguments.delta,
        "charges": (
            Charge(
                ledgers=lambda strategy: list(strategy.rules.ledgers(strategy.charges).values()),
                event=lambda arguments: dp.GaussianDpEvent(multiplier(arguments)),
            ),
        ),
        "noise": lambda arguments, heard: message_noise(arguments) / math.sqrt(heard),
        "reach": lambda arguments: num_steps * STEP_SIZE * arguments.clip_norm,
        "message_noise": message_noise,
        "server_noise": lambda arguments, heard: 0.0,
        "exact": False,
        "poisson": False,
        "target": False,
        "numbers": lambda arguments: {
            "clip_norm": arguments.clip_norm,
            "update_sensitivity_of_round_1": 2 * (num_steps - 1 + 1 / batch) * STEP_SIZE * arguments.clip_norm,
            "least_noise_multiplier": multiplier(arguments),
            "largest_noise_std_of_an_update_of_round_1": message_noise(arguments),
        },
        "sampling": lambda arguments: f"at most {arguments.replies} replies a client; all records, {NUM_RECORDS} in each",
    }


# Every client adds its share of the noise, and the server the shares that are missing, or nobody does.
DISTRIBUTED: dict[str, Any] = CLIENT_LEVEL | {
    "stock": False,
    "charges": charged_to_all(lambda arguments: NOISE_MULTIPLIER * math.sqrt(1 - 1 / arguments.num_clients)),
    "noise": noise_of_the_mean,
    "message_noise": lambda arguments: NOISE_MULTIPLIER * arguments.clip_norm / math.sqrt(arguments.num_clients),
    "server_noise": lambda arguments, heard: noise_of_the_mean(arguments, heard) * math.sqrt(1 - heard / arguments.num_clients),
}
UNTRUSTED: dict[str, Any] = CLIENT_LEVEL | {
    "stock": False,
    "charges": charged_to_all(lambda arguments: NOISE_MULTIPLIER * math.sqrt(1 - 1 / shares(arguments))),
    "noise": lambda arguments, heard: noise_of_the_mean(arguments, heard) * math.sqrt(heard / shares(arguments)),
    "message_noise": lambda arguments: NOISE_MULTIPLIER * arguments.clip_norm / math.sqrt(shares(arguments)),
    "server_noise": lambda arguments, heard: 0.0,
    "fewest": 3,
}

METHODS = (
    Method(
        label="dp-fedavg, stock clients",
        name="dp-fedavg",
        title="DP-FedAvg",
        strategy=client_level(DPFedAvg),
        client=None,
        **CENTRAL,
    ),
    Method(
        label="dp-fedavg",
        variant=True,
        name="dp-fedavg",
        title="DP-FedAvg",
        strategy=client_level(DPFedAvg),
        client=dp_client,
        **CENTRAL,
    ),
    Method(
        label="dp-fedavg distributed",
        variant=True,
        name="dp-fedavg",
        title="DP-FedAvg",
        strategy=client_level(DPFedAvg, placement="distributed"),
        client=dp_client,
        **DISTRIBUTED,
    ),
    Method(
        label="dp-fedavg untrusted",
        name="dp-fedavg",
        title="DP-FedAvg",
        strategy=client_level(DPFedAvg, placement="distributed", trusted_server=False),
        client=dp_client,
        **UNTRUSTED,
    ),
    Method(
        label="dp-fedavg, BLURS",
        variant=True,
        name="dp-fedavg",
        title="DP-FedAvg",
        strategy=client_level(DPFedAvg),
        client=blurs_client,
        **CENTRAL,
    ),
    Method(
        label="dp-fedavg, adaptive clip",
        variant=True,
        num_extra=1,
        name="dp-fedavg",
        title="DP-FedAvg",
        strategy=adaptive(DPFedAvg),
        client=dp_client,
        **CENTRAL
        | {
            "noise": lambda arguments, heard: noise_of_the_mean(joint(arguments), heard),
            "server_noise": lambda arguments, heard: noise_of_the_mean(joint(arguments), heard),
            "numbers": adaptive_numbers,
        },
    ),
    Method(
        label="dp-fedsam distributed, adaptive clip",
        num_extra=1,
        name="dp-fedsam",
        title="DP-FedSAM",
        strategy=adaptive(DPFedSAM, placement="distributed"),
        client=dp_client,
        stock=False,
        charges=charged_to_all(lambda arguments: NOISE_MULTIPLIER * math.sqrt(1 - 1 / arguments.num_clients)),
        noise=lambda arguments, heard: noise_of_the_mean(joint(arguments), heard),
        message_noise=lambda arguments: NOISE_MULTIPLIER * joint(arguments).clip_norm / math.sqrt(arguments.num_clients),
        server_noise=lambda arguments, heard: (
            noise_of_the_mean(joint(arguments), heard) * math.sqrt(1 - heard / arguments.num_clients)
        ),
        **CLIENT_LEVEL | {"numbers": adaptive_numbers},
    ),
    Method(
        label="dp-fedsam distributed",
        variant=True,
        name="dp-fedsam",
        title="DP-FedSAM",
        strategy=client_level(DPFedSAM, placement="distributed"),
        client=dp_client,
        **DISTRIBUTED,
    ),
    Method(
        label="fed-smp",
        variant=True,
        name="fed-smp",
        title="Fed-SMP-rand_k",
        strategy=client_level(FedSMP, keep_ratio=1.0),
        client=dp_client,
        **DISTRIBUTED,
    ),
    Method(
        label="fed-smp top-k",
        name="fed-smp",
        title="Fed-SMP-top_k",
        strategy=client_level(FedSMP, keep_ratio=1.0, mask="top-k"),
        client=dp_client,
        **DISTRIBUTED,
    ),
    Method(
        label="dp-fedsam central",
        variant=True,
        name="dp-fedsam",
        title="DP-FedSAM",
        strategy=client_level(DPFedSAM, placement="central", keep_ratio=1.0),
        client=dp_client,
        **CENTRAL,
    ),
    Method(
        label="dp-fedsam untrusted",
        variant=True,
        name="dp-fedsam",
        title="DP-FedSAM",
        strategy=client_level(DPFedSAM, placement="distributed", trusted_server=False),
        client=dp_client,
        **UNTRUSTED,
    ),
    Method(label="dp-pasgd", title="DP-PASGD", **dp_pasgd(2)),
    Method(label="dp-sgd", variant=True, title="DP-SGD (DP-PASGD with one local step)", **dp_pasgd(1)),
    Method(label="fedsgd-dpc laplace", **fedsgd_dpc("laplace")),
    Method(label="fedsgd-dpc gaussian", variant=True, **fedsgd_dpc("gaussian")),
    Method(label="dp-fedpaq", **local_steps()),
    Method(label="scaffold", **local_steps(Scaffold, ScaffoldRecipe, "scaffold", "SCAFFOLD"), carries_noise=True),
    Method(
        label="nbafl",
        name="nbafl",
        title="NbAFL",
        strategy=nbafl_strategy,
        client=nbafl_client,
        stock=False,
        unit="client",
        relation="replace-one",
        delta=lambda arguments: arguments.delta,
        charges=NBAFL_CHARGES,
        noise=lambda arguments, heard: nbafl_unit(arguments) * nbafl_rounds(arguments) / heard,
        reach=lambda arguments: arguments.clip_norm,
        message_noise=lambda arguments: nbafl_unit(arguments) / arguments.num_clients,
        server_noise=lambda arguments, heard: nbafl_unit(arguments) * math.sqrt(nbafl_rounds(arguments) ** 2 - heard) / heard,
        replaces_model=True,
        exact=False,
        poisson=False,
        target=False,
        numbers=lambda arguments: {
            "clip_norm": arguments.clip_norm,
            "uplink_noise_std": nbafl_unit(arguments),
            "downlink_noise_std": nbafl_unit(arguments)
            * math.sqrt(nbafl_rounds(arguments) ** 2 - arguments.num_clients)
            / arguments.num_clients,
        },
        sampling=lambda arguments: (
            f"all clients of {arguments.num_clients} in every round, at most {arguments.num_rounds} replies"
        ),
    ),
)


# Private evaluation

EVALUATION_NOISE = 2.0
SAMPLERS: dict[str, Sampler] = {
    "full": FullSampling(),
    "poisson": PoissonSampling(sampling_rate=0.5),
    "fixed size": FixedSizeSampling(cohort_size=2),
    "in turn": RoundRobinSampling(cohort_size=1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluating:
    """A run of `NUM_CLIENTS` clients with private evaluations, for methods with one noised sum.

    Attributes:
        cls: the strategy.
        own: its arguments besides the common ones.
        training: who trains, by the name of a sampler.
        evaluation: who evaluates, by the name of a sampler.
        every: rounds from one evaluation to the next.
    """

    cls: type[DPStrategy] = DPFedAvg
    own: Mapping[str, Any]
    training: str
    evaluation: str
    every: int

    NUM_CLIENTS: ClassVar[int] = 4
    DELTA: ClassVar[float] = 1e-3

    @property
    def relation(self) -> Relation:
        return "replace-one" if "fixed size" in (self.training, self.evaluation) else "add-or-remove-one"

    def strategy(self) -> DPStrategy:
        return self.cls(
            clip_norm=0.5,
            noise_multiplier=NOISE_MULTIPLIER,
            sampling=SAMPLERS[self.training],
            num_clients=self.NUM_CLIENTS,
            delta=self.DELTA,
            relation=self.relation,
            evaluation=PrivateEvaluation(
                noise_multiplier=EVALUATION_NOISE, sampling=SAMPLERS[self.evaluation], metrics={"accuracy": 1.0}, every=self.every
            ),
            **self.own,
        )

    def cost(self, trained: int, evaluated: int, num_rounds: int) -> float:
        """What it costs a client, against outsiders, to train and to evaluate so often; a secret cohort, to be in the draw."""
        parts = [
            self._event(self.training, NOISE_MULTIPLIER, trained, num_rounds),
            self._event(self.evaluation, EVALUATION_NOISE, evaluated, num_rounds // self.every),
        ]
        return accounting.epsilon(dp.ComposedDpEvent(parts), delta=self.DELTA, relation=self.relation).epsilon

    def _event(self, sampler: str, multiplier: float, asked: int, draws: int) -> dp.DpEvent:
        one: dp.DpEvent = dp.GaussianDpEvent(multiplier)
        if sampler == "poisson":
            one = dp.PoissonSampledDpEvent(0.5, one)
        if sampler == "fixed size":
            one = dp.SampledWithoutReplacementDpEvent(self.NUM_CLIENTS, 2, one)
        return dp.SelfComposedDpEvent(one, draws if sampler in ("poisson", "fixed size") else asked)

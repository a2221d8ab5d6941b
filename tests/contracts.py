"""What the contract suite knows of every method: one entry each, in `METHODS`.

A new method is one more entry. Its formulas are written down here a second time, from the papers, and not taken from the package.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from flower_dp import clients, strategies
from flower_dp.clients import DPClient, LocalDPClient, Training
from flower_dp.core import dp_events
from flower_dp.core.participation import MinimumSeparationSampling
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling, Sampler
from flower_dp.planning.correlated_noise import Banded
from flower_dp.privacy.charges import History
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.strategies import AdaptiveClip, DPFedAvg, DPFedSAM, DPStrategy, FedSMP
from tests.closed_forms import gaussian_epsilon, gaussian_multiplier

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
        whole_run: whether the first round is charged for all of them, and the others cost nothing.
    """

    ledgers: Callable[[Any], Sequence[History]]
    event: Callable[[Words], dp_events.DpEvent]
    rounds_late: int = 0
    whole_run: bool = False

    def count(self, num_rounds: int) -> int:
        """How often the event is charged in so many rounds."""
        return min(1, max(0, num_rounds)) if self.whole_run else max(0, num_rounds)


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
        relation: neighboring relation.
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
    stock: bool = False
    unit: str = "record"
    relation: str = "replace-one"
    delta: Callable[[Words], float] = lambda arguments: arguments.delta
    charges: tuple[Charge, ...]
    noise: Callable[[Words, int], float]
    reach: Callable[[Words], float]
    message_noise: Callable[[Words], float]
    laplace: bool = False
    server_noise: Callable[[Words, int], float] = lambda arguments, heard: 0.0
    fewest: int = 1
    replaces_model: bool = False
    carries_noise: bool = False
    num_extra: int = 0
    exact: bool = False
    poisson: bool = False
    target: bool = False
    numbers: Callable[[Words], Mapping[str, float]]
    sampling: Callable[[Words], str]
    variant: bool = False

    def epsilon(self, arguments: Words, num_rounds: int) -> float:
        """The epsilon of so many rounds, in closed form."""
        return max(
            closed_epsilon(charge.event(arguments), charge.count(num_rounds), self.relation, self.delta(arguments))
            for charge in self.charges
        )

    @property
    def whole_run(self) -> bool:
        """Whether the first round is charged for all rounds."""
        return self.charges[0].whole_run

    def excess(self, num_clients: int) -> float:
        """The excess kurtosis of a sum of the noise of so many clients."""
        return 3 / num_clients if self.laplace else 0.0


@lru_cache(maxsize=256)
def closed_epsilon(event: dp_events.DpEvent, num_rounds: int, relation: str, delta: float) -> float:
    """The epsilon of plain releases in every round: those of Gaussians are one, pure epsilons add up."""
    if isinstance(event, dp_events.SelfComposedDpEvent):
        return closed_epsilon(event.event, event.count * num_rounds, relation, delta)
    if isinstance(event, dp_events.LaplaceDpEvent):
        return num_rounds * (2 if relation == "replace-one" else 1) / event.noise_multiplier
    return gaussian_epsilon([event.noise_multiplier] * num_rounds, relation, delta)


# Methods with one noised sum

NOISE_MULTIPLIER = 4.0
TRAINING = Training(learning_rate=0.1, batch_size=4)
BLURS = replace(TRAINING, regularizers=(clients.BLUR(strength=1.0, bound=0.01),), sparsifier=clients.LUS(keep_ratio=0.5))
FEDAVG = (DPFedAvg, "dp-fedavg", "DP-FedAvg")
FEDSAM = (DPFedSAM, "dp-fedsam", "DP-FedSAM")
# Andrew et al. 2021: z_delta with sigma_b = z, the default in small cohorts; noise of std z_delta C on every coordinate.
Z_DELTA = (NOISE_MULTIPLIER**-2 - (2 * NOISE_MULTIPLIER) ** -2) ** -0.5


def dp_client(arguments: Words, training: Training = TRAINING, **node: Any) -> DPClient:
    return DPClient(**{"device": "cpu"} | node, training=training)


def charged_to_all(multiplier: Callable[[Words], float]) -> tuple[Charge, ...]:
    """Participants know their own share of the noise, if they have one; outsiders do not."""
    return (
        Charge(
            ledgers=lambda strategy: [strategy.rules.ledger(strategy.charges)],
            event=lambda arguments: dp_events.GaussianDpEvent(multiplier(arguments)),
        ),
        Charge(
            ledgers=lambda strategy: [strategy.rules.outside_ledger(strategy.charges)],
            event=lambda arguments: dp_events.GaussianDpEvent(NOISE_MULTIPLIER),
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


def joint(arguments: Words) -> Words:
    """The same words, with the norm of update and indicator together as the clip norm."""
    return replace(arguments, clip_norm=arguments.clip_norm * Z_DELTA / NOISE_MULTIPLIER)


def adaptive_numbers(arguments: Words) -> dict[str, float]:
    of_both = client_level_numbers(joint(arguments))
    own = {"clip_norm": arguments.clip_norm, "initial_clip_norm": arguments.clip_norm}
    return of_both | {"joint_norm": of_both["clip_norm"]} | own


def noise_of_the_mean(arguments: Words, heard: int) -> float:
    return NOISE_MULTIPLIER * arguments.clip_norm / arguments.num_clients


def shares(arguments: Words) -> int:
    """How many clients must answer where nobody tops up the noise of the others: 3 of 4."""
    return math.ceil(0.75 * arguments.num_clients)


# Who adds the noise: the server; every client its share, and the server the shares that are missing; or clients alone.
CENTRAL: dict[str, Any] = {
    "stock": True,
    "charges": charged_to_all(lambda arguments: NOISE_MULTIPLIER),
    "noise": noise_of_the_mean,
    "message_noise": lambda arguments: 0.0,
    "server_noise": noise_of_the_mean,
}
DISTRIBUTED: dict[str, Any] = {
    "charges": charged_to_all(lambda arguments: NOISE_MULTIPLIER * math.sqrt(1 - 1 / arguments.num_clients)),
    "noise": noise_of_the_mean,
    "message_noise": lambda arguments: NOISE_MULTIPLIER * arguments.clip_norm / math.sqrt(arguments.num_clients),
    "server_noise": lambda arguments, heard: noise_of_the_mean(arguments, heard) * math.sqrt(1 - heard / arguments.num_clients),
}
UNTRUSTED: dict[str, Any] = {
    "charges": charged_to_all(lambda arguments: NOISE_MULTIPLIER * math.sqrt(1 - 1 / shares(arguments))),
    "noise": lambda arguments, heard: noise_of_the_mean(arguments, heard) * math.sqrt(heard / shares(arguments)),
    "message_noise": lambda arguments: NOISE_MULTIPLIER * arguments.clip_norm / math.sqrt(shares(arguments)),
    "fewest": 3,
}


def one_sum(
    label: str,
    cls: type[DPStrategy],
    name: str,
    title: str,
    noised: dict[str, Any],
    *,
    client: Callable[..., Any] | None = dp_client,
    variant: bool = True,
    adaptive: bool = False,
    **own: Any,
) -> Method:
    """A method with one noised sum; an adaptive clip norm has no room to move, so that all rounds have the same noise."""

    def strategy(arguments: Words) -> DPStrategy:
        norm = arguments.clip_norm
        return cls(
            clip_norm=AdaptiveClip(initial_clip_norm=norm, min_clip_norm=norm, max_clip_norm=norm) if adaptive else norm,
            noise_multiplier=NOISE_MULTIPLIER,
            sampling=PoissonSampling(sampling_rate=arguments.sampling_rate) if arguments.sampling_rate else FullSampling(),
            num_clients=arguments.num_clients,
            delta=arguments.delta,
            target_epsilon=arguments.target_epsilon,
            noise_seed=arguments.noise_seed,
            **own,
        )

    if adaptive:
        noises = {key: noised[key] for key in ("noise", "message_noise", "server_noise")}
        noised = noised | {
            key: lambda arguments, *heard, noise=noise: noise(joint(arguments), *heard) for key, noise in noises.items()
        }
    return Method(
        label=label,
        name=name,
        title=title,
        strategy=strategy,
        client=client,
        variant=variant,
        unit="client",
        relation="add-or-remove-one",
        reach=lambda arguments: arguments.clip_norm,
        exact=True,
        poisson=True,
        target=True,
        num_extra=int(adaptive),
        numbers=adaptive_numbers if adaptive else client_level_numbers,
        sampling=lambda arguments: f"{arguments.num_clients} of {arguments.num_clients} clients expected per round",
        **noised,
    )


def dp_ftrl() -> Method:
    """DP-FTRL with C = I, so that the noise of the rounds is independent; every client takes part in every round.

    One event at the start is that of n Gaussians. tests/strategies/test_correlated_noise.py has other matrices.
    """

    def strategy(arguments: Words) -> DPStrategy:
        return strategies.DPFTRL(
            clip_norm=arguments.clip_norm,
            noise_multiplier=NOISE_MULTIPLIER,
            num_rounds=arguments.num_rounds,
            sampling=MinimumSeparationSampling(cohort_size=arguments.num_clients, min_separation=1),
            num_clients=arguments.num_clients,
            delta=arguments.delta,
            noise=Banded(bands=1),
            noise_seed=arguments.noise_seed,
        )

    def event(arguments: Words) -> dp_events.DpEvent:
        return dp_events.GaussianDpEvent(NOISE_MULTIPLIER / math.sqrt(arguments.num_rounds))

    ledgers = (
        lambda strategy: [strategy.rules.ledger(strategy.charges)],
        lambda strategy: [strategy.rules.outside_ledger(strategy.charges)],
    )
    return Method(
        label="dp-ftrl",
        name="dp-ftrl",
        title="DP-FTRL",
        strategy=strategy,
        client=dp_client,
        unit="client",
        relation="add-or-remove-one",
        reach=lambda arguments: arguments.clip_norm,
        exact=True,
        numbers=client_level_numbers,
        sampling=lambda arguments: f"{arguments.num_clients} of {arguments.num_clients} clients expected per round",
        **CENTRAL | {"charges": tuple(Charge(ledgers=each, event=event, whole_run=True) for each in ledgers)},
    )


# Methods with noise of each client's own

EPSILON = 1.0
STEP_SIZE = 0.25
OF_SERVER = {"num_records": NUM_RECORDS}


def own_terms(
    cls: type[DPStrategy],
    recipe: Callable[..., Any],
    both: Callable[[Words], dict[str, Any]],
    *,
    server: Callable[[Words], dict[str, Any]] = lambda arguments: {},
    device: Callable[[Words], dict[str, Any]] = lambda arguments: {},
) -> dict[str, Any]:
    """A method's strategy and its client, by what both must agree on and what each has beside it."""

    def strategy(arguments: Words) -> DPStrategy:
        common = {"num_clients": arguments.num_clients, "noise_seed": arguments.noise_seed}
        return cls(**both(arguments), **common, **server(arguments))

    def client(arguments: Words, **node: Any) -> LocalDPClient:
        return LocalDPClient(**{"device": "cpu"} | node, recipe=recipe(**both(arguments), **device(arguments)))

    return {"strategy": strategy, "client": client}


def charged_to_each(
    event: Callable[[Words], dp_events.DpEvent], ledgers: str = "ledgers", *of: str, rounds_late: int = 0
) -> Charge:
    """Every client has a ledger of its own."""
    return Charge(
        ledgers=lambda strategy: list(getattr(strategy.rules, ledgers)(strategy.charges, *of).values()),
        event=event,
        rounds_late=rounds_late,
    )


def gaussian_terms(arguments: Words, num_steps: int = 1) -> float:
    """Noise std / clip norm of a sum under replace-one, for all replies, of so many steps each."""
    return 2 * math.sqrt(arguments.replies * num_steps) * gaussian_multiplier(EPSILON, arguments.delta)


def of_any(**values: float) -> dict[str, float]:
    """Numbers that are the same for every client: the smallest and the largest."""
    return {f"{which}_{name}": value for name, value in values.items() for which in ("min", "max")}


def fedsgd_dpc(mechanism: str, *, variant: bool = False) -> Method:
    """Both mechanisms of FedSGD-DPC; all clients are asked in every round (b = N), and weigh the same."""
    laplace = mechanism == "laplace"
    event = dp_events.LaplaceDpEvent if laplace else dp_events.GaussianDpEvent

    def delta(arguments: Words) -> float:
        return 0.0 if laplace else arguments.delta

    def multiplier(arguments: Words) -> float:
        """Noise scale / clip norm of the sum of gradients, for all replies together: Theorem 1, or a Gaussian's."""
        return 2 * arguments.replies / EPSILON if laplace else gaussian_terms(arguments)

    def message_noise(arguments: Words) -> float:
        """Of the mean over the records, with the client's weight 1/N on it."""
        std = multiplier(arguments) * arguments.clip_norm * (math.sqrt(2) if laplace else 1)
        return std / NUM_RECORDS / arguments.num_clients

    def numbers(arguments: Words) -> dict[str, float]:
        scale = multiplier(arguments) * arguments.clip_norm / NUM_RECORDS
        return {"clip_norm": arguments.clip_norm} | of_any(
            noise_multiplier=multiplier(arguments), noise_scale_of_a_mean_gradient=scale
        )

    return Method(
        label=f"fedsgd-dpc {mechanism}",
        variant=variant,
        name="fedsgd-dpc",
        title=f"FedSGD-DPC ({mechanism.capitalize()})",
        **own_terms(
            strategies.FedSGDDPC,
            clients.FedSGDDPCRecipe,
            lambda arguments: (
                {"mechanism": mechanism, "epsilon": EPSILON} | {"clip_norm": arguments.clip_norm, "delta": delta(arguments)}
            ),
            server=lambda arguments: (
                OF_SERVER
                | {"cohort_size": arguments.num_clients, "learning_rate": STEP_SIZE, "num_replies": arguments.num_replies}
            ),
            device=lambda arguments: {"num_replies": arguments.replies},
        ),
        delta=delta,
        charges=(charged_to_each(lambda arguments: event(multiplier(arguments))),),
        noise=lambda arguments, heard: STEP_SIZE * math.sqrt(heard) * message_noise(arguments),
        reach=lambda arguments: STEP_SIZE * arguments.clip_norm,
        message_noise=message_noise,
        laplace=laplace,
        numbers=numbers,
        sampling=lambda arguments: f"at most {arguments.replies} replies per client; all records in each",
    )


def dp_pasgd(label: str, title: str, num_local_steps: int, *, variant: bool = False) -> Method:
    """All clients take so many noised steps in every round (tau); with one step the method is DP-SGD."""
    step_size, batch_size = 0.25, 4
    multiplier = partial(gaussian_terms, num_steps=num_local_steps)  # a replaced record moves the sum in every step

    def of_a_mean(arguments: Words) -> float:
        return multiplier(arguments) * arguments.clip_norm / batch_size

    def message_noise(arguments: Words) -> float:
        """Of the movement of the weights: the steps' noises add up."""
        return step_size * math.sqrt(num_local_steps) * of_a_mean(arguments)

    def event(arguments: Words) -> dp_events.DpEvent:
        one = dp_events.GaussianDpEvent(multiplier(arguments))
        return one if num_local_steps == 1 else dp_events.SelfComposedDpEvent(one, num_local_steps)

    def both(arguments: Words) -> dict[str, Any]:
        noise = {"epsilon": EPSILON, "delta": arguments.delta, "num_steps": arguments.replies * num_local_steps}
        steps = {"batch_size": batch_size, "num_local_steps": num_local_steps, "learning_rate": step_size}
        return noise | steps | {"clip_norm": arguments.clip_norm}

    return Method(
        label=label,
        variant=variant,
        name="dp-pasgd",
        title=title,
        **own_terms(strategies.DPPASGD, clients.DPPASGDRecipe, both),
        charges=(charged_to_each(event),),
        noise=lambda arguments, heard: message_noise(arguments) / math.sqrt(heard),
        reach=lambda arguments: num_local_steps * step_size * arguments.clip_norm,
        message_noise=message_noise,
        numbers=lambda arguments: (
            {"clip_norm": arguments.clip_norm}
            | of_any(noise_multiplier=multiplier(arguments), noise_std_of_a_mean_gradient=of_a_mean(arguments))
        ),
        sampling=lambda arguments: (
            f"all {arguments.num_clients} clients in every round, at most {arguments.replies * num_local_steps} local "
            f"steps per client, {num_local_steps} per round"
        ),
    )


def local_steps(cls: type[DPStrategy], recipe: Any, name: str, title: str, *, carries_noise: bool = False) -> Method:
    """DP-FedPAQ without quantization, whose noise is Gaussian then; a round takes all records, so nothing is amplified.

    SCAFFOLD's guarantee and noise are the same. Its corrections add up to zero over all clients, and a first message has none.
    """
    num_steps = 2
    batch = NUM_RECORDS // num_steps

    def sensitivity(arguments: Words) -> float:
        return 2 * (num_steps - 1 + 1 / batch) * STEP_SIZE * arguments.clip_norm

    def message_noise(arguments: Words) -> float:
        """Half of 2 eta C (E - 1 + 1 / b) times the multiplier."""
        return gaussian_terms(arguments) * sensitivity(arguments) / 2

    def both(arguments: Words) -> dict[str, Any]:
        given: dict[str, Any] = {"learning_rate": STEP_SIZE, "sensitivity": "per-step", "decay_iterations": None}
        steps = FedPAQSteps(num_local_steps=num_steps, batch_size=batch, clip_norm=arguments.clip_norm, **given)
        return {"steps": steps, "epsilon": EPSILON, "delta": arguments.delta, "quantization_levels": None}

    return Method(
        label=name,
        name=name,
        title=title,
        **own_terms(
            cls,
            recipe,
            both,
            server=lambda arguments: OF_SERVER | {"sampling": FullSampling(), "num_replies": arguments.num_replies},
            device=lambda arguments: {"num_replies": arguments.replies},
        ),
        charges=(charged_to_each(lambda arguments: dp_events.GaussianDpEvent(gaussian_terms(arguments))),),
        noise=lambda arguments, heard: message_noise(arguments) / math.sqrt(heard),
        reach=lambda arguments: num_steps * STEP_SIZE * arguments.clip_norm,
        message_noise=message_noise,
        carries_noise=carries_noise,
        numbers=lambda arguments: {
            "clip_norm": arguments.clip_norm,
            "update_sensitivity_of_round_1": sensitivity(arguments),
            "min_noise_multiplier": gaussian_terms(arguments),
            "max_noise_std_of_an_update_of_round_1": message_noise(arguments),
        },
        sampling=lambda arguments: f"at most {arguments.replies} replies per client; all records, {NUM_RECORDS} in each",
    )


def nbafl() -> Method:
    paper_epsilon = 0.2

    def unit(arguments: Words) -> float:
        """The noise of one exposure, c (2 C / m) / epsilon (Wei et al. 2020, Section III-A); L is 1 here, so it is sigma_U."""
        return math.sqrt(2 * math.log(1.25 / arguments.delta)) * 2 * arguments.clip_norm / NUM_RECORDS / paper_epsilon

    def rounds(arguments: Words) -> float:
        """Theorem 1: with sigma_D, a broadcast of N clients has noise of std sigma_U T / N, or of that of the clients alone."""
        return max(float(arguments.num_rounds), math.sqrt(arguments.num_clients))

    def event(of_broadcast: Callable[[Words], float]) -> Callable[[Words], dp_events.DpEvent]:
        return lambda arguments: dp_events.GaussianDpEvent(unit(arguments) * of_broadcast(arguments) / arguments.clip_norm)

    def downlink(arguments: Words, heard: int) -> float:
        return unit(arguments) * math.sqrt(rounds(arguments) ** 2 - heard) / heard

    def both(arguments: Words) -> dict[str, Any]:
        common = {"paper_epsilon": paper_epsilon, "uplink_exposures": 1, "num_replies": arguments.replies}
        return {"clip_norm": arguments.clip_norm, "delta": arguments.delta} | common

    # A client's part in an average is C / heard, and the noise on it grows as 1 / heard: the multiplier is the same for any.
    broadcasts = {
        "outsiders": event(rounds),
        "participants": event(lambda arguments: math.sqrt(rounds(arguments) ** 2 - 1)),
    }
    return Method(
        label="nbafl",
        name="nbafl",
        title="NbAFL",
        **own_terms(
            strategies.NbAFL,
            clients.NbAFLRecipe,
            both,
            server=lambda arguments: OF_SERVER,
            device=lambda arguments: {"training": TRAINING, "min_records": NUM_RECORDS},
        ),
        unit="client",
        charges=(
            charged_to_each(event(lambda arguments: 1.0)),
            *(charged_to_each(one, "broadcast_ledgers", whom, rounds_late=1) for whom, one in broadcasts.items()),
        ),
        noise=lambda arguments, heard: unit(arguments) * rounds(arguments) / heard,
        reach=lambda arguments: arguments.clip_norm,
        message_noise=lambda arguments: unit(arguments) / arguments.num_clients,
        server_noise=downlink,
        replaces_model=True,
        numbers=lambda arguments: {
            "clip_norm": arguments.clip_norm,
            "uplink_noise_std": unit(arguments),
            "downlink_noise_std": downlink(arguments, arguments.num_clients),
        },
        sampling=lambda arguments: (
            f"all clients of {arguments.num_clients} in every round, at most {arguments.num_rounds} replies"
        ),
    )


METHODS = (
    one_sum("dp-fedavg, stock clients", *FEDAVG, CENTRAL, client=None, variant=False),
    one_sum("dp-fedavg", *FEDAVG, CENTRAL),
    one_sum("dp-fedavg distributed", *FEDAVG, DISTRIBUTED, placement="distributed"),
    one_sum("dp-fedavg untrusted", *FEDAVG, UNTRUSTED, variant=False, placement="distributed", server_completes_noise=False),
    one_sum("dp-fedavg, BLURS", *FEDAVG, CENTRAL, client=partial(dp_client, training=BLURS)),
    one_sum("dp-fedavg, adaptive clip", *FEDAVG, CENTRAL, adaptive=True),
    one_sum("dp-fedsam distributed, adaptive clip", *FEDSAM, DISTRIBUTED, variant=False, adaptive=True, placement="distributed"),
    one_sum("dp-fedsam distributed", *FEDSAM, DISTRIBUTED, placement="distributed"),
    one_sum("fed-smp", FedSMP, "fed-smp", "Fed-SMP-rand_k", DISTRIBUTED, keep_ratio=1.0),
    one_sum("fed-smp top-k", FedSMP, "fed-smp", "Fed-SMP-top_k", DISTRIBUTED, variant=False, keep_ratio=1.0, mask="top-k"),
    one_sum("dp-fedsam central", *FEDSAM, CENTRAL, placement="central", keep_ratio=1.0),
    one_sum("dp-fedsam untrusted", *FEDSAM, UNTRUSTED, placement="distributed", server_completes_noise=False),
    dp_ftrl(),
    dp_pasgd("dp-pasgd", "DP-PASGD", 2),
    dp_pasgd("dp-sgd", "DP-SGD (DP-PASGD with one local step)", 1, variant=True),
    fedsgd_dpc("laplace"),
    fedsgd_dpc("gaussian", variant=True),
    local_steps(strategies.DPFedPAQ, clients.DPFedPAQRecipe, "dp-fedpaq", "DP-FedPAQ"),
    local_steps(strategies.Scaffold, clients.ScaffoldRecipe, "scaffold", "SCAFFOLD", carries_noise=True),
    nbafl(),
)


# Who trains, or evaluates
SAMPLERS: dict[str, Sampler] = {
    "full": FullSampling(),
    "poisson": PoissonSampling(sampling_rate=0.5),
    "fixed size": FixedSizeSampling(cohort_size=2),
    "in turn": RoundRobinSampling(cohort_size=1),
}

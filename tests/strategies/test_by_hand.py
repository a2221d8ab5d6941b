"""Runs without noise over generated settings, against the same rounds by hand: gaps, decay, a server optimizer."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAdam, FedAvgM, Strategy
from hypothesis import given
from hypothesis import strategies as st

from flower_dp import clients
from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.strategies import DPPASGD, DPFedAvg, DPFedPAQ, DPStrategy, FedSGDDPC, NbAFL, Scaffold, writer
from tests.gaps import ROUNDS, Gaps, gaps, quickly, record, run
from tests.local_grids import CLASSES, FEATURES, linear, vector_of

DELTA = 1e-3
BETAS, TAU, ETA = (0.6, 0.9), 1e-2, 0.05  # of FedAdam
MOMENTUM, SERVER_RATE = 0.5, 0.8
CONVEXITY, SMOOTHNESS = 2.5, 4.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One generated run."""

    gaps: Gaps
    optimizer: str
    rate: float
    decay: float
    clip_norm: float
    steps: int
    batch: int
    pull: float
    option: int
    cohort: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.gaps.sizes


# What is drawn most comes first.
CASES = st.builds(
    Case,
    gaps=gaps(),
    optimizer=st.sampled_from(["adam", "momentum", "none"]),
    rate=st.sampled_from([0.4, 0.1]),
    decay=st.sampled_from([0.3, 0.5, 0.0]),
    clip_norm=st.sampled_from([0.6, 20.0, 0.2]),
    steps=st.sampled_from([2, 1]),
    batch=st.integers(1, 2),
    pull=st.sampled_from([0.7, 0.0]),
    option=st.sampled_from([2, 0, 1]),
    cohort=st.integers(2, 3),
)


# What one client does, by hand


def gradient(weights: np.ndarray, client: int) -> np.ndarray:
    """Of the cross-entropy of a linear model on the client's record."""
    inputs, target = record(client)
    scores = weights.reshape(CLASSES, FEATURES) @ inputs
    parts = np.exp(scores - scores.max())
    parts /= parts.sum()
    parts[target] -= 1
    return np.outer(parts, inputs).ravel()


def clipped(vector: np.ndarray, bound: float, order: int = 2) -> np.ndarray:
    norm = np.linalg.norm(vector, order)
    return vector * min(1.0, bound / norm) if norm else vector


def walk(start: np.ndarray, steps: int, rate: float, slope: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    here = start
    for _ in range(steps):
        here = here - rate * slope(here)
    return here - start


@dataclass
class ByHand:
    """Rounds of one method, by hand: `rows` has what each client would send, `moved` the model that some of these rows make."""

    case: Case
    kept: dict[int, np.ndarray] = field(default_factory=dict)
    common: np.ndarray = field(default_factory=lambda: np.zeros(CLASSES * FEATURES))

    def asked(self, server_round: int) -> list[int]:
        return list(range(len(self.case.sizes)))

    @property
    def shares(self) -> np.ndarray:
        sizes = np.array(self.case.sizes, float)
        return sizes / sizes.sum()

    def row(self, weights: np.ndarray, client: int, server_round: int) -> np.ndarray:
        raise NotImplementedError

    def moved(self, weights: np.ndarray, rows: dict[int, np.ndarray], server_round: int) -> np.ndarray | None:
        """None where the round is left out."""
        return weights + np.mean(list(rows.values()), axis=0) if rows else None


class FedAvgByHand(ByHand):
    def row(self, weights, client, server_round):
        case = self.case
        rate = case.rate * (1 - case.decay) ** (server_round - 1)
        return clipped(walk(weights, case.steps, rate, lambda here: gradient(here, client)), case.clip_norm)

    def moved(self, weights, rows, server_round):
        return weights + sum(rows.values(), np.zeros_like(weights)) / len(self.case.sizes)


class FedPAQByHand(ByHand):
    corrects = False

    def row(self, weights, client, server_round):
        case, corrects = self.case, self.corrects
        rate = case.rate / (1 + (server_round - 1) * case.steps / (4 * case.decay)) if case.decay else case.rate
        drift = self.common - self.kept.get(client, 0 * weights) if corrects else 0 * weights
        found: list[np.ndarray] = []

        def slope(here):
            found.append(clipped(gradient(here, client), case.clip_norm))
            return found[-1] + drift

        walk(weights, case.steps, rate, slope)
        update = sum(found)
        if case.option == 0:  # the whole update is clipped, to half of what it can be
            update = clipped(update, case.steps * case.clip_norm / 2)
        row = -rate * (update + case.steps * drift)
        if corrects:  # by the row that is sent, whether or not it arrives
            self.kept[client] = self.kept.get(client, 0 * weights) - self.common - row / (case.steps * rate)
        return row

    def moved(self, weights, rows, server_round):
        case = self.case
        rate = case.rate / (1 + (server_round - 1) * case.steps / (4 * case.decay)) if case.decay else case.rate
        if self.corrects and rows:
            changes = [-self.common - row / (case.steps * rate) for row in rows.values()]
            # No longer than a mean gradient of honest clients, which bounds the harm of a liar.
            bound = case.clip_norm / (2 if case.option == 0 else 1)
            self.common = clipped(self.common + sum(changes) / len(case.sizes), bound)
        return super().moved(weights, rows, server_round)


class ScaffoldByHand(FedPAQByHand):
    corrects = True


class PASGDByHand(ByHand):
    def row(self, weights, client, server_round):
        case = self.case
        rate = case.rate * (1 - case.decay) ** (server_round - 1)
        return walk(weights, case.steps, rate, lambda here: clipped(gradient(here, client), case.clip_norm) + case.pull * here)

    def moved(self, weights, rows, server_round):
        return super().moved(weights, rows, server_round) if rows else weights


class FedSGDByHand(ByHand):
    def asked(self, server_round):
        first = (server_round - 1) * self.case.cohort
        return sorted((first + one) % len(self.case.sizes) for one in range(self.case.cohort))

    def row(self, weights, client, server_round):
        return -clipped(gradient(weights, client), self.case.clip_norm, order=1 if self.case.option == 0 else 2)

    def moved(self, weights, rows, server_round):
        case, many = self.case, len(self.case.sizes)
        rate = case.rate * (1 - case.decay) ** (server_round - 1)
        if case.option == 2:
            rate = 2 / CONVEXITY / (server_round - 1 + 2 * SMOOTHNESS / CONVEXITY)
        shares = np.full(many, 1 / many) if case.option == 1 else self.shares
        return weights + rate * many / case.cohort * sum(
            (shares[client] * row for client, row in rows.items()), np.zeros_like(weights)
        )


class NbAFLByHand(ByHand):
    def row(self, weights, client, server_round):
        case = self.case
        rate = case.rate * (1 - case.decay) ** (server_round - 1)
        moved = walk(weights, case.steps, rate, lambda here: gradient(here, client) + case.pull * (here - weights))
        return clipped(weights + moved, case.clip_norm)

    def moved(self, weights, rows, server_round):
        if not rows:
            return weights
        shares = np.ones(len(self.case.sizes)) if self.case.option == 1 else self.shares
        return sum(shares[client] * row for client, row in rows.items()) / sum(shares[list(rows)])


def optimized(case: Case, by_hand: ByHand, start: np.ndarray) -> list[np.ndarray]:
    """The model after each round, moved by the server optimizer: momentum, or Adam (Reddi et al. 2021, with Flower's step size)."""
    here, models = start, []
    mean = second = momentum = np.zeros_like(start)
    for server_round in range(1, ROUNDS + 1):
        rows = {}
        for client in by_hand.asked(server_round):
            if case.gaps.reached(client, server_round):
                row = by_hand.row(here, client, server_round)
                if case.gaps.heard(client, server_round):
                    rows[client] = row
        if server_round == case.gaps.unfinished:
            continue
        after = by_hand.moved(here, rows, server_round)
        if after is not None:
            change = after - here
            if case.optimizer == "momentum":
                momentum = MOMENTUM * momentum + change
                change = SERVER_RATE * momentum
            if case.optimizer == "adam":
                mean, second = BETAS[0] * mean + (1 - BETAS[0]) * change, BETAS[1] * second + (1 - BETAS[1]) * change**2
                rate = ETA * math.sqrt(1 - BETAS[1] ** (server_round + 1)) / (1 - BETAS[0] ** (server_round + 1))
                change = rate * mean / (np.sqrt(second) + TAU)
            here = here + change
        models.append(here)
    return models


# The same with the package


@dataclass(frozen=True)
class Pair:
    """A method's strategy and client for a case."""

    by_hand: type[ByHand]
    strategy: Callable[..., DPStrategy]
    client: Callable[..., Any]


def training_of(case: Case, *, regularizers: Any = ()) -> clients.Training:
    return clients.Training(
        learning_rate=case.rate,
        learning_rate_decay=case.decay,
        batch_size=100,
        num_local_steps=case.steps,
        regularizers=regularizers,
    )


def fedavg(case: Case, **options: Any) -> DPFedAvg:
    many = len(case.sizes)
    words = {"clip_norm": case.clip_norm, "noise_multiplier": 0.0, "sampling": FullSampling(), "num_clients": many}
    return DPFedAvg(**words, delta=DELTA, **options)


def fedpaq_steps(case: Case) -> FedPAQSteps:
    whole = {"update_clip_norm": case.steps * case.rate * case.clip_norm / 2} if case.option == 0 else {}
    return FedPAQSteps(
        learning_rate=case.rate,
        decay_iterations=4 * case.decay or None,
        num_local_steps=case.steps,
        batch_size=case.batch,
        clip_norm=case.clip_norm,
        sensitivity="clip-update" if whole else "per-step",
        **whole,
    )


def fedpaq(cls: Any) -> Callable[..., DPStrategy]:
    def make(case: Case, **options: Any) -> DPStrategy:
        many = len(case.sizes)
        words = {"sampling": FullSampling(), "num_clients": many, "num_records": list(case.sizes), "num_replies": ROUNDS}
        return cls(steps=fedpaq_steps(case), epsilon=math.inf, delta=DELTA, quantization_levels=None, **words, **options)

    return make


def local_steps(recipe: Any) -> Callable[..., clients.LocalDPClient]:
    def make(case: Case, **node: Any) -> clients.LocalDPClient:
        words = {"epsilon": math.inf, "delta": DELTA, "num_replies": ROUNDS, "quantization_levels": None}
        return clients.LocalDPClient(recipe=recipe(steps=fedpaq_steps(case), **words), **node)

    return make


def pasgd_words(case: Case) -> dict[str, Any]:
    return {
        "batch_size": case.batch,
        "clip_norm": case.clip_norm,
        "epsilon": math.inf,
        "delta": DELTA,
        "num_steps": ROUNDS * case.steps,
        "num_local_steps": case.steps,
        "learning_rate": case.rate,
        "learning_rate_decay": case.decay,
        "weight_decay": case.pull,
    }


def fedsgd_words(case: Case) -> dict[str, Any]:
    laplace = case.option == 0
    return {
        "mechanism": "laplace" if laplace else "gaussian",
        "clip_norm": case.clip_norm,
        "epsilon": math.inf,
        "delta": 0.0 if laplace else DELTA,
        "num_replies": ROUNDS,
    }


def server_steps(case: Case) -> dict[str, Any]:
    if case.option == 2:
        return {"strong_convexity": CONVEXITY, "smoothness": SMOOTHNESS}
    return {"learning_rate": case.rate, "learning_rate_decay": case.decay}


def nbafl_words(case: Case) -> dict[str, Any]:
    least = min(case.sizes)
    return {"clip_norm": case.clip_norm, "epsilon": math.inf, "delta": DELTA, "num_replies": ROUNDS, "min_records": least}


def weighted(case: Case) -> dict[str, Any]:
    aggregation = "uniform" if case.option == 1 else "data-size"
    return {"num_clients": len(case.sizes), "num_records": list(case.sizes), "aggregation": aggregation}


PAIRS = {
    "dp-fedavg": Pair(FedAvgByHand, fedavg, lambda case, **node: clients.DPClient(training=training_of(case), **node)),
    "dp-fedpaq": Pair(FedPAQByHand, fedpaq(DPFedPAQ), local_steps(clients.DPFedPAQRecipe)),
    "scaffold": Pair(ScaffoldByHand, fedpaq(Scaffold), local_steps(clients.ScaffoldRecipe)),
    "dp-pasgd": Pair(
        PASGDByHand,
        lambda case, **options: DPPASGD(num_clients=len(case.sizes), **pasgd_words(case), **options),
        lambda case, **node: clients.LocalDPClient(recipe=clients.DPPASGDRecipe(**pasgd_words(case)), **node),
    ),
    "fedsgd-dpc": Pair(
        FedSGDByHand,
        lambda case, **options: FedSGDDPC(
            cohort_size=case.cohort,
            **server_steps(case),
            **weighted(case),
            **fedsgd_words(case),
            **options,
        ),
        lambda case, **node: clients.LocalDPClient(recipe=clients.FedSGDDPCRecipe(**fedsgd_words(case)), **node),
    ),
    "nbafl": Pair(
        NbAFLByHand,
        lambda case, **options: NbAFL(**weighted(case), **nbafl_words(case), **options),
        lambda case, **node: clients.LocalDPClient(
            recipe=clients.NbAFLRecipe(
                training=training_of(case, regularizers=(clients.ProximalTerm(strength=case.pull),) if case.pull else ()),
                **nbafl_words(case),
            ),
            **node,
        ),
    ),
}


def optimizer_of(case: Case) -> Strategy | None:
    if case.optimizer == "momentum":
        return FedAvgM(server_learning_rate=SERVER_RATE, server_momentum=MOMENTUM)
    if case.optimizer == "adam":
        return FedAdam(eta=ETA, beta_1=BETAS[0], beta_2=BETAS[1], tau=TAU)
    return None


@pytest.mark.parametrize("method", PAIRS)
def test_rounds_are_those_by_hand(method, monkeypatch):
    monkeypatch.setattr(writer, "_SHARE", 1.0)
    pair = PAIRS[method]

    @quickly(12)
    @given(CASES)
    def check(case: Case) -> None:
        by_hand = pair.by_hand(case)
        with TemporaryDirectory() as folder:
            found = run(
                case.gaps,
                lambda: pair.strategy(case, server_optimizer=optimizer_of(case)),
                lambda **node: pair.client(case, **node),
                Path(folder, "run"),
            )
        models = [found.models[number] for number in sorted(set(found.models) - {0})]
        expected = optimized(case, by_hand, vector_of(linear()).double().numpy())
        np.testing.assert_allclose(np.stack(models), np.stack(expected), rtol=2e-4, atol=2e-5)
        asked = {number: by_hand.asked(number) for number in range(1, ROUNDS + 1) if number != case.gaps.unfinished}
        heard = [sum(case.gaps.heard(one, number) for one in names) for number, names in asked.items()]
        assert [report.replies for report in found.strategy.rounds] == heard
        assert found.strategy.missing.no_reply == sum(map(len, asked.values())) - sum(heard)
        assert found.strategy.statement.num_charged_rounds == ROUNDS
        found.assert_unfinished_are_told()

    check()

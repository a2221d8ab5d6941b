"""Every method, its private evaluations, and its noise, on a pretend device: run by tests/test_pretend_device.py."""

import math
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from flwr.app import Context

from flower_dp.clients import DPClient, FedSGDDPCRecipe, LocalDPClient, Training, client_app, model_arrays
from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.evaluation_budget import EvaluationBudget
from flower_dp.strategies import DPFedAvg, FedSGDDPC, LocalEvaluation, PrivateEvaluation
from tests.contract_runs import SEED, SIZE, SMALL, STILL, Run, run_of
from tests.contracts import METHODS, NOISE_MULTIPLIER, Method, Words
from tests.grids import LocalGrid
from tests.local_grids import linear, records
from tests.pretended.helpers import DEVICE, moved, on, pretended, seeded, without_float64  # noqa: F401 (fixtures)

OWN_CLIENTS = [method for method in METHODS if method.client is not None]
every_method = pytest.mark.parametrize("method", OWN_CLIENTS, ids=lambda method: method.label)


@cache
def on_the_cpu(method: Method) -> Run:
    return seeded(method)


# Methods


@pytest.mark.slow
@pytest.mark.parametrize("here", [False, True], ids=["records off it", "records on it"])
@every_method
def test_a_method_runs_on_it_as_on_the_cpu(method: Method, here: bool) -> None:
    """To the last bit, where no noise is drawn on the device."""
    run = seeded(method, on(SMALL, here=here))
    assert [report.replies for report in run.strategy.rounds] == [4] * 3
    assert run.strategy.statement.epsilon == on_the_cpu(method).strategy.statement.epsilon
    if not method.message_noise(Words()) or method.unit == "record" or method.replaces_model:
        assert run.bits == on_the_cpu(method).bits


@pytest.mark.slow
@pytest.mark.usefixtures("without_float64")
@every_method
def test_a_method_runs_without_float64_to_the_last_bit(method: Method) -> None:
    """What is clipped, noised and added up is so on the CPU."""
    assert seeded(method, on(SMALL, here=True)).bits == on_the_cpu(method).bits


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "num_nodes"), [("one_by_one", 5), ("batched", 1)])
@pytest.mark.parametrize("label", ["dp-fedavg distributed", "fed-smp", "dp-fedsam distributed, adaptive clip"])
def test_shares_of_noise_that_are_drawn_on_it_have_the_stated_scale(label: str, engine: str, num_nodes: int) -> None:
    (method,) = (one for one in METHODS if one.label == label)
    arguments = Words(num_clients=5, num_rounds=4, clip_norm=0.8, delta=1e-5)
    run = run_of(method, arguments, on(STILL, here=True, training_engine=engine, group_size=5), num_nodes=num_nodes)
    released = np.diff(np.stack(run.models).astype(np.float64), axis=0)
    std = method.noise(arguments, 5)
    # 24,000 draws: a scale that is right is 3 % off less often than once in 10^9.
    assert released.std() == pytest.approx(std, rel=0.03)
    assert np.abs(np.corrcoef(released) - np.eye(4)).max() < 6 / math.sqrt(SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("label", [method.label for method in OWN_CLIENTS if method.exact and not method.message_noise(Words())])
def test_a_group_of_clients_is_trained_and_clipped_on_it_as_on_the_cpu(label: str, caplog: Any) -> None:
    (method,) = (one for one in METHODS if one.label == label)
    grouped = seeded(method, on(SMALL, here=True, training_engine="batched", group_size=3), num_nodes=1)
    assert "one by one" not in caplog.text
    assert [report.replies for report in grouped.strategy.rounds] == [4] * 3
    alone = on_the_cpu(method)
    for model, other in zip(grouped.models, alone.models, strict=True):
        np.testing.assert_allclose(model, other, atol=2e-3 * np.abs(other).max())


def evaluations(level: str, device: Any, here: bool) -> list[Mapping[str, float]]:
    """The metrics of a run with private evaluations, of noise for each client or for each record."""
    metrics = {"accuracy": 1.0, "loss": 5.0}
    if level == "client":
        evaluation = PrivateEvaluation(noise_multiplier=0.1, sampling=FullSampling(), metrics=metrics)
        terms: dict[str, Any] = {
            "clip_norm": 0.5,
            "noise_multiplier": NOISE_MULTIPLIER,
            "sampling": FullSampling(),
            "delta": 1e-3,
        }
        strategy: Any = DPFedAvg(**terms, num_clients=4, noise_seed=SEED, evaluation=evaluation)
        node: Any = partial(DPClient, training=Training(learning_rate=0.1, batch_size=4))
    else:
        common: dict[str, Any] = {"mechanism": "laplace", "clip_norm": 0.5, "epsilon": 1.0, "num_replies": 3}
        budget = EvaluationBudget(epsilon=0.9, num_evaluations=3)
        sizes = {"num_clients": 4, "cohort_size": 4, "num_records": 8, "learning_rate": 0.25, "noise_seed": SEED}
        strategy = FedSGDDPC(**common, **sizes, evaluation=LocalEvaluation(budget=budget, metrics=metrics))
        node = partial(LocalDPClient, recipe=FedSGDDPCRecipe(**common), evaluation=budget, noise_seed=SEED)

    def client_fn(context: Context) -> Any:
        name = f"c{context.node_config['partition-id']}"
        own = moved(records(name, 8)) if here else records(name, 8)
        kept = {"context": context} if level == "record" else {}
        return node(model=linear(), clients={name: own}, device=device, **kept)

    strategy.start(LocalGrid(client_app(client_fn), 4), model_arrays(linear()), num_rounds=3)
    return [dict(metrics) for metrics in strategy.evaluations.values()]


@cache
def evaluated_on_the_cpu(level: str) -> list[Mapping[str, float]]:
    return evaluations(level, "cpu", False)


@pytest.mark.slow
@pytest.mark.parametrize(("here", "float64"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("level", ["client", "record"])
def test_private_evaluations_on_it_are_those_of_the_cpu(level: str, here: bool, float64: bool, request: Any) -> None:
    expected = evaluated_on_the_cpu(level)
    assert len(expected) == 3
    if not float64:
        request.getfixturevalue("without_float64")
    assert evaluations(level, DEVICE, here) == expected

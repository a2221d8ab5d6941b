"""SCAFFOLD: control variates on both sides, made of the messages alone: one noise draw, one charge."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_dp.clients import DPFedPAQRecipe, LocalDPClient, ScaffoldRecipe, model_arrays
from flower_dp.clients.client_vectors import KEY, load_vector
from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.strategies import Scaffold
from flower_dp.wire import KEY as ANSWER
from tests.grids import LocalGrid
from tests.local_grids import NAMES, context_of, grid_of, linear, records, start

STEPS = FedPAQSteps(
    learning_rate=0.2, num_local_steps=2, batch_size=4, clip_norm=0.5, sensitivity="per-step", decay_iterations=4.0
)
FOUR = {name: records(name) for name in NAMES[:4]}
BOTH: dict[str, Any] = {"steps": STEPS, "epsilon": 5.0, "delta": 1e-5, "num_replies": 4}
DIVISOR = [2 * 0.2 / (1 + 0.5 * round_) for round_ in range(4)]  # E eta_k


def pair(server: Any = None, **arguments: Any) -> tuple[Scaffold, ScaffoldRecipe]:
    options = {"sampling": FullSampling(), "num_clients": 4, "num_records": 8} | (server or {})
    return Scaffold(**BOTH | arguments, **options), ScaffoldRecipe(**BOTH | arguments)


def rows_of(grid: Any) -> list[np.ndarray]:
    """What the nodes have sent."""
    return [
        array.numpy().astype(np.float64)
        for reply in grid.received
        for array in next(iter(reply.content.array_records.values())).values()
    ]


def control_of(grid: Any, node: int, name: str) -> np.ndarray:
    return grid.contexts[node].state.array_records[KEY][name].numpy()


def sent_control(grid: Any, server_round: int) -> np.ndarray:
    messages = [one for one in grid.sent if one.metadata.message_type == "train" and one.metadata.group_id == str(server_round)]
    (record,) = messages[0].content.array_records.values()
    assert list(record)[-1] == "flower-dp.control"
    return record["flower-dp.control"].numpy()


def test_both_sides_compute_the_same_from_the_messages_alone():
    """c_i' = c_i - c - Dx_i / (E eta) and c' = c + sum (c_i' - c_i) / N, by hand from what was sent. A second noise draw in either fails here."""
    strategy, recipe = pair()
    grid = grid_of(recipe, FOUR)
    start(strategy, grid, 3)
    sent = np.stack(rows_of(grid)).reshape(3, 4, -1)
    own, common = np.zeros((4, 18)), np.zeros(18)
    for server_round in range(3):
        np.testing.assert_allclose(sent_control(grid, server_round + 1), common, rtol=1e-5, atol=1e-5)
        changes = -common - sent[server_round] / DIVISOR[server_round]
        own, common = own + changes, common + changes.sum(0) / 4
    for node, name in enumerate(sorted(FOUR), start=1):
        np.testing.assert_allclose(control_of(grid, node, name), own[node - 1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(common, own.mean(0), rtol=1e-9, atol=1e-9)


def test_a_client_that_comes_back_without_its_vector_starts_at_zero_and_the_server_says_so(caplog):
    strategy, recipe = pair()
    grid = grid_of(recipe, FOUR)

    def lose(server_round: int, arrays: Any) -> None:
        if server_round == 2:
            del grid.contexts[3].state[KEY]

    strategy.start(grid, model_arrays(linear()), num_rounds=3, evaluate_fn=lose)
    assert "1 times a client came back without its control variate and started at zero (c2)" in strategy.statement.incidents
    assert "Control variates were lost and start at zero: c2" in caplog.text
    assert [report.replies for report in strategy.rounds] == [4, 4, 4]
    # From zero, by its last message alone.
    sent = np.stack(rows_of(grid)).reshape(3, 4, -1)[2, 2]
    expected = -sent_control(grid, 3) - sent / DIVISOR[2]
    np.testing.assert_allclose(control_of(grid, 3, "c2"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kept", [np.zeros(17, np.float32), np.zeros(18), np.full(18, np.nan, np.float32)])
def test_a_damaged_vector_counts_as_none(kept):
    state = RecordDict({KEY: ArrayRecord({"a": Array(kept)})})
    assert load_vector(state, "a", 18) is None
    assert load_vector(state, "b", 18) is None


def test_a_numpy_client_finds_the_servers_vector_behind_the_model():
    """Flower gives it the arrays in order, without names; everything else is as with `client_app`, to the last bit."""
    strategy, recipe = pair({"noise_seed": 1})

    def client_fn(context):
        name = sorted(FOUR)[int(context.node_config["partition-id"])]
        arguments = {"recipe": recipe, "noise_seed": 3, "device": "cpu", "context": context}
        return LocalDPClient(model=linear(), clients={name: FOUR[name]}, **arguments).to_client()

    named = start(pair({"noise_seed": 1})[0], grid_of(recipe, FOUR, seeds=lambda context: 3), 3)
    assert torch.equal(start(strategy, LocalGrid(ClientApp(client_fn=client_fn), 4), 3), named)
    assert not strategy.statement.incidents


def test_few_levels_are_refused_since_errors_would_grow():
    strategy, recipe = pair(quantization_levels=4)  # sqrt(18) = 4.2
    with pytest.raises(ValueError, match=r"quantization_levels=4: .* must be at least 5 for 18 parameters"):
        start(strategy, grid_of(recipe, FOUR), 1)
    assert strategy.statement.num_charged_rounds == 0


def test_quantized_control_variates_are_those_of_the_quantized_message():
    strategy, recipe = pair(quantization_levels=40)
    grid = grid_of(recipe, FOUR)
    start(strategy, grid, 4)
    assert [report.replies for report in strategy.rounds] == [4] * 4
    means = np.mean([control_of(grid, node, name) for node, name in enumerate(sorted(FOUR), start=1)], axis=0)
    np.testing.assert_allclose(strategy.state.own.at(18), means, rtol=1e-3, atol=1e-3)


def test_a_client_refuses_vectors_that_its_method_does_not_work_with():
    strategy, recipe = pair()
    grid = grid_of(recipe, FOUR)
    start(strategy, grid, 1)
    message = next(one for one in grid.sent if one.metadata.message_type == "train")
    (config,) = [record for record in message.content.config_records.values() if ANSWER in record]
    answer, weights, zeros = json.loads(config[ANSWER]), linear()[0].weight.detach().numpy(), np.zeros(18, np.float32)
    assert answer["ask"]["vectors"] == {"control": None}
    client = LocalDPClient(model=linear(), clients={"c0": FOUR["c0"]}, recipe=DPFedPAQRecipe(**BOTH), context=context_of())
    with pytest.raises(ValueError, match=r"vectors=\['control'\] came with the model: this method works with \[\]"):
        client.fit([weights, zeros], {ANSWER: json.dumps(answer | {"method": "dp-fedpaq"})})
    own = LocalDPClient(model=linear(), clients={"c0": FOUR["c0"]}, recipe=recipe, context=context_of())
    for names, vectors, why in (
        (None, [], r"vectors=\[\] came with the model: this method works with \['control'\]"),
        (None, [zeros], "the server's model has 2 arrays"),
        ({"control": None}, [], "vector 'control' is float32 of shape"),
        ({"control": None, "other": None}, [zeros] * 2, r"vectors=\['control', 'other'\] came with the model"),
        ({"control": None, "other": None}, [], "must be names of vectors that came with the model"),
        (["control"], [zeros], "Expected object, got array - at ask.vectors"),
        ({"control": [0.0] * 18}, [zeros], r"Expected null, got array - at ask.vectors\[...\]"),
        *(({"control": None}, [bad], "must be finite float32") for bad in (zeros[:17], np.zeros(18), zeros + np.float32(np.nan))),
    ):
        ask = {name: value for name, value in answer["ask"].items() if name != "vectors"}
        forged = json.dumps(answer | {"ask": ask | ({} if names is None else {"vectors": names})})
        with pytest.raises(ValueError, match=why):
            own.fit([weights, *vectors], {ANSWER: forged})
    assert not own.context.state  # nothing was charged

"""Texts of a server that a device writes to its own log, and sends back: one line each, and none without end."""

import json
import logging

import pytest

from flower_dp import wire
from flower_dp.clients import DPClient, FedSGDDPCRecipe, LocalDPClient, Training, model_arrays
from flower_dp.clients.local.agreement import why_not
from flower_dp.clients.reasons import Declined
from flower_dp.wire import Instruction, OwnAsk, Promise
from tests.asks import ask, config_of
from tests.local_grids import context_of, linear, records

BUDGET = FedSGDDPCRecipe(mechanism="laplace", clip_norm=0.5, epsilon=3.0, num_replies=3)
FORGED = "2 replies\nWARNING: client c0: its ledger was deleted\x1b[2J"


def test_terms_of_a_server_forge_no_line_of_a_devices_log(caplog: pytest.LogCaptureFixture) -> None:
    terms = BUDGET.terms("c0", records("c0"))
    asked = OwnAsk(weight=1.0, terms=FORGED + "x" * 10**6, noise_multiplier=1.0, number=1)
    with caplog.at_level(logging.WARNING, "flwr"):
        reason = why_not(terms, Promise(clip_norm=0.5, noise_multiplier=1.0), asked)
    assert reason is not None
    assert "are not this client's own" not in reason  # it was cut before
    for text in (reason, *caplog.messages):
        assert text.isprintable()
        assert len(text) < 2000
    assert terms.kind in caplog.text  # which the device's owner has to see


@pytest.mark.parametrize("key", ["k" * 10**6, "k\nWARNING: client c0: its ledger was deleted"], ids=["long", "two lines"])
@pytest.mark.parametrize("own", [False, True], ids=["shared noise", "own noise"])
def test_what_a_device_tells_of_a_forged_instruction_is_one_short_line(own: bool, key: str) -> None:
    clients = {"c0": records("c0")}
    if own:
        made = LocalDPClient(model=linear(), clients=clients, recipe=BUDGET, device="cpu", context=context_of())
    else:
        made = DPClient(model=linear(), clients=clients, training=Training(learning_rate=0.1), device="cpu")
    asked = Instruction(server_round=1, method=made.methods[0], clients=("c0",), ask=ask())
    table = json.loads(asked.to_json())
    table["ask"][key] = 1
    model = {name: array.numpy() for name, array in model_arrays(linear()).items()}
    for forged in (table, table | {"ask": {}, "method": key * 10}):
        with pytest.raises(Declined) as refused:
            made.answer(model, config_of(asked) | {wire.KEY: json.dumps(forged)})
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 600
    assert Declined("a\nb" * 10**6).reason.startswith("a ba b")
    assert len(Declined("a\nb" * 10**6).reason) == 500

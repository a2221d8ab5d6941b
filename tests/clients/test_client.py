"""The client: its policy, its clip, its noise, its answers, through both ways into Flower."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

import tests.grids  # noqa: F401 (messages need the identity that it sets)
from flower_dp import wire
from flower_dp.clients import ClientPolicy, DPClient, TensorRecords, Training, client_app
from flower_dp.clients.refusal_messages import Declined
from flower_dp.clients.reply.client_level import CLIENT_LEVEL
from flower_dp.core.compression import decode
from flower_dp.core.noise import lattice_step
from flower_dp.core.vectors import Layout
from flower_dp.wire import MESSAGE_API, NUMPY_CLIENT, Instruction, ReplyHeader
from tests.asks import GONE, answered, ask, config_of, forged, reasons, told
from tests.local_grids import TRAINING, Direct, context_of

# Of tests of noise in other files.
SIZE, FALSE_ALARM = 20_000, 1e-6


def _records(*rows: Any) -> TensorRecords:
    inputs = torch.tensor(np.array(rows), dtype=torch.float32)
    return TensorRecords(inputs=inputs, targets=torch.zeros(len(inputs)))


def _client(clients: dict[str, TensorRecords], **settings: Any) -> DPClient:
    size = next(iter(clients.values())).inputs.shape[1]
    return DPClient(model=Direct(size), clients=clients, training=TRAINING, device="cpu", **settings)


def _instruction(names: tuple[str, ...], *, size: int = 2, **changes: Any) -> Instruction:
    """What a server asks: noise on the clients if they are to add some or there is none at all, else its own."""
    arguments = {"server_round": 1, "method": "dp-fedsam"}
    arguments |= {name: changes.pop(name) for name in ("server_round", "method", "report_metrics") if name in changes}
    noise_std, multiplier = changes.get("noise_std", 0.0), changes.setdefault("noise_multiplier", 1.0)
    changes.setdefault("placement", "distributed" if noise_std or not multiplier else "central")
    changes.setdefault("noise_std", 0.0)
    return Instruction(clients=names, ask=ask(size=size, **changes), **arguments)


def _step(size: int, **changes: Any) -> float:
    """The step of the lattice of an instruction."""
    asked = _instruction(("a",), size=size, **changes).ask
    assert asked.step == lattice_step(
        asked.noise_std or asked.promise.noise_scale, clip_norm=asked.promise.clip_norm, dimension=size
    )
    return asked.step


def _fit(client: DPClient, names: tuple[str, ...], **changes: Any) -> tuple[np.ndarray, ReplyHeader]:
    size = client.model.layout.size
    instruction = _instruction(names, size=size, **changes)
    arrays, count, answer = client.fit([np.zeros(size, np.float32)], config_of(instruction))
    read = ReplyHeader.from_json(answer[wire.KEY], names)
    assert count == 1  # example counts are private
    assert list(answer) == [wire.KEY]
    return decode(wire.payload_of(ArrayRecord(arrays), read.payload, size), size), read


# Clip


@pytest.mark.parametrize("noise_multiplier", [0.0, 1.0])
def test_the_sum_is_of_clipped_updates(noise_multiplier: float) -> None:
    client = _client({"long": _records([30.0, 40.0]), "short": _records([0.5, -0.5])})
    total, answer = _fit(client, ("long", "short"), noise_multiplier=noise_multiplier)
    # The lattice takes less than a step off each of two clients' entries; without noise there is none.
    step = _step(2, noise_multiplier=noise_multiplier)
    assert bool(step) == bool(noise_multiplier)
    np.testing.assert_allclose(total, [0.6 + 0.5, 0.8 - 0.5], rtol=1e-6, atol=2 * step)
    assert (answer.refused, answer.metrics) == ({}, {})


def test_each_update_is_rounded_toward_zero_after_its_clip() -> None:
    """Not their sum: what one client moves it by must stay within the clip norm."""
    step = _step(2)
    assert step == 2.0**-10
    # 0.6 and 0.8 less the clip's margin are between steps 614 and 615, 819 and 820.
    total, _ = _fit(
        _client({"a": _records([30.0, 40.0]), "b": _records([-30.0, -40.0]), "c": _records([0.9 * step, -0.9 * step])}),
        ("a", "c"),
    )
    assert (total / step).tolist() == [614, 819]
    many = {f"{i}": _records([-0.9 * step, 1.9 * step]) for i in range(5)}
    total, _ = _fit(_client(many), tuple(many))
    assert (total / step).tolist() == [0, 5]


@pytest.mark.parametrize(("clip_norm", "noise_multiplier"), [(1e-3, 0.5), (1.0, 1e4), (10.0, 0.5)])
def test_one_client_moves_the_sum_by_at_most_the_clip_norm(clip_norm: float, noise_multiplier: float) -> None:
    data = {f"{i}": _records(np.random.default_rng(i).standard_normal(50) * 10.0 ** (i - 3)) for i in range(7)}
    names, arguments = tuple(data), {"clip_norm": clip_norm, "noise_multiplier": noise_multiplier}
    everyone, _ = _fit(_client(data), names, **arguments)
    for name in names:
        without, _ = _fit(_client(data), tuple(other for other in names if other != name), **arguments)
        # On the lattice the sums are exact, and so is their difference.
        alone, _ = _fit(_client(data), (name,), **arguments)
        np.testing.assert_array_equal(everyone.astype(np.float64) - without, alone)
        assert np.linalg.norm(alone.astype(np.float64)) <= clip_norm
    shorter = _step(50, **arguments) * math.sqrt(50)
    assert clip_norm * (1 - 1e-6) - shorter < np.linalg.norm(alone.astype(np.float64))  # of the last, which is the longest


@pytest.mark.parametrize("noise_multiplier", [0.0, 1.0])
def test_copies_of_a_record_do_not_weigh_more(noise_multiplier: float) -> None:
    once, _ = _fit(_client({"a": _records([0.3, 0.4])}), ("a",), noise_multiplier=noise_multiplier)
    often, _ = _fit(_client({"a": _records(*[[0.3, 0.4]] * 50)}), ("a",), noise_multiplier=noise_multiplier)
    np.testing.assert_allclose(once, often, rtol=1e-6)


# Noise


def test_seeded_noise_repeats_and_the_server_is_told() -> None:
    """Noise without a seed never does, whatever torch's and NumPy's own seeds are, and takes nothing of theirs."""
    for noise_seed in (7, None):
        draws = []
        for _ in range(3):
            torch.manual_seed(0)
            np.random.seed(0)  # noqa: NPY002
            state = torch.get_rng_state()
            client = _client({"a": _records(np.zeros(50))}, seed=0, noise_seed=noise_seed)
            total, answer = _fit(client, ("a",), noise_std=1.0)
            assert answer.seeded_noise == (noise_seed is not None)
            assert torch.equal(torch.get_rng_state(), state)
            draws.append(total.tobytes())
        assert len(set(draws)) == (3 if noise_seed is None else 1)


# Compression


@pytest.mark.parametrize(("placement", "match"), [("central", "must be 0, 1 and 0"), ("distributed", "does not go with")])
def test_nothing_is_chosen_by_size_before_the_servers_noise(placement: str, match: str) -> None:
    """A server that asks for it gets nothing."""
    with pytest.raises(ValueError, match=match):
        _fit(_client({"a": _records([0.5, 0.1, 0.2, 0.3])}), ("a",), keep_ratio=0.25, placement=placement)


# Who is in the sum


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
def test_a_client_with_data_that_explode_is_left_out_and_named(bad: float) -> None:
    training = Training(learning_rate=1.0, num_local_steps=2, loss=lambda outputs, targets: (-outputs * 1e3).mean())
    clients = {"good": _records([0.0001, 0.0]), "bad": _records([bad, 1.0]), "fine": _records([0.0, 0.0002])}
    client = DPClient(model=Direct(2), clients=clients, training=training, device="cpu")
    total, answer = _fit(client, tuple(clients))
    # Each entry is one client's, less a step of the lattice at most.
    np.testing.assert_allclose(total, [0.2, 0.4], rtol=1e-6, atol=_step(2))
    assert list(answer.refused) == ["bad"]
    assert "NaN or infinite" in answer.refused["bad"].reason


def test_a_client_that_cant_train_does_not_take_others_out_of_the_sum() -> None:
    nothing = TensorRecords(inputs=torch.zeros(0, 2), targets=torch.zeros(0))
    total, answer = _fit(_client({"a": _records([0.5, 0.0]), "bad": nothing}), ("a", "bad", "stranger"))
    assert total.tolist() == [0.5, 0.0]
    assert set(answer.refused) == {"bad", "stranger"}
    assert reasons(answer)["stranger"] == "not hosted here"


def test_metrics_leave_only_if_both_sides_agree() -> None:
    data = {"a": _records([0.5, 0.0])}
    for asked, allowed in ((False, False), (False, True), (True, False)):
        client = _client(data, policy=ClientPolicy(allow_metrics=allowed))
        assert _fit(client, ("a",), report_metrics=asked)[1].metrics == {}
    client = _client(data, policy=ClientPolicy(allow_metrics=True))
    assert set(_fit(client, ("a",), report_metrics=True)[1].metrics) == {"loss", "update-norm", "update-norm-squared"}


def test_only_losses_of_clients_in_the_sum_are_reported() -> None:
    """At weights 0 a client's loss is its target; the gradient of "bad" is 1e30 x 1e10, beyond float32."""
    training = Training(learning_rate=1.0, loss=lambda outputs, targets: (targets - 1e30 * outputs).mean())
    rows = {"good": (0.5, 2.0), "bad": (1e10, 7.0), "fine": (0.25, 3.0)}
    data = {name: TensorRecords(inputs=torch.tensor([[x, 0.0]]), targets=torch.tensor([y])) for name, (x, y) in rows.items()}
    policy = ClientPolicy(allow_metrics=True)
    client = DPClient(model=Direct(2), clients=data, training=training, device="cpu", policy=policy)
    _, answer = _fit(client, tuple(data), report_metrics=True)
    assert list(answer.refused) == ["bad"]
    assert answer.metrics["loss"] == 5.0
    # The norms of "good" and "fine" are 0.5e30 and 0.25e30.
    assert answer.metrics["update-norm"] == pytest.approx(0.75e30)
    assert answer.metrics["update-norm-squared"] == pytest.approx(0.3125e60)


# Policy and instruction


def test_a_client_without_terms_of_its_own_refuses_to_be_private_on_its_own() -> None:
    """It would send a row without noise, since nobody else is to add any."""
    text = forged(_instruction(("a",)), placement="local", step=GONE, **told("a"))
    with pytest.raises(Declined, match="placement='local': this client has no terms of its own"):
        _client({"a": _records([0.5, 0.0])}).fit([np.zeros(2, np.float32)], config_of(text))


# The lattice that the server asks for


@pytest.mark.parametrize(
    ("step", "arguments", "match"),
    [
        (0.0, {}, "must be a power of two, at most 1/1024 of the noise scale 0.5"),
        (2.0**-10, {}, "must be a power of two, at most 1/1024"),  # twice too coarse for the share
        (1.5 * 2.0**-12, {}, "must be a power of two"),
        (2.0**-12 * (1 + 2.0**-52), {}, "must be a power of two"),
        (2.0**-48, {}, "is too small for clip_norm=1 and noise of scale 0.5"),
        (2.0**-1074, {}, "is too small"),
        # Sums of so many clip norms would not be exact on it.
        (2.0**-29, {"clip_norm": 2.0**20, "noise_multiplier": 2.0**-21}, "is too small for clip_norm="),
        # Where the server adds the noise: a row that is clipped to 0.5 had entries that are infinite.
        (2.0**-49, {"noise_std": 0.0}, "is too small for clip_norm="),
        (2.0**-1028, {"noise_std": 0.0}, "is too small for clip_norm="),
    ],
)
def test_a_lattice_that_the_noise_does_not_hide_is_refused(step: float, arguments: dict[str, float], match: str) -> None:
    """Too coarse, and the noise is seen on it; too fine, and the sums are not exact."""
    client, honest = _client({"a": _records([0.25, 0.5])}), _instruction(("a",), **{"noise_std": 0.5} | arguments)
    client.fit([np.zeros(2, np.float32)], config_of(honest))
    with pytest.raises(Declined, match=match):
        client.fit([np.zeros(2, np.float32)], config_of(forged(honest, step=step)))


def test_servers_that_say_nothing_are_refused() -> None:
    client = _client({"a": _records([0.5, 0.0])})
    for config in ({}, {"server-round": 1}, {wire.KEY: "{}"}):
        with pytest.raises(ValueError, match=r"flower-dp|flower_dp"):
            client.fit([np.zeros(2, np.float32)], config)


@pytest.mark.parametrize("parameters", [[], [np.zeros(2, np.float32)] * 2, [np.zeros(3, np.float32)], [np.zeros(2, np.int64)]])
def test_models_that_do_not_fit_are_refused(parameters: list[np.ndarray]) -> None:
    instruction = _instruction(("a",))
    with pytest.raises(ValueError, match=r"model|float"):
        _client({"a": _records([0.5, 0.0])}).fit(parameters, config_of(instruction))


# Both ways into Flower


DATA = {"a": _records(np.arange(30.0) / 100), "b": _records(np.ones(30))}


def _make(context: Context) -> DPClient:
    return _client(DATA, noise_seed=31)


APPS = {
    "message API": (client_app(_make), MESSAGE_API),
    "NumPyClient": (ClientApp(client_fn=lambda context: _make(context).to_client()), NUMPY_CLIENT),
}


def _record(vector: np.ndarray, layout: Layout) -> ArrayRecord:
    return wire.Model(names=layout.names, layout=layout, vector=vector, frozen={}).record(vector)


def _reply(name: str, instruction: Instruction, vector: np.ndarray | None = None) -> tuple[list[np.ndarray], ReplyHeader]:
    app, record_names = APPS[name]
    layout = _client(DATA).model.layout
    record = _record(np.zeros(30, np.float32) if vector is None else vector, layout)
    if record_names is NUMPY_CLIENT:
        record = ArrayRecord(record.to_numpy_ndarrays())
    reply = app(wire.train_message(1, record_names, record, {}, instruction), context_of())
    metrics = {key: value for part in reply.content.metric_records.values() for key, value in part.items()}
    assert metrics in ({}, {"num_examples": 1})  # nothing else about the data
    answer = wire.answer_of(reply.content, instruction.clients)
    assert answer is not None
    payload = wire.payload_of(wire.arrays_of(reply.content), answer.payload, 30)
    return list(payload.arrays), answer


@pytest.mark.parametrize("keep_ratio", [1.0, 0.2])
def test_both_ways_into_flower_give_the_same_payload(keep_ratio: float) -> None:
    instruction = _instruction(("a", "b"), noise_std=0.3, keep_ratio=keep_ratio)
    (one, said), (other, also) = (_reply(name, instruction) for name in APPS)
    assert said == also
    assert said.seeded_noise
    assert said.refused == {}
    assert [array.tobytes() for array in one] == [array.tobytes() for array in other]


def test_the_query_names_the_clients_and_the_methods() -> None:
    message = Message(RecordDict(), 1, "query")
    reply = client_app(_make)(message, context_of())
    (config,) = reply.content.config_records.values()
    hosted = wire.hosted_of(reply.content, most_names=2)
    assert hosted == wire.HostedClients(names=("a", "b"), methods=frozenset({*CLIENT_LEVEL, wire.EVALUATION}))
    assert set(json.loads(str(config[wire.KEY]))) == {"protocol", "clients", "methods"}


def test_the_message_api_matches_arrays_by_name() -> None:
    app, _ = APPS["message API"]
    instruction = _instruction(("a",))
    record = ArrayRecord({"other": _record(np.zeros(30, np.float32), _client(DATA).model.layout)["weight"]})
    with pytest.raises(ValueError, match=r"has arrays \['other'\], this client's \['weight'\]"):
        answered(app(wire.train_message(1, MESSAGE_API, record, {}, instruction), context_of()))


def test_evaluation_messages_of_other_servers_are_not_answered() -> None:
    arrays = _record(np.zeros(30, np.float32), _client(DATA).model.layout)
    message = Message(RecordDict({"arrays": arrays, "config": ConfigRecord({})}), 1, "evaluate")
    with pytest.raises(ValueError, match="works under a flower_dp strategy only"):
        answered(client_app(_make)(message, context_of()))

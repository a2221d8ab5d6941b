"""`privacy_mod` in a private evaluation: a stock app's own metrics leave as one protected vector, and in no other way."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

import tests.grids  # noqa: F401 - which gives messages a run
from flower_dp import wire
from flower_dp.clients import ClientPolicy, EvaluationBudget, NbAFLTerms, privacy_mod
from flower_dp.clients.account import KEY, LEDGER_PATH
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.wire import MESSAGE_API, NUMPY_CLIENT, Instruction
from tests.asks import ANSWERED, GONE, Evaluated, answered, evaluated, forged, own_instruction, replace, saying, told
from tests.asks import ask as made
from tests.local_grids import context_of
from tests.stock import arrays

BOUNDS = {"loss": 4.0, "acc": 1.0}
TOLD = {"loss": 8.0, "acc": 0.3, "num-examples": 1234, "age": 57.0}
# (loss clipped to 4) / 4, accuracy, 1; over the square root of 3
CLIPPED = np.array([1.0, 0.3, 1.0]) / math.sqrt(3)
TERMS = NbAFLTerms(clip_norm=1.5, paper_epsilon=0.8, delta=0.01, uplink_exposures=3, min_records=8, num_records=8)
BUDGET = EvaluationBudget(epsilon=4.0, num_evaluations=2)


class Stock(NumPyClient):
    def evaluate(self, parameters: Any, config: Any) -> Any:
        return TOLD["loss"], 1234, {"acc": TOLD["acc"], "age": 57.0}


def app_of(mod: Any, metrics: Any = TOLD, *, seen: list[Any] | None = None) -> ClientApp:
    """An app that notes what its account has paid for when it is called."""
    app = ClientApp(mods=[mod])

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        if seen is not None:
            seen.append(list(context.state[KEY]["replies"]) if KEY in context.state else None)
        if isinstance(metrics, Exception):
            raise metrics
        if metrics is None:
            return Message(Error(code=7, reason="Jane Doe"), reply_to=message)
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


def numpy_app(mod: Any) -> ClientApp:
    return ClientApp(client_fn=lambda context: Stock().to_client(), mods=[mod])


def ask_for(placement: str = "central", noise_std: float = 0.0) -> Instruction:
    asked = made(placement=placement, noise_std=noise_std, metrics=MetricBounds(bounds=BOUNDS), size=3)
    return Instruction(server_round=1, method=wire.EVALUATION, clients=("a",), ask=asked)


def own(budget: EvaluationBudget = BUDGET, least: float | None = None, names: Sequence[str] = ("acc",)) -> Instruction:
    """What a server asks of a client with terms of its own."""
    terms, bounds = budget.terms("a", TERMS.terms()), MetricBounds(bounds=dict.fromkeys(names, 1.0))
    instruction = own_instruction(wire.EVALUATION, {"a": terms}, weight=0.5, metrics=bounds)
    if least is None:
        return instruction
    own = {"a": replace(instruction.ask.own["a"], noise_multiplier=least)}
    return replace(instruction, ask=replace(instruction.ask, own=own))


def mod_of(**arguments: Any) -> Any:
    """A mod with terms of its own."""
    return privacy_mod(**{"name": "a", "terms": TERMS, "evaluation": BUDGET} | arguments)


def message_of(instruction: Instruction | str, record_names: Any = MESSAGE_API) -> Message:
    if isinstance(instruction, str):
        return saying(message_of(ask_for(), record_names), instruction)
    return wire.evaluate_message(1, record_names, arrays(w=np.zeros(3, np.float32)), {"lr": 0.5}, instruction)


def ask(app: ClientApp, instruction: Instruction, record_names: Any = MESSAGE_API, context: Context | None = None) -> Evaluated:
    reply = answered(app(message_of(instruction, record_names), context or context_of()))
    # Nothing but the answer: no metric, no example count, no record of the app's.
    assert set(reply.content) == {wire.KEY}
    assert set(reply.content[wire.KEY]) == {wire.KEY}
    text = reply.content[wire.KEY][wire.KEY]
    assert set(json.loads(text)) == ANSWERED
    return evaluated(text, instruction)


@pytest.mark.parametrize(
    ("make", "record_names"),
    [
        (app_of, MESSAGE_API),
        (numpy_app, NUMPY_CLIENT),
        (lambda mod: app_of(mod, {"loss": math.nan, "acc": 0.3}), MESSAGE_API),  # a NaN counts as the bound
    ],
    ids=["message api", "numpy client", "NaN"],
)
def test_what_leaves_is_the_clipped_vector_of_the_metrics_that_are_named(make: Any, record_names: Any) -> None:
    answer = ask(make(privacy_mod(name="a")), ask_for(), record_names)
    assert answer.total == pytest.approx(CLIPPED, abs=0.01)  # on the lattice of the noise, toward zero
    assert np.linalg.norm(answer.total) <= 1
    assert (answer.refused, answer.seeded_noise) == ({}, False)


def test_the_device_adds_its_share_of_the_noise_afresh_every_time() -> None:
    """Std of 1,500 draws: 5 % off with a probability below 1e-6; the fixed seeds of the draws make it none."""
    draws = [ask(app_of(privacy_mod(name="a", noise_seed=seed)), ask_for("distributed", 0.25)).total for seed in range(500)]
    assert np.std(np.array(draws) - CLIPPED) == pytest.approx(0.25, rel=0.025)
    mod = privacy_mod(name="a")
    first, second = (ask(app_of(mod), ask_for("distributed", 0.25)).total for _ in range(2))
    assert not np.any(first == second)


SHARE = ask_for("distributed", 0.4)
AS_TRAINING = json.dumps({**json.loads(ask_for().to_json()), "method": "dp-fedavg"})
TRAINING = Instruction(server_round=1, method="dp-fedavg", clients=("a",), ask=made())
OWN_TERMS = "must be 'local', since this client adds all noise by its own terms"


@pytest.mark.parametrize(
    ("arguments", "instruction", "config", "match"),
    [
        ({"allow_evaluation": False}, ask_for(), {}, "allow_evaluation=False"),
        ({"min_evaluation_noise_std": 0.5}, SHARE, {}, "noise_std=0.4 of an evaluation"),
        ({}, forged(SHARE, noise_std=0.0), {}, "noise_std=0: does not go with noise_multiplier=1"),
        ({}, forged(ask_for(), clip_norm=10.0), {}, "clip_norm=10: must be 1"),
        ({}, forged(ask_for(), metrics=GONE), {}, "metrics must be set for"),
        ({}, AS_TRAINING, {}, "metrics must be set for method='private-evaluation' and for no other"),
        ({}, TRAINING, {}, "method='dp-fedavg': a message to evaluate must be of 'private-evaluation'"),
        ({}, forged(ask_for(), placement="local", step=GONE, **told("a")), {}, "has no terms of its own"),
        ({}, ask_for(), {LEDGER_PATH: "ledger.sqlite"}, "keeps no account"),
        ({"terms": TERMS}, ask_for(), {}, f"placement='central': {OWN_TERMS}"),
        ({"terms": TERMS}, SHARE, {}, f"placement='distributed': {OWN_TERMS}"),
    ],
)
@pytest.mark.parametrize("allow_metrics", [False, True])
def test_what_a_device_does_not_allow_never_reaches_its_app(
    arguments: Any, instruction: Instruction | str, config: Any, match: str, allow_metrics: bool
) -> None:
    seen: list[Any] = []
    limits, context = arguments | {"allow_metrics": allow_metrics}, context_of(**config)
    own = {"terms": limits.pop("terms"), "evaluation": BUDGET} if "terms" in limits else {}
    app = app_of(privacy_mod(name="a", policy=ClientPolicy(**limits), **own), seen=seen)
    with pytest.raises(ValueError, match=f"^{wire.DECLINED}: .*{match}"):
        answered(app(message_of(instruction), context))
    assert seen == []
    assert KEY not in context.state


@pytest.mark.parametrize("metrics", [KeyError("Jane Doe"), None, {"acc": 0.3}, {"loss": [1.0], "acc": 0.3}])
def test_what_goes_wrong_in_the_app_stays_on_the_device(metrics: Any) -> None:
    answer = ask(app_of(privacy_mod(name="a"), metrics), ask_for("distributed", 0.25))
    assert not answer.total.any()
    assert answer.refused["a"] == "training failed; the node's own log says why"


# With terms of its own: full noise, own budget, own account


def test_the_row_is_the_clipped_metric_with_full_laplace_noise() -> None:
    """4,000 entries: the relative error of their std is sqrt(5 / 4 / 4000) = 1.8 %, of fixed seeds; 9 % off is rejected."""
    names = [f"m{index}" for index in range(16)]
    metrics, instruction = dict.fromkeys(names, 7.0), own(names=names)
    rows = np.stack([ask(app_of(mod_of(noise_seed=seed), metrics), instruction).total for seed in range(250)])
    # Replacing the client moves the row by 2; two evaluations for 4: Laplace of scale 1, with the weight 0.5 on the row.
    assert np.std(rows) == pytest.approx(0.5 * math.sqrt(2) * 1.0, rel=0.09)
    # With hardly any noise.
    budget = EvaluationBudget(epsilon=1e6, num_evaluations=1)
    row = ask(app_of(mod_of(evaluation=budget), metrics), own(budget, names=names)).total
    assert row == pytest.approx(0.5 / 16, abs=1e-4)


def test_it_is_charged_before_the_app_is_called_and_refused_when_the_budget_is_spent() -> None:
    seen: list[Any] = []
    state = RecordDict()
    answers = [ask(app_of(mod_of(), {"acc": 0.5}, seen=seen), own(), context=context_of(state)) for _ in range(3)]
    assert [bool(answer.refused) for answer in answers] == [False, False, True]
    assert "its budget is spent" in answers[2].refused["a"]
    assert seen == [[1], [2]]
    assert list(state[KEY]["clients"]) == ["a, evaluation"]


@pytest.mark.parametrize(
    ("arguments", "changes", "match"),
    [
        ({"evaluation": None}, {}, "evaluation=None: this client has no budget of private evaluations"),
        ({"evaluation": EvaluationBudget(epsilon=4.0, num_evaluations=1)}, {}, "are not this client's own"),
        ({}, {"least": 1.1}, "by this client's own budget it is less"),
        ({"policy": ClientPolicy(allow_evaluation=False)}, {}, "allow_evaluation=False"),
        ({"policy": ClientPolicy(min_evaluation_noise_std=2.0)}, {}, "own terms have less noise"),
    ],
)
def test_what_its_own_terms_do_not_allow_never_reaches_the_app(arguments: Any, changes: Any, match: str) -> None:
    seen: list[Any] = []
    answer = ask(app_of(mod_of(**arguments), {"acc": 0.5}, seen=seen), own(**changes))
    assert match in answer.refused["a"]
    assert not answer.total.any()
    assert seen == []


@pytest.mark.parametrize("reported", [KeyError("Jane Doe"), {"f1": 0.5}, {"acc": math.nan}])
def test_no_record_decides_whether_the_client_replies(reported: Any) -> None:
    answer = ask(app_of(mod_of(), reported), own())
    assert answer.refused == {}
    assert answer.total.any()


def test_an_app_evaluates_for_no_client_of_another_node() -> None:
    answer = ask(app_of(privacy_mod(name="a")), replace(ask_for(), clients=("b", "c")))
    assert answer.refused == {"b": "not hosted here", "c": "not hosted here"}
    assert not answer.total.any()

"""`privacy_mod` with terms of its own in a private evaluation: full noise, own budget, own account."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import tests.grids  # noqa: F401 - which gives messages a run
from flower_dp import wire
from flower_dp.clients import ClientPolicy, EvaluationBudget, NbAFLTerms, privacy_mod
from flower_dp.clients.account import KEY
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.wire import MESSAGE_API, Instruction
from tests.asks import ANSWERED, Evaluated, answered, evaluated, own_ask
from tests.asks import ask as made
from tests.stock import arrays, shifted, stock_app

TERMS = NbAFLTerms(clip_norm=1.5, paper_epsilon=0.8, delta=0.01, uplink_exposures=3, min_records=8, num_records=8)
BUDGET = EvaluationBudget(epsilon=4.0, num_evaluations=2)


def app_of(mod: Any, reported: Any, *, seen: list[Any] | None = None) -> ClientApp:
    app = stock_app(shifted(lambda node: 0.0), mods=[mod])

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        if seen is not None:
            seen.append(list(context.state[KEY]["replies"]) if KEY in context.state else None)
        if isinstance(reported, Exception):
            raise reported
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 8, **reported})}), reply_to=message)

    return app


def instruction_of(budget: EvaluationBudget = BUDGET, least: float | None = None, names: Sequence[str] = ("acc",)) -> Instruction:
    terms = budget.terms("a", TERMS.terms())
    multiplier = terms.release.mechanism.noise_multiplier if least is None else least
    asked = own_ask({"a": (0.5, terms.kind, multiplier)}, metrics=MetricBounds(bounds=dict.fromkeys(names, 1.0)))
    return Instruction(server_round=1, method=wire.EVALUATION, clients=("a",), ask=asked)


def context_of(state: Any = None, **config: Any) -> Context:
    return Context(run_id=1, node_id=1, node_config=config, state=RecordDict() if state is None else state, run_config={})


def ask(app: ClientApp, instruction: Instruction, context: Context | None = None) -> Evaluated:
    message = wire.evaluate_message(1, MESSAGE_API, arrays(w=np.zeros(3, np.float32)), {}, instruction)
    reply = answered(app(message, context or context_of()))
    assert set(reply.content) == {wire.KEY}
    text = reply.content[wire.KEY][wire.KEY]
    assert set(json.loads(text)) == ANSWERED
    return evaluated(text, instruction)


def mod(budget: EvaluationBudget | None = BUDGET, **arguments: Any) -> Any:
    return privacy_mod(name="a", terms=TERMS, evaluation=budget, **arguments)


def test_the_row_is_the_clipped_metric_with_full_laplace_noise() -> None:
    """4,000 entries: the relative error of their std is sqrt(5 / 4 / 4000) = 1.8 %, of fixed seeds; 9 % off is rejected."""
    names = [f"m{index}" for index in range(16)]
    metrics, instruction = dict.fromkeys(names, 7.0), instruction_of(names=names)
    rows = np.stack([ask(app_of(mod(noise_seed=seed), metrics), instruction).total for seed in range(250)])
    # Replacing the client moves the row by 2; two evaluations for 4: Laplace of scale 1, with the weight 0.5 on the row.
    assert np.std(rows) == pytest.approx(0.5 * math.sqrt(2) * 1.0, rel=0.09)
    assert np.std(rows, axis=0) == pytest.approx(0.5 * math.sqrt(2), rel=0.4)
    # With hardly any noise.
    budget = EvaluationBudget(epsilon=1e6, num_evaluations=1)
    row = ask(app_of(mod(budget), metrics), instruction_of(budget, names=names)).total
    assert row == pytest.approx(0.5 / 16, abs=1e-4)


def test_it_is_charged_before_the_app_is_called_and_refused_when_the_budget_is_spent() -> None:
    seen: list[Any] = []
    state = RecordDict()
    answers = [ask(app_of(mod(), {"acc": 0.5}, seen=seen), instruction_of(), context_of(state)) for _ in range(3)]
    assert [bool(answer.refused) for answer in answers] == [False, False, True]
    assert "its budget is spent" in answers[2].refused["a"]
    assert seen == [[1], [2]]
    assert list(state[KEY]["clients"]) == ["a, evaluation"]


@pytest.mark.parametrize(
    ("arguments", "changes", "match"),
    [
        ({"budget": EvaluationBudget(epsilon=4.0, num_evaluations=1)}, {}, "are not this client's own"),
        ({}, {"least": 1.1}, "by this client's own budget it is less"),
        ({"policy": ClientPolicy(allow_evaluation=False)}, {}, "allow_evaluation=False"),
        ({"policy": ClientPolicy(min_evaluation_noise_std=2.0)}, {}, "own terms have less noise"),
    ],
)
def test_what_its_own_terms_do_not_allow_never_reaches_the_app(arguments: Any, changes: Any, match: str) -> None:
    seen: list[Any] = []
    answer = ask(app_of(mod(**arguments), {"acc": 0.5}, seen=seen), instruction_of(**changes))
    assert match in answer.refused["a"]
    assert not answer.total.any()
    assert seen == []


@pytest.mark.parametrize(("placement", "noise_std"), [("central", 0.0), ("distributed", 0.5)])
def test_a_client_with_terms_sends_no_metrics_that_another_is_to_noise(placement: str, noise_std: float) -> None:
    seen: list[Any] = []
    asked = made(placement=placement, noise_std=noise_std, metrics=MetricBounds(bounds={"acc": 1.0}), size=2)
    instruction, context = Instruction(server_round=1, method=wire.EVALUATION, clients=("a",), ask=asked), context_of()
    with pytest.raises(ValueError, match=f"declined: placement='{placement}': this client's messages are private on its own"):
        ask(app_of(mod(), {"acc": 0.5}, seen=seen), instruction, context)
    assert seen == []
    assert KEY not in context.state


@pytest.mark.parametrize("reported", [KeyError("Jane Doe"), {"f1": 0.5}, {"acc": math.nan}])
def test_no_record_decides_whether_the_client_replies(reported: Any) -> None:
    answer = ask(app_of(mod(), reported), instruction_of())
    assert answer.refused == {}
    assert answer.total.any()

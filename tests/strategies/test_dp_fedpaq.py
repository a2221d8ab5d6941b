"""DP-FedPAQ from server to client and back: noise, charges, bits, words. Statistical tests state their false-alarm rate."""

import json
import math
from typing import Any

import pytest
import torch
from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent
from flwr.app import Array
from scipy import stats
from torch import nn

from flower_dp.clients import DPFedPAQRecipe, TensorRecords, model_arrays
from flower_dp.core.compression import qsgd_bytes
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.privacy import accounting
from flower_dp.privacy.dp_fedpaq import (
    SENSITIVITIES,
    FedPAQSteps,
    expected_replies,
    paper_epsilon,
    update_terms,
    violated_conditions,
)
from flower_dp.strategies import DPFedPAQ
from flower_dp.wire import KEY
from tests.closed_forms import assert_std
from tests.local_grids import NAMES, grid_of, models_of, records, start

STEPS: dict[str, Any] = {"learning_rate": 0.5, "num_local_steps": 2, "batch_size": 2, "clip_norm": 0.5, "decay_iterations": 4.0}
OWN = {"per-step": {}, "clip-update": {"update_clip_norm": 0.2}, "convex-glm": {"smoothness": 4.0}}
FOUR = {name: records(name) for name in NAMES[:4]}


def steps_of(sensitivity: str = "per-step", **arguments: Any) -> FedPAQSteps:
    return FedPAQSteps(**STEPS | {"sensitivity": sensitivity} | OWN[sensitivity] | arguments)


def pair(steps: FedPAQSteps | None = None, *, server: Any = None, **arguments: Any) -> tuple[DPFedPAQ, DPFedPAQRecipe]:
    """A strategy for the four clients, all in every round, and the recipe with the same numbers."""
    both = {"steps": steps or steps_of(), "epsilon": 2.0, "delta": 1e-5, "num_replies": 3} | arguments
    recipe = DPFedPAQRecipe(**both)
    both.pop("loss", None)
    options = {"sampling": FullSampling(), "num_clients": 4, "num_records": 8} | (server or {})
    return DPFedPAQ(**both, **options), recipe


# How far one record moves an update


def test_sensitivities_by_hand():
    """eta 0.5, E 2, b 2, C 0.5, S 0.2: 2 S, 2 eta C (E - 1 + 1 / b), 2 eta C / b."""
    assert steps_of("clip-update").update_sensitivity(1) == pytest.approx(0.4)
    assert steps_of("per-step").update_sensitivity(1) == pytest.approx(0.75)
    # One step is one step of DP-SGD.
    assert steps_of("per-step", num_local_steps=1).update_sensitivity(1) == pytest.approx(0.25)
    assert steps_of("convex-glm").update_sensitivity(1) == pytest.approx(0.25, rel=2e-5)
    assert steps_of("convex-glm").update_sensitivity(1) > 0.25


@pytest.mark.parametrize("sensitivity", SENSITIVITIES)
def test_sensitivity_and_noise_follow_the_step_size(sensitivity):
    """eta_k = eta_0 / (1 + k E / 4): half of it after two rounds of two steps."""
    steps = steps_of(sensitivity)
    assert [steps.step_size(one) for one in (1, 2, 3)] == pytest.approx([0.5, 0.5 / 1.5, 0.25])
    assert steps.update_sensitivity(3) == pytest.approx(steps.update_sensitivity(1) / 2)
    assert steps_of(sensitivity, decay_iterations=None).step_size(50) == 0.5


def still(outputs: int) -> nn.Module:
    model = nn.Linear(20_000 // outputs, outputs, bias=False)
    nn.init.zeros_(model.weight)
    return model


def still_records(outputs: int) -> TensorRecords:
    return TensorRecords(inputs=torch.zeros(8, 20_000 // outputs), targets=torch.zeros(8, dtype=torch.int64))


@pytest.mark.slow
@pytest.mark.parametrize("sensitivity", SENSITIVITIES)
def test_the_noise_of_every_round_is_what_its_sensitivity_asks(sensitivity):
    """Rounds 1 and 3; E b of n is 4 of 8. The second source of the multiplier is the accountant's own answer for its event."""
    strategy, recipe = pair(steps_of(sensitivity), server={"num_clients": 1}, quantization_levels=None)
    grid = grid_of(recipe, {"c0": still_records(2)}, model=lambda: still(2))
    models = models_of(strategy, grid, model_arrays(still(2)), 3)
    multiplier = strategy.rules.books.terms["c0"].release.mechanism.noise_multiplier
    event = accounting.repeated(SampledWithoutReplacementDpEvent(8, 4, GaussianDpEvent(multiplier)), 3)
    assert accounting.epsilon(event, delta=1e-5, relation="replace-one").epsilon == pytest.approx(2.0, rel=1e-3)
    base = {"per-step": 0.75, "clip-update": 0.4, "convex-glm": 0.25}[sensitivity]
    for server_round, shrink in ((1, 1.0), (3, 0.5)):
        assert_std(models[server_round] - models[server_round - 1], multiplier * base / 2 * shrink)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "client", "message"),
    [
        ({"server": {"num_records": 9}, "calibration": "paper"}, {"calibration": "paper"}, "are not this client's own"),
        ({"calibration": "paper"}, {"steps": steps_of(num_local_steps=3), "calibration": "paper"}, "this client's own"),
        ({}, {"epsilon": 8.0}, "by this client's own budget"),
        ({"epsilon": 8.0}, {"epsilon": 8.0, "calibration": "paper"}, "by this client's own budget"),
    ],
    ids=["data size", "steps", "budget", "calibration"],
)
def test_a_client_with_other_terms_or_less_noise_than_the_server_states_does_not_reply(server, client, message):
    with pytest.raises(RuntimeError, match=message):
        start(pair(**server)[0], grid_of(pair(**client)[1], FOUR), 1)


# Bits


def logistic() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def images(name: str) -> TensorRecords:
    rng = torch.Generator().manual_seed(NAMES.index(name))
    return TensorRecords(inputs=torch.randn(8, 784, generator=rng), targets=torch.randint(10, (8,), generator=rng))


IMAGES = {name: images(name) for name in NAMES[:4]}


def answers(grid: Any) -> list[Any]:
    return [record for reply in grid.received for record in reply.content.config_records.values() if KEY in record]


def test_bytes_per_client_are_told_whatever_the_hosting():
    """A worker that hosts all four sends one sum of floats, and says what each would have sent."""
    answer = []
    for nodes in (4, 2, 1):
        strategy, recipe = pair(quantization_levels=1, server={"noise_seed": 1})
        grid = grid_of(recipe, IMAGES, model=logistic, num_nodes=nodes, seeds=lambda context: 7)
        model = start(strategy, grid, 1, model=logistic)
        (report,) = strategy.rounds
        answer.append((report.bytes_per_client, model))
        assert report.bytes_per_client <= qsgd_bytes(7850, 1)
        kinds = {json.loads(record[KEY])["payload"]["encoding"] for record in answers(grid)}
        assert kinds == ({"qsgd"} if nodes == 4 else {"top-k"})
    assert answer[0][0] == answer[1][0] == answer[2][0]
    for _, model in answer[1:]:
        torch.testing.assert_close(model, answer[0][1], rtol=1e-5, atol=1e-6)


def test_the_quantizers_draws_are_secret():
    """Without noise, and with one public seed, two runs differ: all that is drawn at random is drawn anew."""
    models = []
    for _ in range(2):
        strategy, recipe = pair(epsilon=math.inf, quantization_levels=1, steps=steps_of(num_local_steps=4))
        models.append(start(strategy, grid_of(recipe, FOUR), 1))
        assert not strategy.statement.private
    assert not torch.equal(*models)


def test_an_honest_quantized_row_is_never_refused_and_a_longer_one_is():
    strategy, recipe = pair(quantization_levels=1)
    start(strategy, grid_of(recipe, IMAGES, model=logistic), 3, model=logistic)
    assert [report.replies for report in strategy.rounds] == [4, 4, 4]

    def inflate(node, reply):
        record = next(iter(reply.content.array_records.values()))
        (name,) = record
        coded = record[name].numpy().copy()
        coded[:4].view("<f4")[:] *= 100  # the scale of its levels
        record[name] = Array(coded)
        return [reply]

    other, recipe = pair(quantization_levels=1)
    with pytest.raises(RuntimeError, match="more than 2 times that of any honest one"):
        start(other, grid_of(recipe, IMAGES, model=logistic, tamper=inflate), 1, model=logistic)


# Who takes part, how often


def test_replies_that_a_budget_pays_for():
    assert expected_replies(100, 10, 100, at_random=False) == 10
    assert expected_replies(101, 10, 100, at_random=False) == 11
    assert expected_replies(3, 4, 4, at_random=True) == 3
    replies = expected_replies(100, 10, 100, at_random=True)
    assert stats.binom.sf(replies, 100, 0.1) <= 0.01 < stats.binom.sf(replies - 1, 100, 0.1)
    assert expected_replies(0, 10, 100, at_random=True) == 1


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [FixedSizeSampling(cohort_size=2), RoundRobinSampling(cohort_size=2)])
def test_the_number_of_replies_follows_the_rounds(sampling):
    strategy = DPFedPAQ(steps=steps_of(), sampling=sampling, num_clients=4, num_records=8, epsilon=0.5, delta=1e-5)
    replies = expected_replies(6, 2, 4, at_random=isinstance(sampling, FixedSizeSampling))
    _, recipe = pair(num_replies=replies, epsilon=0.5)
    start(strategy, grid_of(recipe, FOUR), 6)
    assert {terms.num_replies for terms in strategy.rules.books.terms.values()} == {replies}
    assert strategy.statement.private


# Words


@pytest.mark.parametrize("sensitivity", SENSITIVITIES)
def test_the_statement_names_the_sensitivity(sensitivity):
    strategy, _ = pair(steps_of(sensitivity))
    text = " ".join(str(strategy.statement).split())
    assert f"The sensitivity of an update is proved by {sensitivity!r}: " in text
    assert not any(other in text for other in set(SENSITIVITIES) - {sensitivity})
    assert "4 records at random, without replacement" in text
    assert strategy.statement.noise["update_sensitivity_of_round_1"] == steps_of(sensitivity).update_sensitivity(1)


# The paper's noise


@pytest.mark.parametrize("sensitivity", SENSITIVITIES)
def test_the_papers_noise_is_that_of_its_equation(sensitivity):
    """Eq. 17 by hand, gamma 4 / 8, for one reply, whatever their number; it is no budget, so the terms have none."""
    steps = steps_of(sensitivity)
    terms = update_terms(steps=steps, epsilon=0.3, delta=1e-5, num_replies=3, num_records=8, calibration="paper")
    assert terms.release.sensitivity == pytest.approx(2 * steps.sum_norm)
    variance = 2 * steps.update_sensitivity(1) ** 2 * math.log(1.25 / (1e-5 / 0.5)) / (0.3 / (2 * 0.5)) ** 2
    assert terms.release.noise_scale * STEPS["learning_rate"] / STEPS["batch_size"] == pytest.approx(math.sqrt(variance))
    assert terms.event == SampledWithoutReplacementDpEvent(8, 4, GaussianDpEvent(terms.release.mechanism.noise_multiplier))
    assert (terms.num_replies, terms.epsilon) == (3, math.inf)
    more = update_terms(steps=steps, epsilon=0.3, delta=1e-5, num_replies=30, num_records=8, calibration="paper")
    assert more.release == terms.release
    silent = update_terms(steps=steps, epsilon=math.inf, delta=1e-5, num_replies=3, num_records=8, calibration="paper")
    assert silent.release.noise_scale == 0
    for nonsense in ({"calibration": "eq17"}, {"delta": 0.7}, {"epsilon": 0.0}):
        both = {"steps": steps, "epsilon": 0.3, "delta": 1e-5, "num_replies": 3, "num_records": 8, "calibration": "paper"}
        with pytest.raises(ValueError, match=next(iter(nonsense))):
            update_terms(**both | nonsense)


def test_the_statement_of_the_papers_noise_is_what_all_replies_cost():
    """Epsilon 10 of a reply is 18 for three."""
    strategy, recipe = pair(epsilon=10.0, calibration="paper", quantization_levels=None)
    start(strategy, grid_of(recipe, FOUR), 3)
    multiplier = 2 * 2 * 0.5 * math.sqrt(2 * math.log(1.25 * 0.5 / 1e-5)) / 10.0
    event = accounting.repeated(SampledWithoutReplacementDpEvent(8, 4, GaussianDpEvent(multiplier)), 3)
    cost = accounting.epsilon(event, delta=1e-5, relation="replace-one").epsilon
    statement = strategy.statement
    assert statement.epsilon == pytest.approx(cost, rel=2e-3)
    assert statement.epsilon == statement.clients.maximum > 17
    assert strategy.epsilon >= statement.epsilon * (1 - 1e-6)
    assert not statement.paper_epsilon.valid
    assert (
        "was made by this formula for epsilon 10, delta 1e-05 of each reply, which is no budget" in statement.paper_epsilon.reason
    )


def test_an_account_of_one_calibration_does_not_pay_for_the_other():
    both: dict[str, Any] = {"steps": steps_of(), "epsilon": 8.0, "delta": 1e-5, "num_replies": 3, "num_records": 8}
    budget, papers = (update_terms(**both, calibration=one) for one in ("exact", "paper"))
    for opened, later in ((budget, papers), (papers, budget)):
        assert later.refusal_reason(0, opened.text).public == "its account was opened on other terms"
        assert opened.refusal_reason(0, opened.text) is None


def test_the_papers_formula_and_its_limits():
    sigma = math.sqrt(2 * 0.1**2 * math.log(1.25 * 0.2 / 1e-4) / (0.3 / (2 * 0.2)) ** 2)  # eq. 17 as it stands
    assert paper_epsilon(noise_std=sigma, sensitivity=0.1, sampled_part=0.2, delta=1e-4) == pytest.approx(0.3)
    assert violated_conditions(0.3, 0.2) == []
    assert len(violated_conditions(0.42, 0.2)) == 1
    assert len(violated_conditions(0.52, 0.2)) == 2
    with pytest.raises(ValueError, match="delta"):
        paper_epsilon(noise_std=1.0, sensitivity=1.0, sampled_part=0.01, delta=0.02)


# What makes no sense


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"learning_rate": 0}, "learning_rate=0"),
        ({"batch_size": 1.5}, "batch_size=1.5"),
        ({"sensitivity": "convex"}, "must be one of clip-update, per-step, convex-glm"),
        ({"sensitivity": "clip-update"}, "update_clip_norm=None"),
        ({"sensitivity": "convex-glm"}, "smoothness=None"),
        ({"update_clip_norm": 0.1}, "is read with sensitivity='clip-update' only"),
        ({"smoothness": 1.0}, "is read with sensitivity='convex-glm' only"),
        ({"sensitivity": "clip-update", "update_clip_norm": 0.6}, "no update is longer than"),
        ({"sensitivity": "convex-glm", "smoothness": 4.01}, "must be at most 2 / smoothness"),
        ({"decay_iterations": 0.0}, "decay_iterations=0.0"),
    ],
)
def test_steps_that_make_no_sense_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        FedPAQSteps(**STEPS | {"sensitivity": "per-step"} | arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"server": {"sampling": PoissonSampling(sampling_rate=0.5)}}, "sampling="),
        ({"server": {"num_records": 3}}, "num_records=3: a round takes"),
        ({"quantization_levels": 0}, "quantization_levels=0"),
        ({"delta": 0.0}, "delta=0"),
        ({"epsilon": -1.0}, "epsilon=-1"),
    ],
)
def test_settings_that_make_no_sense_are_refused_on_both_sides(arguments, says):
    with pytest.raises(ValueError, match=says):
        pair(**arguments)
    if "server" not in arguments:
        with pytest.raises(ValueError, match=says):
            DPFedPAQRecipe(**{"steps": steps_of(), "epsilon": 2.0, "delta": 1e-5, "num_replies": 3} | arguments)

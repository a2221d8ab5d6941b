"""Statements of generated runs with gaps, against closed forms: every epsilon, every noise std, and what the run says of itself."""

import math
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
)
from hypothesis import given
from hypothesis import strategies as st

from flower_dp.clients import DPClient, DPPASGDRecipe, FedSGDDPCRecipe, LocalDPClient, NbAFLRecipe, Training
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.privacy import accounting
from flower_dp.privacy.server_ledger import ServerLedger
from flower_dp.strategies import (
    DPPASGD,
    DPFedAvg,
    DPFedSAM,
    EvaluationBudget,
    FedSGDDPC,
    LocalEvaluation,
    NbAFL,
    PrivateEvaluation,
    run_checkpoints,
)
from tests.contracts import gaussian_delta, gaussian_multiplier
from tests.gaps import Gaps, gaps, quickly, run
from tests.strategies.closed import gaussian_epsilon

ROUNDS = 4
ADD, REPLACE = "add-or-remove-one", "replace-one"
TRAINING = Training(learning_rate=0.1, batch_size=4)


@pytest.fixture(autouse=True)
def every_round(monkeypatch):
    """A checkpoint after every round, however short."""
    monkeypatch.setattr(run_checkpoints, "_SHARE", 1.0)


def by_name(statement: Any) -> dict[str, Any]:
    return {one.name: one for one in statement.adversaries}


# One noised sum


@st.composite
def sum_cases(draw: Any) -> dict[str, Any]:
    there = draw(gaps(rounds=ROUNDS))
    many = len(there.sizes)
    relation = draw(st.sampled_from([ADD, REPLACE]))
    samplers = [FullSampling(), PoissonSampling(sampling_rate=0.6), RoundRobinSampling(cohort_size=many - 1)]
    samplers += [FixedSizeSampling(cohort_size=many - 1)] if relation == REPLACE else []
    placement = draw(st.sampled_from(["central", "trusted", "untrusted", "lossy"]))
    every = draw(st.integers(0, 2))
    return {
        "gaps": there,
        "relation": relation,
        "sampling": draw(st.sampled_from(samplers)),
        "evaluating": draw(st.sampled_from(samplers)),
        "placement": placement,
        "ratio": draw(st.sampled_from([0.5, 1.0])),
        "every": every,
        "clip_norm": draw(st.sampled_from([0.3, 2.0])),
        "multipliers": draw(st.tuples(st.sampled_from([2.0, 4.0]), st.sampled_from([3.0, 8.0]))),
        "delta": draw(st.sampled_from([1e-3, 1 / many, 0.1])),
        "before": draw(st.integers(0, 2)),
    }


def sum_event(case: dict[str, Any], sampling: Any, multiplier: float, number: int) -> DpEvent | None:
    """What the release of a number costs a client that is in the draw, with this noise; None for nothing."""
    many, one = len(case["gaps"].sizes), GaussianDpEvent(multiplier)
    if isinstance(sampling, RoundRobinSampling):
        turns = [math.ceil(rounds * (many - 1) / many) for rounds in (number - 1, number)]
        return one if turns[1] > turns[0] else None
    if case["placement"] in ("untrusted", "lossy") or isinstance(sampling, FullSampling):
        return one  # adversaries know who takes part
    if isinstance(sampling, PoissonSampling):
        return PoissonSampledDpEvent(0.6, one)
    return SampledWithoutReplacementDpEvent(many, many - 1, one)


def shares_of(case: dict[str, Any], sampling: Any, drawn: int, *, lossy: bool) -> int:
    """In how many shares the noise of a sum is drawn where clients draw it."""
    many = len(case["gaps"].sizes)
    most = many if isinstance(sampling, FullSampling | PoissonSampling) else many - 1
    if lossy:
        return math.ceil(0.6 * many if isinstance(sampling, PoissonSampling) else most)
    if case["placement"] == "untrusted":
        return max(1, math.ceil(case["ratio"] * (drawn if isinstance(sampling, PoissonSampling) else most)))
    return most


def left_of(case: dict[str, Any], sampling: Any, multiplier: float, drawn: int, *, lossy: bool, outside: bool) -> float:
    """The noise multiplier that is left for those who know one share, if they are clients."""
    shares = shares_of(case, sampling, drawn, lossy=lossy)
    if lossy:
        return multiplier / math.sqrt(shares)
    known = 0 if outside or case["placement"] == "central" or shares == 1 else 1
    return multiplier * math.sqrt((shares - known) / shares)


def cost_of(events: list[DpEvent | None], case: dict[str, Any]) -> Any:
    """The cost of releases: in closed form, where all are plain; else by the accountant."""
    found = [event for event in events if event is not None]
    if all(isinstance(event, GaussianDpEvent) for event in found):
        return gaussian_epsilon([event.noise_multiplier for event in found], case["relation"], case["delta"])
    return accounting.epsilon(ComposedDpEvent(found), delta=case["delta"], relation=case["relation"]).epsilon


def sum_strategy(case: dict[str, Any], **options: Any) -> Any:
    kinds = {
        "central": (DPFedAvg, {}),
        "trusted": (DPFedAvg, {"placement": "distributed"}),
        "untrusted": (
            DPFedAvg,
            {"placement": "distributed", "trusted_server": False, "min_reply_ratio": case["ratio"]},
        ),
        "lossy": (DPFedSAM, {"placement": "distributed", "keep_ratio": 0.5}),
    }
    cls, own = kinds[case["placement"]]
    evaluation = None
    if case["every"]:
        evaluation = PrivateEvaluation(
            noise_multiplier=case["multipliers"][1], sampling=case["evaluating"], every=case["every"], metrics={"loss": 4.0}
        )
    common = {"clip_norm": case["clip_norm"], "noise_multiplier": case["multipliers"][0], "sampling": case["sampling"]}
    common |= {"num_clients": len(case["gaps"].sizes), "delta": case["delta"], "relation": case["relation"]}
    return cls(**common, evaluation=evaluation, **own, **options)


@quickly(20)
@given(sum_cases())
def test_the_statement_of_a_noised_sum_is_that_of_its_rounds_by_hand(case):
    there: Gaps = case["gaps"]
    with TemporaryDirectory() as folder:
        found = run(
            there, lambda: sum_strategy(case), lambda **node: DPClient(training=TRAINING, **node), Path(folder, "run")
        )
    strategy, statement = found.strategy, found.strategy.statement
    rounds = range(1, ROUNDS + 1)
    releases = [("train", case["sampling"], case["multipliers"][0], case["placement"] == "lossy", list(rounds))]
    if case["every"]:
        due = [one for one in rounds if one % case["every"] == 0 and one != there.unfinished]
        releases.append(("evaluate", case["evaluating"], case["multipliers"][1], False, due))
    charged = [strategy.rules.training.num_charged, *([strategy.rules.evaluated.num_charged] if case["every"] else [])]
    assert charged == [len(one[-1]) for one in releases]
    told = by_name(statement)
    costs = {"outsiders": [], "participants": [], "the server": []}
    kinds = []
    for kind, sampling, multiplier, lossy, due in releases:
        asked = found.grid.asked(kind)
        drawn = [len(asked.get(one, [])) for one in due]  # of a cohort without anybody no message tells, and it is charged as well
        inside = [left_of(case, sampling, multiplier, one, lossy=lossy, outside=False) for one in drawn]
        outside = [left_of(case, sampling, multiplier, one, lossy=lossy, outside=True) for one in drawn]
        kinds.append((inside, outside))
        costs["participants"] += [sum_event(case, sampling, z, number) for number, z in enumerate(inside, start=1)]
        costs["outsiders"] += [sum_event(case, sampling, z, number) for number, z in enumerate(outside, start=1)]
        most = shares_of(case, sampling, len(there.sizes), lossy=lossy)
        costs["the server"] += [GaussianDpEvent(multiplier / math.sqrt(most))] * len(due)
    assert told["participants"].epsilon == pytest.approx(cost_of(costs["participants"], case), rel=1e-6, abs=1e-9)
    assert told["outsiders"].epsilon == pytest.approx(cost_of(costs["outsiders"], case), rel=1e-6, abs=1e-9)
    assert statement.epsilon == told["participants"].epsilon
    assert told["participants"].noise_std == pytest.approx(case["clip_norm"] * min(kinds[0][0]))
    assert told["outsiders"].noise_std == pytest.approx(case["clip_norm"] * min(kinds[0][1]))
    central = case["placement"] == "central"
    assert told["the server"].epsilon == pytest.approx(math.inf if central else cost_of(costs["the server"], case), rel=1e-6, abs=1e-9)
    most = shares_of(case, case["sampling"], len(there.sizes), lossy=case["placement"] == "lossy")
    share = 0.0 if central else case["clip_norm"] * case["multipliers"][0] / math.sqrt(most)
    assert told["the server"].noise_std == pytest.approx(share)
    assert statement.epsilon <= strategy.epsilon * (1 + 1e-9) <= 1.5 * statement.epsilon + 0.1
    if case["every"]:
        for part, (_, sampling, *_), (inside, _) in zip(("training", "evaluation"), releases, kinds, strict=True):
            alone = cost_of([sum_event(case, sampling, z, number) for number, z in enumerate(inside, start=1)], case)
            assert statement.parts[part] == pytest.approx(alone, rel=1e-6, abs=1e-9)
    assert any("DELTA IS NO GUARANTEE" in line for line in statement.assumptions) == (case["delta"] * len(there.sizes) >= 1)
    found.assert_unfinished_are_told()

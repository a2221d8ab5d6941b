"""Parts of a run over generated settings: the second answer of what remembers, standard errors, and limits."""

import math
from collections import Counter

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from flwr.app import Array, ArrayRecord, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from flower_dp import wire
from flower_dp.core.sampling import FullSampling, PoissonSampling
from flower_dp.privacy.charges import ALL_CLIENTS, Charge, CostScope, History
from flower_dp.privacy.private_file import LedgerError
from flower_dp.privacy.store import Store
from flower_dp.strategies import DPFedAvg, PrivateEvaluation
from flower_dp.strategies.log import StoreLog
from flower_dp.strategies.releases.left_out import RoundDiscarded
from flower_dp.strategies.releases.limits import ReplyLimits
from flower_dp.strategies.releases.planned_cost import EpsilonPlan
from flower_dp.strategies.releases.replies import CollectedReplies, StockReply, collect
from tests.closed_forms import gaussian_epsilon
from tests.gaps import quickly
from tests.releases import ask, round_of

ADD, REPLACE = "add-or-remove-one", "replace-one"


# A target epsilon


@quickly(25)
@given(
    st.lists(st.tuples(st.sampled_from([2.0, 3.0, 6.0]), st.booleans()), min_size=4, max_size=12),
    st.sampled_from([ADD, REPLACE]),
    st.floats(0.8, 6.0),
    st.integers(0, 6),
    st.booleans(),
)
def test_a_target_allows_what_fits_however_often_and_in_whatever_order_it_is_asked(
    rounds, relation, target, planned, counts_plan
):
    """Rounds cost what the plan says, or something else; each is asked for twice, with another event in between."""
    usual = GaussianDpEvent(3.0)
    plan = EpsilonPlan(lambda number: SelfComposedDpEvent(usual, number), target_epsilon=target, delta=1e-3, relation=relation)
    plan.plan(planned)
    spent = []
    for multiplier, asked_twice in rounds:
        as_planned = counts_plan and all(one >= 3.0 for one in spent) and multiplier >= 3.0
        ledger = History(relation=relation, counts=Counter(map(GaussianDpEvent, spent)))
        for ahead in [multiplier, 2.5, multiplier] if asked_twice else [multiplier]:
            event, usually = GaussianDpEvent(ahead), as_planned and ahead >= 3.0
            allowed = plan.allows(len(spent) + 1, ledger=lambda one=ledger: one, event=event, as_planned=usually)
            after = gaussian_epsilon([*spent, ahead], relation, 1e-3)
            assert allowed == (after <= target), (spent, ahead)
        if allowed:
            spent.append(multiplier)


# The standard error of a private evaluation


@quickly(12)
@given(
    *(st.integers(20, 200), st.floats(0.0, 1.0), st.sampled_from([1.0, 5.0]), st.integers(1, 3)),
    *(st.sampled_from([0.5, 2.0]), st.sampled_from([1.0, 0.5])),
)
def test_the_standard_error_is_the_spread_of_the_value(heard, part, bound, metrics, multiplier, rate):
    """Over many releases of one sum: of its noise alone. What it says of the cohort on top is that of numbers that are 0 or 1."""
    sampling = FullSampling() if rate == 1 else PoissonSampling(sampling_rate=rate)
    bounds = {f"m{number}": bound for number in range(metrics)}
    evaluation = PrivateEvaluation(noise_multiplier=multiplier, sampling=sampling, metrics=bounds)
    words = {"clip_norm": 0.5, "noise_multiplier": 1.0, "num_clients": round(heard / rate), "delta": 1e-3}
    strategy = DPFedAvg(**words, sampling=FullSampling(), evaluation=evaluation)
    made = strategy.rules.evaluation
    names = [f"c{number}" for number in range(heard)]
    now = round_of(ask(made, made.length, tuple(names)), made.length, tuple(names))
    total = np.array([heard * part] * metrics + [heard]) / math.sqrt(metrics + 1)
    total = np.round(total / now.ask.step) * now.ask.step
    found = []
    rng = np.random.default_rng(heard)
    for _ in range(400):
        try:
            found.append(made.result(strategy.state, now, CollectedReplies(total=total.copy(), clients=names), rng))
        except RoundDiscarded:  # the count was too noisy
            continue
    std = math.sqrt(metrics + 1) * multiplier
    if len(found) < 400:
        assert heard < 9 * std
        return
    for name in evaluation.metrics:
        values, errors = (np.array([one[key] for one in found]) / bound for key in (name, f"{name}-standard-error"))
        own = errors**2 - values * (1 - values) / heard
        by_hand = math.sqrt(std**2 * (1 + part**2)) / heard
        # 400 draws tell a variance to within 7 %; the noised count makes the tails longer, and bounds cut them off.
        if 5 * by_hand < part < 1 - 5 * by_hand and heard > 15 * std:
            assert math.sqrt(np.median(own)) == pytest.approx(by_hand, rel=0.2)
            assert np.std(values) == pytest.approx(by_hand, rel=0.2)
        assert np.median(errors) >= by_hand * 0.8


# What a device has spent


# Replies


@quickly(30)
@given(st.integers(1, 5000), st.integers(1, 30), st.booleans(), st.floats(0.0, 3.0))
def test_a_reply_may_be_twice_as_large_as_its_numbers_and_no_larger(length, many, stock, factor):
    """Of a node with many clients: its one sum, and an answer; whatever is beside it counts."""
    names = tuple(f"c{number}" for number in range(1 if stock else many))
    message = Message(RecordDict(), 7, "train")
    fixed = 6 * (2**14 + 2 * wire.answer.MOST_REASON * (wire.answer.MOST_REASONS + 1) + 8 * len(names))
    arrays = {"w": Array(np.ones(length, np.float32))}
    size = int(fixed + factor * 16 * length) - 4 * length
    if size > 0:
        arrays["x"] = Array(np.zeros(size, np.int8))
    reply = Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)
    own = StockReply(read=lambda content: np.ones(length)) if stock else None
    limits = ReplyLimits(length=length, clip_norm=1.0, honest_norm=lambda names: 1.0)
    found = collect([reply], asked={7: names}, sent=[message.metadata], limits=limits, stock=own)
    taken = wire.content_bytes(reply.content)
    large = taken > fixed + 16 * length
    assert any("bytes: at most" in why for why in found.refused.values()) == large
    assert found.missing.rejected == (len(names) if large or not stock else 0)


# After the end


def charge(number):
    words = {"release": "r", "fingerprint": "k", "scope": CostScope(unit="client", relation=ADD)}
    return Charge(**words, number=number, server_round=number, owners=(ALL_CLIENTS,), events=(GaussianDpEvent(3.0),))


def test_no_charge_is_taken_twice_or_after_the_end_and_none_is_lost(tmp_path):
    path, words = tmp_path / "ledger", {"method": "m", "delta": 1e-3, "private": True}
    Store.create(path)
    run = StoreLog(path, **words)
    for number in (1, 2):
        run.append(charge(number))
    with pytest.raises(LedgerError):
        run.append(charge(2))
    run.close()
    with pytest.raises(RuntimeError, match="the run has ended"):
        run.append(charge(3))
    again = StoreLog(path, **words, run=run.run)
    assert again.beyond({}) == (("r", 1), ("r", 2))
    again.append(charge(3))
    assert again.charges.number("r") == 3
    again.close()

"""Nodes with several clients, and policies, over generated settings: every client has an account, a choice and limits of its own."""

import math
from collections import Counter
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from flower_dp.clients import ClientPolicy, FlatModel, RecordMetrics, TensorRecords
from flower_dp.clients.account import account_of
from flower_dp.clients.local.evaluation import RecordContributions
from flower_dp.clients.refusal_messages import Declined
from flower_dp.clients.reply.pipeline import ClientJob
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.client_terms import ClientTerms
from flower_dp.privacy.device_store import DeviceLedger, ReplyNumber
from flower_dp.privacy.mechanisms import Laplace
from flower_dp.privacy.release import Release
from flower_dp.wire import Promise, ReleaseRequest
from tests.gaps import quickly
from tests.local_grids import context_of

NAMES = "abcd"


def release_of(**changes):
    words = {"description": "w", "visible_to": "s", "unit": "record", "relation": "replace-one", "clip_norm": 1.0, "num_units": 5}
    return Release(**words | {"mechanism": Laplace(noise_multiplier=1.0), "sampler": FullSampling()} | changes)


PLACES = ["x/ledger", "y/ledger", "y/other"]


@quickly(20)
@given(
    st.lists(st.sampled_from([None, *PLACES]), min_size=4, max_size=4),
    st.lists(st.integers(1, 4), min_size=4, max_size=4),
    st.lists(st.sets(st.sampled_from(NAMES), min_size=1), min_size=3, max_size=6),
    st.integers(0, 3),
)
def test_every_client_of_a_node_has_an_account_of_its_own_wherever_it_is(places, most, rounds, restarts_after):
    """In files of one name in several folders, in one file, or in the node's state, which a restart of the node empties."""
    in_files = None not in places
    with TemporaryDirectory() as folder:
        if in_files:
            for place in set(places):
                Path(folder, place).parent.mkdir(mode=0o700, exist_ok=True)
                DeviceLedger.create(Path(folder, place), [name for name, one in zip(NAMES, places, strict=True) if one == place])
        ledger = {name: Path(folder, str(place)) for name, place in zip(NAMES, places, strict=True)} if in_files else None
        state, count, limits = RecordDict(), Counter(), dict(zip(NAMES, most, strict=True))
        for number, names in enumerate(rounds):
            if number == restarts_after:
                state = RecordDict()
                count = count if in_files else Counter()
            account = account_of(ledger, NAMES, context_of(state))
            due = {name: ClientTerms(release=release_of(), num_replies=limits[name]) for name in sorted(names)}
            refused = account.charge(due, {name: ReplyNumber(run="r", number=number + 1) for name in due})
            assert set(refused) == {name for name in names if count[name] >= limits[name]}
            count.update(set(names) - set(refused))
        if in_files:
            for place in set(places):
                found = {name: entry.replies for name, entry in DeviceLedger(Path(folder, place)).read().items()}
                assert found == {name: count[name] for name, one in zip(NAMES, places, strict=True) if one == place}


class Value(nn.Module):
    """A record's only number, whatever the weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, inputs):
        return inputs + 0 * self.weight


OWN = RecordMetrics(names=("value",), of=lambda outputs, target: {"value": float(outputs)})


@quickly(60)
@given(
    st.integers(1, 12),
    st.integers(1, 9),
    st.sampled_from(["add-or-remove-one", "replace-one"]),
    st.sampled_from(["record", "record", "client"]),
    st.integers(0, 99),
)
@example(12, 9, "replace-one", "record", 0)  # of which twelve a draw with replacement takes one twice
def test_each_record_contributes_once_at_most_to_an_evaluation(size, public, relation, unit, seed):
    """As many as are public, under replace-one; and where the unit is the client, the mean of all of them."""
    values = torch.arange(1, size + 1, dtype=torch.float32)[:, None] / 16
    data = TensorRecords(inputs=values, targets=torch.zeros(size, 1))
    release = release_of(unit=unit, relation=relation, num_units=public)
    model, bounds = FlatModel(Value()), MetricBounds(bounds={"value": 2.0})
    make = RecordContributions(model=model, metrics=OWN, bounds=bounds, release=release)
    rows = make(model.vector.clone(), ClientJob(name="a", records=data, seed=0, secret=lambda: np.random.default_rng(seed)))
    whole = values[:, 0].numpy() - 1  # of bound 2, mapped to [-1, 1]
    if unit == "client":
        np.testing.assert_allclose(rows, [[whole.mean()]])
        return
    found = np.sort(rows[:, 0])
    assert len(found) == (min(size, public) if relation == "replace-one" else size)
    assert len(set(found.tolist())) == len(found)
    assert set(found.tolist()) <= set(whole.tolist())


# Policies

maybe = st.one_of(st.none(), st.sampled_from([0.5, 1.0, 2.0]))
policies = st.fixed_dictionaries(
    {
        "max_clip_norm": maybe,
        "min_clip_norm": maybe,
        "min_noise_multiplier": maybe,
        "min_noise_std": maybe,
        "max_shares": st.one_of(st.none(), st.sampled_from([1, 4])),
        "allow_evaluation": st.booleans(),
        "min_evaluation_noise_multiplier": maybe,
        "min_evaluation_noise_std": maybe,
    }
)
LIMITS = ("max_clip_norm", "min_clip_norm", "min_noise_multiplier", "min_noise_std", "max_shares")
EVALUATION = ("min_evaluation_noise_multiplier", "min_evaluation_noise_std")


def accepts(check, *arguments):
    try:
        check(*arguments)
    except Declined:
        return False
    return True


@quickly(120)
@given(policies, st.sets(st.sampled_from([*LIMITS, *EVALUATION]), min_size=1, max_size=3), st.booleans())
def test_a_policy_accepts_what_each_of_its_limits_allows_and_nothing_without_a_limit_of_noise(words, named, with_clip):
    named = named | {"max_clip_norm"} if with_clip else named
    words = {name: value if name in named or name == "allow_evaluation" else None for name, value in words.items()}
    sizes = [words["min_clip_norm"], words["max_clip_norm"]]
    if (None not in sizes and sizes[0] > sizes[1]) or (words["min_noise_std"] and not words["max_clip_norm"]):
        with pytest.raises(ValueError, match="clip_norm"):
            ClientPolicy(**words)
        return
    for clip_norm, multiplier, shares in product([0.5, 1.0, 2.0], [0.5, 1.0, 2.0], [0, 1, 2, 4, 16]):
        assert_as_by_hand(ClientPolicy(**words), words, clip_norm, multiplier, shares)


def assert_as_by_hand(policy, words, clip_norm, multiplier, shares):
    """What a policy accepts of an ask with so many shares of noise; 0: the server adds it."""
    distributed = shares > 0
    std = clip_norm * multiplier / math.sqrt(shares) if distributed else 0.0
    promise = Promise(clip_norm=clip_norm, noise_multiplier=multiplier)
    ask = ReleaseRequest(promise=promise, placement="distributed" if distributed else "central", noise_std=std)

    def within(name, value, least):
        return words[name] is None or (value >= words[name] if least else value <= words[name])

    limited = any(words[name] is not None for name in (*LIMITS, *EVALUATION))
    clip = within("min_clip_norm", clip_norm, least=True) and within("max_clip_norm", clip_norm, least=False)
    share = words["max_shares"] is None or (distributed and shares <= words["max_shares"])
    noise = within("min_noise_multiplier", multiplier, least=True) and within("min_noise_std", std, least=True)
    says = words["min_noise_multiplier"] is not None or words["min_noise_std"] is not None
    assert accepts(policy.check, ask) == (clip and share and noise and (says or not limited))
    assert accepts(policy.check_local, ask) == (clip and not words["min_noise_std"])
    least = words["min_evaluation_noise_multiplier"] or words["min_noise_multiplier"]
    least_std = words["min_evaluation_noise_std"] or (words["min_noise_std"] and words["min_noise_std"] / words["max_clip_norm"])
    enough = (least is None or multiplier >= least) and (least_std is None or std >= least_std)
    says = least is not None or least_std is not None
    assert accepts(policy.check_evaluation, ask) == (words["allow_evaluation"] and share and enough and (says or not limited))
    own = release_of(clip_norm=clip_norm, mechanism=Laplace(noise_multiplier=multiplier))
    assert accepts(policy.check_own, own) == within("min_noise_multiplier", multiplier, least=True)
    fine = within("min_evaluation_noise_multiplier", multiplier, least=True)
    fine = fine and within("min_evaluation_noise_std", clip_norm * multiplier, least=True)
    assert accepts(policy.check_own_evaluation, own) == (words["allow_evaluation"] and fine)

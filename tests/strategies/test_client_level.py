"""Client-level releases: what noise is in the released model, and what the ledger says about it.

Statistical tests have a false-alarm rate of 1e-6, and reject a std that is 5 % wrong.
"""

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from scipy import stats

from flower_dp.clients import model_arrays
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.privacy import accounting
from flower_dp.strategies import DPFedAvg, DPFedSAM, FedSMP
from tests import local_grids
from tests.charges import charge
from tests.closed_forms import assert_std
from tests.grids import LocalGrid
from tests.local_grids import still_app, still_model
from tests.stock import arrays, shifted, stock_app

SIZE = 4000


def increments(strategy, grid, num_rounds):
    """What each round added to a still model [rounds, d]."""
    return np.diff(local_grids.models_of(strategy, grid, model_arrays(still_model()), num_rounds), axis=0)


ZEROS = {"w": np.zeros(SIZE, np.float32)}
WORDS = {"clip_norm": 0.5, "noise_multiplier": 0.8, "sampling": FullSampling(), "num_clients": 4, "delta": 1e-3}


@pytest.mark.slow
def test_distributed_shares_add_up_to_the_same_noise_whoever_takes_part():
    """In every round: a std that followed the size of the cohort would tell who took part."""
    sampling = PoissonSampling(sampling_rate=0.5)
    strategy = DPFedSAM(**WORDS | {"sampling": sampling, "num_clients": 8})
    steps = increments(strategy, LocalGrid(still_app(8), 2), 6)
    assert len({report.cohort_size for report in strategy.rounds}) > 1
    assert_std(steps, 0.8 * 0.5 / 4)
    squares = np.mean(steps**2, axis=1)  # of 4,000 draws each: 5 sigma
    assert squares == pytest.approx([(0.8 * 0.5 / 4) ** 2] * 6, rel=5 * math.sqrt(2 / SIZE))


@pytest.mark.slow
def test_sparse_messages_carry_the_share_that_is_charged():
    """Only the four smallest of 4,000 coordinates are left out, so that the std is that of the whole noise."""
    strategy = DPFedSAM(**WORDS, keep_ratio=0.999)
    steps = increments(strategy, LocalGrid(still_app(4), 4), 10)
    assert_std(steps, 0.8 * 0.5 / 4)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [FullSampling(), PoissonSampling(sampling_rate=0.5), RoundRobinSampling(cohort_size=3)])
def test_dropouts_pass_no_target(sampling):
    grid = LocalGrid(still_app(6), 6, tamper=lambda node, reply: [] if node <= 2 else [reply])
    words = WORDS | {"noise_multiplier": 5.0, "sampling": sampling, "num_clients": 6}
    strategy = DPFedSAM(**words, target_epsilon=2.0, server_completes_noise=False)
    strategy.start(grid, model_arrays(still_model()), num_rounds=90)
    assert 1 < len(strategy.rounds) < 90
    assert 1.5 < strategy.statement.epsilon <= 2.0


@pytest.mark.slow
def test_central_top_k_keeps_the_largest_of_the_noised_mean():
    strategy = DPFedSAM(**WORDS, placement="central", keep_ratio=0.1)
    steps = increments(strategy, LocalGrid(still_app(4), 2), 5)
    assert [(step != 0).sum() for step in steps] == [SIZE // 10] * 5
    # The largest tenth of |N(0, s)| lies beyond its 90 % quantile, 1.645 s: noise came first, then the choice.
    std = 0.8 * 0.5 / 4
    smallest = np.array([np.abs(step[step != 0]).min() for step in steps])
    assert np.allclose(smallest, stats.norm.ppf(0.95) * std, rtol=0.06)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "num_bytes", "words"),
    [
        # A tenth of 4,000 values of 4 bytes, and the smaller of a bit a coordinate and 2 bytes an index.
        ({"keep_ratio": 0.1}, (400 * 4 + 500, 400 * 4 + 500), "its message is top-k of it"),
        # Some 50 coordinates are not 0, 7 more or less: far less than the 1.7 bits of any.
        ({"quantization_levels": 1}, (1, 300), "its message is a random quantization (1 levels above 0) of it"),
        ({"keep_ratio": 0.1, "quantization_levels": 3}, (1, 300), "top-k and a random quantization (3 levels above 0)"),
    ],
    ids=["top-k", "levels", "both"],
)
def test_lossy_messages_are_small_and_rest_on_each_clients_own_share(own, num_bytes, words):
    strategy = DPFedSAM(**WORDS | {"sampling": PoissonSampling(sampling_rate=0.5), "num_clients": 8}, **own)
    grid = LocalGrid(still_app(8), 8)
    strategy.start(grid, model_arrays(still_model()), num_rounds=4)
    assert grid.received
    for reply in grid.received:
        sizes = [array.numpy().nbytes for array in next(iter(reply.content.array_records.values())).values()]
        assert num_bytes[0] <= sum(sizes) <= num_bytes[1]
    assert strategy.missing.total == 0
    # A client that is not drawn sends nothing, which can be told from a zero update: no amplification.
    event = SelfComposedDpEvent(GaussianDpEvent(0.8 / math.sqrt(4)), 4)
    expected = accounting.epsilon(event, delta=1e-3, relation="add-or-remove-one").epsilon
    assert strategy.statement.epsilon == pytest.approx(expected)
    assert not strategy.statement.paper_epsilon.valid
    assert "not post-processing" in strategy.statement.paper_epsilon.reason
    text = " ".join(str(strategy.statement).split())
    assert words in text
    assert "learns a round's cohort" not in text


# The ledger


# Not private


def test_without_noise_the_statement_says_not_private():
    strategy = DPFedAvg(**WORDS | {"noise_multiplier": 0, "num_clients": 2})
    strategy.start(LocalGrid(stock_app(shifted(lambda node: 1.0)), 2), arrays(**ZEROS), num_rounds=1)
    assert strategy.statement.epsilon == math.inf
    assert strategy.statement.to_dict()["guarantee"]["epsilon"] is None
    assert "NOT PRIVATE" in str(strategy.statement)


def test_a_model_that_would_leave_the_range_of_its_dtype_is_left_out():
    """The noise has a standard deviation of 1e40, and float32 ends at 3.4e38."""
    strategy = DPFedAvg(clip_norm=1e38, noise_multiplier=100, sampling=FullSampling(), num_clients=1, delta=1e-3)
    grid = LocalGrid(stock_app(lambda node, arrays: arrays), 1)
    result = strategy.start(grid, arrays(w=np.full(4, 2, np.float32)), num_rounds=1)
    assert result.arrays["w"].numpy().tolist() == [2] * 4
    assert strategy.incidents == ("round 1 was left out: array 'w' would leave the range of its dtype",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip_norm": True}, "clip_norm=True: must be a finite number > 0"),
        ({"min_reply_ratio": 0.5}, "min_reply_ratio=0.5: is read with"),
        ({"min_reply_ratio": 1.1, "server_completes_noise": False}, "min_reply_ratio=1.1"),
        ({"server_completes_noise": "no"}, "server_completes_noise='no': must be True or False"),
        (
            {"placement": "central", "server_completes_noise": False},
            "server_completes_noise=False: is read with placement='distributed' only",
        ),
        ({"placement": "central", "quantization_levels": 2}, "quantization_levels=2: is read with placement='distributed' only"),
        ({"quantization_levels": 0}, "quantization_levels=0"),
        (
            {"relation": "add-or-remove-one", "sampling": FixedSizeSampling(cohort_size=2)},
            "relation='add-or-remove-one': sampling of a fixed size",
        ),
    ],
)
def test_nonsense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DPFedSAM(**WORDS | arguments)


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("strategy_class", [DPFedAvg, FedSMP], ids=["dp-fedavg", "fed-smp"])
def test_placement_means_the_same_for_every_noised_sum(strategy_class, trusted):
    arguments = WORDS | {"sampling": PoissonSampling(sampling_rate=0.5), "num_clients": 20, "placement": "distributed"}
    arguments |= {"server_completes_noise": trusted} | ({} if trusted else {"min_reply_ratio": 0.5})
    made, sam = strategy_class(**arguments), DPFedSAM(**arguments)
    assert made.rules.noise == sam.rules.noise
    for strategy in (made, sam):
        charge(strategy, [f"client-{number}" for number in range(8)])
    said, other = made.statement, sam.statement
    assert (said.epsilon, said.protected_against, said.assumptions) == (other.epsilon, other.protected_against, other.assumptions)
    assert said.adversaries == other.adversaries
    assert made.rules.about.stock_refusal is not None

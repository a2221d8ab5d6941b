import math
import re

import pytest
import torch

from flower_dp.clients import FlatModel, NbAFLRecipe, ProximalTerm, TensorRecords, Training
from flower_dp.strategies import NbAFL
from tests.local_grids import FEATURES, NAMES, grid_of, linear, one_reply, records, start, vector_of

FOUR = {name: records(name) for name in NAMES[:4]}
TRAINING = Training(learning_rate=0.1, batch_size=4, regularizers=(ProximalTerm(strength=0.5),))
NOISE = {"clip_norm": 1.5, "paper_epsilon": 2.0, "delta": 0.01, "uplink_exposures": 4}
QUIET = NOISE | {"paper_epsilon": math.inf}


def pair(*, training=TRAINING, server=None, min_records=8, **arguments):
    arguments = NOISE | arguments
    recipe = NbAFLRecipe(training=training, min_records=min_records, **arguments)
    return NbAFL(**{"num_clients": 4, "num_records": 8, **arguments, **(server or {})}), recipe


def reply(recipe, data, *, seed=0, model=None, start_at=None):
    flat = FlatModel(model or linear())
    vector = flat.vector.clone() if start_at is None else start_at
    rng = torch.Generator().manual_seed(seed)
    release = recipe.terms("c0", data).release
    return one_reply(recipe, vector, data, release, model=flat, seed=7, rng=rng).row.to(torch.float64)


# Local training


# The reply


@pytest.mark.parametrize("huge", [1e30, math.inf, math.nan])
def test_training_that_breaks_replies_with_the_global_model(huge):
    _, recipe = pair(**QUIET)
    data = TensorRecords(inputs=torch.full((8, FEATURES), huge), targets=torch.zeros(8, dtype=torch.int64))
    origin = vector_of(linear())
    row = reply(recipe, data, start_at=origin)
    assert row.isfinite().all()
    assert row.norm() <= 1.5


def test_terms_are_those_of_replaced_weights():
    """All records of a client together move its clipped weights by 2 C."""
    _, recipe = pair()
    release = recipe.terms("c0", FOUR["c0"]).release
    assert (release.unit, release.relation, release.sensitivity) == ("client", "replace-one", 2 * 1.5)


def test_replies_lie_on_a_lattice_that_broadcasts_hide():
    """Averages are rounded to the step of a release: what clients send is a thousand times finer."""
    _, recipe = pair()
    release = recipe.terms("c0", FOUR["c0"]).release
    model = FlatModel(linear())
    clip = recipe.pipeline(release, model=model, server_round=1).clip
    assert clip.step == release.lattice_step(model.layout.size) / 2**10


def test_a_client_with_fewer_records_than_the_noise_is_made_for_does_not_reply():
    _, recipe = pair(min_records=9)
    strategy, _ = pair(server={"num_records": 9})
    grid = grid_of(recipe, FOUR)
    with pytest.raises(RuntimeError, match="no client has sent a usable update"):
        start(strategy, grid, 1)
    assert strategy.rounds[0].replies == 0


# The average


@pytest.mark.slow
def test_k_of_n_asks_k_at_random_and_not_more_than_the_budget():
    strategy, recipe = pair(server={"cohort_size": 2, "num_replies": 3}, uplink_exposures=3)
    start(strategy, grid_of(recipe, FOUR), 12)
    cohorts = [report.cohort_size for report in strategy.rounds]
    assert max(cohorts) == 2
    assert sum(cohorts) <= 12
    assert all(ledger.num_charges <= 3 for ledger in strategy.rules.ledgers(strategy.charges).values())


# Downlink noise


# The statement


@pytest.mark.slow
def test_exact_composition_under_the_papers_assumption_is_told():
    """Exact composition of L = 25 exposures."""
    arguments = {"clip_norm": 20.0, "paper_epsilon": 50.0, "delta": 0.01, "uplink_exposures": 25}
    strategy, recipe = pair(min_records=100, server={"num_clients": 1, "num_records": 100}, **arguments)
    start(strategy, grid_of(recipe, {"c0": records("c0", 100)}), 25)
    reason = strategy.statement.adversaries[0].paper_epsilon.reason
    answer = float(re.search(r"exact composition under that assumption gives ([\d.]+)", reason)[1])
    assert answer == pytest.approx(11.9, abs=0.06)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"paper_epsilon": -1.0}, r"paper_epsilon=-1\.0"),
        ({"delta": 0.0}, r"delta=0\.0"),
        ({"uplink_exposures": 0}, "uplink_exposures=0"),
        ({"cohort_size": 9}, "cohort_size=9"),
        ({"min_records": 9}, "min_records=9"),
        ({"num_records": [8, 8]}, "num_records: has 2 values"),
        ({"aggregation": "best"}, "aggregation='best'"),
    ],
)
def test_nonsense_is_refused_before_any_client_is_asked(arguments, message):
    with pytest.raises(ValueError, match=message):
        NbAFL(**{"num_clients": 4, "num_records": 8, **NOISE, **arguments})

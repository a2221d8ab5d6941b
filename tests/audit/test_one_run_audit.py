"""The one-run audit of real runs: real digits and tumours, the methods' own strategies and clients, in this process."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from flower_dp.audit import one_run_records
from flower_dp.audit.one_run_audit import audit_run
from flower_dp.audit.one_run_clients import ClientCanaries
from flower_dp.audit.one_run_records import RecordScores, Replies, planted
from flower_dp.clients import FlatModel, TensorRecords
from flower_dp.core import noise
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.running import apps
from flower_dp.wire import Instruction, LocalRequest, Promise, ReleaseRequest

# 200 clients with three real digits each, all in every round; half of them are canaries.
CLIENTS = [
    *(
        "num-clients=200",
        "partition=sample",
        "records-per-client=3",
        "model=logistic",
        "batch-size=3",
        "training-engine=one-by-one",
    ),
    *("num-rounds=3", "seed=1"),
]
FULL = [*CLIENTS, "method=dp-fedavg", "sampling=full"]
FULL += ["dp-fedavg.noise-multiplier=1.0", "dp-fedavg.target-epsilon=0", "dp-fedavg.delta=1e-5"]
# Ten clients with 45 real tumours each, all records in every step.
RECORDS = ["num-clients=10", "partition=sample", "records-per-client=45", "batch-size=45", "sampling=full", "seed=1"]
RECORDS += ["num-rounds=3", "learning-rate=0.1", "learning-rate-decay=0"]
STEPS = ["{0}.epsilon=8", "{0}.delta=1e-4", "{0}.num-local-steps=1", "{0}.sensitivity=per-step", "{0}.quantization-levels=0"]


def config(target, settings):
    run = apps.resolve(target, settings)
    return {**run.app.defaults, **run.overrides}


def fedpaq(method="dp-fedpaq", *more):
    return config("breast-cancer", [*RECORDS, f"method={method}", *(one.format(method) for one in STEPS), *more])


@pytest.fixture
def little_noise(monkeypatch):
    """Plant a bug: all Gaussian noise has next to none of its scale, and what is claimed stays what it is."""
    real = noise.gaussian
    monkeypatch.setattr(
        noise, "gaussian", lambda like, scale, step, rng: noise.round_to_nearest(real(like, scale, step, rng) / 200, step)
    )


# Of tests in which a correct run must not be flagged.
CONFIDENCE = 1 - 1e-6


# Clients


def test_client_canaries_of_a_real_run_show_much_of_the_claim_and_no_more():
    audit = audit_run(config("mnist", FULL), num_canaries=150, seed=3)
    # Three Gaussian releases of noise multiplier 1 are one of separation sqrt(3), whose delta has a closed form (Balle and Wang 2018).
    mu, claimed = math.sqrt(3), audit.claimed
    delta = stats.norm.cdf(mu / 2 - claimed / mu) - math.exp(claimed) * stats.norm.cdf(-mu / 2 - claimed / mu)
    assert delta == pytest.approx(1e-5, rel=0.01)
    assert (audit.unit, audit.relation, audit.num_canaries) == ("client", "add-or-remove-one", 150)
    # 31 right guesses of 44. In eight runs 40 to 44 were right: if each is with probability 0.925 or more, fewer than 31 are with
    # probability 3e-6 at most. All 44 would not refute the claim.
    assert 0.2 < audit.lower_bound < audit.claimed
    assert not audit.refuted


def test_noise_far_below_the_claim_is_flagged_by_client_canaries(little_noise):
    audit = audit_run(config("mnist", [*FULL, "dp-fedavg.noise-multiplier=4", "num-rounds=1"]), num_canaries=150, seed=3)
    assert audit.claimed < 1.1
    assert audit.refuted  # by 95 right guesses of 120; in eight runs all were right


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["method=dp-fedsam", "sampling=fixed-size", "cohort-size=100", "dp-fedsam.target-epsilon=0"],
        ["method=dp-fedsam", "sampling-rate=0.5", "dp-fedsam.keep-ratio=0.3", "dp-fedsam.target-epsilon=0"],
        ["method=dp-fedavg", "sampling-rate=0.5", "dp-fedavg.clip-quantile=0.5", "dp-fedavg.target-epsilon=0"],
        ["method=fed-smp", "sampling-rate=0.5", "fed-smp.target-epsilon=0"],
    ],
    ids=["replace-one", "top-k", "adaptive clip", "mask"],
)
def test_every_kind_of_noised_sum_is_audited(settings):
    audit = audit_run(config("mnist", [*CLIENTS, "num-rounds=2", *settings]), num_canaries=100, confidence=CONFIDENCE, seed=3)
    assert not audit.refuted
    assert audit.num_guesses > 0
    assert audit.relation == ("replace-one" if "sampling=fixed-size" in settings else "add-or-remove-one")


def test_contributions_of_a_coin_are_neighbors_by_the_relation():
    names, choices = [f"c{i}" for i in range(9)], np.array([1, -1, 1, -1])
    words = {"dimension": 50, "rng": np.random.default_rng(0)}
    added = ClientCanaries.drawn(names, choices, relation="add-or-remove-one", **words)
    replaced = ClientCanaries.drawn(names, choices, relation="replace-one", **words)
    assert (added.contributions.tolist(), replaced.contributions.tolist()) == ([1, 0, 1, 0], [1, -1, 1, -1])
    # Absent, not zero: such a client adds no indicator and no share of the noise either.
    assert [update is not None for update in added.updates(2.0).values()] == [True, False, True, False]
    norms = [np.linalg.norm(update) for update in replaced.updates(2.0).values()]
    assert (norms, len(set(replaced.names))) == (pytest.approx([20.0] * 4, rel=1e-5), 4)


def test_a_score_grows_with_what_others_have_not_contributed():
    canaries = ClientCanaries(
        names=("a", "b", "c", "d"), directions=np.eye(4, 6, dtype=np.float32), contributions=np.array([1, 0, 0, 0])
    )
    models = [np.zeros(6), np.array([1.5, 1.0, 0.1, -0.1, 0.0, 3.0])]
    others = [np.array([0.5, 1.0, 0.0, 0.0, 7.0, 0.0])]
    scores = canaries.score(models, others=others, scales=[1.0], sampling_rate=0.25)
    assert scores.argmax() == 0
    assert scores[1] < 0 < scores[0]
    # By hand: the contributions 1, 0, 0.1, -0.1 have the median 0.05, and from that the median deviation 0.1.
    variance = (1.4826 * 0.1) ** 2
    exponent = (0.95 - 0.5) / variance
    assert scores[0] == pytest.approx(math.log(0.75 + 0.25 * math.exp(exponent)), rel=1e-6)


# Records


def test_record_canaries_of_a_real_run_show_some_of_the_claim_and_no_more():
    audit = audit_run(fedpaq(), num_canaries=400, seed=3)
    assert audit.claimed == pytest.approx(8.0, rel=1e-3)
    assert (audit.unit, audit.relation, audit.num_canaries) == ("record", "replace-one", 400)
    # 79 right guesses of 120. In eight runs 99 to 107 were right: with a probability of 0.83 each, fewer than 79 have 2e-6.
    assert 0.3 < audit.lower_bound < audit.claimed


@pytest.mark.parametrize("method", ["dp-fedpaq", "scaffold"])
def test_noise_far_below_the_claim_is_flagged_by_record_canaries(method, little_noise):
    audit = audit_run(fedpaq(method, f"{method}.epsilon=1", "num-rounds=1"), num_canaries=400, seed=3)
    assert audit.claimed == pytest.approx(1.0, rel=1e-3)
    assert audit.refuted  # by 127 right guesses of 160; in eight runs 142 to 148 were right, with a standard deviation of 2


def test_an_error_while_a_row_is_read_ends_the_audit(monkeypatch):
    """A client without a row is left out; where all were, the audit would find nothing, whatever leaves."""
    steps = FedPAQSteps(num_local_steps=1, batch_size=1, clip_norm=1.0, learning_rate=0.1, sensitivity="per-step")
    asked = SimpleNamespace(server_round=1, ask=SimpleNamespace(vectors={"control": np.zeros(3, np.float32)}))
    monkeypatch.setattr(one_run_records, "row_of", lambda sent: (asked, np.zeros(4)))
    with pytest.raises(RuntimeError, match="size"):
        one_run_records.Replies(names={2: "a"}, drift=steps, kept={"a": torch.zeros(5)}).rows({2: None})


def test_record_canaries_change_no_size_and_follow_the_coins():
    clients = {
        name: TensorRecords(inputs=torch.zeros(n, 5), targets=torch.zeros(n, dtype=torch.int64))
        for name, n in (("a", 2), ("b", 4))
    }
    choices = np.array([1, -1, -1, 1, 1])
    made = planted(clients, choices, labels=[0, 1], clip_norm=2.0, rng=np.random.default_rng(0))
    assert {name: len(one.records) for name, one in made.items()} == {"a": 2, "b": 4}
    assert sorted(np.concatenate([one.coins for one in made.values()])) == [0, 1, 2, 3, 4]
    assert len(made["a"].coins) == 2
    for one in made.values():
        held = {tuple(row.tolist()) for row in one.records.inputs if row.any()}
        wanted = {tuple((choices[coin] * row).tolist()) for coin, row in zip(one.coins, one.inputs, strict=True)}
        assert held == wanted
        np.testing.assert_allclose(one.inputs.norm(dim=1), 6.0, rtol=1e-5)


def test_a_score_grows_with_an_update_against_the_gradient_of_x():
    clients = {"a": TensorRecords(inputs=torch.zeros(3, 4), targets=torch.zeros(3, dtype=torch.int64))}
    made = planted(clients, np.array([1]), labels=[0], clip_norm=1.0, rng=np.random.default_rng(0))
    model = FlatModel(torch.nn.Linear(4, 2, bias=False))
    scores = RecordScores(canaries=made, model=model, loss=torch.nn.functional.cross_entropy, clip_norm=1.0, scores=np.zeros(1))
    # At weights 0 the gradient under label 0 is (-x, x) / 2: an update towards x in the row of class 0 fits it.
    towards = torch.cat([made["a"].inputs[0], -made["a"].inputs[0]]).numpy()
    scores.see(np.zeros(8, np.float32), "a", towards)
    assert scores.scores[0] == pytest.approx(2.0, rel=1e-5)  # both gradients have norm 1 after the clip, and are opposite


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["method=nbafl"], "method='nbafl'.*dp-fedpaq"),
        (["method=dp-fedavg", "num-clients=50", "dp-fedavg.delta=1e-5"], "num_canaries=51: must be at most num-clients=50"),
    ],
)
def test_what_has_no_canaries_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        audit_run(config("breast-cancer", settings), num_canaries=51)


def test_rows_of_scaffold_are_seen_without_their_drift():
    """Over two rounds, c_i' is the mean of the noised gradients: Dx = -E eta (g + c - c_i), solved by hand."""
    steps = FedPAQSteps(
        learning_rate=0.5, num_local_steps=2, batch_size=4, clip_norm=1.0, sensitivity="per-step", decay_iterations=None
    )
    replies = Replies(names={2: "a"}, drift=steps)
    first, second = np.array([1.0, 0.0, 2.0]), np.array([0.0, -1.0, 1.0])
    controls = [np.zeros(3), np.array([0.5, 0.25, -1.0])]
    own = np.zeros(3)
    for number, (gradient, control) in enumerate(zip((first, second), controls, strict=True), start=1):
        update = -2 * 0.5 * (gradient + control - own)
        own_ask = {"a": LocalRequest(weight=1.0, terms="", noise_multiplier=1.0, number=1, run="a run")}
        promise, vectors = Promise(clip_norm=1.0, noise_multiplier=1.0), {"control": control.astype(np.float32)}
        ask = ReleaseRequest(promise=promise, placement="local", own=own_ask, vectors=vectors)
        asked = Instruction(server_round=number, method="scaffold", clients=("a",), ask=ask)
        row = replies._own("a", asked, update.astype(np.float32))
        np.testing.assert_allclose(row, -gradient, atol=1e-6)
        own = gradient


@pytest.mark.parametrize("rate", [0.3, 0.7])
def test_a_canary_or_its_negative_scores_by_both_likelihoods(rate):
    """Under replace-one: the log-likelihood ratio of a contribution less that of its negative, by hand."""
    rng = np.random.default_rng(0)
    choices = np.array([1, -1, 1, -1, 1, 1, -1, -1])
    made = ClientCanaries.drawn([f"c{n}" for n in range(8)], choices, relation="replace-one", dimension=400, rng=rng)
    before, other = rng.normal(size=(2, 400))
    after = before + choices @ made.directions + rng.normal(size=400)
    seen = made.directions @ (after - before - other)
    seen -= np.median(seen) if rate < 0.5 else 0.0
    variance = max(1.4826 * np.median(np.abs(seen)), 1e-3) ** 2
    ratios = [np.log(1 - rate + rate * np.exp((sign * seen - 0.5) / variance)) for sign in (1, -1)]
    found = made.score([before, after], others=[other], scales=[1.0], sampling_rate=rate)
    np.testing.assert_allclose(found, ratios[0] - ratios[1], rtol=1e-6, atol=1e-8)

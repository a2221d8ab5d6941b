"""Every method has cases, they run, and their claims are those of the methods' own statements."""

import math
from dataclasses import replace
from functools import partial

import pytest

from flower_dp.apps.commands import cost
from flower_dp.audit import CASES, Claim, audit
from flower_dp.audit.audit import estimator_of
from flower_dp.audit.case import Case, Trials, quiet
from flower_dp.audit.methods import CLIP_NORM, case_of, noised_sum
from flower_dp.core import noise
from flower_dp.core.sampling import FullSampling
from flower_dp.methods import METHODS
from flower_dp.privacy.events import leaves_of
from flower_dp.running import apps
from flower_dp.strategies import DPFedAvg, DPStrategy
from flower_dp.strategies.client_level import ClientLevelRules
from flower_dp.strategies.releases import shared_noise
from flower_dp.strategies.releases.clipped_updates import ClippedUpdates
from flower_dp.strategies.releases.noised_sum import SumState

PRESETS = (
    "mnist-dp-fedsam-topk-paper",
    "mnist-fed-smp-topk",
    "mnist-dp-fedavg-adaptive",
    "mnist-blurs",
    "mnist-nbafl",
    "mnist-dp-pasgd",
    "mnist-dp-fedpaq",
    "breast-cancer-fedsgd-dpc",
)


def test_every_method_has_a_case():
    assert {case.method for case in CASES.values()} == set(METHODS)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.label)
def test_every_case_runs_with_and_without_the_unit_and_has_a_claim(case):
    """Whether trials refute it is not asked: so few that a test has time for would refute no claim as large as these."""
    with quiet():
        runs = Trials(case)
        without, with_it = (runs.run(present=present) for present in (False, True))
        claim = Claim.of(runs.statement, runs.ledger)
    assert without.keys() == with_it.keys()
    assert 0 < claim.epsilon < 20
    assert claim.event


@pytest.mark.parametrize("label", ["dp-fedavg", "dp-fedavg, Poisson", "fedsgd-dpc, Laplace", "nbafl", "dp-sgd"])
def test_a_claim_is_that_of_its_ledger(label):
    with quiet():
        runs = Trials(CASES[label])
        runs.run(present=True)
        statement, cost = runs.statement, runs.ledger.cost(runs.statement.delta)
    assert statement.private
    assert cost.epsilon == pytest.approx(statement.epsilon, rel=1e-3)


def test_runs_share_nothing():
    with quiet():
        runs = Trials(CASES["fedsgd-dpc, Gaussian"])
        values = [runs.run(present=present)["projection"] for present in (True, True, False, True)]
    assert len(set(values)) == 4
    assert runs.statement.num_rounds == 1


def test_update_and_indicator_together_have_the_effect_that_is_claimed(monkeypatch):
    """Without noise: the squares of both effects, over the noise, add up to 1 / z^2, where the update alone has less."""
    case = CASES["dp-fedavg, adaptive clip"]
    training = case.strategy().rules.training
    release = training.next_noise(SumState()).release
    deviation = release.noise_scale  # of every coordinate
    monkeypatch.setattr(noise, "gaussian", lambda like, std, step, rng: 0.0 * like)
    with quiet():
        runs = Trials(case)
        without, with_it = (runs.run(present=present) for present in (False, True))
    asked = training.indicator(SumState())
    # One coordinate in the direction of what the unit adds, as long as update or indicator alone: their weights are their lengths.
    lengths = {"update": asked.clip_norm, "indicator": asked.scale / 2, "projection": asked.joint_norm}
    for name, length in lengths.items():
        effect = (with_it[name] - without[name]) * asked.joint_norm**2 / length
        assert effect == pytest.approx(length, rel=2e-3), name
    assert asked.joint_norm / deviation == pytest.approx(1 / release.mechanism.noise_multiplier, rel=1e-6)


SHARED = (
    "dp-fedavg, distributed",
    "dp-fedavg, distributed, replace-one",
    "dp-fedavg, untrusted server",
    "dp-fedsam",
    "fed-smp, rand-k",
)


def unknown_noise(case, monkeypatch):
    """Return the std of the noise that a participant does not know, without the unit and with it, over that of the claim."""
    drawn, found = [], []
    monkeypatch.setattr(noise, "gaussian", lambda like, std, step, rng: drawn.append(std) or 0.0 * like)
    with quiet():
        runs = Trials(case)
        for present in (False, True):
            drawn.clear()
            runs.run(present=present)
            own = runs.strategy.rules.training.noise.share(len(case.present))
            found.append(math.sqrt(sum(std**2 for std in drawn) - own**2))
        (leaf, count), *more = leaves_of(runs.ledger.event)
    assert count == 1
    assert not more
    return [std / (leaf.noise_multiplier * CLIP_NORM) for std in found]


@pytest.mark.parametrize("label", SHARED)
def test_a_participant_meets_just_the_noise_of_the_claim(label, monkeypatch):
    assert unknown_noise(CASES[label], monkeypatch) == pytest.approx([1.0, 1.0], rel=1e-3)


@pytest.mark.parametrize("label", SHARED)
def test_shares_of_noise_over_their_number_show_with_the_unit_and_without_it(label, monkeypatch):
    """Each of n clients draws noise / n. Of n - 1 shares sqrt(1 / n) is left; where the server adds one of them sqrt(2 / n)."""
    monkeypatch.setattr(shared_noise, "gaussian_share", lambda std, num_shares: std / num_shares)
    case = CASES[label]
    num = len(case.present)
    without, with_it = unknown_noise(case, monkeypatch)
    assert with_it == pytest.approx(math.sqrt(1 / num), rel=1e-3)
    assert without == pytest.approx(math.sqrt((2 if case.silent else 1) / num), rel=1e-3)
    assert without < 0.75


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_case(preset):
    run = apps.resolve(preset, [])
    case = case_of(preset, {**run.app.settings(), **run.overrides})
    with quiet():
        runs = Trials(case)
        for present in (True, False):
            runs.run(present=present)
        assert runs.statement.private


def test_a_preset_keeps_its_noise_and_clip():
    run = apps.resolve("mnist-dp-fedsam", ["dp-fedsam.epsilon=6", "num-rounds=3", "sampling=full", "num-clients=200"])
    strategy = case_of("it", {**run.app.settings(), **run.overrides}).strategy()
    planned = cost({**run.app.defaults, **run.overrides})
    assert strategy.rules.release.mechanism.noise_multiplier == pytest.approx(planned.noise["noise_multiplier"])
    assert strategy.rules.release.clip_norm == planned.noise["clip_norm"]


@pytest.mark.parametrize("method", ["dp-fedpaq", "scaffold"])
@pytest.mark.parametrize("sensitivity", ["per-step", "convex-glm"])
def test_a_preset_keeps_the_proof_of_its_sensitivity(method, sensitivity):
    run = apps.resolve("mnist-dp-fedpaq", [])
    table = {key.replace("dp-fedpaq.", f"{method}."): value for key, value in {**run.app.settings(), **run.overrides}.items()}
    case = case_of("it", {**table, "method": method, f"{method}.sensitivity": sensitivity})
    assert case.strategy().rules.steps.sensitivity == sensitivity
    assert case.method == method


def test_a_method_without_a_case_is_not_audited_as_another_one():
    """A method that the audit did not know was audited as DP-FedPAQ, with its settings."""
    run = apps.resolve("mnist-dp-fedpaq", [])
    table = {key.replace("dp-fedpaq.", "new-method."): value for key, value in {**run.app.settings(), **run.overrides}.items()}
    with pytest.raises(ValueError, match="method='new-method': must be one of dp-fedavg, "):
        case_of("it", {**table, "method": "new-method"})


def test_a_preset_without_privacy_is_no_case():
    run = apps.resolve("mnist-fedavg-not-private", [])
    with pytest.raises(ValueError, match="is not private"):
        case_of("it", {**run.app.settings(), **run.overrides})


class OfOnesOwn(DPFedAvg):
    """A strategy of a user's own, with the default placement of the one that it comes from."""


class OnlyCentral(DPStrategy):
    """One without the argument `placement`: the server adds all noise."""

    def __init__(self, *, clip_norm, noise_multiplier, sampling, num_clients, delta, **options):
        words = {"relation": None, "placement": "central", "trusted_server": True, "min_reply_ratio": None}
        updates = ClippedUpdates(clip_norm=clip_norm, sampling=sampling, num_clients=num_clients, **words)
        super().__init__(ClientLevelRules("only-central", "Only central", updates, noise_multiplier, delta=delta), **options)


@pytest.mark.parametrize("strategy_class", [OfOnesOwn, OnlyCentral])
def test_a_strategy_of_ones_own_is_audited_under_its_own_placement(strategy_class):
    """A subclass of DPFedAvg was audited as if clients shared the noise; a strategy without `placement` was not audited at all."""
    case, same = noised_sum("mine", method=strategy_class), CASES["dp-fedavg"]
    assert (case.view, case.silent) == (same.view, same.silent) == ("outsider", True)
    assert (case.present, case.absent) == (same.present, same.absent)
    assert noised_sum("mine", method=partial(DPFedAvg, placement="distributed")).view == "participant"


@pytest.mark.parametrize("wrong", [{"view": "everybody"}, {"num_rounds": 0}, {"absent": (0.0,)}, {"present": (), "absent": ()}])
def test_nonsense_is_refused(wrong):
    case = CASES["dp-fedavg"]
    fields = {name: getattr(case, name) for name in case.__dataclass_fields__}
    with pytest.raises(ValueError, match=r"view=|num_rounds=|absent="):
        Case(**fields | wrong)


def test_a_case_without_privacy_or_with_fixed_noise_is_refused():
    def strategy():
        return DPFedAvg(clip_norm=1.0, noise_multiplier=0.0, sampling=FullSampling(), num_clients=2, delta=1e-3)

    with pytest.raises(ValueError, match="claims no privacy"):
        audit(replace(CASES["dp-fedavg"], strategy=strategy), trials=20)
    with pytest.raises(ValueError, match="fixed seed"):
        audit(noised_sum("it", method=partial(DPFedAvg, noise_seed=3), placement="central"), trials=20)
    with pytest.raises(ValueError, match="it: is not private"):
        noised_sum("it", method="dp-fedavg", noise_multiplier=0.0)


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("dp-fedavg, stock clients", "Gaussian trade-off"),
        ("dp-fedavg, Poisson", "sampled-Gaussian trade-off"),
        ("dp-fedavg, fixed size", "sampled-Gaussian trade-off"),
        ("fedsgd-dpc, Laplace", "Laplace trade-off"),
        ("dp-pasgd", "Gaussian trade-off"),
        ("dp-pasgd, Poisson", "sampled-Gaussian trade-off"),
        ("dp-fedsam, quantised", "any mechanism"),
        ("dp-fedpaq, quantised", "any mechanism"),
    ],
)
def test_an_estimator_is_chosen_by_what_was_charged(label, name):
    case = CASES[label]
    with quiet():
        runs = Trials(case)
        runs.run(present=True)
        estimator = estimator_of(case, Claim.of(runs.statement, runs.ledger))
    assert estimator.name == name
    assert getattr(estimator, "replaced", False) == (label == "dp-pasgd, Poisson")

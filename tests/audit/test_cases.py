"""Every method has cases, they run, and their claims are those of the methods' own statements."""

import math
from dataclasses import replace
from functools import partial

import pytest

from flower_dp.apps.commands import cost
from flower_dp.audit import CASES, Claim, audit
from flower_dp.audit.audit import estimator_of
from flower_dp.audit.case import TrialRunner, quiet
from flower_dp.audit.methods import CLIP_NORM, case_of, noised_sum
from flower_dp.core import noise
from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.events import flatten_event
from flower_dp.running import apps
from flower_dp.strategies import DPFedAvg

PRESETS = (
    "mnist-fed-smp-topk",
    "mnist-dp-fedavg-adaptive",
    "mnist-blurs",
    "mnist-nbafl",
    "mnist-dp-pasgd",
    "mnist-dp-fedpaq",
    "breast-cancer-fedsgd-dpc",
)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.label)
def test_every_case_runs_with_and_without_the_unit_and_has_a_claim(case):
    """Whether trials refute it is not asked: so few that a test has time for would refute no claim as large as these."""
    with quiet():
        runs = TrialRunner(case)
        without, with_it = (runs.run(present=present) for present in (False, True))
        claim = Claim.of(runs.statement, runs.ledger)
    assert without.keys() == with_it.keys()
    assert 0 < claim.epsilon < 20
    assert claim.event


SHARED = ("dp-fedavg, distributed", "dp-fedavg, distributed, replace-one", "dp-fedavg, server adds no shares", "dp-fedsam")


@pytest.mark.parametrize("label", [*SHARED, "fed-smp, rand-k"])
def test_a_participant_meets_just_the_noise_of_the_claim(label, monkeypatch):
    """The std of the noise that it does not know, without the unit and with it, is that of the claim."""
    case, drawn = CASES[label], []
    monkeypatch.setattr(noise, "gaussian", lambda like, std, step, rng: drawn.append(std) or 0.0 * like)
    with quiet():
        runs = TrialRunner(case)
        for present in (False, True):
            drawn.clear()
            runs.run(present=present)
            own = runs.strategy.rules.training.noise.share_std(len(case.present))
            ((leaf, count),) = flatten_event(runs.ledger.event)
            unknown = math.sqrt(sum(std**2 for std in drawn) - own**2)
            assert (unknown, count % 1) == (pytest.approx(leaf.noise_multiplier * CLIP_NORM, rel=1e-3), 0)


def test_runs_share_nothing():
    with quiet():
        runs = TrialRunner(CASES["fedsgd-dpc, Gaussian"])
        values = [runs.run(present=present)["projection"] for present in (True, True, False, True)]
    assert len(set(values)) == 4
    assert runs.statement.num_charged_rounds == 1


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_case(preset):
    run = apps.resolve(preset, [])
    case = case_of(preset, {**run.app.settings(), **run.overrides})
    with quiet():
        runs = TrialRunner(case)
        for present in (True, False):
            runs.run(present=present)
        assert runs.statement.private


def test_a_preset_keeps_its_noise_and_clip():
    run = apps.resolve("mnist-dp-fedsam", ["dp-fedsam.epsilon=6", "num-rounds=3", "sampling=full", "num-clients=200"])
    strategy = case_of("it", {**run.app.settings(), **run.overrides}).strategy()
    planned = cost({**run.app.defaults, **run.overrides})
    assert strategy.rules.release.mechanism.noise_multiplier == pytest.approx(planned.noise["noise_multiplier"])
    assert strategy.rules.release.clip_norm == planned.noise["clip_norm"]


def of_fedpaq(method, **settings):
    """The case of DP-FedPAQ's preset with another method."""
    run = apps.resolve("mnist-dp-fedpaq", [])
    table = {key.replace("dp-fedpaq.", f"{method}."): value for key, value in {**run.app.settings(), **run.overrides}.items()}
    return case_of("it", {**table, "method": method} | {f"{method}.{name}": value for name, value in settings.items()})


@pytest.mark.parametrize("method", ["dp-fedpaq", "scaffold"])
@pytest.mark.parametrize("sensitivity", ["per-step", "convex-glm"])
def test_a_preset_keeps_the_proof_of_its_sensitivity(method, sensitivity):
    case = of_fedpaq(method, sensitivity=sensitivity)
    assert (case.strategy().rules.steps.sensitivity, case.method) == (sensitivity, method)


def test_a_method_without_a_case_is_not_audited_as_another_one():
    """A method that the audit did not know was audited as DP-FedPAQ, with its settings."""
    with pytest.raises(ValueError, match="method='new-method': must be one of dp-fedavg, "):
        of_fedpaq("new-method")


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
        ("fedsgd-dpc, Laplace", "Laplace trade-off"),
        ("dp-pasgd, Poisson", "sampled-Gaussian trade-off"),
        ("dp-fedpaq, quantized", "any mechanism"),
    ],
)
def test_an_estimator_is_chosen_by_what_was_charged(label, name):
    case = CASES[label]
    with quiet():
        runs = TrialRunner(case)
        runs.run(present=True)
        estimator = estimator_of(case, Claim.of(runs.statement, runs.ledger))
    assert estimator.name == name
    assert getattr(estimator, "replaced", False) == (label == "dp-pasgd, Poisson")

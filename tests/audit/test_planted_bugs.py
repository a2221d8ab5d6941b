"""Bugs that cost privacy, planted one by one: the audit must flag each, and must not flag the same case without it.

Every audit here has confidence 1 - 1e-4: one that flags a correct method is a false alarm, with probability 1e-4 at most each, and
below 1e-3 for all of this file, if noise is drawn anew (TEST_SEED=fresh). Then a bug is missed at times too: a Gaussian effect with a
probability below 1e-3, by simulated audits; the others leave next to no error. Bugs whose small effects only many
trials show are measured without noise: by how many standard deviations the unit moves what is seen, where the claim says fewer.
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from dp_accounting import NoOpDpEvent

from flower_dp.audit import audit, worst_case
from flower_dp.audit.case import TrialRunner, quiet
from flower_dp.audit.methods import fedsgd_dpc, local_steps, noised_sum
from flower_dp.clients import answering
from flower_dp.core import noise
from flower_dp.core.sampling import PoissonSampling
from flower_dp.privacy import accounting, events
from flower_dp.privacy.events import flatten_event
from flower_dp.strategies.releases import limits, shared_noise
from flower_dp.strategies.releases.noised_sum import NoisedSum
from flower_dp.strategies.session import Session

pytestmark = pytest.mark.slow

CONFIDENCE = 1 - 1e-4

# Stock clients are the fastest, and all of central placement is on the server.
fed_avg = partial(noised_sum, method="dp-fedavg")
STOCK = fed_avg("stock", stock=True, noise_multiplier=0.8)
LITTLE = fed_avg("stock, little noise", stock=True, noise_multiplier=0.4)
TWO_ROUNDS = fed_avg("stock, two rounds", stock=True, noise_multiplier=1.14, rounds=2)
FOUR_ROUNDS = fed_avg("stock, four rounds", stock=True, noise_multiplier=0.8, rounds=4)
REPLACED = fed_avg("stock, replace-one", stock=True, noise_multiplier=0.5, relation="replace-one")
SAMPLED = fed_avg("stock, Poisson", stock=True, noise_multiplier=0.25, sampling="poisson", sampling_rate=0.1)
# Among four clients, against one that knows its share: mu = 1.25, and 2 in the others.
distributed = partial(fed_avg, placement="distributed")
SHARED = distributed("distributed", noise_multiplier=1.85, relation="replace-one")
SHARES = distributed("distributed, add-or-remove-one", noise_multiplier=0.5 * math.sqrt(4 / 3))
SHARES_REPLACED = distributed("distributed, replace-one", noise_multiplier=math.sqrt(4 / 3), relation="replace-one")
SHARES_UNTRUSTED = distributed("distributed, untrusted", noise_multiplier=0.5 * math.sqrt(4 / 3), server_completes_noise=False)
RECORDS = fedsgd_dpc("records", mechanism="gaussian", relation="add-or-remove-one", epsilon=1.0)
LAPLACE = fedsgd_dpc("Laplace", mechanism="laplace", epsilon=1.0)
QUANTIZED = local_steps("quantized", quantization_levels=10, epsilon=0.5, delta=0.2)
PER_STEP = local_steps("per-step", sensitivity="per-step", epsilon=1.0)
CONVEX = local_steps("convex-glm", sensitivity="convex-glm", epsilon=1.0)
ADAPTIVE = fed_avg("adaptive", noise_multiplier=0.6, clip_quantile=0.5)


@pytest.fixture(autouse=True)
def _no_cost_is_remembered():
    """A planted bug of accounting must not stay in the accountants' caches."""
    accounting._least.cache_clear()
    yield
    accounting._least.cache_clear()


def quarter_of_the_noise(monkeypatch):
    whole = noise.gaussian
    monkeypatch.setattr(
        noise, "gaussian", lambda like, std, step, rng: noise.round_to_nearest(whole(like, std, step, rng) / 4, step)
    )


def hundredth_of_the_noise(monkeypatch):
    whole = noise.gaussian
    monkeypatch.setattr(
        noise, "gaussian", lambda like, std, step, rng: noise.round_to_nearest(whole(like, std, step, rng) / 100, step)
    )


def shares_by_their_number(monkeypatch):
    """Each of n clients draws noise / n in the place of noise / sqrt(n); what the server adds for missing ones is right."""
    monkeypatch.setattr(shared_noise, "gaussian_share", lambda noise_std, num_shares: noise_std / num_shares)


def no_factor_of_replace_one(monkeypatch):
    monkeypatch.setattr(events, "noise_over_sensitivity", lambda multiplier, relation: multiplier)


def no_clip(monkeypatch):
    monkeypatch.setattr(limits, "_clipped", lambda vector, bound: vector / 1e4)


def no_clip_of_records(monkeypatch):
    from flower_dp.clients.reply import parts

    monkeypatch.setattr(parts, "clip_l2", lambda rows, clip_norm: rows)


def no_clip_of_gradients(monkeypatch):
    """DP-FedPAQ's records are clipped to 1e9, where nothing but the clip norm bounds a client's sum."""
    from flower_dp.clients import dp_fedpaq
    from flower_dp.clients.training.clipped_steps import ConvexModel

    clip, of = dp_fedpaq.RecordClip, ConvexModel.of
    monkeypatch.setattr(dp_fedpaq, "RecordClip", lambda clip_norm, step: clip(clip_norm=1e9, step=step))
    monkeypatch.setattr(ConvexModel, "of", lambda *arguments: replace(of(*arguments), clip_norm=1e9))


def clip_of_each_tensor(monkeypatch):
    whole = limits._clipped
    monkeypatch.setattr(
        limits, "_clipped", lambda vector, bound: np.concatenate([whole(part, bound) for part in np.split(vector, 2)])
    )


def weights_after_the_clip(monkeypatch):
    checked = limits.ReplyLimits._checked
    monkeypatch.setattr(limits.ReplyLimits, "_checked", lambda self, vector, clients: 10 * checked(self, vector, clients))


def one_noise_for_all_rounds(monkeypatch):
    """The server's noise of round 1 is that of round 2 too; every run has its own."""
    fresh, drawn = Session.generator, {}

    def generator(self, *purpose):
        if purpose == ("noise", 1):
            drawn["state"] = (rng := fresh(self, *purpose)).bit_generator.state
            return rng
        rng = fresh(self, *purpose)
        if purpose[0] == "noise":
            rng.bit_generator.state = drawn["state"]
        return rng

    monkeypatch.setattr(Session, "generator", generator)


def one_noise_for_all_clients(monkeypatch):
    """The clients of a round draw from copies of one generator."""
    fresh, drawn = answering.generator, {}

    def generator(client, instruction, name, *, on=None):
        rng = fresh(client, instruction, name, on=on)
        if name == "c0":
            drawn["state"] = rng.bit_generator.state
        elif "state" in drawn:
            rng.bit_generator.state = drawn["state"]
        return rng

    monkeypatch.setattr(answering, "generator", generator)


def cohort_of_the_largest_updates(monkeypatch):
    """All clients are asked, and those with the largest updates are the cohort: the unit, whenever it has one."""
    monkeypatch.setattr(PoissonSampling, "sample", lambda self, server_round, num_clients, rng: np.arange(num_clients))


def only_the_first_release_charged(monkeypatch):
    charge = NoisedSum.charge

    def free(self, charges, server_round, names):
        made, nothing = charge(self, charges, server_round, names), (NoOpDpEvent(),)
        return made if made.number == 1 else replace(made, events=nothing, views=dict.fromkeys(made.views, nothing))

    monkeypatch.setattr(NoisedSum, "charge", free)


def noise_of_half_precision(monkeypatch):
    """Noise is a float16, and neither it nor the value is on a lattice."""
    monkeypatch.setattr(noise, "round_toward_zero", lambda values, step: values)
    monkeypatch.setattr(noise, "gaussian", lambda like, std, step, rng: std * rng.standard_normal(like.shape).astype(np.float16))


def value_off_the_lattice(monkeypatch):
    monkeypatch.setattr(noise, "round_toward_zero", lambda values, step: values)


def no_noise_on_the_indicator(monkeypatch):
    whole = noise.gaussian

    def gaussian(like, std, step, rng):
        drawn = whole(like, std, step, rng)
        drawn[-1] = 0.0
        return drawn

    monkeypatch.setattr(noise, "gaussian", gaussian)


def unbounded_indicator(monkeypatch):
    """A client's indicator is twenty times as large as it may be, and the server does not bound it."""
    from flower_dp.clients.reply import parts

    whole = parts.indicator
    monkeypatch.setattr(parts, "indicator", lambda update, clip_norm, scale: 20 * whole(update, clip_norm, scale))
    monkeypatch.setattr(
        limits.ReplyLimits,
        "_clipped",
        lambda self, vector, clients, bound: np.append(limits._clipped(vector[:-1], bound), vector[-1]),
    )


BUGS = [
    (quarter_of_the_noise, STOCK, 70),
    (hundredth_of_the_noise, RECORDS, 40),
    (shares_by_their_number, SHARES, 320),
    (shares_by_their_number, SHARES_REPLACED, 200),
    (shares_by_their_number, SHARES_UNTRUSTED, 200),
    (no_factor_of_replace_one, REPLACED, 200),
    (no_clip, STOCK, 40),
    (no_clip_of_records, RECORDS, 40),
    (no_clip_of_gradients, PER_STEP, 40),
    (no_clip_of_gradients, CONVEX, 40),
    (weights_after_the_clip, STOCK, 40),
    (one_noise_for_all_rounds, TWO_ROUNDS, 40),
    (one_noise_for_all_clients, SHARED, 40),
    (cohort_of_the_largest_updates, SAMPLED, 45),
    (noise_of_half_precision, STOCK, 60),
    (value_off_the_lattice, RECORDS, 40),
    (no_noise_on_the_indicator, ADAPTIVE, 50),
    (unbounded_indicator, ADAPTIVE, 50),
]


@pytest.mark.parametrize(("plant", "case", "trials"), BUGS, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_is_flagged(plant, case, trials, monkeypatch):
    plant(monkeypatch)
    found = audit(case, trials=trials, confidence=CONFIDENCE)
    assert found.violation, f"{found.lower} of {found.claim.epsilon} by {found.errors}"


def no_bug(monkeypatch):
    """Nothing is planted."""


@pytest.mark.parametrize(
    ("plant", "case", "factor"),
    [
        (no_bug, STOCK, 1.0),
        (no_bug, FOUR_ROUNDS, 1.0),
        (clip_of_each_tensor, STOCK, math.sqrt(2)),
        (only_the_first_release_charged, FOUR_ROUNDS, 2.0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_bug_makes_the_effect_larger_than_the_claim(plant, case, factor, monkeypatch):
    """In standard deviations: of the projection, what the unit moves it by; of the claim, the mu of all Gaussians in the ledger."""
    plant(monkeypatch)
    strategy = case.strategy()
    deviation = strategy.rules.release.noise_scale * math.sqrt(case.num_rounds)
    monkeypatch.setattr(noise, "gaussian", lambda like, std, step, rng: 0.0 * like)
    with quiet():
        runs = TrialRunner(case)
        without, with_it = (runs.run(present=present)["projection"] for present in (False, True))
    effect = (with_it - without) / np.linalg.norm(worst_case.direction(case.inputs)) / deviation
    claimed = math.sqrt(sum(count / leaf.noise_multiplier**2 for leaf, count in flatten_event(runs.ledger.event)))
    assert effect == pytest.approx(factor * claimed, rel=1e-3)


# 40 trials refute a claim if they make next to no error, whatever the estimator; of larger effects they show nothing.
@pytest.mark.parametrize(
    ("case", "trials"),
    [
        (LITTLE, 100),
        *(
            (one, 40)
            for one in (TWO_ROUNDS, REPLACED, SAMPLED, SHARED, SHARES, RECORDS, LAPLACE, QUANTIZED, PER_STEP, CONVEX, ADAPTIVE)
        ),
    ],
    ids=lambda value: getattr(value, "label", None),
)
def test_nothing_is_flagged_without_a_bug(case, trials):
    found = audit(case, trials=trials, confidence=CONFIDENCE)
    assert not found.violation, f"{found.lower} of {found.claim.epsilon} by {found.errors}"
    if case == LITTLE:
        assert found.lower > 0.1 * found.claim.epsilon  # missed with probability 1e-3 at most

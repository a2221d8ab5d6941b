"""Bugs that cost privacy, planted one by one: the audit must flag each, and must not flag the same case without it.

Every audit here has confidence 1 - 1e-4: one that flags a correct method is a false alarm, with probability 1e-4 at most each, and
below 1e-3 for all of this file, if noise is drawn anew (TEST_SEED=fresh). Then a bug is missed at times too: a Gaussian effect with a
probability below 1e-3, which `power.py` beside this file computes; the others leave next to no error.
"""

import copy
from dataclasses import replace

import numpy as np
import pytest

from flower_dp.audit import audit
from flower_dp.audit.methods import client_level, fedsgd_dpc
from flower_dp.clients.node_client import NodeClient
from flower_dp.core import noise
from flower_dp.core.sampling import PoissonSampling
from flower_dp.privacy import accounting
from flower_dp.strategies import AdaptiveClip, DPFedAvg
from flower_dp.strategies.releases import limits
from flower_dp.strategies.releases.noised_sum import NoisedSum
from flower_dp.strategies.run import Run

pytestmark = pytest.mark.slow

CONFIDENCE = 1 - 1e-4

# Stock clients are the fastest, and all of central placement is on the server.
CENTRAL = {"training": None, "noise_multiplier": 0.4}
STOCK = client_level("stock", DPFedAvg, **CENTRAL)
TWO_ROUNDS = client_level("stock, two rounds", DPFedAvg, training=None, noise_multiplier=0.57, num_rounds=2)
FOUR_ROUNDS = client_level("stock, four rounds", DPFedAvg, training=None, noise_multiplier=0.5, num_rounds=4)
REPLACED = client_level("stock, replace-one", DPFedAvg, training=None, noise_multiplier=0.5, relation="replace-one")
SAMPLED = client_level(
    "stock, Poisson", DPFedAvg, training=None, noise_multiplier=0.5, sampling=PoissonSampling(sampling_rate=0.1)
)
SHARED = client_level("distributed", DPFedAvg, placement="distributed", noise_multiplier=2.26, relation="replace-one")
RECORDS = fedsgd_dpc("records", mechanism="gaussian", relation="add-or-remove-one", epsilon=1.0)
GRADIENTS = fedsgd_dpc("gradients", mechanism="gaussian", epsilon=8.0)
ADAPTIVE_CLIP = AdaptiveClip(initial=1.0, smallest=1e-3, largest=1e3)
ADAPTIVE = client_level("adaptive", DPFedAvg, noise_multiplier=0.6, clip_norm=ADAPTIVE_CLIP)
LITTLE = client_level("stock, much noise", DPFedAvg, training=None, noise_multiplier=0.8)


@pytest.fixture(autouse=True)
def _no_cost_is_remembered():
    """A planted bug of accounting must not stay in the accountants' caches."""
    accounting._least.cache_clear()
    yield
    accounting._least.cache_clear()


def half_the_noise(monkeypatch):
    whole = noise.gaussian
    monkeypatch.setattr(noise, "gaussian", lambda like, std, step, rng: noise.nearest(whole(like, std, step, rng) / 2, step))


def no_factor_of_replace_one(monkeypatch):
    monkeypatch.setattr(accounting, "effective", lambda multiplier, relation: multiplier)


def no_clip(monkeypatch):
    monkeypatch.setattr(limits, "_clipped", lambda vector, bound: vector / 1e4)


def no_clip_of_records(monkeypatch):
    from flower_dp.clients.reply import parts

    monkeypatch.setattr(parts, "clip_l2", lambda rows, clip_norm: rows)


def clip_of_each_tensor(monkeypatch):
    whole = limits._clipped
    monkeypatch.setattr(
        limits, "_clipped", lambda vector, bound: np.concatenate([whole(part, bound) for part in np.split(vector, 2)])
    )


def weights_after_the_clip(monkeypatch):
    accepted = limits.Limits.accepted
    monkeypatch.setattr(limits.Limits, "accepted", lambda self, vector, clients: 2 * accepted(self, vector, clients))


def one_noise_for_all_rounds(monkeypatch):
    """The server's noise of round 1 is that of round 2 too; every run has its own."""
    fresh, drawn = Run.generator, {}

    def generator(self, *purpose):
        if purpose == ("noise", 1):
            drawn["state"] = (rng := fresh(self, *purpose)).bit_generator.state
            return rng
        rng = fresh(self, *purpose)
        if purpose[0] == "noise":
            rng.bit_generator.state = drawn["state"]
        return rng

    monkeypatch.setattr(Run, "generator", generator)


def one_noise_for_all_clients(monkeypatch):
    """The clients of a round draw from copies of one generator."""
    fresh, drawn = NodeClient.generator, {}

    def generator(self, instruction, name, *, on=None):
        rng = fresh(self, instruction, name, on=on)
        if name == "c0":
            drawn["state"] = rng.bit_generator.state
        elif "state" in drawn:
            rng.bit_generator.state = drawn["state"]
        return rng

    monkeypatch.setattr(NodeClient, "generator", generator)


def cohort_of_the_largest_updates(monkeypatch):
    """All clients are asked, and those with the largest updates are the cohort: the unit, whenever it has one."""
    monkeypatch.setattr(PoissonSampling, "choose", lambda self, server_round, num_clients, rng: np.arange(num_clients))


def only_the_first_release_charged(monkeypatch):
    charge_to = NoisedSum.charge_to

    def charge_first(self, ledger, *, outside=False):
        first = copy.copy(self)
        first.state = replace(self.state, shares=self.state.shares[:1])
        charge_to(first, ledger, outside=outside)

    monkeypatch.setattr(NoisedSum, "charge_to", charge_first)


def noise_of_half_precision(monkeypatch):
    """Noise is a float16, and neither it nor the value is on a lattice."""
    monkeypatch.setattr(noise, "toward_zero", lambda values, step: values)
    monkeypatch.setattr(noise, "gaussian", lambda like, std, step, rng: std * rng.standard_normal(like.shape).astype(np.float16))


def value_off_the_lattice(monkeypatch):
    monkeypatch.setattr(noise, "toward_zero", lambda values, step: values)


def quarter_of_the_noise_on_the_indicator(monkeypatch):
    noise_on_the_indicator(monkeypatch, 0.25)


def no_noise_on_the_indicator(monkeypatch):
    noise_on_the_indicator(monkeypatch, 0.0)


def noise_on_the_indicator(monkeypatch, part):
    whole = noise.gaussian

    def gaussian(like, std, step, rng):
        drawn = whole(like, std, step, rng)
        drawn[-1] = noise.nearest(drawn[-1:] * part, step)[0]
        return drawn

    monkeypatch.setattr(noise, "gaussian", gaussian)


def unbounded_indicator(monkeypatch):
    """A client's indicator is four times as large as it may be, and the server does not bound it."""
    from flower_dp.clients.reply import parts

    whole = parts.indicator
    monkeypatch.setattr(parts, "indicator", lambda update, clip_norm, scale: 4 * whole(update, clip_norm, scale))
    monkeypatch.setattr(
        limits.Limits, "_clipped", lambda self, vector, clients, bound: np.append(limits._clipped(vector[:-1], bound), vector[-1])
    )


BUGS = [
    (half_the_noise, STOCK, 220),
    (half_the_noise, GRADIENTS, 200),
    (no_factor_of_replace_one, REPLACED, 200),
    (no_clip, STOCK, 70),
    (no_clip_of_records, RECORDS, 60),
    (clip_of_each_tensor, STOCK, 620),
    (weights_after_the_clip, STOCK, 220),
    (one_noise_for_all_rounds, TWO_ROUNDS, 70),
    (one_noise_for_all_clients, SHARED, 60),
    (cohort_of_the_largest_updates, SAMPLED, 120),
    (only_the_first_release_charged, FOUR_ROUNDS, 200),
    (noise_of_half_precision, LITTLE, 80),
    (value_off_the_lattice, RECORDS, 60),
    (quarter_of_the_noise_on_the_indicator, ADAPTIVE, 210),
    (no_noise_on_the_indicator, ADAPTIVE, 80),
    (unbounded_indicator, ADAPTIVE, 210),
]


@pytest.mark.parametrize(("plant", "case", "trials"), BUGS, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_is_flagged(plant, case, trials, monkeypatch):
    plant(monkeypatch)
    found = audit(case, trials=trials, confidence=CONFIDENCE)
    assert found.violation, f"{found.lower} of {found.claim.epsilon} by {found.errors}"


# The effects of the others are too small for so few trials.
SHOWN = [STOCK, TWO_ROUNDS, REPLACED, GRADIENTS]


@pytest.mark.parametrize("case", [*SHOWN, SAMPLED, SHARED, RECORDS, ADAPTIVE], ids=lambda case: case.label)
def test_nothing_is_flagged_without_a_bug(case):
    found = audit(case, trials=100 if case in SHOWN else 40, confidence=CONFIDENCE)
    assert not found.violation, f"{found.lower} of {found.claim.epsilon} by {found.errors}"
    if case in SHOWN:
        assert found.lower > 0.1 * found.claim.epsilon  # missed with probability 1e-3 at most

"""Run-configs of any values: a clear error, or a client with no more than the device's own budget, and its own settings."""

# ruff: noqa: PT017 (a refusal is as good as a right answer)
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flower_dp.apps import user_app
from flower_dp.apps.device_settings import own_settings
from flower_dp.apps.methods import NOT_READ
from flower_dp.clients import LocalDPClient
from flower_dp.clients.node_client import HostingClient
from flower_dp.methods import METHODS
from flower_dp.privacy import accounting
from tests.adversaries.fuzzing import bounded, examples
from tests.apps.test_methods import DEFAULTS

CLIENTS = 4
RECORDS = 20
NODE = {"partition-id": 1, "num-partitions": CLIENTS}
SHARING = ("dp-fedavg", "dp-fedsam", "fed-smp")
NO_BUDGET = (*SHARING, "dp-ftrl")


def load_records(client: int, num_clients: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(client)
    return torch.randn(RECORDS, 3, generator=rng), torch.randint(2, (RECORDS,), generator=rng)


def client_of(run_config: Mapping[str, Any], node_config: Mapping[str, Any]) -> HostingClient:
    context = Context(1, 1, dict(node_config), RecordDict(), dict(run_config))
    return user_app.client_of(lambda: nn.Linear(3, 2), load_records, nn.functional.cross_entropy, context)


# What a device with a budget says in its node-config, and what its replies may cost at that: epsilon and delta.
OWN: dict[str, tuple[dict[str, Any], float, float]] = {
    "fedsgd-dpc": ({"fedsgd-dpc.epsilon": 2.0}, 2.0, 0.0),
    "dp-fedpaq": ({"dp-fedpaq.epsilon": 2.0, "dp-fedpaq.update-clip-norm": 0.1}, 2.0, 1e-4),
    "scaffold": ({"scaffold.epsilon": 2.0, "scaffold.update-clip-norm": 0.1}, 2.0, 1e-4),
    "dp-pasgd": ({"dp-pasgd.epsilon": 2.0}, 2.0, 1e-4),
    "nbafl": ({"nbafl.epsilon": 2.0, "nbafl.num-replies": 3}, 2.0, 0.01),
}


def honest(method: str) -> dict[str, Any]:
    """A run-config that works for a method on four clients."""
    drawn = {"fedsgd-dpc": "round-robin", "dp-fedpaq": "fixed-size", "scaffold": "fixed-size", "dp-ftrl": "minimum-separation"}
    sampling = drawn.get(method, "full")
    run = {"method": method, "num-clients": CLIENTS, "num-rounds": 3, "sampling": sampling, "momentum": 0.0}
    run |= {"batch-size": 2} if method != "fedsgd-dpc" else {}
    run |= {"cohort-size": 2} if sampling in ("fixed-size", "minimum-separation") else {}
    run |= {"learning-rate-decay": 0.0} if method in ("dp-fedpaq", "scaffold", "fedsgd-dpc") else {}
    return run | ({f"{method}.delta": 1e-3} if method in NO_BUDGET else OWN[method][0])


KEYS = sorted(key for key in DEFAULTS if key not in NOT_READ)


@st.composite
def lies(draw: st.DrawFn, method: str, most: int = 4) -> dict[str, Any]:
    """Draw settings of a run that a method may read: those of other methods, and what decides nothing here, are left out."""
    keys = [key for key in KEYS if "." not in key or key.startswith((f"{method}.", "evaluation."))]
    chosen = draw(st.lists(st.sampled_from(keys), min_size=1, max_size=most, unique=True))
    return {key: draw(_value(DEFAULTS[key])) for key in chosen}


def _value(default: Any) -> st.SearchStrategy[Any]:
    """A value of the type of the default, mostly of a plausible size."""
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, str):
        words = ["", "full", "poisson", "fixed-size", "round-robin", "local", "central", "distributed", "replace-one", "adam"]
        return st.sampled_from(
            [*words, "laplace", "gaussian", "per-step", "clip-update", "zcdp", "exact", "paper", "uniform", "1,1,1,1"]
        )
    if isinstance(default, int):
        return st.one_of(st.integers(0, 12), st.sampled_from([100, 10**6, 2**40, -1]))
    return st.one_of(st.sampled_from([0.0, 0.1, 0.5, 0.999, 1.0, 2.0, 30.0, 1e-9, 1e9, math.inf, math.nan]), st.floats(0, 10))


def refused_or_made(run: dict[str, Any], node: dict[str, Any]) -> HostingClient | None:
    """Return the client; None if the settings are refused, with a line for each that is wrong."""
    with bounded():
        try:
            return client_of(run, node)
        except ValueError as error:
            assert str(error).strip()
            return None


def assert_budget(client: HostingClient, method: str) -> None:
    """All replies of the device's clients cost no more than its own budget, by the accountant of the package."""
    _, epsilon, delta = OWN[method]
    assert isinstance(client, LocalDPClient)
    assert client.evaluation_budget is None
    for name, records in client.clients.items():
        try:
            terms = client.recipe.terms(name, records)
        except ValueError:  # then the client does not reply
            continue
        assert terms.epsilon <= epsilon * LOOSE
        assert terms.release.mechanism.noise_multiplier > 0
        if terms.num_replies * terms.num_releases <= 1000:
            event = accounting.repeated(terms.event, terms.num_replies)
            assert accounting.epsilon(event, delta=delta, relation=terms.release.relation).epsilon <= epsilon * (1 + 1e-3)


def assert_policy(client: HostingClient, method: str) -> None:
    policy = client.policy
    assert (policy.max_clip_norm, policy.min_noise_multiplier) == (0.7, 2.0)
    assert policy.min_noise_std is not None
    assert policy.min_noise_std >= 2.0 * 0.7 / math.sqrt(CLIENTS) / LOOSE
    assert not policy.allow_evaluation


LOOSE = 1 + 1e-6
LIMITS = {"noise-multiplier": 2.0, "clip-norm": 0.7, "delta": 1e-3, "placement": "distributed", "server-completes-noise": True}
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    **{method: (own, assert_budget) for method, (own, *_) in OWN.items()},
    **{
        method: ({f"{method}.{key}": value for key, value in LIMITS.items()} | {"sampling": "full"}, assert_policy)
        for method in SHARING
    },
}


@pytest.mark.slow
@examples(12)
@pytest.mark.parametrize("method", KINDS)
@given(data=st.data())
def test_no_run_config_weakens_what_a_device_has_set_for_itself(method: str, data: st.DataObject) -> None:
    own, check = KINDS[method]
    assert refused_or_made(honest(method), NODE | own)
    client = refused_or_made(honest(method) | data.draw(lies(method)), NODE | own)
    if client is not None:
        assert list(client.clients) == ["client-1"]
        assert not client.policy.allow_metrics
        check(client, method)


@examples(40)
@given(data=st.data())
def test_a_devices_own_settings_are_the_devices(data: st.DataObject) -> None:
    """Whatever a server sets, each key of the node-config, and of the method's table, is as the device says."""
    method = data.draw(st.sampled_from(sorted(METHODS)))
    mine = data.draw(lies(method, most=3))
    servers = data.draw(lies(method, most=6))
    with bounded():
        try:
            settings = own_settings({**DEFAULTS, **honest(method), **servers}, NODE | mine, dealt=data.draw(st.booleans()))
        except ValueError as error:
            assert str(error).strip()
            return
    for key, value in mine.items():
        assert settings[key] is value or settings[key] == value
    tables = ("evaluation.", *({f"{method}."} if any(key.startswith(f"{method}.") for key in mine) else ()))
    for key, default in DEFAULTS.items():
        if key.startswith(tables) and key not in mine:
            assert settings[key] == default, key

"""Run-configs and node-configs of any values: a clear error, or a client with no more than the device's own budget."""

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

from flower_dp.apps import own_model
from flower_dp.apps.device import own_settings
from flower_dp.apps.methods import NOT_READ, Run
from flower_dp.clients import DPClient, LocalDPClient
from flower_dp.clients.node_client import NodeClient
from flower_dp.core import checks
from flower_dp.methods import METHODS
from flower_dp.privacy import accounting
from tests.adversaries.fuzzing import HUGE, SMALL, TEXTS, bounded, examples
from tests.apps.test_methods import DEFAULTS

CLIENTS = 4
RECORDS = 20
NODE = {"partition-id": 1, "num-partitions": CLIENTS}
# What a device that has a budget says in its node-config, and what its replies may cost at that: epsilon and delta.
BUDGETS: dict[str, tuple[dict[str, Any], float, float]] = {
    "fedsgd-dpc": ({"fedsgd-dpc.epsilon": 2.0}, 2.0, 0.0),
    "dp-fedpaq": ({"dp-fedpaq.epsilon": 2.0, "dp-fedpaq.update-clip-norm": 0.1}, 2.0, 1e-4),
    "scaffold": ({"scaffold.epsilon": 2.0, "scaffold.update-clip-norm": 0.1}, 2.0, 1e-4),
    "dp-pasgd": ({"dp-pasgd.epsilon": 2.0}, 2.0, 1e-4),
    "nbafl": ({"nbafl.epsilon": 2.0, "nbafl.num-replies": 3}, 2.0, 0.01),
}
# In the paper's own epsilon, which follows from how many replies the noise is made for.
PAPERS = {"nbafl.paper-epsilon": 1.0, "nbafl.delta": 1e-3}
SHARING = ("dp-fedavg", "dp-fedsam", "fed-smp")
LIMITS = {"noise-multiplier": 2.0, "clip-norm": 0.7, "delta": 1e-3, "placement": "distributed", "trusted-server": True}

SCALARS = st.one_of(
    st.sampled_from([*(value for value in (*HUGE, *SMALL) if isinstance(value, float) or abs(value) < 2**63), True, False]),
    st.sampled_from([text for text in TEXTS if text.isprintable() or "\n" in text]),
    st.floats(),
    st.integers(-(2**40), 2**40),
)


def load_records(client: int, num_clients: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(client)
    return torch.randn(RECORDS, 3, generator=rng), torch.randint(2, (RECORDS,), generator=rng)


def client_of(run_config: Mapping[str, Any], node_config: Mapping[str, Any]) -> NodeClient:
    context = Context(1, 1, dict(node_config), RecordDict(), dict(run_config))
    return own_model.client_of(lambda: nn.Linear(3, 2), load_records, nn.functional.cross_entropy, context)


def honest(method: str) -> dict[str, Any]:
    """A run-config that works for a method on four clients."""
    sampling = {"fedsgd-dpc": "round-robin", "dp-fedpaq": "fixed-size", "scaffold": "fixed-size"}.get(method, "full")
    run = {"method": method, "num-clients": CLIENTS, "num-rounds": 3, "sampling": sampling, "momentum": 0.0}
    run |= {"batch-size": 2} if method != "fedsgd-dpc" else {}
    run |= {"cohort-size": 2} if sampling == "fixed-size" else {}
    run |= {"learning-rate-decay": 0.0} if method in ("dp-fedpaq", "scaffold", "fedsgd-dpc") else {}
    own = {key: value for key, (table, *_) in BUDGETS.items() if key == method for key, value in table.items()}
    return run | own | ({f"{method}.delta": 1e-3} if method in SHARING else {})


@pytest.mark.parametrize("method", METHODS)
def test_the_honest_configs_make_clients(method: str) -> None:
    """Else the tests of this file would try nothing."""
    client = client_of(honest(method), NODE)
    assert method in client.methods
    assert list(client.clients) == ["client-1"]


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


def refused_or_made(run: dict[str, Any], node: dict[str, Any]) -> NodeClient | None:
    """Return the client; None if the settings are refused, with a line for each that is wrong."""
    with bounded():
        try:
            return client_of(run, node)
        except ValueError as error:
            assert str(error).strip()
            return None


# Types


@pytest.mark.slow
@examples(15)
@pytest.mark.parametrize("method", METHODS)
@given(data=st.data())
def test_a_value_of_any_type_is_an_error_that_names_its_field(method: str, data: st.DataObject) -> None:
    """Or it does not matter: then the client is the same as without it."""
    changed = {key: data.draw(SCALARS) for key in data.draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True))}
    run = honest(method) | changed
    with bounded():
        try:
            Run.of({**DEFAULTS, **run})
        except checks.SettingsError as error:
            names = [key for key in changed if key in str(error)]
            others = {"method": "is not read by", "sampling": "is not read with", "evaluation.every": "evaluation."}
            assert names or any(word in str(error) for key, word in others.items() if key in changed), str(error)
            return
        try:
            client_of(run, NODE)
        except ValueError as error:
            words = {word for key in changed for word in (key, key.rpartition(".")[2], key.replace("-", "_").rpartition(".")[2])}
            assert any(word in str(error) for word in words) or _follows(str(error)), f"{changed}: {error}"


def _follows(text: str) -> bool:
    """Whether an error names a quantity that follows from several settings, or a setting that another one makes wrong."""
    names = (
        "epsilon",
        "noise",
        "num_replies",
        "num_steps",
        "delta",
        "clip_norm",
        "clip-norm",
        "batch",
        "cohort",
        "sampling",
        "blur",
    )
    return text.partition(":")[0].strip() != "" and any(name in text for name in names)


@pytest.mark.slow
@examples(40)
@given(data=st.data())
def test_a_node_config_of_any_value_is_an_error_that_names_its_field(data: st.DataObject) -> None:
    method = data.draw(st.sampled_from(sorted(METHODS)))
    keys = ["partition-id", "num-partitions", "num-clients", "num-rounds", "seed", f"{method}.clip-norm", f"{method}.delta"]
    changed = {key: data.draw(SCALARS) for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=2, unique=True))}
    with bounded():
        try:
            client = client_of(honest(method), NODE | changed)
        except ValueError as error:
            words = {word for key in changed for word in (key, key.rpartition(".")[2].replace("-", "_"))}
            assert any(word in str(error) for word in words) or _follows(str(error)), f"{changed}: {error}"
        else:
            # The device's owner may let it host others than one of the run's.
            assert len(client.clients) <= CLIENTS or "num-clients" in changed


# Budgets


def assert_own(client: LocalDPClient, epsilon: float, delta: float) -> None:
    """All replies of the device's clients cost no more than its own budget, by the accountant of the package."""
    for name, records in client.clients.items():
        try:
            terms = client.recipe.terms(name, records)
        except ValueError:  # then the client does not reply
            continue
        assert terms.epsilon <= epsilon * (1 + 1e-9)
        release = terms.release
        assert release.mechanism.noise_multiplier > 0
        if delta == 0:
            cost = terms.num_replies * terms.num_releases * release.sensitivity / release.clip_norm
            assert cost / release.mechanism.noise_multiplier <= epsilon * (1 + 1e-9)
        elif terms.num_replies * terms.num_releases <= 1000:
            event = accounting.repeated(terms.event, terms.num_replies)
            assert accounting.epsilon(event, delta=delta, relation=release.relation).epsilon <= epsilon * (1 + 1e-3)


@pytest.mark.slow
@examples(8)
@pytest.mark.parametrize("method", BUDGETS)
@given(data=st.data())
def test_no_run_config_gives_a_device_a_larger_budget_than_its_own(method: str, data: st.DataObject) -> None:
    own, epsilon, delta = BUDGETS[method]
    client = refused_or_made(honest(method) | data.draw(lies(method)), NODE | own)
    if client is None:
        return
    assert isinstance(client, LocalDPClient)
    assert list(client.clients) == ["client-1"]
    assert client.evaluation_budget is None
    assert not client.policy.allow_metrics
    assert_own(client, epsilon, delta)


@pytest.mark.slow
@examples(40)
@given(
    data=st.data(),
    own=st.fixed_dictionaries({}, optional={"nbafl.num-replies": st.integers(1, 9), "nbafl.uplink-exposures": st.integers(1, 9)}),
)
def test_no_run_config_lowers_the_noise_of_the_papers_epsilon(own: dict[str, int], data: st.DataObject) -> None:
    """The noise is made for as many replies as the device says, or else for as many as it may ever send."""
    client = refused_or_made(honest("nbafl") | data.draw(lies("nbafl")), NODE | PAPERS | own)
    if client is None:
        return
    assert isinstance(client, LocalDPClient)
    terms = client.recipe.terms("client-1", client.clients["client-1"])
    # Wei et al. 2020: of one exposure c (2 C / m) / epsilon.
    one = math.sqrt(2 * math.log(1.25 / 1e-3)) * 2 / RECORDS
    made_for = terms.release.mechanism.noise_multiplier / one
    assert terms.num_replies <= own.get("nbafl.num-replies", terms.num_replies)
    assert made_for >= own.get("nbafl.uplink-exposures", terms.num_replies) * (1 - 1e-9)


@pytest.mark.slow
@examples(15)
@pytest.mark.parametrize("method", SHARING)
@given(data=st.data())
def test_no_run_config_weakens_a_devices_policy(method: str, data: st.DataObject) -> None:
    own = {f"{method}.{key}": value for key, value in LIMITS.items()} | {"sampling": "full"}
    client = refused_or_made(honest(method) | data.draw(lies(method)), NODE | own)
    if client is None:
        return
    assert isinstance(client, DPClient)
    policy = client.policy
    assert list(client.clients) == ["client-1"]
    assert (policy.max_clip_norm, policy.min_noise_multiplier) == (0.7, 2.0)
    assert policy.min_noise_std is not None
    assert policy.min_noise_std >= 2.0 * 0.7 / math.sqrt(CLIENTS) * (1 - 1e-6)
    assert not policy.allow_metrics
    assert not policy.allow_evaluation


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
    if any(key.startswith(f"{method}.") for key in mine):
        for key, default in DEFAULTS.items():
            if key.startswith(f"{method}.") and key not in mine:
                assert settings[key] == default, key
    for key, default in DEFAULTS.items():
        if key.startswith("evaluation.") and key not in mine:
            assert settings[key] == default

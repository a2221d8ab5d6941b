"""The eligibility of clients for a method."""

from functools import partial
from typing import Any

from flwr.serverapp import Grid

from flower_dp.core.participation import MinimumSeparationSampling
from flower_dp.strategies.population.client_manager import ClientManager, KnownClients
from flower_dp.strategies.population.client_query import is_simulation
from flower_dp.strategies.releases.local_releases import LocalReleases
from flower_dp.strategies.rules import MethodRules
from flower_dp.wire import EVALUATION

# Seconds between two looks for replies: a grid in this process replies at once, so the default of 0.1 s would be most of a round.
_PULL_SECONDS = 0.002


def query_clients(
    grid: Grid, rules: MethodRules, *, timeout: float, on_shared_ledger: bool, **most: Any
) -> tuple[ClientManager, KnownClients]:
    """Query nodes for their clients before the first round.

    Args:
        grid: the nodes.
        rules: the method's rules; more than `num_clients` clients take part if all of its releases allow it.
        timeout: seconds to wait for the clients.
        on_shared_ledger: whether the ledger also counts other runs, by client name.
        most: limits of the `ClientManager`.

    Raises:
        ValueError: if the clients can't take part.
        TimeoutError: if they don't register in time.
    """
    if type(grid).__name__ == "InMemoryGrid":
        setattr(grid, "pull_interval", _PULL_SECONDS)  # noqa: B010
    if hasattr(grid, "patience"):  # this package's grid replaces a worker that hangs, and repeats its node's query
        setattr(grid, "patience", timeout / 2)  # noqa: B010
    newcomers = all(release.accepts_new_clients for release in rules.releases)
    separated = isinstance(rules.releases[0].sampling, MinimumSeparationSampling)
    manager = ClientManager(
        rules.about.num_clients,
        timeout=timeout,
        newcomers=newcomers,
        accumulates=separated,
        unfit=partial(unfit_reason, rules),
        **most,
    )
    known_clients = manager.known_clients(grid)
    if not known_clients.hosting and rules.about.stock_refusal:
        raise ValueError(f"{rules.about.title}: {rules.about.stock_refusal}")
    if known_clients.hosting and (reason := unfit_reason(rules, known_clients.methods)):
        raise ValueError(reason)
    if separated and not is_simulation(grid) and (name := next(iter(known_clients.named_by_node), None)):
        raise ValueError(
            f"client {name!r} is named by its node's id, which changes when the node restarts: it could come back too early "
            "under another name; give every client its own name, such as privacy_mod(name=...)"
        )
    if on_shared_ledger and (name := next(iter(changing_names(rules, known_clients)), None)):
        raise ValueError(
            f"ledger: client {name!r} is named by its node's id, which changes when the node restarts: the ledger would count "
            "one client as several; give every client its own name, such as privacy_mod(name=...)"
        )
    return manager, known_clients


def changing_names(rules: MethodRules, known_clients: KnownClients) -> tuple[str, ...]:
    """Return the clients whose names count charges, and may differ in the next run."""
    return known_clients.named_by_node if isinstance(rules.releases[0], LocalReleases) else ()


def unfit_reason(rules: MethodRules, methods: frozenset[str]) -> str | None:
    """Return why clients that run these methods can't take part; None if they can."""
    if (name := rules.releases[0].name) not in methods:
        runs = ", ".join(sorted(methods)) or "no common method"
        return f"{rules.about.title}: clients must run {name!r}; these run {runs}"
    if EVALUATION in {release.name for release in rules.releases} - methods:
        return (
            f"evaluation: these clients do not run {EVALUATION!r}; use flower_dp.clients.DPClient, or "
            "LocalDPClient(evaluation=...)"
        )
    return None

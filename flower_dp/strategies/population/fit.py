"""Whether clients can take part in a method."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from flower_dp.strategies.population.client_manager import ClientManager, KnownClients
from flower_dp.strategies.releases.own_replies import OwnReplies
from flower_dp.strategies.rules import Rules
from flower_dp.wire import EVALUATION

# A grid in this process answers at once; the default of 0.1 s would be most of a simulated round.
_PULL_SECONDS = 0.002


def first_query(
    grid: Grid, rules: Rules, *, timeout: float, on_shared_ledger: bool, **most: Any
) -> tuple[ClientManager, KnownClients]:
    """Ask nodes for their clients before the first round.

    Args:
        grid: the nodes.
        rules: the method; more than `num_clients` clients take part where all of its releases allow it.
        timeout: in seconds.
        on_shared_ledger: whether other runs are counted on the same ledger, by the names of clients.
        most: limits of the `ClientManager`.

    Raises:
        ValueError: if the clients can't take part.
        TimeoutError: if they don't register in time.
    """
    if type(grid).__name__ == "InMemoryGrid":
        setattr(grid, "pull_interval", _PULL_SECONDS)  # noqa: B010
    if hasattr(grid, "patience"):  # of this package: a worker that hangs is replaced, and its node asked a second time
        setattr(grid, "patience", timeout / 2)  # noqa: B010
    newcomers = all(release.open_population for release in rules.releases)
    manager = ClientManager(
        rules.about.num_clients, timeout=timeout, newcomers=newcomers, unfit=partial(why_unfit, rules), **most
    )
    known_clients = manager.known_clients(grid)
    if reason := why_none_fits(rules, known_clients):
        raise ValueError(reason)
    if on_shared_ledger and (name := next(iter(changing_names(rules, known_clients)), None)):
        raise ValueError(
            f"ledger: client {name!r} is named by its node's id, which changes when the node starts anew: the ledger would count "
            "one client as several; give every client a name of its own, such as privacy_mod(name=...)"
        )
    return manager, known_clients


def changing_names(rules: Rules, known_clients: KnownClients) -> tuple[str, ...]:
    """Return the clients by whose names charges are counted, and whose names may be others in the next run."""
    return known_clients.named_by_node if isinstance(rules.releases[0], OwnReplies) else ()


def why_none_fits(rules: Rules, known_clients: KnownClients) -> str | None:
    """Return why the known clients can't run a method, None if they can."""
    if not known_clients.hosting:
        about = rules.about
        return f"{about.title}: {about.stock_refusal}" if about.stock_refusal else None
    return why_unfit(rules, known_clients.methods)


def why_unfit(rules: Rules, methods: frozenset[str]) -> str | None:
    """Return why clients that run these methods can't take part, None if they can."""
    if (name := rules.releases[0].name) not in methods:
        runs = ", ".join(sorted(methods)) or "no common method"
        return f"{rules.about.title}: clients must run {name!r}; these run {runs}"
    if EVALUATION in {release.name for release in rules.releases} - methods:
        return (
            f"evaluation: these clients do not run {EVALUATION!r}; use flower_dp.clients.DPClient, or "
            "LocalDPClient(evaluation=...)"
        )
    return None


def check_overrides(strategy: str, overridden: Mapping[str, bool]) -> None:
    """Refuse a strategy that asks clients to evaluate and does not read what they reply, or the other way round.

    Raises:
        ValueError: if it overrides one of the two methods.
    """
    own = [name for name, own in overridden.items() if own]
    if len(own) == 1:
        (other,) = set(overridden) - set(own)
        raise ValueError(
            f"{strategy} overrides {own[0]}, but not {other}: override both, or neither, so that what clients are "
            "asked and what their replies are read for go together"
        )


def check_evaluate_config(evaluate_config: ConfigRecord | None, *, clients_evaluate: bool) -> None:
    """Refuse a config for evaluations that no client makes.

    Raises:
        ValueError: if there is one.
    """
    if evaluate_config and not clients_evaluate:
        raise ValueError(
            "evaluate_config: no client evaluates with this strategy, since its metrics would leave without protection; "
            "give evaluation=PrivateEvaluation(...), evaluate_fn with public data, or override configure_evaluate"
        )

"""Whether clients can take part in a method."""

from collections.abc import Mapping

from flower_dp.strategies.population.client_manager import KnownClients
from flower_dp.strategies.rules import Rules
from flower_dp.wire import EVALUATION


def why_none_fits(rules: Rules, known_clients: KnownClients) -> str | None:
    """Return why the known clients can't run a method, None if they can."""
    if not known_clients.hosting:
        return f"{rules.title}: {rules.stock_refusal}" if rules.stock_refusal else None
    return why_unfit(rules, known_clients.methods)


def why_unfit(rules: Rules, methods: frozenset[str]) -> str | None:
    """Return why clients that run these methods can't take part, None if they can."""
    if (name := rules.training.name) not in methods:
        runs = ", ".join(sorted(methods)) or "no common method"
        return f"{rules.title}: clients must run {name!r}; these run {runs}"
    if rules.evaluation is not None and EVALUATION not in methods:
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

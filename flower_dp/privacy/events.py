"""Privacy events as the accountants take them: flattened, validated, and scaled to what one unit can change.

The noise multiplier of an event is noise scale / clip norm. One unit changes a sum by at most the clip norm under
add-or-remove-one, and by at most twice that under replace-one: `noise_over_sensitivity` applies that factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from flower_dp.core import checks, dp_events

Relation = Literal["add-or-remove-one", "replace-one"]
RELATIONS: tuple[Relation, ...] = ("add-or-remove-one", "replace-one")

# Noise multipliers beyond this overflow when squared. Accounting for less noise than there is stays a valid bound.
LARGEST_MULTIPLIER = 1e50
# (event, count).
Leaves = list[tuple["dp_events.DpEvent", int]]
# Events that a file can hold.
_WRITTEN = (
    "GaussianDpEvent",
    "LaplaceDpEvent",
    "ComposedDpEvent",
    "SelfComposedDpEvent",
    "NoOpDpEvent",
    "NonPrivateDpEvent",
    "PoissonSampledDpEvent",
    "SampledWithoutReplacementDpEvent",
)


class UnsupportedEventError(ValueError):
    """Raised for an event that no accountant here bounds under its relation."""


def noise_over_sensitivity(multiplier: float, relation: Relation) -> float:
    """Return noise scale over sensitivity, for noise scale over clip norm."""
    return multiplier / 2 if relation == "replace-one" else multiplier


def scaled(leaf: dp_events.DpEvent, relation: Relation) -> dp_events.DpEvent:
    """Return a plain release with noise scale over sensitivity for its multiplier."""
    return type(leaf)(noise_over_sensitivity(leaf.noise_multiplier, relation))


def unwrap_sampling(leaf: dp_events.DpEvent) -> tuple[dp_events.DpEvent, float]:
    """Return the plain release inside a leaf, and its sampling rate."""
    if isinstance(leaf, dp_events.PoissonSampledDpEvent):
        return leaf.event, leaf.sampling_probability
    if isinstance(leaf, dp_events.SampledWithoutReplacementDpEvent):
        return leaf.event, leaf.sample_size / leaf.source_dataset_size
    return leaf, 1.0


def least_noise_multiplier(event: dp_events.DpEvent) -> float:
    """Return the least noise multiplier of the releases in an event: 0 for one without noise, infinite without any release."""
    inner = (unwrap_sampling(leaf)[0] for leaf, _ in flatten_event(event))
    return min((float(getattr(release, "noise_multiplier", 0.0)) for release in inner), default=math.inf)


def around(leaf: dp_events.DpEvent, inner: dp_events.DpEvent) -> dp_events.DpEvent:
    """Return another plain release, sampled as a leaf is."""
    if isinstance(leaf, dp_events.PoissonSampledDpEvent):
        return dp_events.PoissonSampledDpEvent(leaf.sampling_probability, inner)
    if isinstance(leaf, dp_events.SampledWithoutReplacementDpEvent):
        return dp_events.SampledWithoutReplacementDpEvent(leaf.source_dataset_size, leaf.sample_size, inner)
    return inner


def probe_event(leaf: dp_events.DpEvent) -> dp_events.DpEvent:
    """Return a quick release of the same kind: which accountants bound a release depends on its kind alone."""
    inner, rate = unwrap_sampling(leaf)
    plain = type(inner)(1.0)
    if rate == 1:
        return plain
    if isinstance(leaf, dp_events.PoissonSampledDpEvent):
        return dp_events.PoissonSampledDpEvent(0.5, plain)
    return dp_events.SampledWithoutReplacementDpEvent(2, 1, plain)


def as_json(event: dp_events.DpEvent) -> dict[str, Any]:
    """Return an event as JSON values.

    Raises:
        UnsupportedEventError: for an event that no accountant here bounds.
    """
    if type(event).__name__ not in _WRITTEN:
        raise UnsupportedEventError(f"event {event}: can't be written down")
    fields = {field: getattr(event, field) for field in event.__annotations__}
    return {"kind": type(event).__name__, **{name: _part_as_json(value) for name, value in fields.items()}}


def of_json(table: Mapping[str, Any]) -> dp_events.DpEvent:
    """Return the event of JSON values.

    Raises:
        KeyError, TypeError: if the values are not those of an event.
    """
    values = {name: _part_of_json(value) for name, value in table.items() if name != "kind"}
    if table["kind"] not in _WRITTEN:
        raise KeyError(table["kind"])
    kind: type[dp_events.DpEvent] = getattr(dp_events, table["kind"])
    return kind(**values)


def _part_as_json(value: Any) -> Any:
    if isinstance(value, dp_events.DpEvent):
        return as_json(value)
    return [as_json(part) for part in value] if isinstance(value, list | tuple) else value


def _part_of_json(value: Any) -> Any:
    if isinstance(value, dict):
        return of_json(value)
    # A tuple, since a ledger uses events as keys.
    return tuple(of_json(part) for part in value) if isinstance(value, list) else value


def flatten_event(event: dp_events.DpEvent, count: int = 1) -> Leaves:
    """Flatten compositions into validated leaves, equal ones merged."""
    merged: dict[dp_events.DpEvent, int] = {}

    def visit(node: dp_events.DpEvent, times: int) -> None:
        if isinstance(node, dp_events.SelfComposedDpEvent):
            visit(node.event, times * checks.integer("event count", node.count, at_least=0))
        elif isinstance(node, dp_events.ComposedDpEvent):
            for child in node.events:
                visit(child, times)
        elif times and not isinstance(node, dp_events.NoOpDpEvent):
            node = _checked(_joined(node))
            merged[node] = merged.get(node, 0) + times

    visit(event, count)
    return list(merged.items())


def _joined(leaf: dp_events.DpEvent) -> dp_events.DpEvent:
    """Return one release in place of several Gaussian ones on one sample of fixed size.

    Without sampling, Gaussian releases of multipliers z1, z2, ... cost what one of multiplier (z1^-2 + z2^-2 + ...)^-1/2 does.
    Sampling without replacement amplifies that cost. Releases on a sample each would be another event.
    """
    if not isinstance(leaf, dp_events.SampledWithoutReplacementDpEvent) or not isinstance(
        leaf.event, (dp_events.ComposedDpEvent, dp_events.SelfComposedDpEvent)
    ):
        return leaf
    parts = flatten_event(leaf.event)
    if any(isinstance(part, dp_events.NonPrivateDpEvent) for part, _ in parts):
        return dp_events.NonPrivateDpEvent()
    if not parts or not all(isinstance(part, dp_events.GaussianDpEvent) for part, _ in parts):
        raise UnsupportedEventError(f"event {leaf}: of several releases on one sample only Gaussian ones can be accounted")
    inverse = math.hypot(*(math.sqrt(count) / part.noise_multiplier for part, count in parts))
    return around(leaf, dp_events.GaussianDpEvent(1 / inverse))


def _checked(leaf: dp_events.DpEvent) -> dp_events.DpEvent:
    """Return the event, or refuse one that the accountants would misread: a NaN multiplier costs nothing in an RDP accountant.

    If its multiplier is out of range, return an event without privacy or with less noise, which costs no less.
    """
    if isinstance(leaf, dp_events.NonPrivateDpEvent):
        return leaf
    if isinstance(leaf, dp_events.PoissonSampledDpEvent):
        checks.number("sampling_probability", leaf.sampling_probability, above=0, at_most=1)
    elif isinstance(leaf, dp_events.SampledWithoutReplacementDpEvent):
        size = checks.integer("source_dataset_size", leaf.source_dataset_size, at_least=1)
        checks.integer("sample_size", leaf.sample_size, at_least=1, at_most=size)
    inner, _ = unwrap_sampling(leaf)
    if not isinstance(inner, (dp_events.GaussianDpEvent, dp_events.LaplaceDpEvent)):
        raise UnsupportedEventError(f"event {leaf}: only (sampled) Gaussian and Laplace releases can be accounted")
    checks.number("noise_multiplier", inner.noise_multiplier, above=0)
    if inner.noise_multiplier < 1 / LARGEST_MULTIPLIER:
        return dp_events.NonPrivateDpEvent()
    return leaf if inner.noise_multiplier <= LARGEST_MULTIPLIER else around(leaf, type(inner)(LARGEST_MULTIPLIER))

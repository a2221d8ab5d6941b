"""What one release asks of its clients in one round: everything that crosses to them besides the model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np

from flower_dp.core import checks
from flower_dp.core.compression import MOST_LEVELS
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.wire.indicator import Indicator
from flower_dp.wire.mask import PublicMask, mask_keys, mask_of
from flower_dp.wire.text import check_keys

PLACEMENTS = ("central", "distributed", "local")


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a server says of a whole release; a client's policy checks it, and no client works by it.

    Attributes:
        clip_norm: bound on the norm of what every client, or every record, contributes.
        noise_multiplier: noise scale of the release / clip norm; 0 for a release without noise.

    Raises:
        ValueError: for a value that makes no sense, naming it.

    Example:
        >>> from flower_dp.wire import Promise
        >>> Promise(clip_norm=0.5, noise_multiplier=1.0).noise_scale
        0.5
    """

    clip_norm: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        checks.number("clip_norm", self.clip_norm, above=0)
        checks.number("noise_multiplier", self.noise_multiplier, at_least=0)

    @property
    def noise_scale(self) -> float:
        """Scale of the noise on the released sum."""
        return self.noise_multiplier * self.clip_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAsk:
    """What is asked of one client whose message is private on its own.

    Attributes:
        weight: what the client's private row counts in the node's sum.
        terms: what the server takes the client's own terms to be (`Terms.kind`). The client compares them with its own, and never
            works by them.
        noise_multiplier: the noise multiplier that goes with them, by which the server charges.
        number: 1, 2, ...: how often the server has charged the client for this release in this run, this reply included. A device
            with a ledger file refuses a number that is not larger than the last one: the server's ledger is an older copy then.
        run: the run's id in the server's ledger, random without one; empty before `Ask.in_run`. A client refuses an empty one.

    Raises:
        ValueError: for a value that makes no sense, naming it.

    Example:
        >>> from flower_dp.wire import Ask, OwnAsk, Promise
        >>> own = OwnAsk(weight=0.25, terms="4 replies, Laplace", noise_multiplier=8.0, number=1)
        >>> ask = Ask(promise=Promise(clip_norm=1.0, noise_multiplier=8.0), placement="local", own={"a": own})
        >>> ask.to_table(("a",))["weights"]
        [0.25]
    """

    weight: float
    terms: str
    noise_multiplier: float
    number: int
    run: str = ""

    def __post_init__(self) -> None:
        checks.number("weight", self.weight, at_least=0)
        if not isinstance(self.terms, str):
            raise ValueError("terms: must be a text")
        checks.number("noise_multiplier", self.noise_multiplier, at_least=0)
        checks.integer("number", self.number, at_least=1, at_most=checks.MOST_COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a release asks of its clients in one round.

    What is not used is not sent; a client refuses an ask with a key that it does not know.

    Attributes:
        promise: clip norm and noise multiplier of the whole release.
        placement: who adds the noise: `central`, the server; `distributed`, each client its share; `local`, each client in full.
        step: of the lattice to which clients round what they clipped, a power of two; 0 for none, and under `local`.
        noise_std: std of the share that each client adds to its own clipped row under `distributed`, else 0.
        mask: the coordinates that all clients keep before the clip; None for all.
        keep_ratio: part of the coordinates that every client sends after its noise; 1 sends all.
        quantization_levels: levels above 0 to which every client rounds its noised row; 0 for no quantisation.
        indicator: what every client sends behind its update, where the clip norm is adaptive: `promise.clip_norm` then bounds
            the norm of both together; None for a fixed clip norm.
        metrics: of an evaluation: the metrics that are asked for, with their bounds; None in training.
        own: under `local`: what is asked of each client, by its name.
        vectors: vectors [d] that the method's clients work with besides the model, finite float32, by name. They are sent as
            arrays behind the model's; the text has their names alone.

    Raises:
        ValueError: for values that make no sense, or do not go together, naming them.

    Example:
        >>> from flower_dp.wire import Ask, Promise
        >>> promise = Promise(clip_norm=0.5, noise_multiplier=1.0)
        >>> Ask(promise=promise, placement="central", step=2.0**-12).to_table(("a", "b"))
        {'clip_norm': 0.5, 'noise_multiplier': 1.0, 'placement': 'central', 'step': 0.000244140625}
    """

    promise: Promise
    placement: str
    step: float = 0.0
    noise_std: float = 0.0
    mask: PublicMask | None = None
    keep_ratio: float = 1.0
    quantization_levels: int = 0
    indicator: Indicator | None = None
    metrics: MetricBounds | None = None
    own: Mapping[str, OwnAsk] = field(default_factory=dict)
    vectors: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        checks.one_of("placement", self.placement, PLACEMENTS)
        if checks.number("step", self.step, at_least=0) and math.frexp(self.step)[0] != 0.5:
            raise ValueError(f"step={self.step!r}: must be a power of two, or 0 for no lattice")
        checks.number("noise_std", self.noise_std, at_least=0)
        checks.number("keep_ratio", self.keep_ratio, above=0, at_most=1)
        checks.integer("quantization_levels", self.quantization_levels, at_least=0, at_most=MOST_LEVELS)
        if self.placement != "distributed" and (self.noise_std or self.keep_ratio != 1 or self.quantization_levels):
            raise ValueError(
                f"noise_std={self.noise_std:g}, keep_ratio={self.keep_ratio:g}, quantization_levels={self.quantization_levels}: "
                f"must be 0, 1 and 0 for placement={self.placement!r}, where clients add no share of the noise"
            )
        if self.placement == "distributed" and bool(self.noise_std) != bool(self.promise.noise_multiplier):
            raise ValueError(
                f"noise_std={self.noise_std:g}: does not go with noise_multiplier={self.promise.noise_multiplier:g} under "
                "placement='distributed'"
            )
        if self.placement == "local" and (self.step or self.mask is not None):
            raise ValueError("step, mask: must not be there for placement='local', where both are the client's own")
        if self.indicator is not None:
            self._check_indicator(self.indicator)
        if self.metrics is not None and self.promise.clip_norm != 1:
            raise ValueError(f"clip_norm={self.promise.clip_norm:g}: must be 1 for an evaluation, the norm of its vectors")
        less = self.keep_ratio != 1 or self.quantization_levels
        if self.mask is not None and less:
            raise ValueError(
                f"mask: does not go with keep_ratio={self.keep_ratio:g} and quantization_levels={self.quantization_levels}"
            )
        if self.metrics is not None and (less or self.mask is not None):
            raise ValueError("metrics: do not go with a mask, keep_ratio or quantization_levels; they are sent whole")
        if self.metrics is not None and self.vectors:
            raise ValueError(f"metrics: do not go with vectors={list(self.vectors)}; an evaluation is of the model alone")
        if self.own and self.placement != "local":
            raise ValueError(f"own: must not be there for placement={self.placement!r}, where clients have no terms of their own")
        for name, vector in self.vectors.items():
            if vector.ndim != 1 or vector.dtype != np.float32 or not np.isfinite(vector).all():
                raise ValueError(
                    f"vector {name!r} is {vector.dtype} of shape {vector.shape}: must be finite float32 of shape (d,)"
                )

    def _check_indicator(self, indicator: Indicator) -> None:
        joint = math.hypot(indicator.clip_norm, indicator.scale / 2)
        if joint > self.promise.clip_norm * (1 + _ROUNDING):
            raise ValueError(
                f"clip_norm={self.promise.clip_norm:g}: is less than {joint:g}, the norm of update and indicator together"
            )
        if self.placement == "local":
            raise ValueError("indicator: must not be there for placement='local', where the clip is the client's own")
        if self.metrics is not None:
            raise ValueError("indicator: does not go with metrics; an evaluation has no update")
        if self.keep_ratio != 1 or self.quantization_levels:
            raise ValueError(
                f"indicator: does not go with keep_ratio={self.keep_ratio:g} and "
                f"quantization_levels={self.quantization_levels}: its coordinate must be sent as it was noised"
            )

    def in_run(self, run: str) -> Self:
        """Return this ask with the id of its run, for clients with terms of their own; others are not told it."""
        return replace(self, own={name: replace(one, run=run) for name, one in self.own.items()}) if self.own else self

    def row_length(self, length: int) -> int:
        """Return the length of a client's row, given that of its update: one more with an indicator."""
        return length + (self.indicator is not None)

    def check_vectors(self, names: Sequence[str], length: int) -> None:
        """Check that these vectors came with the model, and no others, each as long as the model.

        Raises:
            ValueError: if not.
        """
        if set(self.vectors) != set(names):
            raise ValueError(f"vectors={sorted(self.vectors)} came with the model: this method works with {sorted(names)}")
        for name, vector in self.vectors.items():
            if vector.size != length:
                raise ValueError(f"vector {name!r} is of shape {vector.shape}: must be finite float32 of shape ({length},)")

    def to_table(self, clients: Sequence[str]) -> dict[str, Any]:
        """Return what is sent to a node of these clients, of values that JSON can hold."""
        table: dict[str, Any] = {"clip_norm": self.promise.clip_norm, "noise_multiplier": self.promise.noise_multiplier}
        table["placement"] = self.placement
        for name in ("step", "noise_std", "keep_ratio", "quantization_levels"):
            if (value := getattr(self, name)) != _DEFAULTS[name]:
                table[name] = value
        if self.mask is not None:
            table |= self.mask.to_table()
        if self.indicator is not None:
            table["indicator"] = self.indicator.to_table()
        if self.metrics is not None:
            table["metrics"] = dict(self.metrics.bounds)
        if self.placement == "local":
            own = [self.own[name] for name in clients]
            table["weights"] = [one.weight for one in own]
            table["terms"] = [one.terms for one in own]
            table["noise_multipliers"] = [one.noise_multiplier for one in own]
            table["numbers"] = [one.number for one in own]
            table["runs"] = [one.run for one in own]
        if self.vectors:
            table["vectors"] = list(self.vectors)
        return table

    @classmethod
    def from_table(cls, table: Mapping[str, Any], clients: Sequence[str], arrays: Sequence[np.ndarray] = ()) -> Self:
        """Read what was sent to a node of these clients; the ask's vectors are the last of the message's `arrays`.

        Raises:
            ValueError: if a key is unknown or missing, or a value makes no sense.
        """
        local = table.get("placement") == "local"
        groups = [("clip_norm", "noise_multiplier", "placement"), mask_keys(table), _OWN if local else ()]
        needed = [name for group in groups for name in group]
        given = [name for name in (*_PLAIN, "indicator", "metrics", "vectors") if name in table]
        check_keys("ask", table, [*needed, *given])
        plain = {name: table[name] for name in _PLAIN if name in table}
        return cls(
            promise=Promise(clip_norm=table["clip_norm"], noise_multiplier=table["noise_multiplier"]),
            placement=table["placement"],
            mask=mask_of(table),
            indicator=Indicator.from_table(table["indicator"]) if "indicator" in table else None,
            metrics=MetricBounds(bounds=table["metrics"]) if "metrics" in table else None,
            own=_own(table, clients) if local else {},
            vectors=_vectors(table["vectors"], arrays) if "vectors" in table else {},
            **plain,
        )


# What two ways to compute one norm may differ by.
_ROUNDING = 1e-10
_PLAIN = ("step", "noise_std", "keep_ratio", "quantization_levels")
_OWN = ("weights", "terms", "noise_multipliers", "numbers", "runs")
# Characters of a forged value that an error shows.
_SHOWN = 80
_DEFAULTS = {one.name: one.default for one in fields(Ask)}


def _own(table: Mapping[str, Any], clients: Sequence[str]) -> dict[str, OwnAsk]:
    for name in _OWN:
        if not isinstance(table[name], list) or len(table[name]) != len(clients):
            raise ValueError(f"{name}: must have one value for each of {len(clients)} clients")
    entries = zip(*(table[name] for name in _OWN), strict=True)
    return {
        name: OwnAsk(
            weight=weight,
            terms=terms,
            noise_multiplier=multiplier,
            number=number,
            run=checks.line("run", run, most=checks.MOST_ID),
        )
        for name, (weight, terms, multiplier, number, run) in zip(clients, entries, strict=True)
    }


def _vectors(names: object, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the vectors of these names: the last arrays of a message."""
    if not isinstance(names, list) or not 0 < len(names) <= len(arrays):
        shown = checks.one_line(str(names), most=_SHOWN)
        raise ValueError(f"vectors={shown}: must be names of vectors that came with the model, and that this client works with")
    listed = [checks.line("vectors: name", name) for name in names]
    if len(set(listed)) != len(listed):
        raise ValueError("vectors: a name stands twice")
    return dict(zip(listed, arrays[len(arrays) - len(listed) :], strict=True))

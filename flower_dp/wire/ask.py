"""The request of one release in one round: everything that clients receive except the model."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
from msgspec import field
from msgspec.structs import replace

from flower_dp.core import checks
from flower_dp.core.compression import MOST_LEVELS
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.wire.mask import PublicMask
from flower_dp.wire.structs import Part

PLACEMENTS = ("central", "distributed", "local")
# Rounding increases the norm of a row by less than this factor.
_MARGIN = 2.0**-40
# Above this scale the coordinate would be infinite as float32, and no finite noise hides its sign.
_LARGEST_SCALE = 2.0**127
# Relative difference that two ways to compute one norm may have by rounding.
_ROUNDING = 1e-10

if TYPE_CHECKING:
    Vectors = Mapping[str, np.ndarray]
else:  # msgspec decodes names alone: `Instruction.from_json` sets the arrays, which are sent behind the model's
    Vectors = Mapping[str, None]


class Promise(Part, frozen=True, kw_only=True):
    """The clip norm and noise multiplier of a whole release, as the server states them.

    A client's policy checks both. Under local DP it checks only `clip_norm`, and its noise limits hold for the client's own
    noise. Clients without terms of their own clip to `clip_norm`, unless the request has an indicator. No client scales its
    noise by `noise_multiplier`.

    Attributes:
        clip_norm: bound on the norm of every client's, or every record's, contribution; above 0.
        noise_multiplier: noise scale of the release / clip norm; 0 for a release without noise. If one event covers all rounds,
            it is that of the whole run.

    Raises:
        ValueError: naming the value that is out of range.

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


class LocalRequest(Part, frozen=True, kw_only=True):
    """The request to one client under local DP, whose own noise protects its message.

    Attributes:
        weight: weight of the client's private row in the node's sum, at least 0.
        terms: fingerprint of the terms that the server assumes for the client (`ClientTerms.fingerprint`). The client compares it
            with its own, and never works by it.
        noise_multiplier: noise multiplier of these terms, by which the server charges.
        number: number of the server's charges to the client for this release in this run, this reply included: 1, 2, ... A device
            with a ledger file refuses a number that is not larger than its last one: the server's ledger is then an older copy.
        run: id of the run in the server's ledger, random without a ledger; empty before `ReleaseRequest.with_run_id`. A client
            refuses an empty id.

    Raises:
        ValueError: naming the value that is out of range.

    Example:
        >>> from flower_dp.wire import LocalRequest, Promise, ReleaseRequest
        >>> own = LocalRequest(weight=0.25, terms="4 replies, Laplace", noise_multiplier=8.0, number=1)
        >>> ask = ReleaseRequest(promise=Promise(clip_norm=1.0, noise_multiplier=8.0), placement="local", own={"a": own})
        >>> ask.own["a"].weight
        0.25
    """

    weight: float
    terms: str
    noise_multiplier: float
    number: int
    run: str = ""

    def __post_init__(self) -> None:
        checks.number("weight", self.weight, at_least=0)
        checks.number("noise_multiplier", self.noise_multiplier, at_least=0)
        checks.integer("number", self.number, at_least=1, at_most=checks.MOST_COUNT)


class Indicator(Part, frozen=True, kw_only=True):
    """One more coordinate behind the update: s (b - 1/2), with b = 1 if the update is within the clip norm, else 0.

    Source: Andrew et al. 2021, Algorithm 1. Update and indicator are one row, clipped part by part.

    Attributes:
        clip_norm: L2 bound of the update alone (paper: C).
        scale: scale s of the coordinate, in units of the update; at most 2^127, as the row is float32.

    Raises:
        ValueError: naming the value that is out of range.

    Example:
        >>> from flower_dp.wire import Indicator
        >>> round(Indicator(clip_norm=4.0, scale=6.0).joint_norm, 6)
        5.0
    """

    clip_norm: float
    scale: float

    def __post_init__(self) -> None:
        checks.number("indicator clip_norm", self.clip_norm, above=0)
        checks.number("indicator scale", self.scale, above=0, at_most=_LARGEST_SCALE)

    @property
    def joint_norm(self) -> float:
        """L2 bound of the row of update and indicator together: sqrt(C^2 + s^2 / 4), and a margin for rounding."""
        return math.hypot(self.clip_norm, self.scale / 2) * (1 + _MARGIN)


class Separation(Part, frozen=True, kw_only=True):
    """The minimum separation that clients keep: each refuses a request that comes too early, or one too many.

    Attributes:
        number: number of the round in its run, from 1, by the server's charges.
        min_separation: least difference of the numbers of two rounds in which a client replies.
        max_participations: largest number of replies of a client in the run; None for any.
        whole_run: whether the promised noise multiplier is that of all rounds together, as one release; else it is that of each.
        run: id of the run, under which a device counts; empty before `ReleaseRequest.with_run_id`.

    Raises:
        ValueError: naming the value that is out of range.

    Example:
        >>> from flower_dp.wire import Separation
        >>> Separation(number=5, min_separation=4).min_separation
        4
    """

    number: int
    min_separation: int
    max_participations: int | None = None
    whole_run: bool = False
    run: str = ""

    def __post_init__(self) -> None:
        checks.integer("separation number", self.number, at_least=1, at_most=checks.MOST_COUNT)
        checks.integer("min_separation", self.min_separation, at_least=1, at_most=checks.MOST_COUNT)
        if self.max_participations is not None:
            checks.integer("max_participations", self.max_participations, at_least=1, at_most=checks.MOST_COUNT)


class ReleaseRequest(Part, frozen=True, kw_only=True):
    """The request of one release to its clients in one round.

    A field that the server does not set is not sent. A client refuses a request with an unknown key.

    Attributes:
        promise: clip norm and noise multiplier of the whole release.
        placement: place of the noise: `central`, the server adds it; `distributed`, each client adds its share; `local`, each
            client adds it in full.
        step: step of the lattice to which clients round their clipped rows, a power of two; 0 for none, and under `local`.
        noise_std: std of the share that each client adds to its own clipped row under `distributed`, else 0.
        mask: coordinates that all clients keep before the clip; None for all.
        keep_ratio: part of the coordinates that every client sends after its noise, in (0, 1]; 1 sends all.
        quantization_levels: levels above 0 to which every client rounds its noised row; 0 for no quantization.
        indicator: coordinate that every client sends behind its update, if the clip norm is adaptive. `promise.clip_norm` then
            bounds the norm of both together. None for a fixed clip norm.
        metrics: metrics that an evaluation requests, with their bounds; None in training.
        own: requests to single clients under `local`, by client name; empty otherwise.
        separation: minimum separation that clients keep; None for none.
        vectors: vectors [d] that the method's clients need besides the model, finite float32, by name. They are sent as arrays
            behind the model's; the text has their names alone.

    Raises:
        ValueError: naming the values that are out of range or do not go together.

    Example:
        >>> from flower_dp.wire import Promise, ReleaseRequest
        >>> promise = Promise(clip_norm=0.5, noise_multiplier=1.0)
        >>> ReleaseRequest(promise=promise, placement="central", step=2.0**-12).row_length(10)
        10
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
    own: Mapping[str, LocalRequest] = field(default_factory=dict)
    separation: Separation | None = None
    vectors: Vectors = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.one_of("placement", self.placement, PLACEMENTS)
        checks.number("step", self.step, at_least=0)
        checks.number("noise_std", self.noise_std, at_least=0)
        checks.number("keep_ratio", self.keep_ratio, above=0, at_most=1)
        checks.integer("quantization_levels", self.quantization_levels, at_least=0, at_most=MOST_LEVELS)
        if broken := next((rule for rule, holds in self._rules() if not holds), None):
            raise ValueError(broken)
        for name, vector in self.vectors.items():
            checks.line("vectors: name", name)
            if vector is not None and (vector.ndim != 1 or vector.dtype != np.float32 or not np.isfinite(vector).all()):
                raise ValueError(
                    f"vector {name!r} is {vector.dtype} of shape {vector.shape}: must be finite float32 of shape (d,)"
                )

    def _rules(self) -> Iterator[tuple[str, bool]]:
        """Yield the error of every rule on several fields, and whether the rule holds."""
        central, distributed, local = (self.placement == each for each in PLACEMENTS)
        promise, evaluates, counts = self.promise, self.metrics is not None, self.indicator is not None
        compression = f"keep_ratio={self.keep_ratio:g}, quantization_levels={self.quantization_levels}"
        whole = self.keep_ratio == 1 and not self.quantization_levels
        joint = 0.0 if self.indicator is None else math.hypot(self.indicator.clip_norm, self.indicator.scale / 2)

        values = f"must be 0, 1 and 0 for placement={self.placement!r}, whose clients add no share of the noise"
        yield f"step={self.step!r}: must be a power of two, or 0 for no lattice", not self.step or math.frexp(self.step)[0] == 0.5
        yield f"noise_std={self.noise_std:g}, {compression}: {values}", distributed or (whole and not self.noise_std)

        noise = f"noise_std={self.noise_std:g}: does not go with noise_multiplier={promise.noise_multiplier:g}"
        yield noise, not distributed or bool(self.noise_std) == bool(promise.noise_multiplier)
        yield (
            "step, mask: must not be set for placement='local', where each client chooses both",
            not (local and (self.step or self.mask is not None)),
        )
        yield "own: must be set for placement='local' alone, where clients have terms of their own", local or not self.own

        yield f"clip_norm={promise.clip_norm:g}: must be 1 for an evaluation", not evaluates or promise.clip_norm == 1
        yield f"metrics: do not go with vectors={list(self.vectors)}", not (evaluates and self.vectors)
        separate = self.separation is None or not (evaluates or local)
        yield "separation: must be set for the training of client-level methods alone", separate
        whole_run = self.separation is not None and self.separation.whole_run
        yield "whole_run: must be set for placement='central' alone, whose server adds all noise", not whole_run or central
        yield "metrics: do not go with a mask or an indicator", not (evaluates and (self.mask is not None or counts))

        bound = f"clip_norm={promise.clip_norm:g}: must be at least {joint:g}, the norm of update and indicator together"
        yield bound, joint <= promise.clip_norm * (1 + _ROUNDING)
        yield "indicator: must not be set for placement='local', where each client clips by its own terms", not (local and counts)

        sent = "mask" if self.mask is not None else "indicator" if counts else "metrics" if evaluates else ""
        yield f"{sent}: does not go with {compression}, since it is sent as it was noised", whole or not sent

    def with_run_id(self, run: str) -> Self:
        """Return this request with the id of its run, for clients that keep an account; others do not receive the id."""
        if self.separation is not None:
            return replace(self, separation=replace(self.separation, run=run))
        return replace(self, own={name: replace(local, run=run) for name, local in self.own.items()}) if self.own else self

    def row_length(self, length: int) -> int:
        """Return the length of a client's row, given the length of its update: one more with an indicator."""
        return length + (self.indicator is not None)

    def check_vectors(self, names: Sequence[str], length: int) -> None:
        """Check that exactly these vectors came with the model, each as long as the model.

        Raises:
            ValueError: naming the vectors that differ.
        """
        if set(self.vectors) != set(names):
            raise ValueError(f"vectors={sorted(self.vectors)} came with the model: this method works with {sorted(names)}")
        for name, vector in self.vectors.items():
            if vector.size != length:
                raise ValueError(f"vector {name!r} is of shape {vector.shape}: must be finite float32 of shape ({length},)")

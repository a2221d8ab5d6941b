"""A client's reply as a pipeline with named slots: train, before the clip, clip, noise, after the noise, encode, keep.

The types of the parts determine which part may be in which slot, and a pipeline checks this when it is constructed. Nothing is
between clip and noise; rounding to the lattice belongs to the clip. Selections by value are after the noise.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeVar, get_args

from array_api_compat import array_namespace

from flower_dp.clients.refusal_messages import (
    SEE_LOG,
    TRAINING,
    UNFIT,
    Declined,
    UnfitModelError,
    contained,
    new_traceback_of,
    place_of,
)
from flower_dp.clients.reply.parts import Clip, Mask, Noise, NoiseSource, RecordClip, ServerNoise, StepNoise
from flower_dp.clients.reply.sending import QSGD, Dense, Encoder, RandK, Selection, bytes_a_value, width_of_sum
from flower_dp.core.clipping import NOT_FINITE, NotFiniteError, l2_norms
from flower_dp.core.compression import Payload
from flower_dp.core.vectors import Array
from flower_dp.wire import FAILED, Code, Refusal

if TYPE_CHECKING:  # the module needs torch, and a device that trains in another framework has none
    from flower_dp.clients.training.records import Records

log = logging.getLogger("flwr")

# A clipped row on the lattice, None for one that is not finite; and its norm before the clip, None unless metrics are requested.
_Clipped = tuple[Array | None, Array | None]
_CLIPS, _NOISES = get_args(Clip), get_args(Noise)
# A client's row [d] and its 0-d training loss, or its error; arrays of any library.
Trained = tuple[Array, Array] | Exception
_Work = TypeVar("_Work")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientJob:
    """One client's part in a round.

    Attributes:
        name: name of the client.
        records: records of the client.
        seed: public seed of the order of the records, never of a secret.
        secret: function that returns the generator of noise and secret choices, made for this reply.
        weight: public weight of the reply in the node's sum.
        kept: vector [d] that the client has kept from an earlier round, float32; None for none.
        measured: whether the reply has the norm of its row before the clip, since the server requests metrics.
    """

    name: str
    records: "Records"
    seed: int
    secret: NoiseSource
    weight: float = 1.0
    kept: Array | None = None
    measured: bool = False


class Train(Protocol):
    """Local training of some clients.

    Optional attributes of a class:

    - `rows_together`: number of rows that may be clipped at once, which takes less time on a GPU. Neither data nor other clients
      decide it.
    - `record_clip`: a `RecordClip` equal to the pipeline's; required if the training clips every record's contribution.
    - `step_noise`: the pipeline's `StepNoise` object itself; required if the training adds the noise of every step.
    """

    def rows(self, vector: Array, jobs: Sequence[ClientJob]) -> Iterator[Trained]:
        """Yield every client's row [d] and training loss, or its error, in order; no row depends on another client."""


class Keep(Protocol):
    """The vector that a client keeps on its device until its next round.

    It is computed from the row that leaves, the client's previous vector and public numbers, never from a record. If single
    records are protected, the row has all its noise: a kept vector changes every other record's later contributions.
    """

    slot: ClassVar[Literal["keep"]]

    def __call__(self, row: Array, kept: Array | None) -> Array:
        """Return the vector [d] that is kept.

        Args:
            row: row [k] that leaves the client.
            kept: vector that the client has kept from an earlier round; None for none.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One client's reply: the row that is sent, and values beside it.

    Loss and norm have no noise.

    Attributes:
        row: row [k] that is sent, with its weight; float32 or float64.
        loss: mean training loss, a 0-d tensor; sent only if both sides allow metrics.
        norm: L2 norm of the row before the clip, 0-d, float64; None unless the server requests metrics.
        num_bytes: size of the row if the client sent it alone.
        alone: payload if the client is the only one in the node's sum, if it differs from the sum's payload.
        kept: vector that the client keeps until its next round, once the reply leaves; None for none.
    """

    row: Array
    loss: Array
    norm: Array | None
    num_bytes: int
    alone: Payload | None = None
    kept: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The steps by which a client's reply is made.

    Attributes:
        train: training that makes a row [d] of a client's records.
        before_clip: coordinates that all clients keep, which do not depend on data; None for all. Clip, lattice and noise are
            those of the kept coordinates alone.
        clip: bound on the change by one client, or by one record, with rounding to the lattice of the noise.
        noise: noise that this client adds to the clipped row, or in training to the clipped sum of every step.
        after_noise: function of the noised row, for example a selection of its largest entries; None for none.
        encode: encoding of the sum of a node's rows. Quantization belongs here, and changes every row before the sum.
        keep: function that makes the vector that the client keeps, from the row that leaves; None for none.

    Raises:
        ValueError: for a part in a slot where it is not allowed, naming the slot.

    Example:
        >>> import torch
        >>> from flower_dp.clients.reply.parts import GaussianShare, RowClip
        >>> from flower_dp.clients.reply.sending import Lossless, TopK
        >>> from flower_dp.clients.reply.pipeline import ClientJob, Pipeline
        >>> class Constant:
        ...     def rows(self, vector, jobs):
        ...         return ((torch.full_like(vector, 9.0), torch.tensor(0.0)) for job in jobs)
        >>> clip = RowClip(clip_norm=1.0, step=2.0**-14)
        >>> share = GaussianShare(noise_std=0.5)
        >>> pipeline = Pipeline(train=Constant(), clip=clip, noise=share, after_noise=TopK(keep_ratio=0.5), encode=Lossless())
        >>> job = ClientJob(name="a", records=[], seed=0, secret=lambda: torch.Generator())
        >>> (reply,) = pipeline.replies(torch.zeros(8), [job])
        >>> int(reply.row.count_nonzero())
        4
        >>> Pipeline(train=Constant(), before_clip=TopK(keep_ratio=0.5), clip=clip, noise=share, encode=Lossless())
        Traceback (most recent call last):
            ...
        ValueError: before_clip: TopK may not stand here; must be a Mask, which no data chose
    """

    train: Train
    before_clip: Mask | None = None
    clip: Clip
    noise: Noise
    after_noise: Selection | None = None
    encode: Encoder
    keep: Keep | None = None

    def __post_init__(self) -> None:
        # Check exact types: a subclass could change what its parent does.
        if type(self.before_clip) not in (type(None), Mask):
            raise ValueError(f"before_clip: {_kind(self.before_clip)} may not stand here; must be a Mask, which no data chose")
        if type(self.clip) not in _CLIPS:
            raise ValueError(f"clip: {_kind(self.clip)} may not stand here; must be RowClip, IndicatorClip or RecordClip")
        if type(self.noise) not in _NOISES:
            names = ", ".join(kind.__name__ for kind in _NOISES)
            raise ValueError(f"noise: {_kind(self.noise)} may not stand here; must be one of {names}")
        for slot, part in (("after_noise", self.after_noise), ("encode", self.encode), ("keep", self.keep)):
            if (part is not None or slot == "encode") and getattr(part, "slot", None) != slot:
                raise ValueError(f"{slot}: {_kind(part)} may not stand here; its slot must be {slot!r}")
        if isinstance(self.clip, RecordClip) and getattr(self.train, "record_clip", None) != self.clip:
            raise ValueError(f"clip: {_kind(self.train)} does not clip its records by {self.clip}")
        if isinstance(self.clip, RecordClip) and self.before_clip is not None:
            raise ValueError("before_clip: a mask can't stand here with RecordClip, which is applied in training")
        if isinstance(self.noise, StepNoise) and getattr(self.train, "step_noise", None) is not self.noise:
            raise ValueError(f"noise: {_kind(self.train)} does not add this {_kind(self.noise)} in every step")
        if isinstance(self.noise, StepNoise) and not isinstance(self.clip, RecordClip):
            raise ValueError(f"clip: {_kind(self.clip)} would clip what is noised already; StepNoise goes with RecordClip")
        sent_mask = self.encode.mask if isinstance(self.encode, RandK) else None
        if sent_mask != self.before_clip:
            raise ValueError(f"encode: {_kind(self.encode)} does not send the coordinates of the mask before the clip")
        if type(self.noise) is ServerNoise:
            self._check_without_noise()

    def _check_without_noise(self) -> None:
        """Refuse parts that must not see rows without noise, to which the server adds the noise later."""
        if self.after_noise is not None:
            raise ValueError(f"after_noise: {_kind(self.after_noise)} would see rows without noise; the server adds it later")
        if type(self.encode) not in (Dense, RandK):
            raise ValueError(
                f"encode: {_kind(self.encode)} would change rows without noise, or tell their zeros; must be Dense or RandK"
            )
        if self.keep is not None and isinstance(self.clip, RecordClip):
            raise ValueError(f"keep: {_kind(self.keep)} would keep a sum of records without noise; the server adds it later")

    def dimension(self, length: int) -> int:
        """Return the number of coordinates of a vector [length] that are clipped, noised and added up."""
        return length if self.before_clip is None else len(self.before_clip.indices)

    def replies(self, vector: Array, jobs: Sequence[ClientJob]) -> Iterator[Reply | Refusal]:
        """Yield every client's reply, or its refusal, in order.

        Args:
            vector: the global model [d], float32.
            jobs: the clients.
        """
        pairs = zip(jobs, self.train.rows(vector, jobs), strict=True)
        for job, trained, clipped in self._clipped_together(pairs, rows_together(self.train)):
            try:
                answer = self._reply(trained, job, clipped)
            except Exception as error:
                answer = failure(job.name, error)
            yield answer

    def payload(self, total: Array, num_rows: int) -> Payload:
        """Return the payload of the sum [dimension] of `num_rows` rows."""
        width = width_of_sum(num_rows, self.clip, self.noise)
        return self.encode.encode(total if self.before_clip is None else self.before_clip.spread(total), width)

    def _clipped_together(
        self, pairs: Iterator[tuple[ClientJob, Trained]], size: int
    ) -> Iterator[tuple[ClientJob, Trained, _Clipped | None]]:
        """Yield every client's job, row and clipped row, clipping `size` rows at once; None: the row must be clipped alone."""
        if size == 1:
            yield from ((job, trained, None) for job, trained in pairs)
            return
        while part := list(islice(pairs, size)):
            rows = [trained[0] for _, trained in part if not isinstance(trained, Exception)]
            try:
                measured = any(job.measured for job, _ in part)
                clipped = iter(self._clipped(rows, size, measured=measured) if rows else [])
            except Exception as error:  # such as rows of different shapes
                log.debug("Rows can't be clipped at once: %s: %s", type(error).__name__, error)
                yield from ((job, trained, None) for job, trained in part)
                continue
            for job, trained in part:
                yield job, trained, None if isinstance(trained, Exception) else next(clipped)

    def _clipped(self, rows: Sequence[Array], size: int, *, measured: bool) -> list[_Clipped]:
        """Clip rows [d] as one matrix [size, d], of the same shape for any number of clients: no row's bits depend on it."""
        xp = array_namespace(rows[0])
        # Fill up with ones: the norms of rows of zeros would be computed a second time.
        matrix = xp.stack([*rows, *[xp.ones_like(rows[0])] * (size - len(rows))])
        if self.before_clip is not None:
            matrix = self.before_clip.keep(matrix)
        finite = xp.all(xp.isfinite(matrix), axis=-1)
        matrix = xp.where(finite[:, None], matrix, xp.zeros_like(matrix))
        norms = l2_norms(matrix) if measured else None
        clipped, flags = self.clip(matrix), finite.tolist()
        return [(clipped[i] if flags[i] else None, None if norms is None else norms[i]) for i in range(len(rows))]

    def _clipped_alone(self, row: Array, *, measured: bool) -> _Clipped:
        if self.before_clip is not None:
            row = self.before_clip.keep(row)
        norm = l2_norms(row) if measured else None
        try:
            return self.clip(row), norm
        except NotFiniteError:
            return None, norm

    def _reply(self, trained: Trained, job: ClientJob, made: _Clipped | None = None) -> Reply | Refusal:
        if isinstance(trained, Exception):
            raise trained
        row, loss = trained
        length = row.shape[0]
        clipped, norm = self._clipped_alone(row, measured=job.measured) if made is None else made
        if clipped is None:
            return Refusal(code=FAILED, reason=f"{TRAINING}: {NOT_FINITE}")
        # One generator per reply: noise and quantization never share random numbers, not even under a fixed seed of a test.
        secret = cache(job.secret)
        noised = self.noise.add(clipped, self.clip.step, secret)
        leaving: Array = noised if self.after_noise is None else self.after_noise(noised)
        num_bytes, alone = self.encode.row_bytes(length, bytes_a_value(leaving, self.clip, self.noise)), None
        if job.weight != 1:  # under local DP: the row has all its noise, so weighting is post-processing
            xp = array_namespace(leaving)
            leaving = job.weight * xp.astype(leaving, xp.float64)
        if isinstance(self.encode, QSGD):
            leaving, alone = self.encode.quantize(leaving, secret())
            num_bytes = alone.num_bytes
        kept = None if self.keep is None else self.keep(leaving, job.kept)
        return Reply(row=leaving, loss=loss, norm=norm if job.measured else None, num_bytes=num_bytes, alone=alone, kept=kept)


def rows_together(train: Train) -> int:
    """Return the number of a training's rows that are clipped at once."""
    return getattr(train, "rows_together", 1)


def failure(name: str, error: Exception, what: str = TRAINING, *, code: Code = FAILED) -> Refusal:
    """Log why a client fails; return the refusal that the server receives: the client's own, or a fixed text.

    Neither the text nor the class nor the traceback of another error leaves: data may have chosen them.

    Args:
        name: name of the client.
        error: cause of the failure.
        what: text of the failure, in fixed words.
        code: code of the refusal.
    """
    trace = "" if type(error) is Declined else new_traceback_of(error)
    log.warning("Client %s: %s: %s%s%s", name, type(error).__name__, error, place_of(error), trace)
    if type(error) is Declined:
        return error.refusal
    reason = f"{what}: {UNFIT}" if type(error) is UnfitModelError else f"{what}; {SEE_LOG}"
    return Refusal(code=code, reason=reason)


def _kind(part: object) -> str:
    return type(part).__name__


def one_by_one(
    jobs: Sequence[_Work], row: Callable[[_Work], tuple[Array, Array]], *, reset: Callable[[], None] = lambda: None
) -> Iterator[Trained]:
    """Yield every client's row and training loss, made by `row`, or its error, in order.

    `reset` is called before and after each client: the next client's reply must not depend on leftovers of this client's data.
    """
    for job in jobs:
        made: Trained
        try:
            with contained():
                reset()
                made = row(job)
        except Exception as error:
            made = error
        try:
            with contained():
                reset()
        except Exception as error:
            made = error
        yield made


def changed(trained: Iterable[Trained], change: Callable[[Array], Array]) -> Iterator[Trained]:
    """Yield clients' rows with a change of each; errors and losses as they are."""
    for result in trained:
        yield result if isinstance(result, Exception) else (change(result[0]), result[1])

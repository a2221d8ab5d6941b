"""Record isolation: find out on synthetic records whether a record's result depends on that record alone.

A model may join the records that are computed together: by a mean over the batch, or by `torch.func`, which looks up numbers in
one table for all records. A model may also keep something of one forward pass for the next. Both are looked for with synthetic
records and synthetic weights, so that neither a client's data nor the server's model decides the result. Records that a model
joins are computed one at a time; a model that keeps something is refused.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flower_dp.clients.refusal_messages import UnfitModelError
from flower_dp.clients.training.batches import Batch, Inputs, each, kind_of
from flower_dp.clients.training.dry_run_cache import findings_of
from flower_dp.clients.training.recipe import FlatModel, parts
from flower_dp.clients.training.training_rng import IsolatedRng

log = logging.getLogger("flwr")

# Inputs and targets [size, ...] -> rows [size, ...] of floats, the same whatever was computed before.
Compute = Callable[[Inputs, Tensor], Tensor]

# For these operations torch.func joins the tables of several records: an index beyond one record's table reads the next record's.
_LOOK_UPS = ("embedding", "index_fill", "index_fill_")
# The fraction of NaN in some of the records that are put beside others.
_PART_NAN = 0.1
# The number of records of which at least one is expected to have a gradient other than zero.
_FEW = 4
# The largest distance, relative to its norm, between two rows of one record at different times. (Last bits may depend on the
# addresses of tensors.)
_TOLERANCE = 1e-5


@final
class KeepsError(UnfitModelError):
    """Raised if a record's result depends on earlier computations."""


def must_compute_alone(model: FlatModel, inputs: Inputs, targets: Tensor, compute: Compute, key: object) -> bool:
    """Return whether records must be computed one at a time, because records that are computed together may be joined.

    The result is cached (`findings_of`), for a key and for names, shapes and types of records.

    Args:
        model: model to try; its weights are restored.
        inputs: inputs [size, ...]; only names, shapes and types matter.
        targets: targets [size, ...]; only shapes and types matter.
        compute: computation of records.
        key: cache key of `compute`.

    Raises:
        KeepsError: if a record's result depends on earlier computations.
    """
    known = ("joins", key, kind_of(inputs, targets))
    findings = findings_of(model)
    if known not in findings:
        start = model.vector.clone()
        try:
            with IsolatedRng.of_data_sets(model.device):
                findings[known] = _Trials(model, inputs, targets, compute).found()
        finally:
            model.vector.copy_(start)
            model.reset_buffers()
    joined: bool | None = findings[known]
    if joined is None:
        raise KeepsError("model: its result for a record depends on earlier inputs; keep what changes in buffers")
    return joined


def differs(row: Tensor, again: Tensor) -> bool:
    """Tell whether two rows, computed of the same records at different times, differ by more than last bits."""
    if not torch.equal(row.isnan(), again.isnan()):
        return True
    first, second = row.nan_to_num(), again.nan_to_num()
    return bool((first - second).norm() > _TOLERANCE * first.norm())


class _Trials:
    """Trial computations of synthetic records, some of which change while the others stay."""

    def __init__(self, model: FlatModel, inputs: Inputs, targets: Tensor, compute: Compute) -> None:
        self._like, self._compute = (inputs, targets), compute
        self._rng = torch.Generator().manual_seed(1)
        model.vector.copy_(_weights(model, self._rng))

    def found(self) -> bool | None:
        """Return whether records may be joined; None if the model keeps something of them."""
        # Whole numbers, as in texts: the model may not know the number 1.
        for num_whole in (2, 1):
            own, watch = self._made_up(num_whole), Watch(looks_up)
            try:
                with watch:
                    expected = self._compute(*own)
                break
            except Exception as error:
                log.debug("Synthetic records can't be computed: %s: %s", type(error).__name__, error)
        else:
            return True
        joined = bool(watch.found) or not bool(expected.isfinite().all()) or not bool(expected.any())
        finite, others = self._made_up(num_whole, large=True), self._made_up(num_whole, large=True, part_nan=_PART_NAN)
        beside = []
        for kept, other in zip(_places(len(expected)), (finite, finite, others, others), strict=True):
            try:
                made = self._compute(*(_where(kept, one, another) for one, another in zip(own, other, strict=True)))
            except Exception:
                # `map_isolated` leaves out records that raise, and computes the others again without them.
                joined = joined or other is finite
                continue
            beside.append((made[kept], expected[kept]))
        again = self._compute(*own)
        if differs(expected, again) or self._keeps(num_whole):
            return None
        # Some operations on a GPU have different last bits every time.
        same = _same_bits if _same_bits(expected, again) else lambda one, other: not differs(one, other)
        return joined or not all(same(*rows) for rows in beside)

    def _keeps(self, num_whole: int) -> bool:
        """Return whether something is kept, by at least `_FEW` records in all: some gradients may be zero."""
        batches = [self._made_up(num_whole) for _ in range(_FEW // len(self._like[1]))]
        first, again = ([self._compute(*batch) for batch in batches] for _ in range(2))
        return any(differs(*rows) for rows in zip(first, again, strict=True))

    def _made_up(self, num_whole: int, *, large: bool = False, part_nan: float = 0.0) -> Batch:
        """Return synthetic records of the shapes and types of these."""
        rng = self._rng

        def features(tensor: Tensor) -> Tensor:
            if not tensor.dtype.is_floating_point:
                return target(tensor)
            drawn = torch.randn(tensor.shape, generator=rng)
            if large:
                drawn *= torch.where(torch.rand(tensor.shape, generator=rng) < 0.5, 1.0, 100.0)
                drawn[torch.rand(tensor.shape, generator=rng) < part_nan] = torch.nan
            return drawn.to(tensor.device, tensor.dtype)

        def target(tensor: Tensor) -> Tensor:
            size, whole = tensor.shape, not tensor.dtype.is_floating_point
            drawn = torch.randint(num_whole, size, generator=rng) if whole else torch.rand(size, generator=rng)
            return drawn.to(tensor.device, tensor.dtype)

        inputs, targets = self._like
        return each(inputs, features), target(targets)


def _places(size: int) -> Iterator[Tensor]:
    """Yield masks of the places that keep their records while the others change: every second place, or half of them."""
    place = torch.arange(size)
    even, later = place % 2 == 0, place >= size // 2
    yield from (even, later, ~even, ~later) if size > 1 else [~even] * 4


def _where(kept: Tensor, ones: Any, others: Any) -> Any:
    if isinstance(ones, Tensor):
        return torch.where(kept.to(ones.device).view(-1, *[1] * (ones.ndim - 1)), ones, others)
    return {name: _where(kept, tensor, others[name]) for name, tensor in ones.items()}


def _weights(model: FlatModel, rng: torch.Generator) -> Tensor:
    """Return synthetic weights [d] under which few units are dead; under a server's zeros no row would show anything."""
    drawn = torch.randn(model.layout.size, generator=rng).to(model.device)
    for part in parts(drawn, model.layout):
        if part.ndim > 1:
            part.div_(max(1, part[0].numel()) ** 0.5)
        else:
            part.mul_(0.25).add_(1)
    return drawn


def _same_bits(ones: Tensor, others: Tensor) -> bool:
    """Tell whether two tensors have the same bits, apart from those of NaN."""
    return torch.equal(ones.isnan(), others.isnan()) and torch.equal(ones.nan_to_num(), others.nan_to_num())


class Watch(TorchFunctionMode):
    """A context that inspects every call of a torch function, and keeps the first result.

    Attributes:
        found: first result of the inspection that is true; None before.
    """

    def __init__(self, inspect: Callable[[Any, list[Any]], Any]) -> None:
        super().__init__()
        self._inspect, self.found = inspect, None

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.found = self.found or self._inspect(function, [*arguments, *(named or {}).values()])
        return function(*arguments, **(named or {}))


def looks_up(function: Any, given: list[Any]) -> bool:
    """Tell whether `torch.func` looks up numbers in a table that has a part for every record."""
    if getattr(function, "__name__", "") not in _LOOK_UPS:
        return False
    return any(isinstance(tensor, Tensor) and tensor.is_floating_point() and _has_records(tensor) for tensor in given)


def _has_records(tensor: Tensor) -> bool:
    """Tell whether a tensor in `torch.func` has a part for every record."""
    inner = tensor
    while torch._C._functorch.is_gradtrackingtensor(inner) or torch._C._functorch.is_batchedtensor(inner):
        if torch._C._functorch.is_batchedtensor(inner):
            return True
        inner = torch._C._functorch.get_unwrapped(inner)
    return False

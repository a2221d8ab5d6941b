"""A dry run: whether a client can train at all, found out on records that nobody has, before anything is asked of it.

What is reported is one of the texts of `flower_dp.clients.reasons`. It follows from the model, the recipe, and shapes and types
of records. Where single records are protected, these are the public ones alone (`made_up`); where the client is, those of its
first record serve as well, for the server learns of a client that fails anyway. No value of a record matters.

Doubt counts for the client: it can't train only if no made-up batch works, and a loss of the user's own is not judged, since
nobody knows which targets it takes.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flower_dp.clients import reasons
from flower_dp.clients.reasons import UnfitLossError
from flower_dp.clients.tracebacks import place_of, traceback_of
from flower_dp.clients.training.convex import ConvexModel
from flower_dp.clients.training.devices import is_accelerator
from flower_dp.clients.training.draws import OwnDraws
from flower_dp.clients.training.engines import local_updates
from flower_dp.clients.training.findings import findings_of
from flower_dp.clients.training.joins import KeepsError, differs
from flower_dp.clients.training.losses import Loss, checked
from flower_dp.clients.training.per_record import UnfitModelError
from flower_dp.clients.training.recipe import FlatModel, Training
from flower_dp.clients.training.record_clipping import check_model
from flower_dp.clients.training.records import (
    DatasetRecords,
    Inputs,
    Records,
    TensorRecords,
    canonical,
    each,
    kinds,
    made_up,
    outputs_of,
)
from flower_dp.core import checks
from flower_dp.privacy.dp_fedpaq import FedPAQSteps

log = logging.getLogger("flwr")

# In the line of a node's log that tells why made-up records can't be computed.
FIRST_CAUSE = "dry run, first cause"
# In what torch says of reentrant checkpointing: its error, and its warning where a loss has no gradient at all.
_REENTRANT = ("use_reentrant=True", "None of the inputs have requires_grad=True")
# Characters of an error's text in that line.
_MOST_OF_CAUSE = 300
# Records of a made-up batch: some models need more than one.
_FEW = 2
_Batch = tuple[Inputs, Tensor]
# Losses of torch that compare number by number, and broadcast.
_PAIRED = tuple(getattr(nn.functional, f"{name}_loss") for name in ("mse", "l1", "smooth_l1", "huber"))


def of_training(model: FlatModel, records: Records, training: Training, *, public: bool = False) -> str | None:
    """Return why a recipe can't train a model on records like a client's, None if it can or nobody knows.

    One step is taken from the model's present weights, which stay as they are.

    Args:
        model: on the device that would train.
        records: the client's.
        training: the recipe.
        public: whether only public shapes and types may be looked at.
    """
    with OwnDraws.of_data_sets(model.vector.device):
        example = _example(records, model.device, public=public)
        if not isinstance(example, tuple):
            return example
        key = ("trained", training, kinds(*example))
        findings = findings_of(model)
        if key not in findings:
            why = _Trial(model, training).why_not(example)
            if why is not None:
                return why
            findings[key] = True
        return None


def of_records(model: FlatModel, records: Records, loss: Loss) -> str | None:
    """Return why the gradient of a single record of public shape and type can't be computed, None if it can or nobody knows."""
    with OwnDraws.of_data_sets(model.vector.device):
        try:
            check_model(model, records, loss)
        except UnfitModelError as error:
            _log_cause("the gradient of a single record", error.__cause__ or error)
            if isinstance(error.__cause__, KeepsError):
                return reasons.KEEPS
            if isinstance(error.__cause__, UnfitLossError):
                return str(error.__cause__)
            return _why_no_record(model, records, loss, error.__cause__ or error)
        return None


def of_convex(model: FlatModel, records: Records, loss: Loss, steps: FedPAQSteps) -> str | None:
    """Return why `convex-glm` has no gradient of a record of public shape and type, None if it has or nobody knows."""
    try:
        convex = ConvexModel.of(model, loss, steps)
        example = _example(records, model.device, public=True)
        if not isinstance(example, tuple):
            return example
        convex.fitting(*example)
    except Exception as error:
        _log_cause("convex-glm", error)
        return reasons.CONVEX
    return None


def log_private_kind(clients: Mapping[str, Records]) -> None:
    """Log, on the node alone, that the first client's first record is no pair; nobody else may know what one record tells."""
    try:
        name, records = next(iter(clients.items()))
        if isinstance(records, DatasetRecords) and records.example is None and not _is_pair(records.dataset[0]):
            log.error("client %s can't train: %s (only this log says so)", name, reasons.ROWS, extra={"shown": True})
    except Exception as error:
        _warn_once(f"dry run: the first record can't be read: {type(error).__name__}: {error}")


def _why_no_record(model: FlatModel, records: Records, loss: Loss, error: BaseException) -> str | None:
    """Return in which step a single made-up record fails, in the types in which records are computed one by one.

    `error` is what it fails with.
    """
    example = _example(records, model.device, public=True)
    if not isinstance(example, tuple):
        return example
    inputs, target = each(example[0], canonical), canonical(example[1])
    trial = _Trial(model, Training(learning_rate=1.0, batch_size=1, loss=loss))
    if (why := trial.why_no_outputs((inputs, target))) is not None:
        return why
    if trial.loss_fails((inputs, target)):
        return reasons.LOSS
    return _why_no_function(model.module, str(error))


def _why_no_function(module: nn.Module, text: str) -> str:
    """Return which layer, or use of autograd, torch.func does not support, by the layers and by torch's words for it."""
    layers = list(module.modules())
    tables = [layer for layer in layers if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    found = {
        reasons.RECURRENT: any(type(layer) in (nn.GRU, nn.RNN) for layer in layers),
        reasons.SPARSE: any(table.sparse for table in tables),
        reasons.MAX_NORM: any(table.max_norm for table in tables),
        reasons.CHECKPOINTING: "saved tensor hooks" in text,
        reasons.OLD_FUNCTION: "setup_context" in text,
    }
    return next((why for why, holds in found.items() if holds), reasons.SINGLE_RECORD)


class _Trial:
    """Steps of training on made-up batches: a few records, then a whole batch, of zeros, then of ones."""

    def __init__(self, model: FlatModel, training: Training) -> None:
        self._model, self._training, self._shapes = model, training, _Shapes()
        # On a GPU an index out of range makes it unusable for the process.
        self._safe = not is_accelerator(model.device)

    def why_not(self, example: _Batch) -> str | None:
        """Return why there is no step on any batch that looks like this record [1, ...]; None if there is one."""
        for batch in self._batches(example):
            row = self._step(batch)
            if isinstance(row, Tensor):
                return reasons.KEEPS if self._keeps(batch, row) else self._why_broadcast()
            error = row
        _log_cause("a step of training", error)
        if isinstance(error, UnfitLossError):
            return str(error)
        if (why := self.why_no_outputs(example)) is not None:
            return why
        if self.loss_fails(example):  # a loss of the user's own may take other targets than these
            return reasons.LOSS if _is_torchs(self._training.loss) else None
        return self._why_no_gradient(example)

    def _why_no_gradient(self, example: _Batch) -> str:
        """Return why there is no gradient of a loss that can be computed."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            errors = [self._error(self._gradients, batch) for batch in self._batches(example)]
        if None in errors:
            return reasons.STEP
        texts = [*map(str, errors), *(str(one.message) for one in told)]
        return reasons.REENTRANT if any(sign in text for sign in _REENTRANT for text in texts) else reasons.GRADIENT

    def _keeps(self, batch: _Batch, row: Tensor) -> bool:
        """Return whether the row of a batch is another one after a step on another batch."""
        other = each(batch[0], _drawn), batch[1]
        self._step(other)
        again = self._step(batch)
        return isinstance(again, Exception) or differs(row, again)

    def _why_broadcast(self) -> str | None:
        """Return why the loss mixes the records of a batch by its shapes, None if it did not in the steps so far."""
        if self._shapes.found is None:
            return None
        _log_cause("the loss", ValueError(self._shapes.found))
        return reasons.BROADCAST

    def why_no_outputs(self, example: _Batch) -> str | None:
        """Return why the model has no outputs, None if it has."""
        if self._works(lambda batch: self._outputs(batch[0]), example):
            return None
        floats = each(example[0], lambda tensor: tensor if tensor.is_floating_point() else tensor.float())
        works = self._works(lambda batch: self._outputs(batch[0]), (floats, example[1]))
        return reasons.WHOLE_NUMBERS if works else reasons.MODEL

    def loss_fails(self, example: _Batch) -> bool:
        """Tell whether the loss fails on every made-up batch."""
        return not self._works(self._loss, example)

    def _batches(self, example: _Batch) -> Iterator[_Batch]:
        size = self._training.batch_size
        for count in dict.fromkeys((min(_FEW, size), size)):
            for value in (0, 1) if self._safe else (0,):
                yield _filled(example, count, value)

    def _works(self, function: Callable[[_Batch], object], example: _Batch) -> bool:
        return any(self._error(function, batch) is None for batch in self._batches(example))

    def _error(self, function: Callable[[_Batch], object], batch: _Batch) -> Exception | None:
        self._model.reset_buffers()
        start = self._model.vector.clone()
        try:
            function(batch)
        except Exception as error:
            return error
        finally:
            self._model.vector.copy_(start)
            self._model.reset_buffers()
        return None

    def _step(self, batch: _Batch) -> Tensor | Exception:
        """Return the update of one step, or its error; without the loss where it is not safe to ask it."""
        inputs, targets = batch
        asked = self._safe or targets.is_floating_point() or _is_torchs(self._training.loss)
        loss = self._training.loss if asked else _no_loss
        brief = replace(self._training, batch_size=len(targets), num_local_epochs=1, num_local_steps=1, loss=loss)

        rows: list[Tensor] = []

        def step(_: _Batch) -> None:
            records = TensorRecords(inputs=inputs, targets=targets)
            vector = self._model.vector.clone()
            with self._shapes:
                for row in local_updates(vector, [records], brief, model=self._model, server_round=1, seeds=[0]):
                    if isinstance(row, Exception):
                        raise row
                    rows.append(row)

        return self._error(step, batch) or rows[0]

    def _outputs(self, inputs: Inputs) -> Any:
        return outputs_of(self._model.module, inputs)

    def _loss(self, batch: _Batch) -> Tensor:
        return checked(self._training.loss)(self._outputs(batch[0]), batch[1])

    def _gradients(self, batch: _Batch) -> None:
        torch.autograd.grad(self._loss(batch), self._model.parameters, allow_unused=True)


class _Shapes(TorchFunctionMode):
    """A context that notes whether one of torch's losses of single numbers broadcasts outputs to targets of other dimensions.

    Outputs [n, 1] against targets [n] make n x n pairs.

    Attributes:
        found: what it compares; None for nothing of that kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function in _PAIRED and len(arguments) > 1 and all(isinstance(one, Tensor) for one in arguments[:2]):
            outputs, targets = (tuple(one.shape) for one in arguments[:2])
            if len(outputs) != len(targets) and np.broadcast_shapes(outputs, targets) != outputs:
                self.found = f"{function.__name__} compares outputs of shape {outputs} with targets of shape {targets}"
        return function(*arguments, **(named or {}))


def _no_loss(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.mean()


def _example(records: Records, device: torch.device, *, public: bool) -> _Batch | str | None:
    """Return a record [1, ...] of a client's shapes and types, or why there is none; None if nobody knows them."""
    try:
        made = made_up(records, device)
    except Exception as error:
        _log_cause("the transform of a record of zeros", error)
        return reasons.TRANSFORM
    if made is not None or public:
        return made
    try:
        if not len(records):
            return None
        if isinstance(records, DatasetRecords) and not _is_pair(row := records.dataset[0]):
            _warn_once(f"dry run: a row of the data set is a {type(row).__name__}")
            return reasons.ROWS
        inputs, targets = records.batch(torch.tensor([0]), device)
    except Exception as error:  # of one record, which decides nothing
        _warn_once(f"dry run: the first record can't be read: {type(error).__name__}: {error}")
        return None
    return inputs, targets


def _log_cause(what: str, error: BaseException) -> None:
    """Log in one line why made-up records can't be computed, and below it the traceback; each once in a process."""
    seen = {id(error)}  # a cause may be the error itself
    while (earlier := error.__cause__) is not None and id(earlier) not in seen:
        seen.add(id(error := earlier))
    text = checks.one_line(f"{type(error).__name__}: {error}", most=_MOST_OF_CAUSE)
    _log_once(f"{FIRST_CAUSE}: {what} fails: {text}{place_of(error)}", traceback_of(error))


@lru_cache(maxsize=64)
def _log_once(line: str, trace: str) -> None:
    log.error("%s%s", line, trace, extra={"shown": True})


@lru_cache(maxsize=64)
def _warn_once(line: str) -> None:
    """Log a warning that many clients of this process may have in common."""
    log.warning("%s", line, extra={"shown": True})


def _is_pair(row: Any) -> bool:
    return isinstance(row, tuple | list) and len(row) == 2


def _filled(example: _Batch, count: int, value: int) -> _Batch:
    """Return a batch [count, ...] of one value, of the shapes and types of a record."""

    def filled(tensor: Tensor) -> Tensor:
        return torch.full((count, *tensor.shape[1:]), value, dtype=tensor.dtype, device=tensor.device)

    return each(example[0], filled), filled(example[1])


def _drawn(tensor: Tensor) -> Tensor:
    """Return numbers that nobody has of the shape and type of others; whole numbers as they are."""
    if not tensor.is_floating_point():
        return tensor
    return (100 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))).to(tensor.device, tensor.dtype)


def _is_torchs(loss: Loss) -> bool:
    """Whether a loss is torch's own, which takes zeros as targets of any type that it takes at all."""
    return (getattr(loss, "__module__", None) or type(loss).__module__).startswith("torch.nn.")

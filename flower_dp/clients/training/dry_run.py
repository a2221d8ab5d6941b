"""A dry run: find out on synthetic records, before any request, whether a client can train at all.

The result is one of the texts of `flower_dp.clients.refusal_messages`. It follows from the model, the recipe, and shapes and
types of records. If single records are protected, only public shapes count (`made_up`). If the client is protected, the shapes of
its first record serve as well: the server learns of a client that fails anyway. No value of a record matters.

In doubt the client counts as able: it can't train only if no synthetic batch works. A user's own loss is not judged, since only
the user knows its valid targets.
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

from flower_dp.clients import refusal_messages
from flower_dp.clients.refusal_messages import place_of, traceback_of
from flower_dp.clients.training import batches
from flower_dp.clients.training.batches import Batch
from flower_dp.clients.training.clipped_steps import ConvexModel
from flower_dp.clients.training.devices import is_accelerator
from flower_dp.clients.training.dry_run_cache import findings_of
from flower_dp.clients.training.engines import local_updates
from flower_dp.clients.training.losses import Loss, checked
from flower_dp.clients.training.recipe import FlatModel, Training, outputs_of
from flower_dp.clients.training.record_clipping import check_model
from flower_dp.clients.training.record_isolation import KeepsError, Watch, differs
from flower_dp.clients.training.records import DatasetRecords, Records, TensorRecords, made_up
from flower_dp.clients.training.training_rng import IsolatedRng
from flower_dp.core import checks
from flower_dp.core.root_logger import SHOWN
from flower_dp.privacy.dp_fedpaq import FedPAQSteps

log = logging.getLogger("flwr")

# Words that begin the line of a node's log with the cause of a failed dry run.
FIRST_CAUSE = "Dry run, first cause"
# Parts of torch's texts on reentrant checkpointing: of its error, and of its warning if a loss has no gradient at all.
_REENTRANT = ("use_reentrant=True", "None of the inputs have requires_grad=True")
# Characters of an error's text in the line of the cause.
_MAX_CAUSE = 300
# Records of a synthetic batch: some models need more than one.
_FEW = 2
# Losses of torch that compare number by number, and broadcast.
_PAIRED = tuple(getattr(nn.functional, f"{name}_loss") for name in ("mse", "l1", "smooth_l1", "huber"))


def of_training(model: FlatModel, records: Records, training: Training, *, public: bool = False) -> str | None:
    """Return why a recipe can't train a model on records of a client's kind; None if it can, or in doubt.

    The dry run takes one step from the model's present weights, and restores them.

    Args:
        model: model on the device that would train.
        records: records of the client.
        training: recipe of local training.
        public: whether to use only public shapes and types.
    """
    with IsolatedRng.of_data_sets(model.vector.device):
        example = _example(records, model.device, public=public)
        if not isinstance(example, tuple):
            return example
        key, findings = ("trained", training, batches.kind_of(*example)), findings_of(model)
        reason = None if key in findings else _Trial(model, training).refusal_reason(example)
        if reason is None:
            findings[key] = True
        return reason


def of_records(model: FlatModel, records: Records, loss: Loss) -> str | None:
    """Return why the gradient of a single record of public shape and type can't be computed; None if it can, or in doubt."""
    with IsolatedRng.of_data_sets(model.vector.device):
        try:
            check_model(model, records, loss)
        except refusal_messages.UnfitModelError as error:
            cause = error.__cause__ or error
            _log_cause("the gradient of a single record", cause)
            if isinstance(cause, KeepsError):
                return refusal_messages.KEEPS
            return (
                str(cause)
                if isinstance(cause, refusal_messages.UnfitLossError)
                else _record_unfit_reason(model, records, loss, cause)
            )
        return None


def of_convex(model: FlatModel, records: Records, loss: Loss, steps: FedPAQSteps) -> str | None:
    """Return why `convex-glm` has no gradient of a record of public shape and type; None if it has one, or in doubt."""
    try:
        convex = ConvexModel.of(model, loss, steps)
        example = _example(records, model.device, public=True)
        if not isinstance(example, tuple):
            return example
        convex.fitting(*example)
    except Exception as error:
        _log_cause("convex-glm", error)
        return refusal_messages.CONVEX
    return None


def log_private_kind(clients: Mapping[str, Records]) -> None:
    """Log, on the node alone, that the first client's first record is not a pair; the server must learn nothing of one record."""
    try:
        name, records = next(iter(clients.items()))
        if isinstance(records, DatasetRecords) and records.example is None and not _is_pair(records.dataset[0]):
            log.error("Client %s can't train: %s (only this log says so)", name, refusal_messages.ROWS, extra=SHOWN)
    except Exception as error:
        _log_unread(error)


def _record_unfit_reason(model: FlatModel, records: Records, loss: Loss, error: BaseException) -> str | None:
    """Return the reason by the step in which a single synthetic record fails, with the types of per-record computation.

    `error` is the error of the record's gradient.
    """
    example = _example(records, model.device, public=True)
    if not isinstance(example, tuple):
        return example
    record = batches.mapped(batches.canonical, *example)
    trial = _Trial(model, Training(learning_rate=1.0, batch_size=1, loss=loss))
    if (reason := trial.outputs_unfit_reason(record)) is not None:
        return reason
    return refusal_messages.LOSS if trial.fails(trial.loss, record) else _unsupported_reason(model.module, str(error))


def _unsupported_reason(module: nn.Module, text: str) -> str:
    """Return the reason by the layer, or use of autograd, that torch.func does not support; `text` is torch's error."""
    layers = list(module.modules())
    tables = [layer for layer in layers if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    reasons = {
        refusal_messages.RECURRENT: any(type(layer) in (nn.GRU, nn.RNN) for layer in layers),
        refusal_messages.SPARSE: any(table.sparse for table in tables),
        refusal_messages.MAX_NORM: any(table.max_norm for table in tables),
        refusal_messages.CHECKPOINTING: "saved tensor hooks" in text,
        refusal_messages.OLD_FUNCTION: "setup_context" in text,
    }
    return next((reason for reason, holds in reasons.items() if holds), refusal_messages.SINGLE_RECORD)


class _Trial:
    """Steps of training on synthetic batches: a few records, then a whole batch, of zeros, then of ones."""

    def __init__(self, model: FlatModel, training: Training) -> None:
        self._model, self._training, self._shapes = model, training, Watch(_mixes)
        # An index out of range makes a GPU unusable for the process.
        self._safe = not is_accelerator(model.device)

    def refusal_reason(self, example: Batch) -> str | None:
        """Return why there is no step on any batch of this record's kind [1, ...]; None if there is one."""
        row: Any = None
        for batch in self._batches(example):
            row = self._tried(self._row, batch)
            if isinstance(row, Tensor):
                return refusal_messages.KEEPS if self._keeps(batch, row) else self._broadcast_reason()
        _log_cause("a step of training", row)
        if isinstance(row, refusal_messages.UnfitLossError):
            return str(row)
        if (reason := self.outputs_unfit_reason(example)) is not None:
            return reason
        if self.fails(self.loss, example):  # a loss of the user's own may take other targets than these
            return refusal_messages.LOSS if _is_torchs(self._training.loss) else None
        return self._gradient_unfit_reason(example)

    def _gradient_unfit_reason(self, example: Batch) -> str:
        """Return why a loss that can be computed has no gradient."""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            results = [self._tried(self._gradients, batch) for batch in self._batches(example)]
        if not all(isinstance(result, Exception) for result in results):
            return refusal_messages.STEP
        texts = [*map(str, results), *(str(warning.message) for warning in warned)]
        reentrant = any(sign in text for sign in _REENTRANT for text in texts)
        return refusal_messages.REENTRANT if reentrant else refusal_messages.GRADIENT

    def _keeps(self, batch: Batch, row: Tensor) -> bool:
        """Return whether a step on another batch changes the row of a batch."""
        self._tried(self._row, (batches.each(batch[0], _drawn), batch[1]))
        again = self._tried(self._row, batch)
        return isinstance(again, Exception) or differs(row, again)

    def _broadcast_reason(self) -> str | None:
        """Return why the loss mixes the records of a batch by broadcasting; None if it did not in the steps so far."""
        if self._shapes.found is None:
            return None
        _log_cause("the loss", ValueError(self._shapes.found))
        return refusal_messages.BROADCAST

    def outputs_unfit_reason(self, example: Batch) -> str | None:
        """Return why the model has no outputs; None if it has."""
        if not self.fails(self._outputs, example):
            return None
        floats = batches.each(example[0], lambda tensor: tensor if tensor.is_floating_point() else tensor.float())
        return refusal_messages.MODEL if self.fails(self._outputs, (floats, example[1])) else refusal_messages.WHOLE_NUMBERS

    def fails(self, function: Callable[[Batch], object], example: Batch) -> bool:
        """Tell whether a function fails on every synthetic batch."""
        return all(isinstance(self._tried(function, batch), Exception) for batch in self._batches(example))

    def _batches(self, example: Batch) -> Iterator[Batch]:
        size = self._training.batch_size
        for count in dict.fromkeys((min(_FEW, size), size)):
            for value in (0, 1) if self._safe else (0,):
                yield _filled(example, count, value)

    def _tried(self, function: Callable[[Batch], object], batch: Batch) -> Any:
        """Return a function's result for a batch, or its error; the model stays as it is."""
        self._model.reset_buffers()
        start = self._model.vector.clone()
        try:
            return function(batch)
        except Exception as error:
            return error
        finally:
            self._model.vector.copy_(start)
            self._model.reset_buffers()

    def _row(self, batch: Batch) -> Tensor | Exception:
        """Return the update of one step, or its error; with another loss if the recipe's could make a GPU unusable."""
        inputs, targets = batch
        is_safe = self._safe or targets.is_floating_point() or _is_torchs(self._training.loss)
        loss = self._training.loss if is_safe else lambda outputs, _: outputs.mean()
        brief = replace(self._training, batch_size=len(targets), num_local_epochs=1, num_local_steps=1, loss=loss)
        clients, start = [TensorRecords(inputs=inputs, targets=targets)], self._model.vector.clone()
        with self._shapes:
            return next(local_updates(start, clients, brief, model=self._model, server_round=1, seeds=[0]))

    def _outputs(self, batch: Batch) -> Any:
        return outputs_of(self._model.module, batch[0])

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        return checked(self._training.loss)(self._outputs(batch), batch[1])

    def _gradients(self, batch: Batch) -> object:
        return torch.autograd.grad(self.loss(batch), self._model.parameters, allow_unused=True)


def _mixes(function: Any, given: list[Any]) -> str | None:
    """Return the shapes, as text, if one of torch's losses of single numbers broadcasts outputs to targets of other dimensions.

    Outputs [n, 1] against targets [n] make n x n pairs.
    """
    if function in _PAIRED and len(given) > 1 and all(isinstance(tensor, Tensor) for tensor in given[:2]):
        outputs, targets = (tuple(tensor.shape) for tensor in given[:2])
        if len(outputs) != len(targets) and np.broadcast_shapes(outputs, targets) != outputs:
            return f"{function.__name__} compares outputs of shape {outputs} with targets of shape {targets}"
    return None


def _example(records: Records, device: torch.device, *, public: bool) -> Batch | str | None:
    """Return a record [1, ...] of a client's shapes and types, or why there is none; None if they are not known."""
    try:
        made = made_up(records, device)
    except Exception as error:
        _log_cause("the transform of a record of zeros", error)
        return refusal_messages.TRANSFORM
    if made is not None or public:
        return made
    try:
        if not len(records):
            return None
        if isinstance(records, DatasetRecords) and not _is_pair(row := records.dataset[0]):
            _log_once(logging.WARNING, f"Dry run: a row of the data set is a {type(row).__name__}")
            return refusal_messages.ROWS
        inputs, targets = records.batch(torch.tensor([0]), device)
        return inputs, targets
    except Exception as error:
        _log_unread(error)
        return None


def _log_cause(what: str, error: BaseException) -> None:
    """Log in one line why the dry run fails, and below it the traceback; each once in a process."""
    seen = {id(error)}  # a cause may be the error itself
    while (earlier := error.__cause__) is not None and id(earlier) not in seen:
        seen.add(id(error := earlier))
    text = checks.one_line(f"{type(error).__name__}: {error}", most=_MAX_CAUSE)
    _log_once(logging.ERROR, f"{FIRST_CAUSE}: {what} fails: {text}{place_of(error)}", traceback_of(error))


def _log_unread(error: Exception) -> None:
    """Log that one record can't be read, which decides nothing."""
    _log_once(logging.WARNING, f"Dry run: the first record can't be read: {type(error).__name__}: {error}")


@lru_cache(maxsize=128)
def _log_once(level: int, line: str, trace: str = "") -> None:
    """Log once a line that many clients of this process may share."""
    log.log(level, "%s%s", line, trace, extra=SHOWN)


def _is_pair(row: Any) -> bool:
    return isinstance(row, tuple | list) and len(row) == 2


def _filled(example: Batch, count: int, value: int) -> Batch:
    """Return a batch [count, ...] of one value, of the shapes and types of a record."""
    return batches.mapped(lambda one: torch.full((count, *one.shape[1:]), value, dtype=one.dtype, device=one.device), *example)


def _drawn(tensor: Tensor) -> Tensor:
    """Return synthetic numbers of the shape and type of others; whole numbers as they are."""
    if not tensor.is_floating_point():
        return tensor
    return (100 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))).to(tensor.device, tensor.dtype)


def _is_torchs(loss: Loss) -> bool:
    """Return whether a loss is torch's own, which takes zeros as targets of any type that it takes at all."""
    return (getattr(loss, "__module__", None) or type(loss).__module__).startswith("torch.nn.")

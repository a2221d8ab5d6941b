"""Refusal reasons that a client sends to the server: words of this package, and nothing that data could choose.

The text of an error may hold a record, and data may even choose the error's class; Flower would send both to the server. So no
error leaves the device. The reply is a refusal with a code, and either the text of a `Declined`, written in this package, or one
fixed line. The rest is in the node's own log. `SystemExit` and other errors outside `Exception` are treated like any error: if
one client's data raise them, they decide nothing for the node's other clients.
"""

import logging
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, final

from flwr.app import Message

from flower_dp import wire
from flower_dp.core import checks

log = logging.getLogger("flwr")

Made = TypeVar("Made")

# Characters of a reason.
_MAX_CHARACTERS = 500

UNFIT = "the model can't be trained, whatever a record holds"
SEE_LOG = "the node's own log says why"
TRAINING = "training failed"
# Reasons of a dry run. None of them depends on a value of a record.
ROWS = "a row of the data set is not a pair of inputs and target: let its __getitem__ return (inputs, target), not a dict"
TRANSFORM = f"the transform fails on synthetic inputs of the shape and type of the client's records; {SEE_LOG}"
TABLE = "a client's data are a DataFrame: give (frame[names].to_numpy(dtype='float32'), frame[label].to_numpy())"
WHOLE_NUMBERS = (
    "inputs are whole numbers and the model takes floats: convert them, for example in "
    "TensorRecords(..., transform=lambda batch: batch.float() / 255)"
)
MODEL = f"the model's forward fails on synthetic inputs of the names, shape and type of the client's records; {SEE_LOG}"
LOSS = f"the loss fails on the model's outputs and synthetic targets of the shape and type of the client's records; {SEE_LOG}"
LOSS_SHAPE = "the loss of a batch is not one number: use reduction='mean' or 'sum'"
LOSS_UNEVEN = (
    "the loss of a batch is neither the mean nor the sum of its records' losses, so that of a single record lacks the record's "
    "weight: do not divide by weights of targets; torch's losses with weight=... need reduction='sum'"
)
LOSS_OF_WEIGHTS = "the loss uses the model's weights, which gradients of single records would lack: use outputs and targets alone"
GRADIENT = "the loss has no gradient in the model's parameters"
REENTRANT = (
    "activation checkpointing with use_reentrant=True has no gradient in single parameters: give torch.utils.checkpoint "
    "use_reentrant=False, for example by "
    "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
)
STEP = f"a step of training fails on a synthetic batch; {SEE_LOG}"
DATA = "its data can't be read"
RECURRENT = "GRU and RNN of torch.nn have no gradient of single records: use DPGRU or DPRNN of opacus.layers"
SINGLE_RECORD = (
    "the gradient of a single record can't be computed by torch.func: avoid branches on values, .item(), writing into tensors, "
    "and layers that need more than one record"
)
CHECKPOINTING = "activation checkpointing has no gradient of single records: turn it off (model.gradient_checkpointing_disable())"
OLD_FUNCTION = (
    "an autograd.Function without setup_context (that of torch.utils.checkpoint with use_reentrant=True is one) has no gradient "
    "of single records: give it setup_context and generate_vmap_rule = True, or turn off checkpointing"
)
SPARSE = "an embedding with sparse=True has no gradient of single records: use sparse=False"
MAX_NORM = "an embedding with max_norm changes its weights by the records that it is given: use max_norm=None"
BROADCAST = (
    "the loss compares outputs with targets of another shape, so that every output meets the targets of other records: give both "
    "one shape, for example outputs.squeeze(1) or targets.unsqueeze(1); the node's own log has the shapes"
)
CONVEX = f"sensitivity='convex-glm' is not proved for this model, loss and kind of record; use 'per-step'; {SEE_LOG}"
KEEPS = "the model stores something of its inputs outside its buffers, where it could reveal other records: use buffers"
BATCH_STATISTICS = (
    "a layer of the model mixes and keeps statistics of private records: use GroupNorm instead of BatchNorm, or "
    "flower_dp.clients.fix_batchnorm(model), and InstanceNorm without track_running_stats; the node's own log names the layer"
)
HALVES = "parameters of 16 bits would round most rounds' small steps to nothing: train float32, for example model.float()"
OPACUS = "the model is wrapped by opacus, whose hooks keep gradients of single records: give wrapped.to_standard_module()"


@final
class Declined(ValueError):  # noqa: N818 (what the client did, as in the protocol)
    """Raised when a client declines an instruction.

    The server receives `reason`, so it must hold nothing computed from records, not even their number. It may hold numbers and
    names that the server has sent, or that the device's owner has set as limits for servers to keep. Text of the server may be
    long and of many lines: the reason is cut to one printable line of a few hundred characters, for the reply and for the log.

    Args:
        reason: text that goes to the server.
    """

    def __init__(self, reason: str) -> None:
        self.reason = checks.one_line(reason, most=_MAX_CHARACTERS)
        super().__init__(self.reason)

    def __str__(self) -> str:
        """Return the text as people read it."""
        return f"{wire.DECLINED}: {self.reason}"

    @property
    def refusal(self) -> wire.Refusal:
        """The refusal that the server receives."""
        return wire.Refusal(reason=self.reason)


@final
class Failed(RuntimeError):  # noqa: N818 (as above)
    """Raised when something fails on a client.

    Args:
        reason: fixed words of this package, which go to the server.
    """

    @property
    def refusal(self) -> wire.Refusal:
        """The refusal that the server receives."""
        return wire.Refusal(code=wire.FAILED, reason=str(self))


class UnfitModelError(RuntimeError):
    """Raised if no record at all could be trained on, because of the model or the loss; the text stays on the device."""


@final
class UnfitLossError(UnfitModelError):
    """Raised for a loss that can't be trained with, whatever a record holds; the text is one of this module."""


@final
class ChangedBaseError(UnfitModelError):
    """Raised if a model has changed its frozen parameters; no client may then train or evaluate on it."""


@final
class BatchStatisticsError(ValueError):
    """Raised for a model with a layer of batch statistics; the text, which names the layer, stays on the device."""


@final
class WrappedModelError(ValueError):
    """Raised for a model that opacus wraps; the text is one of this module."""


@final
class HalfPrecisionError(ValueError):
    """Raised for a model with trainable parameters of float16 or bfloat16; the text, which names one, stays on the device."""


@final
class ExitError(RuntimeError):
    """Raised in place of an error that would end the process, such as `SystemExit`; the text stays on the device."""


@contextmanager
def contained() -> Iterator[None]:
    """Turn an error outside `Exception` into one, so that it fails for this client, or this record, alone.

    All work on one client's data runs inside. The block must not hold a `yield`: closing a generator raises such an error there.

    Raises:
        ExitError: for `SystemExit`, `GeneratorExit` and others, but not for `KeyboardInterrupt`.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ExitError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from None


def client_fn_refusal(error: BaseException) -> str:
    """Return the text that the server receives about an error in `client_fn`."""
    known: dict[type[BaseException], str] = {
        BatchStatisticsError: BATCH_STATISTICS,
        HalfPrecisionError: HALVES,
        WrappedModelError: OPACUS,
    }
    cause = f": {known[type(error)]}" if type(error) in known else f"; {SEE_LOG}"
    return error.reason if type(error) is Declined else f"client_fn failed{cause}"


@contextmanager
def decline_invalid() -> Iterator[None]:
    """Turn errors of this package's checks into `Declined`; for code that sees the server's message alone, never a record."""
    try:
        yield
    except Declined:
        raise
    except ValueError as error:
        raise Declined(str(error)) from error


@contextmanager
def redact_errors(what: str) -> Iterator[None]:
    """Let no error out but `Declined` and `Failed`; turn all others into a `Failed` of one line.

    Args:
        what: name of the step that fails, in fixed words.

    Raises:
        Declined: as raised inside.
        Failed: for every other error, which goes to the node's own log; also for `SystemExit`, whose text may hold data.
        KeyboardInterrupt: for an interruption, without its text.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None
    except BaseException as error:
        if type(error) in (Declined, Failed):
            raise
        log.error("%s failed", what, exc_info=error)
        raise Failed(f"{what} failed; {SEE_LOG}") from None


def replied(message: Message, what: str, make: Callable[[], Message]) -> Message:
    """Return the reply, or for any error a refusal in this package's words: see `redact_errors`."""
    reply = made_or_refused(what, make)
    return wire.refusal_reply(message, reply) if isinstance(reply, wire.Refusal) else reply


def made_or_refused(what: str, make: Callable[[], Made]) -> Made | wire.Refusal:
    """Return the result of `make`, or for any error the refusal that the server receives; the node's own log has it too."""
    try:
        with redact_errors(what):
            return make()
    except (Declined, Failed) as error:
        log.warning("No reply: %s", error)
        return error.refusal


# The origin of an error, for a node's own log. None of it may leave the device: the text of an error may hold a record.

# Code that a user has not written.
_LIBRARIES = (
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(__file__).parents[1]) + os.sep,
    "<frozen ",
    "<eval_with_key>",
)
# Origins of the errors whose traceback this process has logged. Their number is limited: data could raise any number of errors.
_traced: set[str] = set()
_MAX_TRACED = 64


def place_of(error: BaseException) -> str:
    """Return file and line of the user's own code that has raised an error, for the node's own log, as " (model.py:12)".

    If no code of the user is in the traceback, return the place in the library; without a traceback return "".
    """
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    return f" ({Path(user_frames[-1].filename).name}:{user_frames[-1].lineno})" if user_frames else ""


def traceback_of(error: BaseException) -> str:
    """Return an error's traceback as lines of the node's own log, each behind a line break; a screen leaves these lines out.

    The traceback has the error's text, which may hold a record: it must not leave the device.
    """
    return "".join(f"\ntraceback | {line}" for line in "".join(traceback.format_exception(error)).splitlines())


def new_traceback_of(error: BaseException) -> str:
    """Return `traceback_of` an error; empty if this process has logged that of another error on the same lines of code."""
    origin = "".join(traceback.format_tb(error.__traceback__))
    if origin in _traced or len(_traced) >= _MAX_TRACED:
        return ""
    _traced.add(origin)
    return traceback_of(error)

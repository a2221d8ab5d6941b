"""What a client tells the server when it does not reply: this package's own words, and nothing that data could choose.

The text of an error may hold a record, and even its class may be one that data have chosen; Flower would send both to the
server. So no error leaves: the reply is a refusal with a code, and the text of a `Declined`, which is written in this package, or
one fixed line. The node's own log has the rest. `SystemExit` and other errors that are no `Exception` are treated like any error:
raised by one client's data, they decide nothing for the node's other clients.
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
_MOST = 500

UNFIT = "the model can't be trained, whatever a record holds"
SEE_LOG = "the node's own log says why"
TRAINING = "training failed"
# What a dry run finds. None of these depends on a value of a record.
ROWS = "a row of the data set is no pair of inputs and target: let its __getitem__ return (inputs, target), not a dict"
TRANSFORM = f"the transform fails on made-up inputs of the shape and type of the client's records; {SEE_LOG}"
TABLE = "a client's data are a DataFrame: give (frame[names].to_numpy(dtype='float32'), frame[label].to_numpy())"
WHOLE_NUMBERS = (
    "inputs are whole numbers and the model takes floats: convert them, for example in "
    "TensorRecords(..., transform=lambda batch: batch.float() / 255)"
)
MODEL = f"the model's forward fails on made-up inputs of the names, shape and type of the client's records; {SEE_LOG}"
LOSS = f"the loss fails on the model's outputs and made-up targets of the shape and type of the client's records; {SEE_LOG}"
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
STEP = f"a step of training fails on a made-up batch; {SEE_LOG}"
DATA = "its data can't be read"
RECURRENT = "GRU and RNN of torch.nn have no gradient of single records: use DPGRU or DPRNN of opacus.layers"
SINGLE_RECORD = (
    "its gradient of a single record can't be computed by torch.func: avoid branches on values, .item(), writing into tensors, "
    "and layers that need more than one record"
)
CHECKPOINTING = "activation checkpointing has no single records' gradients: turn it off (model.gradient_checkpointing_disable())"
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
KEEPS = "the model keeps something of what it was given for later, outside its buffers, where it could tell of other records"
BATCH_STATISTICS = (
    "a layer of the model mixes and keeps statistics of private records: use GroupNorm instead of BatchNorm, or "
    "flower_dp.clients.fix_batchnorm(model), and InstanceNorm without track_running_stats; the node's own log names the layer"
)
HALVES = "parameters of 16 bits would swallow most rounds' small steps: train float32, for example model.float()"
OPACUS = "the model is wrapped by opacus, whose hooks keep gradients of single records: give wrapped.to_standard_module()"


@final
class Declined(ValueError):  # noqa: N818 (what the client did, as in the protocol)
    """A client does not do what is asked.

    Args:
        reason: goes to the server. Only numbers and names that the server has sent, or that the device's owner has set as limits
            for servers to keep; never anything computed from records, not even how many there are. What the server has sent may
            be long and of many lines: it is told, and logged on the device, as one printable line that is not longer than a few
            hundred characters.
    """

    def __init__(self, reason: str) -> None:
        self.reason = checks.one_line(reason, most=_MOST)
        super().__init__(self.reason)

    def __str__(self) -> str:
        """Return the text as people read it."""
        return f"{wire.DECLINED}: {self.reason}"

    @property
    def refusal(self) -> wire.Refusal:
        """What the server learns."""
        return wire.Refusal(reason=self.reason)


@final
class Failed(RuntimeError):  # noqa: N818 (as above)
    """Something has failed on a client.

    Args:
        reason: goes to the server: fixed words of this package.
    """

    @property
    def refusal(self) -> wire.Refusal:
        """What the server learns."""
        return wire.Refusal(code=wire.FAILED, reason=str(self))


class UnfitModelError(RuntimeError):
    """The model or the loss can't be differentiated record by record, whatever the record holds; the text stays on the device."""


@final
class UnfitLossError(UnfitModelError):
    """A loss that can't be trained with, whatever a record holds; the text is one of this module."""


@final
class ChangedBaseError(UnfitModelError):
    """A model has changed its frozen parameters; no client may train or evaluate on what is left."""


@final
class BatchStatisticsError(ValueError):
    """The model has a layer with batch statistics; the text, which names the layer, stays on the device."""


@final
class WrappedModelError(ValueError):
    """The model is wrapped by opacus; the text is one of this module."""


@final
class HalfPrecisionError(ValueError):
    """The model would train parameters of float16 or bfloat16; the text, which names one, stays on the device."""


@final
class ExitError(RuntimeError):
    """A client's data have raised what would end the process, such as `SystemExit`; the text stays on the device."""


@contextmanager
def contained() -> Iterator[None]:
    """Turn an error that is no `Exception` into one, so that it fails for this client, or this record, alone.

    Whatever runs on one client's data runs inside. It may not hold a `yield`: closing a generator raises such an error there.

    Raises:
        ExitError: for `SystemExit`, `GeneratorExit` and others, but not for `KeyboardInterrupt`.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ExitError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from None


def why_no_client(error: BaseException) -> str:
    """Return what the server learns of an error in `client_fn`."""
    known: dict[type[BaseException], str] = {
        BatchStatisticsError: BATCH_STATISTICS,
        HalfPrecisionError: HALVES,
        WrappedModelError: OPACUS,
    }
    why = f": {known[type(error)]}" if type(error) in known else f"; {SEE_LOG}"
    return error.reason if type(error) is Declined else f"client_fn failed{why}"


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
    """Let no error out but `Declined` and `Failed`, which has one line about all others.

    Args:
        what: has failed then, in fixed words.

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
    """Return the reply that is made, or in place of any error a refusal in this package's words: see `redact_errors`."""
    reply = made_or_refused(what, make)
    return wire.refusal_reply(message, reply) if isinstance(reply, wire.Refusal) else reply


def made_or_refused(what: str, make: Callable[[], Made]) -> Made | wire.Refusal:
    """Return what is made, or what the server learns where a client does not reply; the node's own log has it too."""
    try:
        with redact_errors(what):
            return make()
    except (Declined, Failed) as error:
        log.warning("no reply: %s", error)
        return error.refusal


# Where an error came from, for a node's own log. None of it may leave the device: the text of an error may hold a record.

# Code that a user has not written.
_LIBRARIES = (
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(__file__).parents[1]) + os.sep,
    "<frozen ",
    "<eval_with_key>",
)
# Where errors came from whose traceback this process has logged: no more than a few, whatever data do.
_traced: set[str] = set()
_MOST_TRACED = 64


def place_of(error: BaseException) -> str:
    """Return file and line of the user's own code that has raised an error, for the node's own log; empty if nobody knows.

    Where there is none, the place is in a library. It has parentheses, and a space before them.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def traceback_of(error: BaseException) -> str:
    """Return an error's traceback as lines of the node's own log, each behind a line break; a screen leaves these lines out.

    It has the error's text, which may hold a record: it must not leave the device.
    """
    return "".join(f"\ntraceback | {line}" for line in "".join(traceback.format_exception(error)).splitlines())


def new_traceback_of(error: BaseException) -> str:
    """Return `traceback_of` an error; empty if this process has logged that of another error on the same lines of code."""
    place = "".join(traceback.format_tb(error.__traceback__))
    if place in _traced or len(_traced) >= _MOST_TRACED:
        return ""
    _traced.add(place)
    return traceback_of(error)

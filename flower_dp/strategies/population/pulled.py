"""Replies that a grid has from a SuperLink, one of which may be unreadable: that must not end the run of the others."""

import logging
import time
from collections.abc import Iterable

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

log = logging.getLogger("flwr")

# Between two looks for replies, as in Flower's own grid.
_POLL_SECONDS = 3.0
# Flower's code for a message that the SuperLink does not have.
_UNAVAILABLE = 3


def pulled(grid: Grid, ids: Iterable[str]) -> list[Message]:
    """Return the replies to these messages that are there, an error reply for one that can't be read.

    A device packs its reply itself, with the metadata, and the SuperLink passes that on unread. Flower's grid raises where it is
    no message, and then all replies that were pulled with it are lost: so each is pulled alone.
    """
    if not _unpacks(grid):
        return list(grid.pull_messages(ids))
    import httpx  # noqa: PLC0415 (this grid has imported it; others have no use of it)

    found = []
    for number in ids:
        try:
            replies = list(grid.pull_messages([number]))
            told = all(reply.metadata.reply_to_message_id == number for reply in replies)
        except (httpx.HTTPError, OSError):  # of the SuperLink, not of a reply
            raise
        except Exception as error:  # a forged object may raise any error
            log.warning("a reply was refused: it can't be read (%s)", type(error).__name__)
            told = False
        found += replies if told else [_unreadable(number)]
    return found


def received(grid: Grid, messages: Iterable[Message], timeout: float) -> Iterable[Message]:
    """Send messages, and return the replies that come within `timeout` seconds, as a grid's `send_and_receive`."""
    if not _unpacks(grid):
        return grid.send_and_receive(messages, timeout=timeout)
    waiting = [number for number in grid.push_messages(list(messages)) if number is not None]  # of one that could not be sent
    end, found = time.monotonic() + timeout, list[Message]()
    while waiting and time.monotonic() < end:
        found += pulled(grid, waiting)
        there = {reply.metadata.reply_to_message_id for reply in found}
        waiting = [number for number in waiting if number not in there]
        if waiting:
            time.sleep(_POLL_SECONDS)
    return found


def _unpacks(grid: Grid) -> bool:
    """Return whether a grid unpacks what devices have packed: Flower's own for a SuperLink."""
    return any(one.__name__ == "HttpGrid" for one in type(grid).__mro__)


def _unreadable(number: str) -> Message:
    """Return an error reply to a message, as from the SuperLink."""
    asked = Message(RecordDict(), 1, "train")
    vars(asked.metadata)["_message_id"] = number
    return Message(Error(_UNAVAILABLE, "its reply can't be read"), reply_to=asked)

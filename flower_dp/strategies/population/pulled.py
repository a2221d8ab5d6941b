"""Replies that a grid has from a SuperLink: one that is unreadable, or never arrives, must not end or hold up a run."""

import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

log = logging.getLogger("flwr")

# Between two looks for replies: the longest pause, as in Flower's own grid, and the shortest, just before the deadline.
_POLL_SECONDS, _LAST_POLL_SECONDS = 3.0, 0.1
# How many replies are pulled at once. One that takes longer than so many seconds no longer counts.
_AT_ONCE, _QUICK_SECONDS = 4, 0.5
# Flower's code for a message that the SuperLink does not have.
_UNAVAILABLE = 3


class Pulls:
    """Pulls replies from a grid, and waits for none of them beyond a deadline.

    A device packs its reply itself, with the metadata, and the SuperLink passes that on unread. Flower's grid raises where it is
    no message, and then all replies that were pulled with it are lost. It waits for up to two hours where a device announces a
    reply and does not upload it. So each reply is pulled alone, in a thread that nobody waits for beyond the deadline.

    Args:
        grid: Flower's own for a SuperLink; any other is asked for all replies at once.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        # Message id -> when the pull of its reply began, and what it will return.
        self._running: dict[str, tuple[float, Future[list[Message]]]] = {}

    def pull(self, ids: Iterable[str], seconds: float) -> list[Message]:
        """Return the replies to these messages that are there, an error reply for one that can't be read.

        Args:
            ids: of the messages.
            seconds: the deadline. A reply that has not arrived by then is returned by a later call, if it is wanted then.
        """
        if not _unpacks(self._grid):
            return list(self._grid.pull_messages(ids))
        wanted = list(ids)
        waiting = [number for number in reversed(wanted) if number not in self._running]
        end, found = time.monotonic() + seconds, self._arrived(wanted)
        while (left := end - time.monotonic()) > 0:
            quick_since = time.monotonic() - _QUICK_SECONDS
            quick = [future for since, future in self._running.values() if since > quick_since]
            while waiting and len(quick) < _AT_ONCE:
                quick.append(self._begin(waiting.pop()))
            if not quick:
                break
            wait(quick, timeout=min(left, _QUICK_SECONDS), return_when=FIRST_COMPLETED)
            found += self._arrived(wanted)
        return found

    def close(self) -> None:
        """End the pulls that are still under way: no device takes up the server's threads."""
        if self._running and (close := getattr(self._grid, "close", None)) is not None:
            close()  # Flower's grid connects again by itself
        self._running.clear()

    def _begin(self, number: str) -> Future[list[Message]]:
        """Pull the reply to a message in a thread."""
        future: Future[list[Message]] = Future()

        def pull() -> None:
            try:
                future.set_result(list(self._grid.pull_messages([number])))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=pull, name="pull", daemon=True).start()
        self._running[number] = time.monotonic(), future
        return future

    def _arrived(self, wanted: list[str]) -> list[Message]:
        """Return what pulls have returned that have ended since the last call."""
        ended = [number for number, (_, future) in self._running.items() if future.done()]
        replies = {number: _read(number, self._running.pop(number)[1]) for number in ended}
        return [reply for number in wanted for reply in replies.get(number, ())]


def received(grid: Grid, messages: Iterable[Message], timeout: float) -> Iterable[Message]:
    """Send messages, and return the replies that come within `timeout` seconds, as a grid's `send_and_receive`."""
    if not _unpacks(grid):
        return grid.send_and_receive(messages, timeout=timeout)
    waiting = [number for number in grid.push_messages(list(messages)) if number is not None]  # of one that could not be sent
    end, found, pulls = time.monotonic() + timeout, list[Message](), Pulls(grid)
    try:
        while waiting and (left := end - time.monotonic()) > 0:
            found += pulls.pull(waiting, left)
            there = {reply.metadata.reply_to_message_id for reply in found}
            waiting = [number for number in waiting if number not in there]
            if waiting and (left := end - time.monotonic()) > 0:
                time.sleep(min(left, _POLL_SECONDS, max(left / 2, _LAST_POLL_SECONDS)))
    finally:
        pulls.close()
    return found


def _read(number: str, ended: Future[list[Message]]) -> list[Message]:
    """Return what the pull of a reply has returned, an error reply if that can't be read."""
    import httpx  # noqa: PLC0415 (this grid has imported it; others have no use of it)

    try:
        replies = ended.result()
        told = all(reply.metadata.reply_to_message_id == number for reply in replies)
    except (httpx.HTTPError, OSError):  # of the SuperLink, not of a reply
        raise
    except Exception as error:  # a forged object may raise any error
        log.warning("a reply was refused: it can't be read (%s)", type(error).__name__)
        told = False
    return replies if told else [_unreadable(number)]


def _unpacks(grid: Grid) -> bool:
    """Return whether a grid unpacks what devices have packed: Flower's own for a SuperLink."""
    return any(one.__name__ == "HttpGrid" for one in type(grid).__mro__)


def _unreadable(number: str) -> Message:
    """Return an error reply to a message, as from the SuperLink."""
    asked = Message(RecordDict(), 1, "train")
    vars(asked.metadata)["_message_id"] = number
    return Message(Error(_UNAVAILABLE, "its reply can't be read"), reply_to=asked)

"""Pulling replies from a grid: one that is unreadable, or never arrives, must not end or delay a run."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

log = logging.getLogger("flwr")

# Flower's own grids: those of a SuperLink, whose replies are packed by devices, and that of Flower's simulation.
_PACKED, _IN_MEMORY = frozenset({"HttpGrid", "GrpcGrid"}), frozenset({"InMemoryGrid"})
# Message ids in one request.
_IDS_A_REQUEST = 500
# Seconds until the next look for a reply that was announced and is not uploaded yet: doubled each time.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
# For an unknown release of Flower: the number of pulls that may hang, and the seconds after which none waits for one.
_MOST_THREADS, _QUICK_SECONDS = 64, 0.5
# Names that the module of Flower's grid imports for its own pulls; if one is missing, the release of Flower is unknown.
_STEPS = (
    "ConfirmMessageReceivedRequest",
    "ObjectPullError",
    "PullAppMessagesRequest",
    "inflate_object_from_contents",
    "iterate_object_tree",
    "make_pull_object_fn_protobuf",
    "pull_objects",
)
# Flower's code for a message that the SuperLink does not have.
_UNAVAILABLE = 3


@dataclass(slots=True, kw_only=True)
class _Announced:
    """A reply that the SuperLink has announced. It announces a reply once: a forgotten one never arrives.

    Attributes:
        number: id of the reply.
        objects: ids of the objects that make up the reply.
        pause: seconds until the next look.
        due: time of the next look, on the monotonic clock, in seconds.
    """

    number: str
    objects: list[str]
    pause: float = _FIRST_PAUSE
    due: float = 0.0


class Pulls:
    """The pulls of replies from a grid, each separate, without waiting for any.

    A device packs its reply itself, with the metadata, and the SuperLink passes it on unread. Flower's grid has two weaknesses.
    If a reply is no message, the grid raises, and all replies that were pulled with it are lost. If a device announces a reply
    and does not upload it, the grid waits for up to two hours.

    So this class asks the SuperLink for many replies at once, as Flower's grid does, then fetches and unpacks each uploaded reply
    separately. If a release of Flower does not allow that, the grid's public methods pull each reply alone, in one of a limited
    number of threads. Devices that announce replies without uploading them may then delay a round until its deadline.

    Args:
        grid: Flower's own grid for a SuperLink; any other gets one request for all replies.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid, self._packed = grid, _flowers(grid, _PACKED)
        # Both by the id of the message that is answered.
        self._announced: dict[str, _Announced] = {}
        self._running: dict[str, tuple[float, Future[list[Message]]]] = {}

    def pull(self, ids: Iterable[str], seconds: float) -> Iterator[Message]:
        """Yield the uploaded replies to these messages, with an error reply for one that can't be read.

        Args:
            ids: ids of the messages.
            seconds: time limit, in seconds. A later call can return a reply that arrives after it.
        """
        wanted, end = list(ids), time.monotonic() + seconds
        if self._packed is None:
            replies = list(self._grid.pull_messages(wanted))
            while replies:
                yield replies.pop(0)
        elif (link := _link(self._grid, sys.modules[self._packed.__module__])) is not None:
            yield from self._fetched(link, wanted, end)
        else:
            yield from self._in_threads(wanted, end)

    def close(self) -> None:
        """End the open pulls, so that no device keeps the server's threads busy."""
        if self._running and (close := getattr(self._grid, "close", None)) is not None:
            close()  # Flower's grid connects again by itself
        self._running.clear()

    def _fetched(self, link: "_Link", wanted: list[str], end: float) -> Iterator[Message]:
        unknown = iter([number for number in wanted if number not in self._announced])
        while (some := list(islice(unknown, _IDS_A_REQUEST))) and time.monotonic() < end:
            self._announced |= link.announced(some)
        for number in wanted:
            if (reply := self._announced.get(number)) is None or reply.due > time.monotonic():
                continue
            if time.monotonic() >= end:
                return
            if (contents := link.contents(reply)) is None:
                reply.due, reply.pause = time.monotonic() + reply.pause, min(2 * reply.pause, _LONGEST_PAUSE)
                continue
            del self._announced[number]
            yield from _pull_result(number, partial(link.unpacked, reply, contents))

    def _in_threads(self, wanted: list[str], end: float) -> Iterator[Message]:
        waiting = [number for number in reversed(wanted) if number not in self._running]
        while (left := end - time.monotonic()) > 0:
            while waiting and len(self._running) < _MOST_THREADS:
                self._begin(waiting.pop())
            quick_since = time.monotonic() - _QUICK_SECONDS
            quick = [future for since, future in self._running.values() if since > quick_since]
            wait(quick, timeout=min(left, _QUICK_SECONDS), return_when=FIRST_COMPLETED)
            for number in [number for number in wanted if number in self._running and self._running[number][1].done()]:
                yield from _pull_result(number, self._running.pop(number)[1].result)
            if not quick:
                break

    def _begin(self, number: str) -> None:
        """Pull the reply to a message in a thread."""
        future: Future[list[Message]] = Future()

        def pull() -> None:
            try:
                future.set_result(list(self._grid.pull_messages([number])))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=pull, name="pull", daemon=True).start()
        self._running[number] = time.monotonic(), future


def pulls_replies(grid: Grid) -> bool:
    """Return whether replies are pulled from a grid one by one: from Flower's own, which would keep them all in memory."""
    return _flowers(grid, _PACKED | _IN_MEMORY) is not None


def _flowers(grid: Grid, names: frozenset[str]) -> type | None:
    """Return Flower's own class with one of these names, if the grid is an instance of it; else None."""
    classes = type(grid).__mro__
    return next((base for base in classes if base.__name__ in names and base.__module__.startswith("flwr.")), None)


def _pull_result(number: str, read: Callable[[], list[Message]]) -> list[Message]:
    """Return the result of a pull; an error reply if the reply can't be read or answers another message."""
    import httpx  # noqa: PLC0415 (Flower's own grid has imported it; other grids do not need it)

    try:
        replies = read()
        valid = all(reply.metadata.reply_to_message_id == number for reply in replies)
    except (httpx.HTTPError, OSError):  # errors of the SuperLink, not of a reply
        raise
    except Exception as error:  # a forged object may raise any error
        log.warning("A reply was refused: it can't be read (%s)", type(error).__name__)
        valid = False
    if valid:
        return replies
    asked = Message(RecordDict(), 1, "train")
    vars(asked.metadata)["_message_id"] = number
    # The same code as the SuperLink's own for a message that it does not have, so that callers need no other case.
    return [Message(Error(_UNAVAILABLE, "its reply can't be read"), reply_to=asked)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """The SuperLink of Flower's own grid: the steps of the grid's `pull_messages`, one at a time.

    Attributes:
        grid: Flower's own grid.
        run: id of the run.
        flower: the grid's module, for the names that it imports for these steps.
    """

    grid: Any
    run: int
    flower: Any

    def announced(self, ids: list[str]) -> dict[str, _Announced]:
        """Return the announced replies to these messages, by the ids of the messages."""
        asked = set(ids)
        answer = self.grid._runtime_client.PullMessages(self.flower.PullAppMessagesRequest(message_ids=ids))
        return {
            packed.metadata.reply_to_message_id: _Announced(
                number=packed.metadata.message_id, objects=[part.object_id for part in self.flower.iterate_object_tree(tree)]
            )
            for packed, tree in zip(answer.messages_list, answer.message_object_trees, strict=True)
            if packed.metadata.reply_to_message_id in asked
        }

    def contents(self, reply: _Announced) -> dict[str, bytes] | None:
        """Return the objects of a reply; None if it is not uploaded yet."""
        pull = self.flower.make_pull_object_fn_protobuf(
            pull_object_protobuf=self.grid._runtime_client.PullObject, node=self.grid.node, run_id=self.run
        )
        try:
            contents: dict[str, bytes] = self.flower.pull_objects(reply.objects, pull, max_tries_per_object=1)
        except self.flower.ObjectPullError:
            return None
        confirmed = self.flower.ConfirmMessageReceivedRequest(
            node=self.grid.node, run_id=self.run, message_object_id=reply.number
        )
        self.grid._runtime_client.ConfirmMessageReceived(confirmed)
        return contents

    def unpacked(self, reply: _Announced, contents: dict[str, bytes]) -> list[Message]:
        """Return the message of a reply; a forged reply may raise any error."""
        message = self.flower.inflate_object_from_contents(reply.number, contents)
        vars(message.metadata)["_message_id"] = reply.number
        return [message]


def _link(grid: Any, flower: Any) -> _Link | None:
    """Return the steps of Flower's own grid; None if this release's module has other steps."""
    if not hasattr(type(grid), "_runtime_client") or not all(hasattr(flower, name) for name in _STEPS):
        return None
    return _Link(grid=grid, run=grid.run.run_id, flower=flower)

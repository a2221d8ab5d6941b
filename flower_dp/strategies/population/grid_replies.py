"""Replies that a grid has from a SuperLink: one that is unreadable, or never arrives, must not end or hold up a run."""

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

# Flower's own grids: of a SuperLink, whose replies devices have packed themselves, and of Flower's simulation.
_PACKED, _IN_MEMORY = frozenset({"HttpGrid", "GrpcGrid"}), frozenset({"InMemoryGrid"})
# Ids of messages in one request.
_IDS_A_REQUEST = 500
# Seconds until a reply that was announced and is not uploaded yet is looked for again: doubled each time.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
# Where this release of Flower is not known: how many pulls may hang, and after how many seconds one is not waited for any more.
_MOST_THREADS, _QUICK_SECONDS = 64, 0.5
# What the module of Flower's grid has imported for its own pulls.
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
    """A reply that the SuperLink has told of. It tells once: whoever forgets it never gets it.

    Attributes:
        number: its own id.
        objects: ids of what it consists of.
        pause: seconds until it is looked for again.
        due: when that is.
    """

    number: str
    objects: list[str]
    pause: float = _FIRST_PAUSE
    due: float = 0.0


class Pulls:
    """Pulls replies from a grid, each by itself, and waits for none of them.

    A device packs its reply itself, with the metadata, and the SuperLink passes that on unread. Flower's grid raises where it is
    no message, and then all replies that were pulled with it are lost. It waits for up to two hours where a device announces a
    reply and does not upload it. So the SuperLink is asked here for many replies at once, as Flower's grid does it, and each
    that is there is fetched and unpacked by itself. In a release of Flower where that is not possible each is pulled alone, by
    the grid's public methods, in one of a limited number of threads: there devices that announce what they do not upload may
    hold up a round until its deadline.

    Args:
        grid: Flower's own for a SuperLink; any other is asked for all replies at once.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid, self._packed = grid, _flowers(grid, _PACKED)
        # By the id of the message that is answered.
        self._announced: dict[str, _Announced] = {}
        self._running: dict[str, tuple[float, Future[list[Message]]]] = {}

    def pull(self, ids: Iterable[str], seconds: float) -> Iterator[Message]:
        """Yield the replies to these messages that are there, an error reply for one that can't be read.

        Args:
            ids: of the messages.
            seconds: the deadline. A reply that has not arrived by then is returned by a later call, if it is wanted then.
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
        """End the pulls that are still under way: no device takes up the server's threads."""
        if self._running and (close := getattr(self._grid, "close", None)) is not None:
            close()  # Flower's grid connects again by itself
        self._running.clear()

    def _fetched(self, link: "_Link", wanted: list[str], end: float) -> Iterator[Message]:
        unknown = iter([number for number in wanted if number not in self._announced])
        while (some := list(islice(unknown, _IDS_A_REQUEST))) and time.monotonic() < end:
            self._announced |= link.announced(some)
        for number in wanted:
            if (one := self._announced.get(number)) is None or one.due > time.monotonic():
                continue
            if time.monotonic() >= end:
                return
            if (contents := link.contents(one)) is None:
                one.due, one.pause = time.monotonic() + one.pause, min(2 * one.pause, _LONGEST_PAUSE)
                continue
            del self._announced[number]
            yield from _told(number, partial(link.unpacked, one, contents))

    def _in_threads(self, wanted: list[str], end: float) -> Iterator[Message]:
        waiting = [number for number in reversed(wanted) if number not in self._running]
        while (left := end - time.monotonic()) > 0:
            while waiting and len(self._running) < _MOST_THREADS:
                self._begin(waiting.pop())
            quick_since = time.monotonic() - _QUICK_SECONDS
            quick = [future for since, future in self._running.values() if since > quick_since]
            wait(quick, timeout=min(left, _QUICK_SECONDS), return_when=FIRST_COMPLETED)
            for number in [number for number in wanted if number in self._running and self._running[number][1].done()]:
                yield from _told(number, self._running.pop(number)[1].result)
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
    """Return whether the replies of a round are pulled from a grid one by one: from Flower's own, which would keep them all."""
    return _flowers(grid, _PACKED | _IN_MEMORY) is not None


def _flowers(grid: Grid, names: frozenset[str]) -> type | None:
    """Return the class of Flower's own of one of these names that a grid is of."""
    return next((one for one in type(grid).__mro__ if one.__name__ in names and one.__module__.startswith("flwr.")), None)


def _told(number: str, read: Callable[[], list[Message]]) -> list[Message]:
    """Return what the pull of a reply returns, an error reply if that can't be read or answers another message."""
    import httpx  # noqa: PLC0415 (this grid has imported it; others have no use of it)

    try:
        replies = read()
        told = all(reply.metadata.reply_to_message_id == number for reply in replies)
    except (httpx.HTTPError, OSError):  # of the SuperLink, not of a reply
        raise
    except Exception as error:  # a forged object may raise any error
        log.warning("a reply was refused: it can't be read (%s)", type(error).__name__)
        told = False
    if told:
        return replies
    asked = Message(RecordDict(), 1, "train")
    vars(asked.metadata)["_message_id"] = number
    return [Message(Error(_UNAVAILABLE, "its reply can't be read"), reply_to=asked)]  # as from the SuperLink


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """The SuperLink of Flower's own grid: the steps of the grid's `pull_messages`, one at a time.

    Attributes:
        grid: Flower's own.
        run: id of the run.
        flower: what the grid's module has imported for these steps.
    """

    grid: Any
    run: int
    flower: Any

    def announced(self, ids: list[str]) -> dict[str, _Announced]:
        """Return the replies to these messages that there are, by the ids of these."""
        asked = set(ids)
        answer = self.grid._runtime_client.PullMessages(self.flower.PullAppMessagesRequest(message_ids=ids))
        return {
            packed.metadata.reply_to_message_id: _Announced(
                number=packed.metadata.message_id, objects=[one.object_id for one in self.flower.iterate_object_tree(tree)]
            )
            for packed, tree in zip(answer.messages_list, answer.message_object_trees, strict=True)
            if packed.metadata.reply_to_message_id in asked
        }

    def contents(self, one: _Announced) -> dict[str, bytes] | None:
        """Return what a reply consists of; None if it is not uploaded yet."""
        pull = self.flower.make_pull_object_fn_protobuf(
            pull_object_protobuf=self.grid._runtime_client.PullObject, node=self.grid.node, run_id=self.run
        )
        try:
            contents: dict[str, bytes] = self.flower.pull_objects(one.objects, pull, max_tries_per_object=1)
        except self.flower.ObjectPullError:
            return None
        confirmed = self.flower.ConfirmMessageReceivedRequest(node=self.grid.node, run_id=self.run, message_object_id=one.number)
        self.grid._runtime_client.ConfirmMessageReceived(confirmed)
        return contents

    def unpacked(self, one: _Announced, contents: dict[str, bytes]) -> list[Message]:
        """Return a reply; a forged one raises any error."""
        message = self.flower.inflate_object_from_contents(one.number, contents)
        vars(message.metadata)["_message_id"] = one.number
        return [message]


def _link(grid: Any, flower: Any) -> _Link | None:
    """Return the steps of a grid of Flower's own; None if its module, in this release, has others."""
    if not hasattr(type(grid), "_runtime_client") or not all(hasattr(flower, name) for name in _STEPS):
        return None
    return _Link(grid=grid, run=grid.run.run_id, flower=flower)

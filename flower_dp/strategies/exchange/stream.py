"""Messages out through a grid, and their replies as they arrive, within the time that a round has."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from flower_dp.strategies.population.grid_replies import Pulls, pulls_replies

# Seconds, as in Flower's own `start`, for stages after the first one in a custom loop.
_TIMEOUT = 3600.0
# Messages in one request to a SuperLink, which refuses requests that are too large.
_AT_ONCE = 64
# Seconds between two looks for replies: a tenth of the time so far, so that quick rounds stay quick, within these limits.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 3.0


class Replies:
    """The replies to a round's messages, each yielded as it arrives and then dropped, until the time is over.

    The messages are sent at once, by the grid's public methods alone. They are `push_messages` and `pull_messages` for Flower's
    own grids, whose `send_and_receive` would keep all replies of a round; else `stream`, if the grid has it, or
    `send_and_receive`.

    Args:
        grid: grid that sends the messages.
        messages: messages of the first stage.
        timeout: seconds from now until the last reply of the last stage.
    """

    def __init__(self, grid: Grid, messages: Iterable[Message] = (), timeout: float = _TIMEOUT) -> None:
        self._grid, self._end = grid, time.monotonic() + timeout
        self._first = self.more(messages) if (messages := list(messages)) else iter(())

    def __iter__(self) -> Iterator[Message]:
        return self._first

    def more(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Send the messages of a further stage, within the time that is left, and return the replies as they arrive."""
        if (left := self._end - time.monotonic()) <= 0:
            return iter(())
        if not pulls_replies(self._grid):
            stream: Any = getattr(self._grid, "stream", self._grid.send_and_receive)
            return iter(stream(messages, timeout=left))
        out, sent = list(messages), list[str]()
        while out:
            sent += self._grid.push_messages(out[:_AT_ONCE])
            del out[:_AT_ONCE]
        return self._pulled({number for number in sent if number})  # a message that could not be sent has None or ""

    def _pulled(self, waiting: set[str]) -> Iterator[Message]:
        pulls, begun = Pulls(self._grid), time.monotonic()
        try:
            while waiting and (left := self._end - time.monotonic()) > 0:
                for reply in pulls.pull(waiting, left):
                    waiting.discard(reply.metadata.reply_to_message_id)
                    yield reply
                    del reply  # so that memory holds one reply at a time
                now = time.monotonic()
                if waiting and now < self._end:
                    pause = getattr(self._grid, "pull_interval", max((now - begun) / 10, _SHORTEST_PAUSE))
                    time.sleep(min(self._end - now, pause, _LONGEST_PAUSE))
        finally:
            pulls.close()

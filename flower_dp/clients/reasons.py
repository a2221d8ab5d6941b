"""What a client tells the server when it does not reply: this package's own words, and nothing that data could choose.

Flower sends the class and the text of an error that leaves a ClientApp to the server. The text of an error may hold a record, and
even its class may be one that data have chosen. So only `Declined` leaves, whose texts are written in this package, or one fixed
line. The node's own log has the rest.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from flower_dp import wire

log = logging.getLogger("flwr")

UNFIT = "the model can't be trained, whatever a record holds"
SEE_LOG = "the node's own log says why"


@final
class Declined(ValueError):  # noqa: N818 (what the client did, as in the protocol)
    """A client does not do what is asked.

    Args:
        reason: goes to the server. Only numbers and names that the server has sent, or that the device's owner has set as limits
            for servers to keep; never anything computed from records, not even how many there are.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        """Return the text as the server gets it."""
        return f"{wire.DECLINED}: {self.reason}"


class UnfitModelError(RuntimeError):
    """The model or the loss can't be differentiated record by record, whatever the record holds; the text stays on the device."""


@contextmanager
def reading() -> Iterator[None]:
    """Turn errors of this package's checks into `Declined`; for code that sees the server's message alone, never a record."""
    try:
        yield
    except Declined:
        raise
    except ValueError as error:
        raise Declined(str(error)) from error


@contextmanager
def in_own_words(what: str) -> Iterator[None]:
    """Let no error out but `Declined`, and one line about all others.

    Args:
        what: has failed then, in fixed words.

    Raises:
        Declined: as raised inside.
        RuntimeError: for every other error, which goes to the node's own log.
    """
    try:
        yield
    except Exception as error:
        if type(error) is Declined:
            raise
        log.error("%s failed", what, exc_info=error)
        raise RuntimeError(f"{what} failed; {SEE_LOG}") from None

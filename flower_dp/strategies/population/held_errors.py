"""Errors that Flower logs in this process, held back while a node is asked a question that it may not understand."""

import logging
from types import TracebackType
from typing import Self

log = logging.getLogger("flwr")


class HeldErrors(logging.Filter):
    """Within this context errors on Flower's logger are held back; on leaving they are logged, except those that were dropped.

    A simulation logs every error of a ClientApp in the process of the ServerApp.

    Example:
        >>> from flower_dp.strategies.population.held_errors import HeldErrors, log
        >>> with HeldErrors() as held:
        ...     log.error("No query function registered")
        ...     held.drop()
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[logging.LogRecord] = []

    def __enter__(self) -> Self:
        log.addFilter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        log.removeFilter(self)
        for record in self._waiting:
            log.handle(record)

    def filter(self, record: logging.LogRecord) -> bool:
        """Let everything below an error pass."""
        if record.levelno < logging.ERROR:
            return True
        self._waiting.append(record)
        return False

    def drop(self) -> None:
        """Forget the errors held back so far."""
        self._waiting.clear()

"""Log records for the screen of a run, and protection of the host program's root logger."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# `extra` of log records for the screen of a run: `log.warning("...", extra=SHOWN)`.
SHOWN = {"shown": True}


@contextmanager
def untouched_root_logger() -> Iterator[None]:
    """Keep handlers and level of the root logger, even if libraries configure it within the block.

    Some libraries call `logging.basicConfig`, which then prints the lines of every logger in the process: Ray's debug lines, and
    those of Flower a second time. `basicConfig` does nothing if the root logger has a handler, so it gets one meanwhile.

    Example:
        >>> import logging
        >>> from flower_dp.core.root_logger import untouched_root_logger
        >>> before = list(logging.getLogger().handlers)
        >>> with untouched_root_logger():
        ...     logging.basicConfig(level=logging.DEBUG)
        >>> logging.getLogger().handlers == before
        True
    """
    root, silent = logging.getLogger(), logging.NullHandler()
    root.addHandler(silent)
    try:
        yield
    finally:
        root.removeHandler(silent)

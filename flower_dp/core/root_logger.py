"""Records that are logged to be shown, and the root logger of somebody else's program, which stays as it is."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# `extra` of what is logged to be shown on the screen of a run: `log.warning("...", extra=SHOWN)`.
SHOWN = {"shown": True}


@contextmanager
def untouched_root_logger() -> Iterator[None]:
    """Keep handlers and level of the root logger, though libraries that are imported or called within configure it.

    Some call `logging.basicConfig`, which then prints the lines of every logger in the process: Ray's debug lines, and those of
    Flower a second time. It does nothing where the root logger has a handler.

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

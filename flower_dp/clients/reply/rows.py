"""Rows of several clients, made one after another; arrays of any library."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from flower_dp.clients.reasons import contained
from flower_dp.clients.reply.pipeline import Trained
from flower_dp.core.vectors import Array

Work = TypeVar("Work")


def one_by_one(
    jobs: Sequence[Work], row: Callable[[Work], tuple[Array, Array]], *, reset: Callable[[], None] = lambda: None
) -> Iterator[Trained]:
    """Yield what `row` makes of every client, its row and its training loss, or its error, in order.

    `reset` is called before and after each: the next client's reply must not depend on what this client's data left behind.
    """
    for job in jobs:
        made: Trained
        try:
            with contained():
                reset()
                made = row(job)
        except Exception as error:
            made = error
        try:
            with contained():
                reset()
        except Exception as error:
            made = error
        yield made


def changed(trained: Iterable[Trained], change: Callable[[Array], Array]) -> Iterator[Trained]:
    """Yield clients' rows with a change of each; errors and losses as they are."""
    for one in trained:
        yield one if isinstance(one, Exception) else (change(one[0]), one[1])

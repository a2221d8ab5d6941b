"""The exception that ends a round without a new model."""


class RoundDiscarded(Exception):  # noqa: N818 (nothing went wrong in the program)
    """The end of a round that was charged and does not change the model; the text has the reason.

    Args:
        reason: the reason, as text.
        in_vain: expected cohort size, if the noised number of clients that replied looks like zero; else 0.
    """

    def __init__(self, reason: str, *, in_vain: int = 0) -> None:
        super().__init__(reason)
        self.in_vain = in_vain

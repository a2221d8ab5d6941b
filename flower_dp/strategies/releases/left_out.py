"""What ends a round without a new model."""


class RoundLeftOut(Exception):  # noqa: N818 (nothing went wrong in the program)
    """A round that was charged does not change the model; the text has the reason."""

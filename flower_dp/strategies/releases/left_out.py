"""What ends a round without a new model."""


class RoundDiscarded(Exception):  # noqa: N818 (nothing went wrong in the program)
    """A round that was charged does not change the model; the text has the reason.

    Args:
        reason: in words.
        in_vain: how many clients were asked, as the plan says, if the noised number of those who answered looks like none.
    """

    def __init__(self, reason: str, *, in_vain: int = 0) -> None:
        super().__init__(reason)
        self.in_vain = in_vain

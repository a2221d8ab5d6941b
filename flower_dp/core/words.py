"""Epsilon and delta as text: rounded up, since a printed bound must not be below the proved one."""

import math
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

# More digits than any float has before its point.
_DIGITS = 400
_DECIMALS = 4


def epsilon_in_words(epsilon: float | None, *, decimals: int = _DECIMALS) -> str:
    """Return an epsilon with so many decimals, rounded up; `infinite` for one that is not finite, or None.

    Example:
        >>> from flower_dp.core.words import epsilon_in_words
        >>> epsilon_in_words(1.23401), epsilon_in_words(2.0), epsilon_in_words(float("inf"))
        ('1.2341', '2.0000', 'infinite')
    """
    if epsilon is None or not math.isfinite(epsilon):
        return "infinite"
    # From the float's shortest decimal: 0.001 is shown as it was given, though as a float it is a little above 1/1000.
    up = Context(prec=_DIGITS, rounding=ROUND_CEILING)
    return f"{Decimal(repr(float(epsilon))).quantize(Decimal(1).scaleb(-decimals), context=up):f}"


def delta_in_words(delta: float) -> str:
    """Return a delta with three significant digits, rounded up.

    Example:
        >>> from flower_dp.core.words import delta_in_words
        >>> delta_in_words(1e-5), delta_in_words(0.00123401)
        ('1e-05', '0.00124')
    """
    return digits_in_words(delta, 3)


def digits_in_words(number: float, digits: int) -> str:
    """Return a number with so many significant digits, rounded up.

    Example:
        >>> from flower_dp.core.words import digits_in_words
        >>> digits_in_words(12.3401, 4)
        '12.35'
    """
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).plus(Decimal(repr(float(number))))):.{digits}g}"


def beyond_in_words(claimed: float, largest: float) -> str:
    """Return why an audit could not refute a claim: `largest` is the bound that it would have shown without any error.

    Example:
        >>> from flower_dp.core.words import beyond_in_words
        >>> beyond_in_words(8.0, 4.5678)
        'without any error they would prove epsilon >= 4.568 and no more: not enough to refute a claim of 8'
    """
    return (
        f"without any error they would prove epsilon >= {largest:.4g} and no more: not enough to refute a claim of {claimed:.4g}"
    )


def spent_in_words(epsilon: float | None, delta: float) -> str:
    """Return `epsilon 1.2341 at delta 1e-05`, both rounded up."""
    return f"epsilon {epsilon_in_words(epsilon)} at delta {delta_in_words(delta)}"


def finite_or_none(value: Any) -> Any:
    """Return the value with None for every number that is not finite, in dicts, lists and tuples too, as JSON needs it."""
    if isinstance(value, dict):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(finite_or_none, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value

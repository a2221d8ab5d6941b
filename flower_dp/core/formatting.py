"""Epsilon and delta as text: rounded up, since a printed bound must not be below the proved one."""

import math
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

# More digits than any float has before its point.
_DIGITS = 400
_DECIMALS = 4


def format_epsilon(epsilon: float | None, *, decimals: int = _DECIMALS) -> str:
    """Return an epsilon with `decimals` decimals, rounded up; `infinite` for None or a value that is not finite.

    Example:
        >>> from flower_dp.core.formatting import format_epsilon
        >>> format_epsilon(1.23401), format_epsilon(2.0), format_epsilon(float("inf"))
        ('1.2341', '2.0000', 'infinite')
    """
    if epsilon is None or not math.isfinite(epsilon):
        return "infinite"
    # From the float's shortest decimal: 0.001 is shown as it was given, though as a float it is a little above 1/1000.
    up = Context(prec=_DIGITS, rounding=ROUND_CEILING)
    return f"{Decimal(repr(float(epsilon))).quantize(Decimal(1).scaleb(-decimals), context=up):f}"


def format_delta(delta: float) -> str:
    """Return a delta with three significant digits, rounded up.

    Example:
        >>> from flower_dp.core.formatting import format_delta
        >>> format_delta(1e-5), format_delta(0.00123401)
        ('1e-05', '0.00124')
    """
    return format_rounded_up(delta, 3)


def format_rounded_up(number: float, digits: int) -> str:
    """Return a number with `digits` significant digits, rounded up.

    Example:
        >>> from flower_dp.core.formatting import format_rounded_up
        >>> format_rounded_up(12.3401, 4)
        '12.35'
    """
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).plus(Decimal(repr(float(number))))):.{digits}g}"


def format_audit_limit(claimed: float, largest: float) -> str:
    """Return the reason why an audit could not refute a claim; `largest` is the bound that it would prove without any error.

    Example:
        >>> from flower_dp.core.formatting import format_audit_limit
        >>> format_audit_limit(8.0, 4.5678)
        'without any error they would prove epsilon >= 4.568 and no more: not enough to refute a claim of 8'
    """
    return (
        f"without any error they would prove epsilon >= {largest:.4g} and no more: not enough to refute a claim of {claimed:.4g}"
    )


def format_epsilon_at_delta(epsilon: float | None, delta: float) -> str:
    """Return `epsilon 1.2341 at delta 1e-05`, both rounded up."""
    return f"epsilon {format_epsilon(epsilon)} at delta {format_delta(delta)}"


def finite_or_none(value: Any) -> Any:
    """Return the value with None for every number that is not finite, also inside dicts, lists and tuples: JSON has none."""
    if isinstance(value, dict):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(finite_or_none, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value

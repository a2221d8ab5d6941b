"""Printed bounds are not below the proved ones."""

import math
import re

import pytest

from flower_dp.core.formatting import format_delta, format_epsilon, format_epsilon_at_delta, format_rounded_up

NUMBERS = [1e-12, 0.1, 0.1 + 0.2, 1 / 3, 0.99994, 0.999951, 1.23456789, 2.0, 12.345678, 99999.99991, 1e16, 1.7e308]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("decimals", [2, 3, 4])
def test_an_epsilon_is_rounded_up_by_less_than_one_of_its_last_digit(number, decimals):
    shown = format_epsilon(number, decimals=decimals)
    assert re.fullmatch(rf"\d+\.\d{{{decimals}}}", shown)
    assert number <= float(shown) < number + 1.0001 * 10**-decimals or float(shown) == number


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("digits", [3, 4, 6])
def test_significant_digits_are_rounded_up(number, digits):
    if number == 1.7e308:
        assert format_rounded_up(number, digits) == "1.7e+308"
    assert number <= float(format_rounded_up(number, digits)) <= number * (1 + 10.0 ** (1 - digits))
    assert len(re.sub(r"e.*|\.|^0\.0*", "", format_rounded_up(number, digits)).strip("0")) <= digits


def test_words_by_hand():
    shown = [format_epsilon(one) for one in (0.0, 0.1, 1.00001, math.inf, None)]
    assert shown == ["0.0000", "0.1000", "1.0001", "infinite", "infinite"]
    assert [format_delta(one) for one in (1e-5, 0.001, 0.00100001, 1.234e-7)] == ["1e-05", "0.001", "0.00101", "1.24e-07"]
    assert format_epsilon_at_delta(1.23401, 1.0001e-5) == "epsilon 1.2341 at delta 1.01e-05"

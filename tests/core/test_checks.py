"""Refusals of configuration values: always a ValueError that names the field and what would be valid."""

import json
import pickle
from typing import Any

import numpy as np
import pytest

from flower_dp.core import checks

HUGE = 10**5000  # Python refuses to write it out
BOOLS = [True, np.True_, np.array(True)]


@pytest.mark.parametrize("value", [10**400, -(10**400), HUGE, np.ones(3), 1j, None, *BOOLS, "1", float("nan")], ids=lambda _: "")
def test_what_is_not_a_finite_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^field=.*: must be a finite number > 0$") as caught:
        checks.number("field", value, above=0)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [HUGE, 0, 1.5, None, *BOOLS], ids=lambda _: "")
def test_integers_out_of_range_are_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^field=.*: must be a whole number >= 1 and <= 9$"):
        checks.integer("field", value, at_least=1, at_most=9)


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.array(0.5), 0.5])
def test_numbers_come_back_as_plain_floats(value: Any) -> None:
    number = checks.number("field", value, above=0)
    assert type(number) is float
    assert json.dumps(number) == "0.5"


@pytest.mark.parametrize("value", ["no", 1, 0, None, np.True_])
def test_a_flag_is_true_or_false(value):
    with pytest.raises(ValueError, match=r"server_completes_noise=.*: must be True or False"):
        checks.flag("server_completes_noise", value)
    assert checks.flag("server_completes_noise", True) is True
    assert checks.flag("server_completes_noise", False) is False


def test_a_bad_value_names_its_field_also_where_another_process_raised_it():
    with pytest.raises(checks.BadValue) as caught:
        checks.number("delta", 2.0, below=1)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):  # noqa: S301
        assert (error.field, str(error)) == ("delta", "delta=2.0: must be a finite number < 1")

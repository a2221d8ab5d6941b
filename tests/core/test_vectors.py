"""Layout: named arrays to one flat float32 vector and back."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_dp.core.vectors import Layout

KINDS = {"numpy": np.asarray, "torch": lambda values: torch.from_numpy(np.array(values))}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


def _arrays(kind: Any) -> dict[str, Any]:
    return {
        "weight": kind(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "scale": kind(np.float32(7.0)),
        "none": kind(np.zeros((0, 4), np.float32)),
        "half": kind(np.array([0.5, -2.0], np.float16)),
        "wide": kind(np.array([1e-3], np.float64)),
    }


def test_flat_vector_has_every_entry_in_order(kind: Any) -> None:
    arrays = _arrays(kind)
    layout = Layout.of(arrays)
    vector = layout.flatten(arrays)
    assert layout.sizes == (6, 1, 0, 2, 1)
    assert layout.size == 10
    assert str(vector.dtype).endswith("float32")
    assert np.array_equal(np.asarray(vector), np.array([0, 1, 2, 3, 4, 5, 7, 0.5, -2, 1e-3], np.float32))


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_round_trip_of_any_shapes(shapes: list[list[int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = {f"p{i}": rng.standard_normal(shape, dtype=np.float32) for i, shape in enumerate(shapes)}
    layout = Layout.of(arrays)
    vector = layout.flatten(arrays)
    for name, array in layout.unflatten(vector).items():
        np.testing.assert_array_equal(array, arrays[name])


def test_a_layout_of_torch_tensors_takes_numpy_arrays_and_the_other_way_round() -> None:
    arrays = _arrays(KINDS["numpy"])
    tensors = _arrays(KINDS["torch"])
    assert Layout.of(arrays) == Layout.of(tensors)
    assert isinstance(Layout.of(tensors).flatten(arrays), np.ndarray)
    assert isinstance(Layout.of(arrays).unflatten(torch.zeros(10))["weight"], torch.Tensor)


def test_nothing_returned_shares_memory_with_what_was_given(kind: Any) -> None:
    arrays = {"a": kind(np.ones(3, np.float32))}
    layout = Layout.of(arrays)
    vector = layout.flatten(arrays)
    back = layout.unflatten(vector)["a"]
    vector += 5
    assert np.array_equal(np.asarray(arrays["a"]), np.ones(3))
    assert np.array_equal(np.asarray(back), np.ones(3))


def test_order_is_the_layouts_not_the_mappings() -> None:
    layout = Layout.of({"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float32)})
    assert layout.flatten({"b": np.full(1, 2, np.float32), "a": np.full(1, 1, np.float32)}).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "dtype", "why"),
    [
        *(("steps", dtype, f"'steps' has dtype {dtype}") for dtype in ("int64", "bool", "complex64")),
        *((f"net.1.{one}", "float32", r"layer 'net\.1'.*GroupNorm") for one in ("running_mean", "num_batches_tracked")),
    ],
)
def test_what_cant_be_trained_in_private_is_refused_by_name(name: str, dtype: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Layout.of({"w": np.zeros(1, np.float32), name: np.zeros(2, dtype)})
    with pytest.raises(ValueError, match="no arrays"):
        Layout.of({})


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ({"a": (2,)}, r"missing \['b'\]"),
        ({"a": (2,), "b": (1,), "c": (1,)}, r"unknown \['c'\]"),
        ({"a": (2, 1), "b": (1,)}, r"'a' has shape \(2, 1\)"),
        ({"a": (3,), "b": (0,)}, r"'a' has shape \(3,\)"),
    ],
)
def test_other_names_and_shapes_are_refused(shapes: dict[str, tuple[int, ...]], why: str) -> None:
    layout = Layout.of({"a": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match=why):
        layout.flatten({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})

"""The mask of a round on the wire: a seed, or a bit a coordinate."""

from typing import Any

import numpy as np
import pytest

from flower_dp.wire import Ask, Instruction, Promise, SentMask
from tests.asks import ask, forged

WHOLE = [0, 3, 7, 8, 12]


def instruction(mask: Any) -> Instruction:
    return Instruction(server_round=1, method="fed-smp", clients=("a",), ask=ask(size=5, mask=mask))


@pytest.mark.parametrize("length", [13, 16, 17, 4000])
def test_a_sent_mask_is_read_as_it_was_made(length: int) -> None:
    mask = SentMask.of(np.array(WHOLE)[::-1], length=length)
    assert mask.indices(length).tolist() == WHOLE
    assert len(mask.bits) == -(-length // 8)
    assert Instruction.from_json(instruction(mask).to_json()) == instruction(mask)
    assert not mask.indices(length).flags.writeable


def test_a_mask_takes_a_bit_a_coordinate() -> None:
    """In base64, which has 4 characters for 3 bytes."""
    text = instruction(SentMask.of(np.arange(0, 60_000, 7), length=60_000)).to_json()
    assert len(text) - len(instruction(None).to_json()) == 10_000 + len(',"mask":{"type":"bits","bits":""}')


@pytest.mark.parametrize(
    ("bits", "length"),
    [(b"", 3), (b"\xff", 9), (b"\xff\xff", 8), (b"\x00\x00", 16), (b"\x01", 7), (b"\xff\x01", 15)],
    ids=["empty", "short", "long", "keeps nothing", "beyond the vector", "beyond two bytes"],
)
def test_bits_that_are_no_mask_of_the_model_are_refused(bits: bytes, length: int) -> None:
    with pytest.raises(ValueError, match="mask bits"):
        SentMask(bits=bits).indices(length)


@pytest.mark.parametrize(
    "mask",
    [
        {"type": "bits", "bits": "/w==", "seed": 1, "keep_ratio": 0.5},
        {"type": "seed", "seed": 1, "keep_ratio": 0.5, "bits": "/w=="},
        {"type": "seed", "seed": 1},
        {"bits": "/w=="},
        {"type": "both"},
        [],
    ],
)
def test_a_mask_is_of_one_kind(mask: Any) -> None:
    with pytest.raises(ValueError, match=r"at ask\.mask"):
        Instruction.from_json(forged(instruction(None), mask=mask))


@pytest.mark.parametrize("arguments", [{"keep_ratio": 0.5}, {"quantization_levels": 3}])
def test_a_sent_mask_goes_with_nothing_that_a_seeded_one_does_not_go_with(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="mask: does not go with"):
        ask(placement="distributed", mask=SentMask.of([1], length=8), **arguments)
    with pytest.raises(ValueError, match="mask: must not be there"):
        Ask(promise=Promise(clip_norm=1.0, noise_multiplier=1.0), placement="local", mask=SentMask.of([1], length=8))

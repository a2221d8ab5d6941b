"""The mask of a round on the wire: a seed, or a bit a coordinate."""

from typing import Any

import numpy as np
import pytest

from flower_dp.wire import Instruction, SentMask
from tests.asks import ask, forged

WHOLE = [0, 3, 7, 8, 12]
BITS, SEED = {"type": "bits", "bits": "/w=="}, {"type": "seed", "seed": 1, "keep_ratio": 0.5}


def instruction(mask: Any) -> Instruction:
    return Instruction(server_round=1, method="fed-smp", clients=("a",), ask=ask(size=5, mask=mask))


@pytest.mark.parametrize("length", [13, 16, 17, 4000])
def test_a_sent_mask_is_read_as_it_was_made(length: int) -> None:
    """It takes a bit a coordinate, in base64, which has 4 characters for 3 bytes."""
    mask = SentMask.of(np.array(WHOLE)[::-1], length=length)
    assert mask.indices(length).tolist() == WHOLE
    sent = instruction(mask).to_json()
    assert Instruction.from_json(sent) == instruction(mask)
    base64 = 4 * -(-len(mask.bits) // 3)
    assert len(mask.bits) == -(-length // 8)
    assert len(sent) - len(instruction(None).to_json()) == base64 + len(',"mask":{"type":"bits","bits":""}')
    assert not mask.indices(length).flags.writeable


@pytest.mark.parametrize(
    ("bits", "length"),
    [(b"", 3), (b"\xff", 9), (b"\xff\xff", 8), (b"\x00\x00", 16), (b"\x01", 7), (b"\xff\x01", 15)],
    ids=["empty", "short", "long", "keeps nothing", "beyond the vector", "beyond two bytes"],
)
def test_bits_that_are_no_mask_of_the_model_are_refused(bits: bytes, length: int) -> None:
    with pytest.raises(ValueError, match="mask bits"):
        SentMask(bits=bits).indices(length)


@pytest.mark.parametrize("mask", [BITS | {"seed": 1}, SEED | {"bits": "/w=="}, {"bits": "/w=="}, {"type": "both"}, []])
def test_a_mask_is_of_one_kind(mask: Any) -> None:
    with pytest.raises(ValueError, match=r"at ask\.mask"):
        Instruction.from_json(forged(instruction(None), mask=mask))


def test_a_sent_mask_goes_with_nothing_that_a_seeded_one_does_not_go_with() -> None:
    mask = SentMask.of([1], length=8)
    with pytest.raises(ValueError, match="mask: does not go with"):
        ask(placement="distributed", mask=mask, keep_ratio=0.5)
    with pytest.raises(ValueError, match="mask: must not be set"):
        ask(placement="local", mask=mask)

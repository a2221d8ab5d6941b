"""The pipeline of a client's reply: what may stand in which slot, in what order parts run, and what a client's row would cost."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch

from flower_dp.clients.fedsgd_dpc import FedSGDDPCRecipe
from flower_dp.clients.reply.parts import (
    FullNoise,
    GaussianShare,
    Mask,
    NotPrivate,
    RecordClip,
    RowClip,
    ServerNoise,
)
from flower_dp.clients.reply.pipeline import ClientJob, Pipeline, Refusal, Reply
from flower_dp.clients.reply.sending import QSGD, Dense, Lossless, RandK, SinglePrecision, TopK, bytes_a_value
from flower_dp.clients.training.recipe import FlatModel
from flower_dp.core import compression
from flower_dp.core.noise import noise_generator
from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.mechanisms import Gaussian
from flower_dp.privacy.release import Release
from flower_dp.wire import RoundMask
from tests.local_grids import linear, records, reply_of

SIZE = 1000
STEP = 2.0**-16


class Rows:
    """Training that gives each client a row, or an error."""

    def __init__(self, *rows: Any) -> None:
        self.given = rows

    def rows(self, vector: Any, jobs: Any) -> Any:
        for row in self.given[: len(jobs)]:
            yield row if isinstance(row, Exception) else (row, torch.tensor(0.0))


def pipeline(*rows: Any, **parts: Any) -> Pipeline:
    arguments = {
        "train": Rows(*rows),
        "clip": RowClip(clip_norm=1.0, step=STEP),
        "noise": GaussianShare(noise_std=0.1),
        "encode": Lossless(),
    }
    return Pipeline(**arguments | parts)


def job(name: str = "a", seed: int = 0) -> ClientJob:
    return ClientJob(name=name, records=[], seed=0, secret=lambda: noise_generator(seed))


MASK, OTHER_MASK = (Mask(of=RoundMask(seed=seed, keep_ratio=0.1), length=SIZE) for seed in (3, 4))
RELEASE = Release(
    description="a test",
    visible_to="everyone",
    unit="record",
    relation="replace-one",
    clip_norm=1.0,
    mechanism=Gaussian(noise_multiplier=1.0),
    sampler=FullSampling(),
    num_units=8,
)


# What may stand where


def overridden(part: type) -> type:
    """A class of a user's own that calls itself what the part is."""
    return type("Own", (part,), {})


@dataclass(frozen=True)
class Both:
    """What is kept: the row that leaves, and what was kept before."""

    slot: ClassVar[Literal["keep"]] = "keep"

    def __call__(self, row: Any, kept: Any) -> Any:
        return torch.cat([row, kept if kept is not None else row[:0]])


@pytest.mark.parametrize(
    ("parts", "arguments"),
    [
        ({"before_clip": TopK(keep_ratio=0.5)}, "before_clip: TopK may not stand here"),
        ({"before_clip": overridden(Mask)(of=MASK.of, length=SIZE)}, "before_clip: Own may not stand here"),
        ({"clip": lambda row: row}, "clip: function may not stand here"),
        ({"clip": overridden(RowClip)(clip_norm=1.0, step=STEP)}, "clip: Own may not stand here"),
        ({"noise": None}, "noise: NoneType may not stand here"),
        ({"noise": overridden(GaussianShare)(noise_std=0.1)}, "noise: Own may not stand here"),
        ({"after_noise": MASK}, "after_noise: Mask may not stand here"),
        ({"after_noise": lambda row: row}, "after_noise: function may not stand here"),
        ({"noise": ServerNoise(), "after_noise": TopK(keep_ratio=0.5)}, "after_noise: TopK would see rows without noise"),
        ({"noise": ServerNoise(), "encode": SinglePrecision()}, "encode: SinglePrecision would change rows without noise"),
        ({"noise": ServerNoise()}, "encode: Lossless would change rows without noise, or tell their zeros"),
        ({"encode": TopK(keep_ratio=0.5)}, "encode: TopK may not stand here"),
        ({"encode": None}, "encode: NoneType may not stand here"),
        ({"keep": lambda row, kept: row}, "keep: function may not stand here"),
        ({"before_clip": MASK}, "encode: Lossless does not send the coordinates of the mask"),
        ({"encode": RandK(mask=MASK)}, "encode: RandK does not send the coordinates of the mask"),
        ({"before_clip": MASK, "encode": RandK(mask=OTHER_MASK)}, "encode: RandK does not send"),
        ({"clip": RecordClip(clip_norm=1.0, step=STEP)}, "clip: Rows does not clip its records by"),
    ],
)
def test_parts_in_a_slot_where_they_may_not_stand_are_refused(parts: dict[str, Any], arguments: str) -> None:
    """mypy refuses them too: see refused_pipelines.py beside this file."""
    with pytest.raises(ValueError, match=arguments):
        pipeline(**parts)


def test_a_sum_of_records_is_clipped_as_the_pipeline_names_and_not_kept_without_its_noise() -> None:
    """Else the noise would be too small, or one record would change what all others contribute later. A client's own update may be kept."""
    made = FedSGDDPCRecipe(mechanism="laplace", clip_norm=0.5, epsilon=2.0, num_replies=2)
    good = made.pipeline(made.terms("c0", records("c0")).release, model=FlatModel(linear()), server_round=1)
    for change in ({"clip_norm": 0.51}, {"norm": "l2"}, {"step": 0.0}):
        train = replace(good.train, record_clip=replace(good.clip, **change))
        with pytest.raises(ValueError, match="does not clip its records by"):
            replace(good, train=train)
    replace(good, keep=Both())
    with pytest.raises(ValueError, match="keep: Both would keep a sum of records without noise"):
        replace(good, keep=Both(), noise=ServerNoise(), after_noise=None, encode=Dense())
    pipeline(noise=ServerNoise(), encode=Dense(), keep=Both())


# In what order parts run


def test_a_row_is_masked_clipped_rounded_noised_and_then_chosen_from() -> None:
    """The noise here is that of the test's own generator: what leaves is computed a second time by hand."""
    row = torch.from_numpy(np.random.default_rng(1).standard_normal(SIZE).astype(np.float32))
    made = pipeline(row, before_clip=MASK, encode=RandK(mask=MASK), after_noise=TopK(keep_ratio=0.5))
    (reply,) = made.replies(torch.zeros(SIZE), [job(seed=5)])
    assert isinstance(reply, Reply)
    kept = row.numpy()[MASK.indices].astype(np.float64)
    steps = np.trunc(kept / np.linalg.norm(kept) * (1 - 2.0**-22) / STEP)
    drawn = np.rint(noise_generator(5).standard_normal(100) * 0.1 / STEP)
    noised = (steps + drawn) * STEP
    expected = np.where(np.abs(noised) >= np.sort(np.abs(noised))[50], noised, 0)
    # float32 moves an entry over a multiple of the step here and there.
    np.testing.assert_allclose(reply.row.numpy(), expected, atol=STEP)
    assert int(reply.row.count_nonzero()) == 50


def test_errors_of_one_client_do_not_touch_the_others() -> None:
    broken = RuntimeError("a record of Jane")
    made = pipeline(torch.ones(4), broken, torch.tensor([math.nan] * 4), torch.ones(4))
    replies = list(made.replies(torch.zeros(4), [job(name) for name in "abcd"]))
    assert [type(reply) for reply in replies] == [Reply, Refusal, Refusal, Reply]
    assert replies[1] == Refusal(code="failed", reason="training failed; the node's own log says why")
    assert "NaN" in replies[2].reason


def test_the_norm_of_a_row_is_taken_where_somebody_asks_for_it_and_before_the_clip() -> None:
    made = pipeline(3 * torch.ones(4), noise=GaussianShare(noise_std=0.5))
    assert reply_of(made, torch.zeros(4), job()).norm is None
    assert float(reply_of(made, torch.zeros(4), replace(job(), measured=True)).norm) == 6.0


def test_noise_that_does_not_fit_the_lattice_of_the_clip_is_no_reply() -> None:
    made = pipeline(torch.ones(4), clip=RowClip(clip_norm=1.0, step=2.0**-4))
    assert list(made.replies(torch.zeros(4), [job()])) == [
        Refusal(code="failed", reason="training failed; the node's own log says why")
    ]


# What a client's row would cost alone


WIDE = {"noise": GaussianShare(noise_std=2.0**10)}
CASES = {
    "dense": ({}, 4 * SIZE),
    "dense, noise with more bits than float32": (WIDE, 8 * SIZE),
    "no noise": ({"noise": ServerNoise(), "encode": Dense()}, 4 * SIZE),
    "top-k": ({"after_noise": TopK(keep_ratio=0.1), "encode": Lossless(keep_ratio=0.1)}, 4 * 100 + 125),
    "a few": ({"after_noise": TopK(keep_ratio=0.01), "encode": Lossless(keep_ratio=0.01)}, 4 * 10 + 2 * 10),
    "rand-k": ({"before_clip": MASK, "encode": RandK(mask=MASK)}, 4 * 100),
    "wide rand-k": ({"before_clip": MASK, "encode": RandK(mask=MASK), **WIDE}, 8 * 100),
    "local": ({"encode": SinglePrecision(), "noise": FullNoise(release=RELEASE)}, 4 * SIZE),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_a_row_are_those_of_its_payload(name: str) -> None:
    """The second source: the payload of a node with this one client."""
    parts, num_bytes = CASES[name]
    made = pipeline(torch.linspace(-1, 1, SIZE), **parts)
    (reply,) = made.replies(torch.zeros(SIZE), [job(seed=8)])
    assert isinstance(reply, Reply)
    assert reply.num_bytes == num_bytes == made.payload(reply.row.to(torch.float64), 1).num_bytes


@pytest.mark.parametrize("encode", [Dense(), RandK(mask=MASK)])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 4), (16, 4), (17, 8)])
def test_the_size_of_a_sum_without_noise_does_not_follow_from_its_values(encode, num_rows, width) -> None:
    """It is public how many bytes a round has sent: float32 where any sum of so many rows is exact in it, else float64."""
    parts = {"before_clip": MASK, "encode": encode} if isinstance(encode, RandK) else {"encode": encode}
    made = pipeline(torch.zeros(SIZE), noise=ServerNoise(), clip=RowClip(clip_norm=1.0, step=2.0**-20), **parts)
    kept = made.dimension(SIZE)
    for values in (torch.zeros(kept), torch.full((kept,), 1 + 2.0**-20), torch.full((kept,), 1 / 3)):
        payload = made.payload(values.to(torch.float64), num_rows)
        assert payload.num_bytes == width * kept


def test_the_width_of_a_value_follows_from_public_numbers_where_noise_surely_fits() -> None:
    """A row that is not looked at may hold anything."""
    odd = torch.full((4,), 1 + 2.0**-40, dtype=torch.float64)
    clip, share = RowClip(clip_norm=1.0, step=2.0**-16), GaussianShare(noise_std=1.0)
    assert bytes_a_value(odd, clip, share) == 4
    assert bytes_a_value(odd, clip, GaussianShare(noise_std=2.0**9)) == 8
    assert bytes_a_value(odd.round(), clip, GaussianShare(noise_std=2.0**9)) == 4


# Quantization


def test_each_row_is_quantized_by_itself_with_its_weight_before_rows_are_added_up():
    """Ternary rows of unit vectors are exact: a quantized sum would have one scale for both."""
    rows = [torch.tensor([0.5, 0.0, 0.0]), torch.tensor([0.0, 0.0, -0.25])]
    made = pipeline(*rows, clip=RowClip(clip_norm=1.0, step=0.0), noise=NotPrivate(), encode=QSGD(levels=1))
    replies = list(made.replies(torch.zeros(3), [job("a"), replace(job("b"), weight=0.5)]))
    assert [reply.row.tolist() for reply in replies] == [[0.5, 0.0, 0.0], [0.0, 0.0, -0.125]]
    for reply in replies:
        assert reply.num_bytes == reply.alone.num_bytes
        assert compression.decode(reply.alone, 3).tolist() == reply.row.tolist()
    total = made.payload(sum(reply.row.to(torch.float64) for reply in replies), len(replies))
    assert total.header["encoding"] != "qsgd"
    assert compression.decode(total, 3).tolist() == [0.5, 0.0, -0.125]


def test_what_is_drawn_after_the_noise_does_not_repeat_it():
    """One generator a reply, also with a seed: a second one from the same seed would draw the noise's own numbers again."""
    made = []

    def secret() -> np.random.Generator:
        made.append(np.random.default_rng(7))
        return made[-1]

    quantized = pipeline(torch.zeros(50), encode=QSGD(levels=1))
    list(quantized.replies(torch.zeros(50), [replace(job(), secret=secret)]))
    assert len(made) == 1


def test_what_a_client_keeps_is_the_row_that_leaves():
    made = pipeline(torch.ones(50), encode=QSGD(levels=3), keep=Both())
    reply = reply_of(made, torch.zeros(50), job())
    assert torch.equal(reply.kept, reply.row)
    assert compression.decode(reply.alone, 50).tobytes() == reply.kept.numpy().tobytes()
    again = reply_of(made, torch.zeros(50), replace(job(), kept=reply.kept))
    assert torch.equal(again.kept, torch.cat([again.row, reply.row]))
    assert reply_of(replace(made, keep=None), torch.zeros(50), job()).kept is None

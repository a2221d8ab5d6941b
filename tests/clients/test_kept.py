"""What a client keeps from round to round: a value in, a value out, stored when the reply leaves and never before."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from flwr.app import Context
from torch import Tensor

from flower_dp import wire
from flower_dp.clients import FedSGDDPCRecipe, LocalDPClient, ScaffoldRecipe
from flower_dp.clients.account import NodeStateAccounts
from flower_dp.clients.client_vectors import load_vector
from flower_dp.core import compression
from flower_dp.privacy.client_terms import ClientTerms
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.wire import ReplyHeader
from tests.asks import config_of, own_instruction
from tests.local_grids import context_of, linear, records

NAMES = ("c0", "c1")
SIZE = 18
PLAIN = FedSGDDPCRecipe(mechanism="laplace", clip_norm=0.5, epsilon=3.0, num_replies=3)


@dataclass(frozen=True)
class SumOfRows:
    """All rows that a client has sent, added up."""

    slot: ClassVar[Literal["keep"]] = "keep"

    def __call__(self, row: Tensor, kept: Tensor | None) -> Tensor:
        return row if kept is None else row + kept


@dataclass(frozen=True)
class Remembering:
    """A method of a user's own, whose clients keep a vector, and for which the server sends none."""

    given_to: list[Any] = field(default_factory=list)
    broken: Any = None
    method = "fedsgd-dpc"
    vectors = ()

    def terms(self, name: str, records: Any) -> ClientTerms:
        return PLAIN.terms(name, records)

    def with_vectors(self, vectors: Mapping[str, Tensor], kept: Tensor | None) -> "Remembering":
        assert not vectors
        self.given_to.append(kept)
        return self

    def pipeline(self, release: Any, **arguments: Any) -> Any:
        made = replace(PLAIN.pipeline(release, **arguments), keep=SumOfRows())
        return made if self.broken is None else self.broken(made)


def node(context: Context, recipe: Any = None, names: Any = NAMES) -> LocalDPClient:
    data = {name: records(name) for name in names}
    return LocalDPClient(model=linear(), clients=data, recipe=recipe or Remembering(), device="cpu", context=context)


def asked(names: tuple[str, ...] = NAMES) -> dict[str, str]:
    return config_of(own_instruction("fedsgd-dpc", {name: PLAIN.terms(name, records(name)) for name in names}))


def answered(client: LocalDPClient, names: tuple[str, ...] = NAMES) -> tuple[np.ndarray, ReplyHeader]:
    weights = {"0.weight": linear()[0].weight.detach().numpy()}
    arrays, text = client.answer(weights, asked(names))
    answer = ReplyHeader.from_json(text[wire.KEY], names)
    return compression.decode(compression.Payload(arrays=tuple(arrays), header=answer.payload), SIZE), answer


def account(context: Context) -> list[int]:
    return [NodeStateAccounts(context.state).replies(name) for name in NAMES]


def stored(context: Context) -> list[Any]:
    return [load_vector(context.state, name, SIZE) for name in NAMES]


def test_any_method_may_keep_a_vector_and_its_answers_say_who_had_none():
    context, seen = context_of(), []
    first, answer = answered(node(context, Remembering(given_to=seen), ("c0",)), ("c0",))
    assert (answer.fresh, answer.refused) == (("c0",), {})
    np.testing.assert_array_equal(stored(context)[0], first)
    second, answer = answered(node(context, Remembering(given_to=seen)))
    assert answer.fresh == ("c1",)
    own, other = stored(context)
    np.testing.assert_allclose(own + other, first + second, rtol=1e-4, atol=1e-4)
    assert [one is None for one in seen] == [True, False, True]
    np.testing.assert_array_equal(seen[1].numpy(), first)
    assert answered(node(context))[1].fresh == ()


def test_a_node_that_fails_before_its_reply_leaves_keeps_nothing_new(monkeypatch):
    """Both clients have paid by then; a lost reply is paid and not sent, and what is kept stays that of the last one that was."""
    context = context_of()
    answered(node(context))
    before = stored(context)

    def fails(*made: Any) -> Any:
        raise OSError("the reply's text")

    with monkeypatch.context() as patched:
        patched.setattr(ReplyHeader, "to_json", fails)
        with pytest.raises(RuntimeError, match="training failed"):
            answered(node(context))
    assert account(context) == [2, 2]
    np.testing.assert_array_equal(before, stored(context))


def test_a_client_that_does_not_reply_keeps_what_it_had():
    """One whose reply fails has paid for it; one that can't pay has not; both have what the last reply left."""
    context = context_of()
    answered(node(context))
    before = stored(context)

    class Failing:
        def __init__(self, train: Any) -> None:
            self.train, self.record_clip = train, train.record_clip

        def rows(self, vector: Any, jobs: Any) -> Any:
            (job,) = jobs
            return iter([OSError("Jane Doe")]) if job.name == "c1" else self.train.rows(vector, jobs)

    _, answer = answered(node(context, Remembering(broken=lambda made: replace(made, train=Failing(made.train)))))
    assert (set(answer.refused), answer.fresh) == ({"c1"}, ())
    assert account(context) == [2, 2]
    assert not np.array_equal(stored(context)[0], before[0])
    np.testing.assert_array_equal(stored(context)[1], before[1])
    answered(node(context))
    spent = stored(context)
    _, answer = answered(node(context))
    assert set(answer.refused) == {"c0", "c1"}
    np.testing.assert_array_equal(spent, stored(context))


def test_scaffold_reads_what_it_has_written_and_nothing_damaged():
    """The correction is c - c_i: with c_i = c the steps are those of a client of a first round, where both are zero."""
    steps = FedPAQSteps(learning_rate=0.2, num_local_steps=2, batch_size=4, clip_norm=0.5, sensitivity="per-step")
    recipe = ScaffoldRecipe(steps=steps, epsilon=float("inf"), delta=1e-5, num_replies=4)
    control = torch.linspace(-1, 1, SIZE)
    release = recipe.terms("c0", records("c0")).release
    model = node(context_of(), recipe).model

    def shift(own: Tensor | None) -> Tensor | None:
        return recipe.with_vectors({"control": control}, own).pipeline(release, model=model, server_round=1).after_noise.shift

    assert not shift(control).any()
    torch.testing.assert_close(shift(None), -2 * steps.step_size(1) * control)
    assert recipe.pipeline(release, model=model, server_round=1).keep is None
    assert json.loads(asked()[wire.KEY])["ask"].get("vectors") is None

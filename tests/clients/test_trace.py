"""A traced function does again what the function does, and what it can't do again is refused."""

import pytest
import torch
from torch import nn

from flower_dp.clients.training.engines.trace import traced


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_what_it_makes_itself_it_may_change():
    """And look up by numbers."""
    numbers = torch.tensor([2, 0])

    def function(given):
        made = given * 2
        part = made[0]
        part += 1
        made[1:].mul_(3)
        return made, made.topk(2).values, given[numbers]

    graph = traced(function, draw(3, 4))
    other = draw(3, 4) - 1
    assert all(torch.equal(*pair) for pair in zip(graph(other), function(other), strict=True))


KEPT = torch.zeros(4)


@pytest.mark.parametrize(
    "change",
    [
        lambda given: KEPT.add_(given[0]),
        lambda given: KEPT.view(2, 2)[0].mul_(2) + 0 * given[0, 0],
        lambda given: torch.ops.aten._unsafe_view(KEPT, [2, 2]).mul_(2) + 0 * given[0, 0],
        lambda given: torch.add(given[0], 1, out=KEPT),
        lambda given: given.mul_(2),
    ],
    ids=["buffer", "view of a view", "unsafe view", "out", "input"],
)
def test_what_outlives_a_step_is_not_changed(change):
    given = draw(3, 4)
    with pytest.raises(RuntimeError, match=r"changes a tensor that outlives a step.*aten\."):
        traced(change, given)
    assert torch.equal(KEPT, torch.zeros(4))
    assert torch.equal(given, draw(3, 4))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda given: given if given.sum() > 0 else -given, "depend on data"),
        (lambda given: given * given.max().item(), "depend on data"),
        (lambda given: given[given > 0], "depend on data"),
        (lambda given: given if torch.equal(given, given) else -given, "depend on data"),
        (nn.functional.dropout, "draws random numbers"),
        (lambda given: given.clone().normal_(), "draws random numbers"),
    ],
    ids=["branch", "number", "mask", "equal", "dropout", "in place"],
)
def test_what_other_data_would_do_otherwise_is_refused(function, reason):
    with pytest.raises(RuntimeError, match=reason):
        traced(function, draw(3, 4))

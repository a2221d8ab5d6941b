"""Regularisers: their pull is the gradient of their penalty, in both engines, and no client's pull has another client in it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flower_dp.clients import BLUR, ProximalTerm, Regularizer

# The penalties, written down a second time.
PENALTIES: dict[str, tuple[Regularizer, Callable[[Tensor, Tensor], Tensor]]] = {
    "proximal": (ProximalTerm(strength=0.7), lambda weights, start: 0.35 * (weights - start).square().sum()),
    "BLUR": (
        BLUR(strength=0.7, bound=1.5),
        lambda weights, start: 0.35 * ((weights - start).square().sum().sqrt() - 1.5).clamp(min=0) ** 2,
    ),
}


def draws(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("length", [0.01, 1.4, 1.6, 40.0])
def test_a_pull_is_the_gradient_of_the_penalty(name: str, length: float) -> None:
    part, penalty = PENALTIES[name]
    start, away = draws(1, 200), draws(2, 200)
    weights = (start + length * away / away.norm()).requires_grad_()
    (expected,) = torch.autograd.grad(penalty(weights, start), weights)
    with torch.no_grad():
        found = part.pull(weights, start)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    assert not part.pull(start, start).any()  # where the norm is 0
    assert bool(found.any()) == (name == "proximal" or length > 1.5)


@pytest.mark.parametrize("name", PENALTIES)
def test_no_row_of_a_pull_depends_on_another(name: str) -> None:
    """Stacked clients are pulled as each is alone, to the bit in every slot, next to whatever there is."""
    size = 4099
    part, start, own = PENALTIES[name][0], draws(1, size), 5 * draws(2, size)
    alone = part.pull(own, start)
    for other in (draws(3, size), torch.full((size,), torch.nan), torch.full((size,), torch.inf)):
        for slot in range(8):
            stacked = other.expand(8, size).clone()
            stacked[slot] = own
            found = part.pull(stacked, start)
            torch.testing.assert_close(found[slot], alone)
            assert torch.equal(found[slot], part.pull(own.expand(8, size), start)[0])

"""Regularisers: their pull is the gradient of their penalty, in both engines, and no client's pull has another client in it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flower_dp.clients import BLUR, ProximalTerm, Regularizer, Training
from flower_dp.clients.training.engines import ENGINES
from tests.clients.test_training import Point, quadratic, records, update

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
    assert bool(found.any()) == (name == "proximal" or length > 1.5)


def test_blur_does_nothing_within_its_bound() -> None:
    """Not a bit: also at the start itself, where the norm is 0, and a hair below the bound."""
    start = draws(1, 50)
    for length in (0.0, 1e-30, 0.3, 1.4999):
        away = torch.zeros(50)
        away[7] = length
        weights = torch.zeros(50) + away
        assert not BLUR(strength=1e6, bound=1.5).pull(weights, torch.zeros(50)).any()
        assert BLUR(strength=1e6, bound=1.5).pull(start + 0.0, start).eq(0).all()


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


@pytest.mark.parametrize("engine", ENGINES)
def test_blur_by_hand(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    """From x = 2 with gradient x: x1 = 1.8, 0.2 away; the penalty's is -3 (0.2 - 0.1): x2 = 1.8 - 0.1 (1.8 - 0.3) = 1.65."""
    training = Training(
        learning_rate=0.1, num_local_steps=2, loss=quadratic([1.0]), regularizers=(BLUR(strength=3.0, bound=0.1),)
    )
    np.testing.assert_allclose(update(Point(2.0), records([0.0]), training, engine=engine), [1.65 - 2], rtol=1e-6)
    assert "one by one" not in caplog.text  # the row is the engine's own


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ProximalTerm(strength=0.0), "strength=0"),
        (lambda: BLUR(strength=1.0, bound=0.0), "bound=0"),
        (lambda: Training(learning_rate=0.1, regularizers=(0.5,)), "must be a tuple of regularisers"),  # type: ignore[arg-type]
    ],
)
def test_nonsense_is_refused(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()

"""The Flower app: a small language model learns the clients' style. Only adapters are trained, clipped, noised and sent."""

import warnings
from functools import cache

from torch import Tensor, nn

import flower_dp
from lora_style.base import Base
from lora_style.grammar import Writer, records

SENTENCES, TEST_SENTENCES = 8, 500
# Clients' seeds begin after those of the base language and of the test.
_FIRST_CLIENT = 1000


class LanguageModel(nn.Module):
    """A transformer that returns next-word scores [records, words, positions], the shape that torch's cross-entropy takes."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the scores for inputs [records, positions]."""
        scores: Tensor = self.transformer(input_ids=inputs).logits
        return scores.transpose(1, 2)


def make_model(base: Base | None = None, *, rank: int = 2) -> nn.Module:
    """Return the frozen base with LoRA adapters; only the adapters have gradients."""
    transformer = (base or Base()).model()
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings(action="ignore"):
        adapted = get_peft_model(
            transformer, LoraConfig(r=rank, lora_alpha=4 * rank, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
        )
    return LanguageModel(adapted).eval()


def load_records(client: int, num_clients: int) -> tuple[Tensor, Tensor]:
    """Return the sentences of client 0, 1, ..., in the clients' style and on its own topics."""
    return records(Writer(_FIRST_CLIENT + client, style=True, topics=3), SENTENCES)


def evaluate(model: nn.Module) -> dict[str, float]:
    """Return loss and perplexity on public sentences in the clients' style; no client has these sentences."""
    inputs, targets = public_records()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    return {"perplexity": loss.exp().item(), "loss": loss.item()}


@cache
def public_records() -> tuple[Tensor, Tensor]:
    """Return the public test sentences."""
    return records(Writer(1, style=True), TEST_SENTENCES)


app = flower_dp.app(model_fn=make_model, data_fn=load_records, evaluate_fn=evaluate)

"""The base model: a small transformer, trained once on the base language and stored in a folder. Every run starts from it."""

import json
import logging
import os
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import nn

from flower_dp.running.apps import own_module
from lora_style.grammar import LENGTH, WORDS, Writer, records

log = logging.getLogger("flwr")

# The environment variable with the folder of base models; the default is ~/.cache/flower-dp-lora.
FOLDER = "LORA_STYLE_FOLDER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The settings of a base model. The same settings on the same machine give the same bits.

    Attributes:
        layers, width, heads: sizes of the transformer.
        steps, batch_size, learning_rate: parameters of its training with Adam.
        seed: seed of the initial weights and of the text.
    """

    layers: int = 2
    width: int = 64
    heads: int = 4
    steps: int = 600
    batch_size: int = 32
    learning_rate: float = 3e-3
    seed: int = 0

    @property
    def file(self) -> Path:
        """The path of the stored model."""
        folder = Path(os.environ.get(FOLDER) or Path.home() / ".cache" / "flower-dp-lora").expanduser()
        name = sha256(json.dumps([asdict(self), WORDS, LENGTH]).encode()).hexdigest()[:12]
        return folder / f"base-{name}.safetensors"

    def model(self) -> nn.Module:
        """Return the trained model. The first process that calls this trains it; other processes wait."""
        model = self._untrained()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.file.with_suffix(".lock")):
            if not self.file.exists():
                self._train(model)
                part = self.file.with_suffix(".part")
                save_file({name: value.contiguous() for name, value in model.state_dict().items() if "lm_head" not in name}, part)
                part.replace(self.file)
        model.load_state_dict(load_file(self.file), strict=False)  # the head is tied to the embedding
        return model.eval()

    def _untrained(self) -> nn.Module:
        """Return the transformer with random weights from the seed alone. Torch's global random state does not change."""
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
            torch.default_generator.manual_seed(self.seed)
            return _gpt2(
                vocab_size=len(WORDS),
                n_positions=LENGTH,
                n_embd=self.width,
                n_layer=self.layers,
                n_head=self.heads,
                bos_token_id=1,
                eos_token_id=1,
                use_cache=False,
                # No dropout, so that the order of records is the only randomness of training.
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )

    def _train(self, model: nn.Module) -> None:
        started, writer = time.monotonic(), Writer(self.seed, style=False)
        adam = torch.optim.Adam(model.parameters(), lr=self.learning_rate)
        model.train()
        for _ in range(self.steps):
            inputs, targets = records(writer, self.batch_size)
            adam.zero_grad()
            loss = nn.functional.cross_entropy(model(input_ids=inputs).logits.transpose(1, 2), targets)
            loss.backward()
            adam.step()
        log.info("Base model: %s steps, loss %.3f, %.0f s: %s", self.steps, loss.item(), time.monotonic() - started, self.file)


def _gpt2(**sizes: Any) -> nn.Module:
    # transformers imports torchvision if it is installed, even a build that does not fit torch.
    if "transformers" not in sys.modules:
        with suppress(ImportError):
            own_module("tasks.vision").import_torchvision()
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**sizes))

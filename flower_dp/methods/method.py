"""What the package knows of a method by its name, before any part of it is imported."""

from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any, Literal

# Settings of local training: every method says which of them it reads.
TRAINING = (
    "local_epochs",
    "batch_size",
    "momentum",
    "weight_decay",
    "proximal",
    "blur_strength",
    "blur_bound",
    "update_keep_ratio",
    "optimizer",
    "engine",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method: where its parts are, as "module" or "module:name", and what of the common settings it reads.

    Attributes:
        name: on the wire, in settings, commands and presets; also of its page in the documentation.
        strategy: what users construct on the server.
        recipe: the terms and the training of a client that has terms of its own (`LocalDPClient`); empty: `DPClient`, which does
            what the server's release asks.
        settings: the module of the app with its table of settings, and functions that make both sides from it.
        planner: the module of the paper's planner; empty if there is none.
        audit: makes the case of a run's settings for `flower-dp audit`.
        canaries: what a one-run audit of it plants: clients, or records where its rows are updates along negative gradients of
            records; empty if it can't.
        samplings: the samplings that it can account for, its default first.
        reads: the settings of local training that it reads.
    """

    name: str
    strategy: str
    recipe: str = ""
    settings: str
    planner: str = ""
    audit: str
    canaries: Literal["clients", "records", ""] = ""
    samplings: tuple[str, ...]
    reads: Collection[str] = TRAINING

    def load(self, part: str) -> Any:
        """Import what an attribute names: `load("strategy")`."""
        module, _, name = getattr(self, part).partition(":")
        found = import_module(module)
        return attrgetter(name)(found) if name else found

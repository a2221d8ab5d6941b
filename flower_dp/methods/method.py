"""What the package knows of a method by its name, before any part of it is imported."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from typing import Any, Literal

# Settings of local training: every method says which of them it reads.
TRAINING = (
    "local_epochs",
    "batch_size",
    "momentum",
    "weight_decay",
    "proximal_mu",
    "blur_strength",
    "blur_bound",
    "lus_keep_ratio",
    "optimizer",
    "training_engine",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method: where its parts are, as "module" or "module:name", and what of the common settings it reads.

    Attributes:
        name: on the wire, in settings, commands and presets; also of its page in the documentation.
        strategy: what users construct on the server.
        recipe: the terms and the training of a client that has terms of its own (`LocalDPClient`); empty: `DPClient`, which does
            what the server's release asks.
        settings: the module of the app that makes arguments of both sides from several settings, and what a planner takes.
        defaults: of settings of its table in the app: where a parameter of the strategy has none, or another one, and of settings
            that are no parameter of it.
        renamed: the setting of a parameter whose name a common setting has.
        planner: the module of the paper's planner; empty if there is none.
        audit: makes a case of `flower-dp audit` from a label and settings, by keyword.
        cases: the settings of its cases by label, where they are not the audit's own; `rounds` are those of a run.
        canaries: what a one-run audit of it plants: clients, or records where its rows are updates along negative gradients of
            records; empty if it can't.
        samplings: the samplings that it can account for, its default first.
        reads: the settings of local training that it reads.
    """

    name: str
    strategy: str
    recipe: str = ""
    settings: str
    defaults: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    planner: str = ""
    audit: str
    cases: Mapping[str, Mapping[str, bool | int | float | str]]
    canaries: Literal["clients", "records", ""] = ""
    samplings: tuple[str, ...]
    reads: Collection[str] = TRAINING

    def load(self, part: str) -> Any:
        """Import what an attribute names: `load("strategy")`."""
        module, _, name = getattr(self, part).partition(":")
        found = import_module(module)
        return attrgetter(name)(found) if name else found


# An audit's noise multiplier of noise that clients share: a Gaussian trade-off curve of mu = 2.5 against a participant, who knows
# a quarter of the variance; 0.4 has the same curve against everybody.
SHARED_NOISE = 0.4 * (4 / 3) ** 0.5
DISTRIBUTED: dict[str, float | str] = {"placement": "distributed", "noise_multiplier": SHARED_NOISE}
# What is post-processed is audited by the bound for every mechanism. It sees nothing of events whose probability is far
# below 1 / trials: epsilon is claimed at a delta for which the best test makes some ten errors in a thousand trials.
LARGE_DELTA = 0.2

# The app's defaults of methods with one noised sum; settings of the clip norm are those of an adaptive one.
ONE_NOISED_SUM: Mapping[str, float] = {
    "clip_norm": 0.5,
    "noise_multiplier": 0.9,
    "target_epsilon": 8.0,
    "clip_quantile": 0.0,
    "clip_learning_rate": 0.2,
    "clip_count_noise_std": 0.0,
    "min_clip_norm": 0.0,
    "max_clip_norm": 0.0,
}

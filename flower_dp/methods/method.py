"""The registry entry of a method: facts that the package needs before it imports any part of the method."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from typing import Any, Literal

# Settings of local training; each method lists those that it reads.
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
    """One method: its parts, as "module" or "module:name", and the common settings that it reads.

    Attributes:
        name: name on the wire and in settings, commands and presets.
        strategy: class that users construct on the server.
        recipe: class with the terms and the training of a client that has its own terms (`LocalDPClient`); empty for `DPClient`,
            which follows the server's release.
        settings: module of the app that makes the arguments of both sides from several settings, and the planner's inputs.
        defaults: defaults of settings of the method's table, if the strategy's parameter has none or another one, or if the
            setting is not a parameter of the strategy.
        renamed: names of settings by parameter, for parameters whose name a common setting has.
        planner: module of the paper's planner; empty if there is none.
        audit: function that makes a case of `flower-dp audit` from a label and settings, by keyword.
        cases: settings of the audit's cases by label, if they differ from the audit's own; `rounds` are those of one run.
        canaries: canaries of a one-run audit: clients, or records if the rows are updates along negative gradients of records;
            empty if the method can't be audited so.
        samplings: samplings that the method can account for, the default first.
        reads: settings of local training that the method reads.
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
        """Import the object that an attribute names, such as `load("strategy")`."""
        module_name, _, name = getattr(self, part).partition(":")
        module = import_module(module_name)
        return attrgetter(name)(module) if name else module


# An audit's noise multiplier for shared noise. A participant knows a quarter of the variance, its own share, so against it the
# trade-off curve is Gaussian with mu = 2.5. The multiplier 0.4 has the same curve if nobody knows a part of the noise.
SHARED_NOISE = 0.4 * (4 / 3) ** 0.5
DISTRIBUTED: dict[str, float | str] = {"placement": "distributed", "noise_multiplier": SHARED_NOISE}
# Post-processed releases are audited by the bound that holds for every mechanism. It can't see events whose probability is far
# below 1 / trials, so epsilon is claimed at a delta for which the best test makes about ten errors in a thousand trials.
LARGE_DELTA = 0.2

# The app's defaults for methods with one noised sum; `clip_quantile` and the settings after it are of the adaptive clip norm.
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

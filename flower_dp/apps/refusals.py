"""Check a run's settings within a second or two, before Flower, Ray or torch start."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flower_dp.apps.methods import ParsedRunConfig
from flower_dp.apps.settings import key_of
from flower_dp.apps.tasks import module_of
from flower_dp.core import checks
from flower_dp.core.formatting import format_rounded_up
from flower_dp.methods import METHODS
from flower_dp.privacy import accounting
from flower_dp.strategies.client_level import ClientLevelRules

# Stands for every client's number of records, which only the data give; it is so large that no setting is refused for it.
_MANY_RECORDS = 10**6
# Step of the coarse grid that `_check_target` computes epsilon on.
_GRID = 1e-2


def check(run_config: Mapping[str, Any], *, defaults: Mapping[str, Any], given: Sequence[str], built: bool) -> None:
    """Refuse settings with which no round can run.

    The check stops at the first error. To find all errors, it gives each refused setting its default and checks again.

    Args:
        run_config: settings of the run.
        defaults: settings of flower-dp's own app with their defaults.
        given: keys that were set on the command line; none may belong to a method that was not chosen.
        built: whether the app has a user's own model and data.

    Raises:
        SettingsError: with all errors, one per line.
    """
    config, findings = {**defaults, **run_config}, checks.ErrorCollector()
    method = config["method"]
    for key in given:
        if (table := key.rpartition(".")[0]) in METHODS and table != method and method in METHODS:
            findings.errors.append(
                checks.refusal(key, config[key], f"is not read by method={method!r}; set method={table} with it")
            )
    refused: set[str] = set()
    while True:
        try:
            _try(config, built=built)
            break
        except ValueError as error:
            keys = {_in_keys(cause, config): _key_of(cause, config) for cause in getattr(error, "errors", (error,))}
            # A SettingsError has all errors of the settings alone. One that comes later results from a default put in above.
            if not (refused and isinstance(error, checks.SettingsError)):
                findings.errors += [cause for cause, key in keys.items() if key not in refused]
        changed = {key for key in keys.values() if key and config[key] != defaults.get(key)}
        if not changed or changed & {"method", "num-clients"}:  # all other checks depend on these
            break
        refused |= changed
        config = {key: value for key, value in config.items() if key not in changed}
        config |= {key: defaults[key] for key in changed & defaults.keys()}
    findings.raise_if_any()


def _try(config: Mapping[str, Any], *, built: bool) -> None:
    run = ParsedRunConfig.of(config, own_model=built)
    folder = run.settings.data_dir
    # The task itself refuses a missing folder, with its own advice. A prefix such as "torchvision:" fills the folder later.
    if not built and not re.match("[a-z]{2,}:", folder):
        missing = not Path(folder).expanduser().is_dir() if folder else "data-dir" in module_of(run.settings.task).NEEDS
        if missing:
            run.task()
    names = run.settings.client_names()
    strategy = run.strategy(lambda: dict.fromkeys(names, _MANY_RECORDS))
    if run.settings.num_rounds:
        _check_target(strategy.rules, len(names))


def _check_target(rules: Any, num_clients: int) -> None:
    """Refuse a target epsilon that one round alone exceeds, with the most noise that a round can have.

    A coarse grid makes the accounting quick and adds less than twice its step to epsilon. So the check refuses only targets that
    are exceeded by more; the run itself accounts exactly.
    """
    if not isinstance(rules, ClientLevelRules) or rules.target_epsilon is None:
        return
    release = (
        rules.noise.without_own_share(rules.noise.shares(num_clients))
        if rules.noise.num_shares_varies
        else rules.noise.release_to_participants
    )
    event, relation = release.event(1), rules.release.relation
    renyi = accounting.rdp_epsilon(event, delta=rules.about.delta, relation=relation)
    if renyi is not None and renyi <= rules.target_epsilon:
        return
    cost = accounting.epsilon(event, delta=rules.about.delta, relation=relation, grid=_GRID).epsilon
    if cost - 2 * _GRID > rules.target_epsilon:
        why = f"one round alone costs epsilon={format_rounded_up(cost, 3)}; add more noise, or raise the target"
        raise checks.refusal("target_epsilon", rules.target_epsilon, why)


def _key_of(error: ValueError, config: Mapping[str, Any]) -> str | None:
    """Return the setting of an error, which may name the strategy's argument instead."""
    field, method = getattr(error, "field", ""), METHODS.get(config["method"])
    name = key_of(method.renamed.get(field, field) if method else field)
    return next((key for key in (f"{config['method']}.{name}", name) if key in config), None)


def _in_keys(error: ValueError, config: Mapping[str, Any]) -> ValueError:
    """Return an error that names the setting instead of the strategy's argument."""
    key = _key_of(error, config)
    return ValueError(key + str(error).removeprefix(error.field)) if key and isinstance(error, checks.BadValue) else error

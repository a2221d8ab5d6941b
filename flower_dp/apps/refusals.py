"""What is wrong with a run, as far as its settings say: found within a second or two, before Flower, Ray or torch start."""

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

# Stands for every client's number of records, which only the data say: no setting is refused for it.
_MANY_RECORDS = 10**6
_GRID = 1e-2


def check(run_config: Mapping[str, Any], *, defaults: Mapping[str, Any], given: Sequence[str], built: bool) -> None:
    """Refuse settings with which no round can be run.

    What is wrong is found one by one: each refused setting gets its default, and then the others are checked again.

    Args:
        run_config: the settings of the run.
        defaults: those of flower-dp's own app.
        given: keys that were set on the command line; of those, none may be of a method that is not chosen.
        built: whether the run is that of an app around somebody's own model and data.

    Raises:
        SettingsError: with all that is wrong, a line each.
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
            found = {_in_keys(one, config): _key_of(one, config) for one in getattr(error, "errors", (error,))}
            # All that is wrong with settings alone is told at once: what comes later follows from one that was refused.
            if not (refused and isinstance(error, checks.SettingsError)):
                findings.errors += [one for one, key in found.items() if key not in refused]
        changed = {key for key in found.values() if key and config[key] != defaults.get(key)}
        if not changed or changed & {"method", "num-clients"}:  # all else depends on these
            break
        refused |= changed
        config = {key: value for key, value in config.items() if key not in changed}
        config |= {key: defaults[key] for key in changed & defaults.keys()}
    findings.raise_if_any()


def _try(config: Mapping[str, Any], *, built: bool) -> None:
    run = ParsedRunConfig.of(config, own_model=built)
    folder = run.settings.data_dir
    # A folder that does not exist is refused in the task's words; what is in it, or how it is filled, is seen later.
    if not built and not re.match("[a-z]{2,}:", folder):
        missing = not Path(folder).expanduser().is_dir() if folder else "data-dir" in module_of(run.settings.task).NEEDS
        if missing:
            run.task()
    names = run.settings.client_names()
    strategy = run.strategy(lambda: dict.fromkeys(names, _MANY_RECORDS))
    if run.settings.num_rounds:
        _check_target(strategy.rules, len(names))


def _check_target(rules: Any, num_clients: int) -> None:
    """Refuse a target that not even one round meets, with the most noise that a round can have.

    The cost is computed on a coarse grid, which is quick and adds less than twice its step. A target that close is left to the
    run, which computes exactly.
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
        why = f"one round alone costs epsilon={format_rounded_up(cost, 3)}; more noise costs less"
        raise checks.refusal("target_epsilon", rules.target_epsilon, why)


def _key_of(error: ValueError, config: Mapping[str, Any]) -> str | None:
    """Return the setting that an error is of, which may name the argument."""
    field, method = getattr(error, "field", ""), METHODS.get(config["method"])
    name = key_of(method.renamed.get(field, field) if method else field)
    return next((key for key in (f"{config['method']}.{name}", name) if key in config), None)


def _in_keys(error: ValueError, config: Mapping[str, Any]) -> ValueError:
    """Return an error that names the setting where it named the argument."""
    key = _key_of(error, config)
    return ValueError(key + str(error).removeprefix(error.field)) if key and isinstance(error, checks.BadValue) else error

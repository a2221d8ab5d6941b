"""What is wrong with a run, as far as its settings say: found within a second or two, before Flower, Ray or torch start."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flower_dp.apps.methods import Run
from flower_dp.apps.own_config import run_of
from flower_dp.apps.tasks import module_of
from flower_dp.core import checks
from flower_dp.core.words import digits_in_words
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
    config = {**defaults, **run_config}
    findings = checks.Findings()
    _find_given(config, given, findings)
    refused: set[str] = set()
    while True:
        try:
            _try(config, built=built)
            break
        except ValueError as error:
            lines = str(error).splitlines()
        # What follows from a setting that was refused already is no news.
        findings.lines += [_in_keys(line, config) for line in lines if not any(_speaks_of(key, line) for key in refused)]
        changed = {key for line in lines if (key := _key_of(line, config)) and config[key] != defaults.get(key)}
        if not changed or "method" in changed:
            break
        refused |= changed
        config = {key: value for key, value in config.items() if key not in changed}
        config |= {key: defaults[key] for key in changed & defaults.keys()}
    findings.refuse()


def _find_given(config: Mapping[str, Any], given: Sequence[str], findings: checks.Findings) -> None:
    for key in given:
        table = key.partition(".")[0] if "." in key else ""
        if table in METHODS and table != config["method"] and config["method"] in METHODS:
            findings.lines.append(
                f"{key}={config[key]!r}: is not read by method={config['method']!r}; set method={table} with it"
            )


def _try(config: Mapping[str, Any], *, built: bool) -> None:
    run = run_of(config) if built else Run.of(config)
    if not built:
        _find_data(run)
    names = run.settings.client_names()
    strategy = run.strategy(lambda: dict.fromkeys(names, _MANY_RECORDS))
    if run.settings.num_rounds:
        _check_target(strategy.rules, len(names))


def _find_data(run: Run) -> None:
    """Refuse a folder that does not exist, in the task's words; what is in it is read later."""
    folder = run.settings.data_dir
    if re.match("[a-z]{2,}:", folder):
        return  # which says how it is filled
    missing = not Path(folder).expanduser().is_dir() if folder else "data-dir" in module_of(run.settings.task).NEEDS
    if missing:
        run.task()


def _check_target(rules: Any, num_clients: int) -> None:
    """Refuse a target that not even one round meets, with the most noise that a round can have.

    The cost is computed on a coarse grid, which is quick and adds less than twice its step. A target that close is left to the
    run, which computes exactly.
    """
    if not isinstance(rules, ClientLevelRules) or rules.target_epsilon is None:
        return
    release = rules.noise.without_one_of(rules.noise.shares(num_clients)) if rules.noise.shares_vary else rules.noise.charged
    event, relation = release.event(1), rules.release.relation
    renyi = accounting.rdp_epsilon(event, delta=rules.about.delta, relation=relation)
    if renyi is not None and renyi <= rules.target_epsilon:
        return
    cost = accounting.epsilon(event, delta=rules.about.delta, relation=relation, grid=_GRID).epsilon
    if cost - 2 * _GRID > rules.target_epsilon:
        raise ValueError(
            f"target_epsilon={rules.target_epsilon:g}: one round alone costs epsilon={digits_in_words(cost, 3)}; "
            "more noise costs less"
        )


def _key_of(line: str, config: Mapping[str, Any]) -> str | None:
    """Return the setting that a line names first, as a setting or as an argument."""
    name = _name(line).replace("_", "-")
    return next((key for key in (f"{config['method']}.{name}", name) if key in config), None)


def _in_keys(line: str, config: Mapping[str, Any]) -> str:
    """Return a line that names a setting, where it named the argument."""
    key = _key_of(line, config)
    return line if key is None else key + line[len(_name(line)) :]


def _name(line: str) -> str:
    return re.split(r"[^\w.-]", line, maxsplit=1)[0]


def _speaks_of(key: str, line: str) -> bool:
    """Tell whether a line names a setting; what it lists after a semicolon is no reason."""
    named = re.findall(r"[\w-]+", line.partition(";")[0].replace("_", "-"))
    return key.rpartition(".")[2] in named

"""The file of a sweep: its settings, its seeds and its resources."""

import itertools
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flower_dp.core import checks
from flower_dp.core.checks import bad, refusal
from flower_dp.privacy.selection import RunCountLaw, number_of_runs
from flower_dp.running import values
from flower_dp.running.apps import flatten, own_module
from flower_dp.running.values import Value

# Stands for the table of a point's method: if method = "dp-fedavg", METHOD.epsilon is dp-fedavg.epsilon.
OF_METHOD = "METHOD."
# Settings that the sweep itself gives to each run.
_SET_BY_SWEEP = ("seed", "output-dir", "resume")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRule:
    """The rule that selects the best point.

    Attributes:
        metric: metric whose mean over the seeds decides.
        mode: `max` or `min`.
    """

    metric: str
    mode: str = "max"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionSettings:
    """The settings of a selection by private results, with `--private-selection`.

    Attributes:
        number: law of the number of runs.
        public_test_data: whether the test records are public, so that a metric on them may decide.
    """

    number: RunCountLaw
    public_test_data: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Settings that run with every seed.

    Attributes:
        app: a preset, a task, or the absolute folder of an app; empty for flower-dp's own app.
        settings: settings that differ from the app's, by key.
    """

    app: str
    settings: Mapping[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFile:
    """The content of a sweep's file.

    Attributes:
        points: the points, each once, in the order of the file.
        seeds: the seeds of each point's runs.
        metric: metric of tables and figures.
        select: rule that selects the best point; None for no selection.
        private_selection: settings of a selection by private results; None if all runs are made and shown.
        workers: worker processes per run; None: as many as the machine has for it.
        supernodes: SuperNodes that the workers simulate; None: as `flower-dp run`.
        gpus_per_worker: fraction of a GPU per worker.
        jobs: maximum number of simultaneous runs; None: as many as the machine has workers for.
    """

    points: tuple[Point, ...]
    seeds: tuple[int, ...] = (0,)
    metric: str = "accuracy"
    select: SelectionRule | None = None
    private_selection: SelectionSettings | None = None
    workers: int | None = None
    supernodes: int | None = None
    gpus_per_worker: float = 0.0
    jobs: int | None = None


def read(path: Path) -> SweepFile:
    """Read a sweep's file. Relative paths in it start from the file's folder.

    Raises:
        ValueError: with one line for each error.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: must be TOML: {error}") from None
    errors, fields = checks.ErrorCollector(), dict[str, Any]()
    for key, value in content.items():
        with errors.collect_errors():
            if key not in _READERS:
                known = ", ".join(_READERS)
                raise ValueError(f"{key}: is not a key of a sweep; put settings of runs into [settings]. Keys: {known}")
            fields[key.replace("-", "_")] = _READERS[key](key, value)
    parts = {key: fields.pop(key) for key in ("app", "settings", "grid", "points") if key in fields}
    with errors.collect_errors():
        fields["points"] = _points(**parts, base=path.absolute().parent)
    errors.raise_if_any()
    return SweepFile(**fields)


# Values of keys


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise bad(key, value, "a string")
    return value


def _table(key: str, value: Any, *, keys: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """Return a table as one level. With `keys`, it must have the first of them, and may have no others."""
    if not isinstance(value, dict):
        raise bad(key, value, "a table")
    if keys and (unknown := sorted(value.keys() - set(keys))):
        raise ValueError(f"{key}.{unknown[0]}: is not a key of [{key}]; keys are {', '.join(keys)}")
    if keys and keys[0] not in value:
        raise ValueError(f"{key}.{keys[0]}: is missing")
    return flatten(value)


def _blocks(key: str, value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(block, dict) for block in value):
        raise ValueError(f"{key}: must be one [[points]] table or more")
    return [flatten(block) for block in value]


def _seeds(key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        return tuple(range(checks.integer(key, value, at_least=1)))
    seeds = tuple(checks.integer(key, seed, at_least=0) for seed in value)
    if not seeds or len(set(seeds)) < len(seeds):
        raise bad(key, value, "the number of seeds, or an array of different whole numbers >= 0")
    return seeds


def _choice(key: str, value: Any) -> SelectionRule:
    table = _table(key, value, keys=("metric", "mode"))
    mode = checks.one_of(f"{key}.mode", table.get("mode", "max"), ("max", "min"))
    return SelectionRule(metric=checks.line(f"{key}.metric", table["metric"]), mode=mode)


def _private(key: str, value: Any) -> SelectionSettings:
    table = _table(key, value, keys=("mean", "shape", "public-test-data"))
    shape = table.get("shape", 1.0)
    try:
        number = number_of_runs(table["mean"], math.inf if shape == "poisson" else shape)
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from None
    public = checks.flag(f"{key}.public-test-data", table.get("public-test-data", False))
    return SelectionSettings(number=number, public_test_data=public)


_COUNT = partial(checks.integer, at_least=1)
_READERS: dict[str, Callable[[str, Any], Any]] = {
    "app": _text,
    "seeds": _seeds,
    "metric": checks.line,
    "settings": _table,
    "grid": _table,
    "points": _blocks,
    "select": _choice,
    "private-selection": _private,
    "workers": _COUNT,
    "supernodes": _COUNT,
    "gpus-per-worker": partial(checks.number, at_least=0),
    "jobs": _COUNT,
}


# Points


def _points(
    *,
    app: str = "",
    settings: Mapping[str, Any] | None = None,
    grid: Mapping[str, Any] | None = None,
    points: list[Mapping[str, Any]] | None = None,
    base: Path,
) -> tuple[Point, ...]:
    common, shared = settings or {}, grid or {}
    distinct: dict[str, Point] = {}
    errors, unread = checks.ErrorCollector(), set(common)
    for number, block in enumerate(points or [{}], start=1):
        if twice := sorted(block.keys() & shared.keys()):
            errors.errors.append(ValueError(f"{twice[0]}: is in [grid] and in point {number}; leave it out of one of them"))
            continue
        for combination in _combinations({**shared, **block}, errors):
            with errors.collect_errors():
                held = _settings_read(common, combination)
                unread -= held.keys() | combination.keys()
                point = _point({"app": app, **held, **combination}, base)
                distinct.setdefault(repr((point.app, sorted(point.settings.items()))), point)
    for key in [key for key in common if key in unread]:
        errors.errors.append(refusal(key, common[key], "is in [settings], and no point reads it; remove it"))
    errors.raise_if_any()
    return tuple(distinct.values())


def _settings_read(common: Mapping[str, Any], point: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the common settings that a point's method and sampling read; all of them if neither is known."""
    method, sampling = point.get("method", common.get("method")), point.get("sampling")
    if not common or (method is None and not sampling):
        return common
    unread = own_module("unread_settings").by_others(method, sampling)
    return {key: value for key, value in common.items() if not unread(key)}


def _combinations(table: Mapping[str, Any], errors: checks.ErrorCollector) -> Iterator[dict[str, Any]]:
    """Yield each combination of a table's values; an array holds several values."""
    lists = {key: value if isinstance(value, list) else [value] for key, value in table.items()}
    if empty := [key for key, values_ in lists.items() if not values_]:
        errors.errors.append(ValueError(f"{empty[0]}=[]: must have one value or more"))
    for combination in itertools.product(*lists.values()):
        yield dict(zip(lists, combination, strict=True))


def _point(settings: dict[str, Any], base: Path) -> Point:
    app, method = settings.pop("app"), settings.get("method")
    if not isinstance(app, str):
        raise bad("app", app, "a preset, a task, or the folder of an app")
    if key := next((key for key in _SET_BY_SWEEP if key in settings), None):
        raise ValueError(
            f"{key}: " + ("set seeds instead" if key == "seed" else "the sweep gives each run its folder; remove it")
        )
    expanded: dict[str, Value] = {}
    for key, value in settings.items():
        if key.startswith(OF_METHOD) and not isinstance(method, str):
            raise ValueError(f"{key}: needs a method, in [settings], [grid] or the point")
        if not isinstance(value, Value):
            raise bad(key, value, "a string, a number, true or false, or an array of them")
        whole = f"{method}.{key.removeprefix(OF_METHOD)}" if key.startswith(OF_METHOD) else key
        expanded[whole] = values.from_toml(whole, value, "", base) if isinstance(value, str) else value
    folder = base / Path(app).expanduser()
    return Point(app=str(folder.resolve()) if app and (folder / "pyproject.toml").is_file() else app, settings=expanded)

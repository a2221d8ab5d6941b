"""The file of a sweep: which settings are run with which seeds, and with what."""

import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_dp.core import checks
from flower_dp.privacy.selection import NumberOfRuns, number_of_runs
from flower_dp.running import values
from flower_dp.running.apps import flatten, own_module
from flower_dp.running.values import Value

# Stands for the table of a point's method: METHOD.epsilon is dp-fedavg.epsilon with method = "dp-fedavg".
OF_METHOD = "METHOD."
# Settings that the sweep itself gives to each run.
_OWN = ("seed", "output-dir", "resume")
_KEYS: dict[str, tuple[type, ...]] = {
    "app": (str,),
    "seeds": (int, list),
    "metric": (str,),
    "settings": (dict,),
    "grid": (dict,),
    "points": (list,),
    "select": (dict,),
    "private-selection": (dict,),
    "workers": (int,),
    "supernodes": (int,),
    "gpus-per-worker": (int, float),
    "at-once": (int,),
}
_KINDS = {str: "a string", int: "a whole number", float: "a number", list: "an array", dict: "a table"}
_MODES = ("max", "min")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """By what the best point is found.

    Attributes:
        metric: its mean over the seeds decides.
        mode: `max` or `min`.
    """

    metric: str
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateChoice:
    """How one run is chosen by private results, with `--private-selection`.

    Attributes:
        number: the law of the number of runs.
        public_test_data: whether the records that models are tested with are public, so that a metric on them may decide.
    """

    number: NumberOfRuns
    public_test_data: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Settings that are run with every seed.

    Attributes:
        app: what runs: a preset, a task, or an app's folder, absolute; empty for flower-dp's own app.
        settings: the settings that differ from it, by key.
    """

    app: str
    settings: Mapping[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFile:
    """What a sweep's file says.

    Attributes:
        points: the settings, each once, in the order of the file.
        seeds: of each point's runs.
        metric: what tables and figures are of.
        choice: by what the best point is found; None for no choice.
        private: how one run is chosen by private results; None where all runs are made and shown.
        workers: worker processes of a run; None: as many as the machine has for it.
        supernodes: that they simulate; None: as `flower-dp run`.
        gpus_per_worker: the fraction of a GPU of each.
        at_once: runs at once, at most; None: as many as the machine has workers for.
    """

    points: tuple[Point, ...]
    seeds: tuple[int, ...]
    metric: str
    choice: Choice | None
    private: PrivateChoice | None
    workers: int | None
    supernodes: int | None
    gpus_per_worker: float
    at_once: int | None


def read(path: Path) -> SweepFile:
    """Read a sweep's file. Relative folders in it are relative to the folder that it is in.

    Raises:
        ValueError: with all that is wrong, a line each.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not TOML: {error}") from None
    findings = checks.Findings()
    for key, value in content.items():
        with findings.noted():
            _check_key(key, value)
    findings.refuse()
    numbers: dict[str, int | None] = {}
    for key in ("workers", "supernodes", "at-once"):
        with findings.noted():
            numbers[key] = checks.integer(key, content[key], at_least=1) if key in content else None
    gpus, choice, private = 0.0, None, None
    seeds: tuple[int, ...] = ()
    points: tuple[Point, ...] = ()
    with findings.noted():
        gpus = checks.number("gpus-per-worker", content.get("gpus-per-worker", 0.0), at_least=0)
    with findings.noted():
        seeds = _seeds(content.get("seeds", 1))
    with findings.noted():
        choice = _choice(content["select"]) if "select" in content else None
    with findings.noted():
        private = _private(content["private-selection"]) if "private-selection" in content else None
    with findings.noted():
        points = _points(content, path.absolute().parent)
    findings.refuse()
    return SweepFile(
        points=points,
        seeds=seeds,
        metric=checks.line("metric", content.get("metric", "accuracy")),
        choice=choice,
        private=private,
        workers=numbers["workers"],
        supernodes=numbers["supernodes"],
        gpus_per_worker=gpus,
        at_once=numbers["at-once"],
    )


def _check_key(key: str, value: Any) -> None:
    if key not in _KEYS:
        raise ValueError(f"{key}: is no key of a sweep; settings of the runs are in [settings]. Keys: {', '.join(_KEYS)}")
    if not isinstance(value, _KEYS[key]) or isinstance(value, bool):
        raise ValueError(f"{key}={value!r}: must be {' or '.join(_KINDS[kind] for kind in _KEYS[key])}")


def _seeds(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list):
        return tuple(range(checks.integer("seeds", given, at_least=1)))
    found = tuple(checks.integer("seeds", seed, at_least=0) for seed in given)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"seeds={given}: must be different whole numbers, one at least; or how many")
    return found


def _choice(table: Mapping[str, Any]) -> Choice:
    if unknown := sorted(table.keys() - {"metric", "mode"}):
        raise ValueError(f"select.{unknown[0]}: is no key of select, which has metric and mode")
    if "metric" not in table:
        raise ValueError('select: must be {metric = "...", mode = "max" or "min"}')
    mode = checks.one_of("select.mode", table.get("mode", "max"), _MODES)
    return Choice(metric=checks.line("select.metric", table["metric"]), mode=mode)


def _private(table: Mapping[str, Any]) -> PrivateChoice:
    if unknown := sorted(table.keys() - {"mean", "shape", "public-test-data"}):
        raise ValueError(f"private-selection.{unknown[0]}: is no key of it, which has mean, shape and public-test-data")
    if "mean" not in table:
        raise ValueError("private-selection.mean: is missing; it is the expected number of runs")
    public = table.get("public-test-data", False)
    if not isinstance(public, bool):
        raise ValueError(f"private-selection.public-test-data={public!r}: must be true or false")
    shape = table.get("shape", 1.0)
    try:
        number = number_of_runs(table["mean"], math.inf if shape == "poisson" else shape)
    except ValueError as error:
        raise ValueError(f"private-selection.{error}") from None
    return PrivateChoice(number=number, public_test_data=public)


# Points


def _points(content: Mapping[str, Any], base: Path) -> tuple[Point, ...]:
    common, grid = flatten(content.get("settings", {})), flatten(content.get("grid", {}))
    blocks = content.get("points", [{}])
    if not blocks or not all(isinstance(block, dict) for block in blocks):
        raise ValueError("points: must be tables, [[points]], one at least")
    found: dict[str, Point] = {}
    findings, unread = checks.Findings(), set(common)
    for number, block in enumerate(map(flatten, blocks), start=1):
        if twice := sorted(block.keys() & grid.keys()):
            findings.add(ValueError(f"{twice[0]}: is in [grid] and in point {number}: leave it out of one of them"))
            continue
        for combination in _combinations({**grid, **block}, findings):
            with findings.noted():
                held = _held(common, combination)
                unread -= held.keys() | combination.keys()
                point = _point({"app": content.get("app", ""), **held, **combination}, base)
                found.setdefault(repr((point.app, sorted(point.settings.items()))), point)
    for key in [key for key in common if key in unread]:
        findings.add(checks.refusal(key, common[key], "is in [settings], and no point reads it"))
    findings.refuse()
    return tuple(found.values())


def _held(common: Mapping[str, Any], point: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of all runs that hold for a point: those that its method and its sampling read, if these are known."""
    method, sampling = point.get("method", common.get("method")), point.get("sampling")
    if not common or (method is None and not sampling):
        return common
    unread = own_module("unread").by_others(method, sampling)
    return {key: value for key, value in common.items() if not unread(key)}


def _combinations(table: Mapping[str, Any], findings: checks.Findings) -> Iterator[dict[str, Any]]:
    """Yield each combination of a table's values; an array has several, another value is one."""
    lists = {key: value if isinstance(value, list) else [value] for key, value in table.items()}
    if empty := [key for key, values_ in lists.items() if not values_]:
        findings.add(ValueError(f"{empty[0]}: has no value"))
    for combination in itertools.product(*lists.values()):
        yield dict(zip(lists, combination, strict=True))


def _point(table: Mapping[str, Any], base: Path) -> Point:
    settings, app = dict(table), table["app"]
    del settings["app"]
    if not isinstance(app, str):
        raise ValueError(f"app={app!r}: must be a preset, a task, or the folder of an app")
    if own := next((key for key in _OWN if key in settings), None):
        raise ValueError(f"{own}: " + ("use seeds" if own == "seed" else "the sweep gives each run its folder"))
    for key in [key for key in settings if key.startswith(OF_METHOD)]:
        method = settings.get("method")
        if not isinstance(method, str):
            raise ValueError(f"{key}: needs a method, in [settings], [grid] or the point")
        settings = {f"{method}.{key.removeprefix(OF_METHOD)}" if one == key else one: of for one, of in settings.items()}
    for key, value in settings.items():
        if not isinstance(value, Value):
            raise ValueError(f"{key}={value!r}: must be a string, a number, true or false; or several in an array")
    folder = base / Path(app).expanduser()
    return Point(
        app=str(folder.resolve()) if app and (folder / "pyproject.toml").is_file() else app,
        settings={
            key: values.from_toml(key, value, "", base) if isinstance(value, str) else value for key, value in settings.items()
        },
    )

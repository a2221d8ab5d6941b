"""The runs of a sweep: each with its settings, its folder and the command that makes it alone."""

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flower_dp.core import checks
from flower_dp.running import plugins, preflight
from flower_dp.running.apps import Target, resolve
from flower_dp.running.launch_record import LaunchRecord
from flower_dp.running.values import Value
from flower_dp.sweeps.file import Point, SweepFile

_SLUG, _HASH = 40, 8  # characters of a run's name


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """A run of a sweep.

    Attributes:
        point: settings of the run.
        seed: seed of the run.
        label: settings in which the points differ, as text.
        name: name of the run's folder, the same in every sweep with these settings and this seed.
        target: the app with all settings.
        launched: record that `flower-dp run` keeps of a run.
        command: the `flower-dp run` that makes this run alone.
    """

    point: Point
    seed: int
    label: str
    name: str
    target: Target
    launched: LaunchRecord
    command: str

    @property
    def config(self) -> dict[str, Value]:
        """The whole run-config."""
        return {**self.target.app.defaults, **self.target.overrides}

    @property
    def description(self) -> str:
        """The run's name for people: label and seed."""
        return f"{self.label}{', ' * bool(self.label)}seed {self.seed}"


def planned(file: SweepFile, cores: int) -> tuple[SweepRun, ...]:
    """Return the runs of a sweep: all points with the first seed, then all points with the next.

    Args:
        file: the sweep's file.
        cores: CPU cores of this machine. If there are more cores than runs, each run gets several workers.

    Raises:
        SettingsError: with one line for each setting that an app can't take.
    """
    workers = file.workers or max(1, cores // (len(file.points) * len(file.seeds)))
    errors, labels = PointErrors(len(file.points)), _labels(file.points)
    runs = []
    for seed in file.seeds:
        for point, label in zip(file.points, labels, strict=True):
            with errors.of(label):
                runs.append(_run(file, point, seed, label, preflight.workers_of(workers, file.gpus_per_worker)))
    if errors:  # then report the errors of the other points too
        for run in _of_one_seed(runs):
            with errors.of(run.label):
                preflight.check_settings(run.target)
    errors.refuse()
    known: dict[str, SweepRun] = {}
    for run in runs:
        if (other := known.setdefault(run.name, run)) is not run:
            raise checks.SettingsError(
                f"points: {other.description!r} and {run.description!r} are the same run; leave one of them out"
            )
    return tuple(runs)


def check(runs: Iterable[SweepRun], *, forecast: bool = False) -> None:
    """Refuse settings that an app can't use, as `flower-dp run` does before a run.

    Args:
        runs: runs of a sweep; those of one seed stand for the others.
        forecast: whether to simulate the rounds of each run without clients too, to refuse what a run refuses when it begins.

    Raises:
        SettingsError: with one line for each error.
    """
    points = _of_one_seed(runs)
    errors = PointErrors(len(points))
    for run in points:
        app = run.target.app
        functions = [app.check] if app.check and run.target.overrides else []  # the defaults are valid
        with errors.of(run.label):
            preflight.check_settings(run.target)
            for name in [*functions, *([app.cost] if forecast and app.cost else [])]:
                with plugins.load_plugin(app, name) as function:
                    function(run.config)
    errors.refuse()


def _of_one_seed(runs: Iterable[SweepRun]) -> list[SweepRun]:
    """Return one run for each point."""
    first: dict[str, SweepRun] = {}
    for run in runs:
        first.setdefault(run.label, run)
    return list(first.values())


class PointErrors:
    """Errors of points: each line once, with its points.

    Args:
        count: number of all points.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._labels: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._labels)

    @contextmanager
    def of(self, label: str) -> Iterator[None]:
        """Collect the ValueError of a point that ends the block, if any."""
        try:
            yield
        except ValueError as error:
            for line in str(error).splitlines():
                self._labels.setdefault(line, []).append(label)

    def refuse(self) -> None:
        """Raise the collected errors.

        Raises:
            SettingsError: if there are any.
        """
        lines = []
        for line, all_labels in self._labels.items():
            labels = list(dict.fromkeys(all_labels))
            others = f", and {len(labels) - 1} other points" if len(labels) > 1 else ""
            lines.append(line if len(labels) == self._count else f"{line} (point {labels[0]}{others})")
        if lines:
            raise checks.SettingsError("\n".join(lines))


def _run(file: SweepFile, point: Point, seed: int, label: str, workers: int) -> SweepRun:
    texts = [f"{key}={_text(value)}" for key, value in point.settings.items()]
    plain = resolve(point.app or None, texts)
    known = plain.app.settings()
    if "seed" not in known:
        raise ValueError(f"seeds: {plain.app.name} has no setting `seed`; add it to [tool.flwr.app.config] of its pyproject.toml")
    if plain.app.own and any(plain.overrides.get(key) for key in ("output-dir", "resume")):
        raise ValueError("output-dir: the sweep gives each run its folder; remove it")
    target = resolve(point.app or None, [*texts, f"seed={seed}"])
    nodes = preflight.nodes_of(target, file.supernodes, workers)
    words = ["flower-dp", "run", *([point.app] if point.app else [])]
    words += [word for text in [*texts, f"seed={seed}"] for word in ("--set", text)]
    words += ["--workers", str(workers), "--supernodes", str(nodes)]
    words += ["--gpus-per-worker", f"{file.gpus_per_worker:g}"] if file.gpus_per_worker else []
    return SweepRun(
        point=point,
        seed=seed,
        label=label,
        name=f"{_name(plain)}-seed-{seed}",
        target=target,
        launched=LaunchRecord(
            app="" if target.app.own else str(target.app.folder),
            name=target.name,
            overrides=dict(target.overrides),
            workers=workers,
            supernodes=nodes,
            gpus_per_worker=file.gpus_per_worker,
        ),
        command=shlex.join(words),
    )


def _text(value: Value) -> str:
    """Return a value in the form that `--set` takes."""
    if isinstance(value, bool):
        return str(value).lower()
    quoted = isinstance(value, str) and (value[:1] in "'\"" and value != "")
    return f'"{value}"' if quoted else str(value)


def _name(target: Target) -> str:
    """Return a name for settings. It depends only on the settings that differ from the app's defaults, not on the file's form."""
    known = target.app.settings()
    other = {key: value for key, value in sorted(target.overrides.items()) if key != "seed" and value != known.get(key)}
    content = json.dumps(["" if target.app.own else str(target.app.folder), other])
    method = {**known, **target.overrides}.get("method", target.name)
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", str(method)).strip("-.")[:_SLUG] or "run"
    return f"{slug}-{hashlib.sha256(content.encode()).hexdigest()[:_HASH]}"


def _labels(points: Sequence[Point]) -> list[str]:
    """Return, for each point, the settings in which points differ; settings of the method's table lose the table's name."""
    tables: list[dict[str, Any]] = [{"app": point.app, **_shortened(point.settings)} for point in points]
    keys = dict.fromkeys(key for table in tables for key in table)
    differ = [key for key in keys if len({repr(table.get(key)) for table in tables}) > 1]
    if not differ:
        return [""] * len(tables)
    if "method" in differ:  # the method's name stands for the settings that all points of the method share
        methods = {table.get("method") for table in tables}
        groups = [[table for table in tables if table.get("method") == method] for method in methods]
        implied = {key for key in differ if all(len({repr(table.get(key)) for table in group}) == 1 for group in groups)}
        differ = [key for key in differ if key == "method" or key not in implied]
    shown = [
        [_setting_text(key, table[key]) for key in differ if key in table and (key, table[key]) != ("app", "")]
        for table in tables
    ]
    return [", ".join(texts) or "defaults" for texts in shown]


def _shortened(settings: Mapping[str, Value]) -> dict[str, Value]:
    method = settings.get("method")
    return {key.removeprefix(f"{method}."): value for key, value in settings.items()}


def _setting_text(key: str, value: Any) -> str:
    if key in ("app", "method"):
        return str(value)
    return f'{key}=""' if value == "" else f"{key}={_text(value)}"

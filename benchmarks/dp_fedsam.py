"""Test DP-FedSAM's claims: six methods, fixed and adaptive clip norm, tuned with equally many runs, then several seeds.

    python benchmarks/dp_fedsam.py --output-dir FOLDER --set data-dir=DIR [--set KEY=VALUE ...] [--minutes M] [--in-process]

Five sweeps, one after another, in FOLDER. `tune` is benchmarks/dp_fedsam.toml. The others have the settings of each method that
are best by validation accuracy: `norms`, one run each that tells the norms of updates and is not private; `tables`, three
partitions and three seeds; `radii`, DP-FedSAM with several radii at DP-FedAvg's clip norm and learning rate; `epsilons`, noise
for epsilon 1, 2, 4 and 8, a fixed clip norm and three seeds. `report.md` has the tables, `accuracy-epsilon.png` the picture.
Repeat the command to resume. With --minutes the program stops by itself after that time, with status 3, so that a queue that
lends a GPU for ten minutes can call it repeatedly. --set KEY=VALUE is a setting of all runs: another task, model or number of
rounds. --clips and --partitions select parts. --clip-norms and --learning-rates are the candidates for fixed clip norms and for
all learning rates. --sam-radius is DP-FedSAM's in all sweeps except `radii`. --epsilon calibrates the noise of all sweeps except
`epsilons`. --stages selects the sweeps; all except `tune` need the results of `tune`.

`flower-dp sweep` makes the runs; with --in-process this process makes them one after another, without Ray and without plots.
"""

import argparse
import fcntl
import logging
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tomli_w

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY)]

from flower_dp.core.environment import RESUME, RESUMED, RUN_FOLDER  # noqa: E402
from flower_dp.reporting import canvas  # noqa: E402
from flower_dp.reporting.past_run import read_past_run  # noqa: E402
from flower_dp.reporting.update_norms import read_update_norms  # noqa: E402
from flower_dp.running.apps import resolve  # noqa: E402
from flower_dp.running.run_folder import PLOT, is_finished, write_whole  # noqa: E402
from flower_dp.running.values import Value  # noqa: E402
from flower_dp.sweeps.folder import SweepFolder  # noqa: E402
from flower_dp.sweeps.plan import SweepRun  # noqa: E402
from flower_dp.sweeps.results import Results, last_metrics  # noqa: E402
from flower_dp.sweeps.sweep import Sweep  # noqa: E402

GRID = Path(__file__).with_suffix(".toml")
TUNE, NORMS, TABLES, RADII, EPSILONS = STAGES = ("tune", "norms", "tables", "radii", "epsilons")
REPORT, PICTURE, LOCK = "report.md", "accuracy-epsilon.png", "program.lock"
METHODS = ("DP-FedAvg", "BLURS", "Fed-SMP-rand_k", "Fed-SMP-top_k", "DP-FedSAM", "DP-FedSAM-top_k")
CLIPS = ("fixed", "adaptive")
PARTITIONS: dict[str, dict[str, Value]] = {
    "Dirichlet 0.3": {"partition": "dirichlet", "dirichlet-alpha": 0.3},
    "Dirichlet 0.6": {"partition": "dirichlet", "dirichlet-alpha": 0.6},
    "i.i.d.": {"partition": "iid"},
}
TARGETS = (1.0, 2.0, 4.0, 8.0)
SAM_RADII = (0.05, 0.15, 0.5)
CHOSEN_BY, SHOWN = "validation-accuracy", "accuracy"
# Exit status if the time is up before all runs are made.
UNFINISHED = 3
Variant = tuple[str, str]


def variant(settings: Mapping[str, Any]) -> Variant:
    """Return the name of a run's settings: the method, and its kind of clip norm."""
    method = str(settings["method"])
    if method == "dp-fedavg":
        name = "BLURS" if settings.get("blur-strength") else "DP-FedAvg"
    elif method == "fed-smp":
        name = f"Fed-SMP-{str(settings['fed-smp.mask']).replace('-', '_')}"
    else:
        name = "DP-FedSAM-top_k" if settings["dp-fedsam.keep-ratio"] < 1 else "DP-FedSAM"
    return name, "adaptive" if settings.get(f"{method}.clip-quantile") else "fixed"


def partition_of(settings: Mapping[str, Any]) -> str:
    """Return the name of a run's partition."""
    if settings["partition"] == "iid":
        return "i.i.d."
    return f"{str(settings['partition']).capitalize()} {settings['dirichlet-alpha']:g}"


# The files of the sweeps


def tuning(
    settings: Mapping[str, Value],
    gpus: float,
    clips: Sequence[str] = CLIPS,
    rates: Sequence[float] = (),
    norms: Sequence[float] = (),
    radius: float | None = None,
    epsilon: float | None = None,
    jobs: int = 0,
) -> dict[str, Any]:
    """Return the sweep that tunes: the grid's file with other settings of all runs; the arguments replace the file's values.

    Args:
        settings: settings of all runs.
        gpus: number of GPUs per worker; 0: the file's.
        clips: kinds of clip norm.
        rates: learning rates to choose from.
        norms: fixed clip norms to choose from.
        radius: radius of SAM.
        epsilon: target epsilon of the noise, in place of the grid's noise multiplier.
        jobs: number of parallel runs; 0: the file's.
    """
    content = tomllib.loads(GRID.read_text(encoding="utf-8"))
    content["settings"] |= settings
    points: list[dict[str, Any]] = []
    for point in content["points"]:
        own = point[point["method"]]
        kind = "adaptive" if "clip-quantile" in own else "fixed"
        if kind not in clips:
            continue
        if rates:
            point["learning-rate"] = list(rates)
        if radius is not None and "sam-radius" in own:
            own["sam-radius"] = radius
        made = [point]
        if norms and kind == "fixed":
            made = [_at_clip_norm(point, norm) for norm in norms]
        points += [one for one in made if one not in points]  # the file has a point for each clip norm of BLURS
    content["points"] = points
    if epsilon is not None:
        del content["grid"]["METHOD.noise-multiplier"]
        content["grid"]["METHOD.epsilon"] = epsilon
    if jobs:
        content["jobs"] = jobs
    if gpus:
        content["gpus-per-worker"] = gpus
    return content


def _at_clip_norm(point: Mapping[str, Any], norm: float) -> dict[str, Any]:
    """Return a point at a clip norm, which is also BLUR's bound if the point uses BLUR."""
    method = point["method"]
    bound = {"blur-bound": norm} if "blur-bound" in point else {}
    return {**point, **bound, method: {**point[method], "clip-norm": norm}}


def best(results: Sequence[tuple[Mapping[str, Any], float]]) -> dict[Variant, dict[str, Any]]:
    """Return the best settings of each method and kind of clip norm, the first of equal ones."""
    found: dict[Variant, tuple[float, dict[str, Any]]] = {}
    for settings, number in results:
        name = variant(settings)
        if name not in found or number > found[name][0]:
            found[name] = number, dict(settings)
    return {name: settings for name, (_, settings) in found.items()}


def chosen_runs(
    stage: str,
    chosen: Mapping[Variant, Mapping[str, Any]],
    seeds: int,
    tune: Mapping[str, Any],
    partitions: Sequence[str] = tuple(PARTITIONS),
) -> dict[str, Any]:
    """Return the sweep of a later stage: the chosen settings with norms, on partitions, with radii, or with each epsilon."""
    points: list[dict[str, Any]] = []
    for (name, clip), settings in chosen.items():
        own = f"{settings['method']}."
        if stage == TABLES:
            free = {key: value for key, value in settings.items() if key not in ("partition", "dirichlet-alpha")}
            points += [free | PARTITIONS[name] for name in partitions]
        elif clip == "adaptive":
            continue
        elif stage == NORMS:
            points.append({**settings, "report-client-metrics": True})
        elif stage == EPSILONS:
            points.append({key: value for key, value in settings.items() if key != f"{own}noise-multiplier"})
            points[-1][f"{own}epsilon"] = list(TARGETS)
        elif name == "DP-FedAvg":
            same = {key.replace(own, "dp-fedsam."): value for key, value in settings.items()}
            own_radii = {"dp-fedsam.keep-ratio": 1.0, "dp-fedsam.sam-radius": list(SAM_RADII)}
            points.append(same | {"method": "dp-fedsam", "report-client-metrics": True} | own_radii)
    kept = {key: tune[key] for key in ("workers", "jobs", "gpus-per-worker") if key in tune}
    return {"seeds": 1 if stage == NORMS else seeds, "metric": SHOWN, **kept, "points": points}


# Making them


def make(file: Path, folder: Path, deadline: float, *, in_process: bool) -> bool:
    """Make the remaining runs of a sweep until the deadline; return whether all are made.

    Raises:
        SystemExit: if a run failed.
    """
    if in_process:
        _in_process(Sweep.read(file), SweepFolder(folder), deadline)
    else:
        _as_command(file, folder, deadline)
    return all(is_finished(SweepFolder(folder).of(run)) for run in Sweep.read(file).runs)


def _as_command(file: Path, folder: Path, deadline: float) -> None:
    program = [sys.executable, "-c", "from flower_dp.cli.entry import main; main()"]
    words = [*program, "sweep", str(file), "--output-dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))}
    with subprocess.Popen(words, env=environment) as process:
        try:
            status = process.wait(max(0.0, deadline - time.monotonic()) if deadline < float("inf") else None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # each run leaves its statement and a checkpoint
            process.wait()
            return
    if status:
        raise SystemExit(status)


def _in_process(sweep: Sweep, folder: SweepFolder, deadline: float) -> None:
    runs = sweep.runs
    # Runs on the same records follow one another, because dealing records takes much of a short run's time.
    with folder.locked():
        folder.check(runs)
        folder.keep(sweep.path)
        left = sorted(folder.left(runs), key=lambda one: (one[0].seed, partition_of(one[0].config)))
        for number, (run, place, goes_on) in enumerate(left, start=1):
            if time.monotonic() > deadline:
                break
            started = time.monotonic()
            play(run, place, goes_on=goes_on)
            print(f"[{number}/{len(left)}] {run.description}: {time.monotonic() - started:.0f} s", flush=True)
        Results(folder=folder, runs=runs, metric=sweep.file.metric).write_rows()
    if all(is_finished(folder.of(run)) for run in runs):
        sweep.make(folder, print)  # makes no run: writes the table, the figure and the statement


def play(run: SweepRun, place: Path, *, goes_on: bool) -> None:
    """Make one run in this process, on one node that hosts all clients, as a worker of the simulation does."""
    from flwr.app import Context, RecordDict  # noqa: PLC0415 - a second, and torch another

    from flower_dp.apps.client_app import app as client_app  # noqa: PLC0415
    from flower_dp.apps.server_app import app as server_app  # noqa: PLC0415
    from tests.grids import LocalGrid  # noqa: PLC0415

    config = run.config
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
    launched = {RUN_FOLDER: str(place), RESUME: RESUMED if goes_on else ""}
    # A plot would take much of a short run's time.
    with patch.dict(os.environ, launched), patch("flower_dp.running.plot.png", lambda rows: b""):
        server_app(LocalGrid(client_app, 1, **config), context)
    (place / PLOT).unlink()


# What came out


def finished(file: Path, folder: Path) -> list[SweepRun]:
    """Return the runs of a sweep that have finished."""
    if not file.is_file():
        return []
    return [run for run in Sweep.read(file).runs if is_finished(SweepFolder(folder).of(run))]


def last(run: SweepRun, folder: Path, metric: str) -> float:
    """Return the last value of a run's metric."""
    return float(last_metrics(read_past_run(SweepFolder(folder).of(run)), metric)[metric])


def spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation (n - 1) in percent; one value has no deviation."""
    mean = f"{100 * statistics.fmean(values):.1f}"
    return f"{mean} ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else mean


def differences(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> str:
    """Return two methods' difference in points, over runs that both have: mean ± standard error, and how often it is > 0."""
    apart = [100 * (ours[key] - theirs[key]) for key in ours if key in theirs]
    if not apart:
        return "not run"
    error = f" ± {statistics.stdev(apart) / len(apart) ** 0.5:.2f}" if len(apart) > 1 else ""
    return f"{statistics.fmean(apart):+.2f}{error} (above in {sum(one > 0 for one in apart)} of {len(apart)})"


def report(place: Path) -> str:
    """Return the finished runs so far as Markdown."""
    runs = {stage: finished(place / f"{stage}.toml", place / stage) for stage in STAGES}
    accuracy: dict[Variant, dict[str, dict[int, float]]] = {}
    for run in runs[TABLES]:
        of = accuracy.setdefault(variant(run.config), {}).setdefault(partition_of(run.config), {})
        of[run.seed] = last(run, place / TABLES, SHOWN)
    parts = [
        f"{platform.system()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}, "
        f"flwr {version('flwr')}",
        "## Settings chosen by validation accuracy\n\n" + _settings(place, runs[TUNE]),
    ]
    clips = [clip for clip in CLIPS if any(kind == clip for _, kind in accuracy)]
    for clip in clips:
        rows = [[method, *_cells(accuracy.get((method, clip), {}), tuple(PARTITIONS))] for method in METHODS]
        parts.append(f"## Test accuracy (%), {clip} clip norm\n\n" + _table(["", *PARTITIONS], rows))
    rows = []
    for clip in clips:
        base = _by_run(accuracy.get(("DP-FedAvg", clip), {}))
        rows += [[f"{one}, {clip}", differences(_by_run(accuracy.get((one, clip), {})), base)] for one in METHODS[1:]]
    if rows:
        parts.append("## Points above DP-FedAvg, by partition and seed\n\n" + _table(["", "difference"], rows))
    if runs[RADII]:
        parts.append("## DP-FedSAM at DP-FedAvg's clip norm and learning rate, by radius\n\n" + _radii(place, runs, accuracy))
    if runs[NORMS] or runs[RADII]:
        parts.append("## Norms of updates before the clip\n\n" + _norms(place, runs))
    if curve := curves(place, runs[EPSILONS]):
        rows = [[method, *_cells(of, TARGETS)] for method, of in curve.items()]
        parts.append(
            "## Test accuracy (%) by epsilon, fixed clip norm\n\n" + _table(["", *(f"{one:g}" for one in TARGETS)], rows)
        )
    return "\n\n".join(parts) + "\n"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(values: Mapping[Any, Mapping[int, float]], keys: Sequence[Any]) -> list[str]:
    return [f"{spread(list(values[key].values()))} ({len(values[key])})" if key in values else "not run" for key in keys]


def _by_run(values: Mapping[str, Mapping[int, float]]) -> dict[tuple[str, int], float]:
    return {(name, seed): one for name, of in values.items() for seed, one in of.items()}


def _settings(place: Path, runs: Sequence[SweepRun]) -> str:
    numbers = [(run.config, last(run, place / TUNE, CHOSEN_BY)) for run in runs]
    chosen, rows = best(numbers), []
    for name in ((method, clip) for clip in CLIPS for method in METHODS):
        if name not in chosen:
            continue
        settings, of = chosen[name], [number for config, number in numbers if variant(config) == name]
        own = settings["method"]
        norm = f"{settings[f'{own}.clip-norm']:g}"
        if name[1] == "adaptive":
            norm = f"quantile {settings[f'{own}.clip-quantile']:g}"
        found = [f"{100 * max(of):.1f}", f"{100 * min(of):.1f}", str(len(of))]
        rows.append([", ".join(name), norm, f"{settings['learning-rate']:g}", *found])
    return _table(["", "clip norm", "learning rate", "best (%)", "worst (%)", "runs"], rows)


def _radii(place: Path, runs: Mapping[str, Sequence[SweepRun]], accuracy: Mapping[Variant, Mapping[str, Any]]) -> str:
    found: dict[float, dict[str, dict[int, float]]] = {0.0: {}}
    for run in runs[RADII]:
        of = found.setdefault(run.config["dp-fedsam.sam-radius"], {}).setdefault(partition_of(run.config), {})
        of[run.seed] = last(run, place / RADII, SHOWN)
    named = {name for of in found.values() for name in of}
    base = accuracy.get(("DP-FedAvg", "fixed"), {})
    found[0.0] = {name: base[name] for name in named if name in base}
    rows = [
        [f"{radius:g}", *_cells(of, tuple(named)), differences(_by_run(of), _by_run(found[0.0])) if radius else ""]
        for radius, of in found.items()
    ]
    return _table(["radius (0: DP-FedAvg)", *named, "above DP-FedAvg"], rows)


def _norms(place: Path, runs: Mapping[str, Sequence[SweepRun]]) -> str:
    rows = []
    for stage in (NORMS, RADII):
        for run in [run for run in runs[stage] if run.seed == 0]:
            norms, own = read_update_norms(read_past_run(SweepFolder(place / stage).of(run))), run.config["method"]
            radius = f", radius {run.config['dp-fedsam.sam-radius']:g}" if own == "dp-fedsam" else ""
            radius += ", with DP-FedAvg's settings" if stage == RADII else ""
            shown = [run.config["learning-rate"], run.config[f"{own}.clip-norm"]]
            found = [norms.mean[0], norms.mean[-1], statistics.fmean(norms.mean), statistics.fmean(norms.std)]
            rows.append([f"{variant(run.config)[0]}{radius}", *(f"{one:g}" for one in shown), *(f"{one:.2f}" for one in found)])
    return _table(["", "learning rate", "clip norm", "first round", "last round", "mean of all", "std over clients"], rows)


def curves(place: Path, runs: Sequence[SweepRun]) -> dict[str, dict[float, dict[int, float]]]:
    """Return each method's accuracy by epsilon and seed."""
    found: dict[str, dict[float, dict[int, float]]] = {}
    for run in runs:
        target = float(run.config[f"{run.config['method']}.epsilon"])
        found.setdefault(variant(run.config)[0], {}).setdefault(target, {})[run.seed] = last(run, place / EPSILONS, SHOWN)
    return found


def draw(found: Mapping[str, Mapping[float, Mapping[int, float]]], path: Path) -> None:
    """Draw accuracy against epsilon, one line per method, with error bars."""
    figure = canvas.empty(7.0, 4.8)
    axes = figure.subplots()
    for place, (method, of) in enumerate(found.items()):
        # Slightly apart, so that error bars do not hide one another.
        epsilons = [target * 1.02 ** (place - len(found) / 2) for target in sorted(of)]
        values = [[100 * one for one in of[target].values()] for target in sorted(of)]
        bars = [statistics.stdev(one) if len(one) > 1 else 0.0 for one in values]
        axes.errorbar(
            epsilons, list(map(statistics.fmean, values)), bars, marker="o", capsize=3, label=method, **canvas.look(place)
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(TARGETS, [f"{one:g}" for one in TARGETS])
    axes.set(xlabel="epsilon of a client", ylabel="test accuracy (%)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    canvas.save(figure, path)


def main() -> None:
    """Make the remaining runs of all stages, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of all sweeps: new, or made by this program")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of all runs")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of tables and epsilons")
    parser.add_argument("--clips", nargs="+", choices=CLIPS, default=CLIPS, help="kinds of clip norm")
    parser.add_argument("--learning-rates", nargs="+", type=float, default=(), help="candidates; default: the grid's")
    parser.add_argument("--clip-norms", nargs="+", type=float, default=(), help="candidates, fixed; default: the grid's")
    parser.add_argument("--sam-radius", type=float, help="radius of DP-FedSAM; default: the grid's")
    parser.add_argument("--epsilon", type=float, help="target epsilon of the noise; default: the grid's noise multiplier")
    parser.add_argument("--partitions", nargs="+", choices=PARTITIONS, default=tuple(PARTITIONS), help="partitions of tables")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="sweeps to make")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this many minutes, with status 3")
    parser.add_argument("--gpus-per-worker", type=float, default=0.0)
    parser.add_argument("--jobs", type=int, default=0, help="number of parallel runs; not with --in-process")
    parser.add_argument("--in-process", action="store_true", help="make runs in this process, without Ray")
    options = parser.parse_args()
    deadline, place = time.monotonic() + 60 * options.minutes, options.output_dir.expanduser().absolute()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    place.mkdir(parents=True, exist_ok=True)
    with alone_in(place):
        make_all(options, place, deadline)


@contextmanager
def alone_in(place: Path) -> Iterator[None]:
    """Lock a folder within this context against other processes of this program.

    Raises:
        SystemExit: if another process has the lock.
    """
    with (place / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"{place}: another process of this program uses this folder") from None
        yield


def make_all(options: argparse.Namespace, place: Path, deadline: float) -> None:
    """Make the remaining runs of all stages in a folder until the deadline, and report.

    Raises:
        SystemExit: if a run failed, or the time is up.
    """
    settings, done = dict(resolve(None, options.set).overrides), True
    chosen_from = (options.clips, options.learning_rates, options.clip_norms, options.sam_radius, options.epsilon)
    tune = tuning(settings, options.gpus_per_worker, *chosen_from, options.jobs)
    for stage in (one for one in STAGES if one in options.stages):
        file, content = place / f"{stage}.toml", tune
        if stage != TUNE:
            tuned = finished(place / f"{TUNE}.toml", place / TUNE)
            chosen = best([(run.point.settings, last(run, place / TUNE, CHOSEN_BY)) for run in tuned])
            content = chosen_runs(stage, chosen, options.seeds, tune, options.partitions)
        if not content["points"]:
            continue  # a stage of fixed clip norms alone
        write_whole(file, tomli_w.dumps(content).encode())
        done = make(file, place / stage, deadline, in_process=options.in_process)
        write_whole(place / REPORT, report(place).encode())
        if found := curves(place, finished(place / f"{EPSILONS}.toml", place / EPSILONS)):
            draw(found, place / PICTURE)
        if not done:
            break
    print((place / REPORT).read_text(encoding="utf-8"))
    if not done:
        print(f"time is up after {options.minutes:g} minutes; repeat the command to resume")
        raise SystemExit(UNFINISHED)


if __name__ == "__main__":
    main()

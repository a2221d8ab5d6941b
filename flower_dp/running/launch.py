"""Run a Flower app from this machine: failures are detected, and no process is left running.

There are two engines. `ray` is this package's own (`flower_dp.simulation`), in one process and its workers. `flower` is `flwr
run` on a private SuperLink: `flwr run` alone exits with status 0 when the app failed, leaves a SuperLink running on fixed ports,
installs the app's dependencies at run time and lets Ray's workers import modules from the working directory. Here the SuperLink
is private: on a free loopback port, with its own FLWR_HOME, an in-memory state and a working directory without Python modules.
"""

import importlib.util
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tomli_w

from flower_dp.core import checks
from flower_dp.core.environment import RESUMED, STATED
from flower_dp.running.apps import read_app
from flower_dp.running.flower_log import is_refusal, why_of, without_colours
from flower_dp.running.processes import Programs
from flower_dp.running.ray_process import RayProcess
from flower_dp.running.run_folder import CHECKPOINT, LOG, METRICS, STATEMENT_JSON, new_log, write_whole
from flower_dp.running.signals import Interrupted, Signals
from flower_dp.running.superlink import CONNECTION, LaunchError, SuperLink, plain, programs

# How long the statement of a run that was interrupted may take.
_STATE_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended.

    `status` is Flower's word (`completed`, `failed`, `stopped`) or `lost` when the SuperLink died with the run;
    `details` is empty if the run completed, else a few lines with the reason; `seconds` is the time from start to end.
    """

    status: str
    details: str
    seconds: float

    @property
    def completed(self) -> bool:
        """Whether the app ran to its end."""
        return self.status == "completed"


def default_workers() -> int:
    """Return the number of CPU cores that this process may use; each runs one SuperNode."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def launch(
    app_dir: str | os.PathLike[str],
    *,
    overrides: Mapping[str, bool | int | float | str],
    output_dir: Path,
    working_dir: Path | None = None,
    num_workers: int,
    num_supernodes: int | None = None,
    gpus_per_worker: float,
    on_progress: Callable[[dict[str, Any]], None],
    on_log: Callable[[str], None] | None = None,
    engine: Literal["flower", "ray"] = "flower",
    ray_address: str = "",
    resume: str = "",
    check: Callable[[], None] | None = None,
) -> Outcome:
    """Run a Flower app to its end, or to the first SIGINT, SIGTERM or SIGHUP.

    When this returns or raises, no process that it started is left. The first signal is passed on to the process that runs the
    ServerApp, which then writes the statement and the model; a second one ends it at once. Where the process has left no
    statement of what it charged, as after `kill -9`, the statement is made from the run folder.

    Args:
        app_dir: The folder of the app's pyproject.toml.
        overrides: Run-config values by flat key (`a.b` for a nested one); the app must have every key.
        output_dir: The run folder. Flower's output goes to `flower.log` there; `RunFolder.create` uses this folder in the app.
        working_dir: Where the app runs; None for an empty folder, which is removed afterwards.
        num_workers: Number of Ray workers, one CPU core each; with Flower's engine on a cluster, as many as fit there.
        num_supernodes: Number of SuperNodes that the workers simulate; None for one per worker. Each stock client is a SuperNode.
        gpus_per_worker: The fraction of a GPU that Ray gives each worker; with 0 they use the CPU.
        on_progress: Called with every line that the app appends to `output_dir/metrics.jsonl`.
        on_log: Called with every line of Flower's output, without colours.
        engine: What runs the app.
        ray_address: HOST:PORT of a Ray cluster to which this machine belongs, for the workers; "" for Ray on this machine alone.
            Flower's engine loads the app from `output_dir`, which all machines must then share.
        resume: Whether the run in `output_dir` goes on (`environment.RESUMED`), or its statement alone is made (`STATED`).
        check: Called before the ServerApp begins, with `ray` while its process starts; ValueError, OSError and ImportError refuse
            the settings.

    Raises:
        ValueError: a bad number, or `app_dir` has no pyproject.toml; `check`, or with `ray` the app's own check, refuses the
            settings.
        LaunchError: Flower is not installed here or its SuperLink does not start.
        Interrupted: a signal came.
    """
    checks.integer("num_workers", num_workers, at_least=1)
    if num_supernodes is not None:
        checks.integer("num_supernodes", num_supernodes, at_least=1)
    checks.number("gpus_per_worker", gpus_per_worker, at_least=0)
    app = Path(app_dir).expanduser().resolve()
    if not (app / "pyproject.toml").is_file():
        raise ValueError(f"app_dir={str(app_dir)!r}: must be a folder with a pyproject.toml")
    if importlib.util.find_spec("ray") is None:
        raise LaunchError("Ray is not installed: pip install 'flower-dp[simulation]'")
    output_dir = output_dir.absolute()
    start = time.monotonic()
    log = output_dir / LOG
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        shared = output_dir if ray_address and engine == "flower" else None
        private_folder = Path(stack.enter_context(_temporary_folder(shared)))
        stack.callback(without_colours, log)
        rows = _Tail(output_dir / METRICS, _rows_to(on_progress), anew=bool(resume))
        readers = [rows]
        if on_log is not None:
            # A run that goes on appends to its log; what is in it already has been shown.
            begin = log.stat().st_size if resume and log.exists() else 0
            readers.append(_Tail(log, lambda line: on_log(plain(line)), begin=begin))

        original = _RestoredFile(app / "pyproject.toml")
        stack.callback(original.keep)

        def read() -> None:
            original.keep()
            for reader in readers:
                reader.read()

        run = _Run(
            app=app,
            overrides=overrides,
            private_folder=private_folder,
            output_dir=output_dir,
            working_dir=working_dir and working_dir.absolute(),
            num_workers=num_workers,
            num_supernodes=num_supernodes or num_workers,
            gpus_per_worker=float(gpus_per_worker),
            ray_address=ray_address,
            resume=resume,
            check=check,
        )
        status, details = run.result(engine, signals, read)
    if status == "refused":
        if not resume:
            log.unlink(missing_ok=True)
        raise ValueError(details)
    why = "" if status == "completed" else why_of(details, log.read_text(encoding="utf-8", errors="replace"))
    return Outcome(status=status, details=why, seconds=time.monotonic() - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What is to be run, as the arguments of `launch` say; both methods return the status and Flower's details."""

    app: Path
    overrides: Mapping[str, bool | int | float | str]
    private_folder: Path
    output_dir: Path
    working_dir: Path | None
    num_workers: int
    num_supernodes: int
    gpus_per_worker: float
    ray_address: str = ""
    resume: str = ""
    check: Callable[[], None] | None = None

    def result(self, engine: str, signals: Signals, read: Callable[[], None]) -> tuple[str, str]:
        """Run it, and leave a statement of all that was charged, whatever has ended the run."""
        if self.resume == STATED:
            return self.on_ray(signals, read)
        try:
            status, details = self.on_ray(signals, read) if engine == "ray" else self.on_flower(signals.check, read)
        except Interrupted:
            self._state(signals, read)
            raise
        if status not in ("completed", "refused"):
            self._state(signals, read)
        return status, details

    def _state(self, signals: Signals, read: Callable[[], None]) -> None:
        """Make the statement of a run whose process could not, unless another signal comes."""
        folder = self.output_dir
        if (folder / STATEMENT_JSON).exists() or not any((folder / CHECKPOINT).glob("checkpoint*")):
            return
        private = self.private_folder / "statement"
        private.mkdir()
        with suppress(LaunchError, Interrupted):
            replace(self, resume=STATED, private_folder=private, check=None).on_ray(_Deadline(signals), read)

    @property
    def config(self) -> dict[str, Any]:
        """The run's settings."""
        app = read_app(self.app)
        return {**(app.defaults if app else {}), **self.overrides}

    def on_flower(self, check: Callable[[], None], read: Callable[[], None]) -> tuple[str, str]:
        """Run it with `flwr run`."""
        log = self.output_dir / LOG
        if (reason := self._why_refused()) is not None:
            return "refused", str(reason)
        with SuperLink(self.private_folder, check, programs=self._programs(check)) as superlink:
            config = self.private_folder / "overrides.toml"
            config.write_text(tomli_w.dumps(dict(self.overrides)), encoding="utf-8")
            cores = "" if self.ray_address else f"init-args-num-cpus={self.num_workers} "  # a cluster has its own
            nodes = (
                f"num-supernodes={self.num_supernodes} {cores}"
                f"client-resources-num-cpus=1 client-resources-num-gpus={self.gpus_per_worker}"
            )
            with new_log(self.output_dir, go_on=bool(self.resume), resumed=self.resume == RESUMED) as output:
                arguments = ["run", str(self.app), CONNECTION, "--stream", "-c", str(config), "--federation-config", nodes]
                client = superlink.start("flwr", arguments, output)
                superlink.wait(client, read)
            status, details = superlink.status(client.returncode, read)
            read()
            superlink.stop()
            if status == "lost":
                with log.open("ab") as output:
                    output.write(f"\n--- SuperLink ---\n{superlink.log_text()}".encode())
        if self.resume and status == "failed" and is_refusal(log.read_text(encoding="utf-8", errors="replace")):
            return "refused", details
        return status, details

    def on_ray(self, signals: "Signals | _Deadline", read: Callable[[], None]) -> tuple[str, str]:
        """Run it in a process of its own, without Flower's runtime."""
        programs = self._programs(signals.check)
        try:
            with new_log(self.output_dir, go_on=bool(self.resume), resumed=self.resume == RESUMED) as output:
                process = RayProcess(
                    programs,
                    self.app,
                    private_folder=self.private_folder,
                    overrides=self.overrides,
                    num_workers=self.num_workers,
                    num_nodes=self.num_supernodes,
                    gpus_per_worker=self.gpus_per_worker,
                    ray_address=self.ray_address,
                    only_state=self.resume == STATED,
                    output=output,
                )
                if (reason := self._why_refused()) is not None:
                    process.kill()
                    return "refused", str(reason)
                process.go()
                try:
                    status, details = process.result(read)
                except Interrupted:
                    process.interrupt(signals.again)
                    raise
            read()
        finally:
            programs.stop()
        return status, details

    def _why_refused(self) -> Exception | None:
        """Return why the settings are refused; None if they are not."""
        try:
            if self.check is not None:
                self.check()
        except (ValueError, OSError, ImportError) as error:
            return error
        return None

    def _programs(self, check: Callable[[], None]) -> Programs:
        return programs(
            self.private_folder,
            check,
            run_folder=self.output_dir,
            config=self.config,
            working_dir=self.working_dir,
            ray_address=self.ray_address,
            resume=self.resume,
        )


class _Deadline:
    """The time in which a statement is made after a run was interrupted; another signal ends it at once."""

    def __init__(self, signals: Signals) -> None:
        self._signals, self._count = signals, signals.count
        self._end = time.monotonic() + _STATE_SECONDS

    def check(self) -> None:
        """Raise LaunchError if it is over."""
        if time.monotonic() > self._end or self.again():
            raise LaunchError("the statement was not made in time")

    def again(self) -> bool:
        """Return whether another signal came."""
        return self._signals.count > self._count


def _rows_to(take: Callable[[dict[str, Any]], None]) -> Callable[[str], None]:
    def parse(line: str) -> None:
        try:
            row = json.loads(line)
        except ValueError:
            return  # what is shown while a run lasts must not end it
        if isinstance(row, dict):
            take(row)

    return parse


class _RestoredFile:
    """An app's pyproject.toml, restored if Flower's migration comments out its federations.

    The migration would move the user's connections into the run's own FLWR_HOME, which is removed after the run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = path.read_bytes()
        self._migrates = b"\n[tool.flwr.federations" in self._content

    def keep(self) -> None:
        """Restore the file if it has been migrated; any other change was made by its owner and stays.

        Flower reads it in these moments, and may still write it: a new file takes its place.
        """
        if self._migrates and self._path.is_file() and b"\n# [tool.flwr.federations" in self._path.read_bytes():
            file = self._path.resolve()
            there = file.stat()
            try:
                write_whole(file, self._content)
            except PermissionError:  # of its folder
                file.write_bytes(self._content)
                return
            file.chmod(stat.S_IMODE(there.st_mode))
            with suppress(OSError, AttributeError):  # another user's file
                os.chown(file, there.st_uid, there.st_gid)


class _Tail:
    """Passes on the complete lines of a file from byte `begin` on; with `anew` those of another file that takes its place."""

    def __init__(self, path: Path, take: Callable[[str], None], *, begin: int = 0, anew: bool = False) -> None:
        self._path = path
        self._take = take
        self._offset = begin
        self._not = path.stat().st_ino if anew and path.exists() else None

    def read(self) -> None:
        if not self._path.exists() or self._path.stat().st_ino == self._not:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode("utf-8", errors="replace").splitlines():
            self._take(line)


def _temporary_folder(shared: Path | None) -> tempfile.TemporaryDirectory[str]:
    if shared is not None:
        return tempfile.TemporaryDirectory(prefix="flower-", dir=shared, ignore_cleanup_errors=True)
    # Ray puts sockets under it, and a socket's path has at most 103 characters on macOS, 107 on Linux.
    parent = tempfile.gettempdir()
    if len(parent) > 12 and os.access("/tmp", os.W_OK):  # noqa: S108
        parent = "/tmp"  # noqa: S108
    return tempfile.TemporaryDirectory(prefix="flower-dp-", dir=parent, ignore_cleanup_errors=True)

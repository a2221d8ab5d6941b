"""A process that makes runs one after another on the same workers: python -m flower_dp.simulation.lane NUM_WORKERS GPUS FOLDER.

Its standard input has an order a line, and ends when no more will come, or when whoever gave them is gone: the run that is under
way is then interrupted, with its statement and a checkpoint.
"""

import json
import logging
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from flower_dp.core.checks import SettingsError
from flower_dp.core.environment import RESUME, RUN_CONFIG, RUN_FOLDER
from flower_dp.running.apps import App, own_app, own_module, read_app
from flower_dp.running.flower_log import log_without_colours
from flower_dp.running.run_folder import new_log
from flower_dp.running.workplace import app_files_linked

log = logging.getLogger("flwr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A run that a lane is to make.

    Attributes:
        app: the app's folder; empty for flower-dp's own.
        overrides: settings that differ from the app's.
        num_nodes: nodes of the run.
        folder: the run folder.
        resume: `environment.RESUMED` where the run in the folder goes on.
        outcome: the file to which the status and details are written when it has ended, as `flower_dp.simulation.process` does.
    """

    app: str
    overrides: dict[str, Any]
    num_nodes: int
    folder: str
    resume: str
    outcome: str

    @property
    def line(self) -> str:
        """The order as a line of standard input."""
        return json.dumps(asdict(self)) + "\n"


def main(num_workers: int, gpus: float, ray_folder: Path) -> None:
    """Make the runs that are ordered, and end with the standard input."""
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    from flower_dp.simulation.workers import Workers, start_ray  # noqa: PLC0415  (after the thread that reads)

    log_without_colours()
    start_ray(num_workers, ray_folder)
    signal.signal(signal.SIGTERM, _interrupt)  # Ray has set its own
    os.environ["OMP_NUM_THREADS"] = str(num_workers)  # of this process alone: its workers began without
    workers = Workers(num_workers=num_workers, gpus=gpus)
    home = Path.cwd()
    while True:
        order = orders.get()
        status, details = _made(order, workers)
        os.chdir(home)
        outcome = Path(order.outcome)
        part = outcome.with_suffix(".part")
        part.write_text(json.dumps({"status": status, "details": details}), encoding="utf-8")
        part.replace(outcome)
        if status == "interrupted":
            return


def _own_server_app() -> Any:
    return own_module("server_app").app


def _read(orders: "queue.SimpleQueue[Order]") -> None:
    for line in sys.stdin:
        orders.put(Order(**json.loads(line)))
    from flower_dp.simulation.workers import end_this_process  # noqa: PLC0415  (imported by the main thread meanwhile)

    end_this_process()


def _made(order: Order, workers: Any) -> tuple[str, str]:
    """Make a run; return its status and details."""
    with _logged(Path(order.folder), go_on=bool(order.resume)):
        try:
            _run(order, workers)
        except SettingsError as error:  # before anything was spent
            return "refused", str(error)
        except KeyboardInterrupt:
            return "interrupted", ""
        except BaseException as error:  # an app may end the process
            log.error("Simulation raised an exception", exc_info=error)
            return "failed", f"Simulation failed with exception: {error}"
    return "completed", ""


def _run(order: Order, workers: Any) -> None:
    from flower_dp.simulation.grid import RayGrid  # noqa: PLC0415  (while the workers start)
    from flower_dp.simulation.modules import components, forget, own_client_app  # noqa: PLC0415

    app: App | None = read_app(Path(order.app)) if order.app else own_app()
    if app is None:
        raise ValueError(f"{order.app}: is no longer the folder of a Flower app")
    config = {**app.defaults, **order.overrides}
    os.environ |= {RUN_FOLDER: order.folder, RUN_CONFIG: json.dumps(config), RESUME: order.resume}
    sys.dont_write_bytecode = not app.own  # somebody else's folder stays as it is
    with ExitStack() as stack:
        client, server = (own_client_app, _own_server_app) if app.own else components(app)
        if not app.own:
            stack.callback(forget, str(app.folder))  # another app may have modules of the same names
            stack.enter_context(app_files_linked(Path(order.folder), app.folder))
            os.chdir(order.folder)
        grid = stack.enter_context(RayGrid(client, workers, num_nodes=order.num_nodes, run_config=config))
        server()(grid, grid.server_context())


@contextmanager
def _logged(folder: Path, *, go_on: bool) -> Iterator[None]:
    """Let all that this process and its workers write go to the log of a run."""
    before = [(stream, os.dup(stream)) for stream in (1, 2)]
    with new_log(folder, go_on=go_on, resumed=go_on) as file:
        for stream, _ in before:
            os.dup2(file.fileno(), stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, copy in before:
            os.dup2(copy, stream)
            os.close(copy)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signum, signal.SIG_IGN)  # what is written now is not interrupted
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]))
    except KeyboardInterrupt:
        pass
    except BaseException:  # such as a disk without space
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Ray's processes end with this one; to wait for each takes a second

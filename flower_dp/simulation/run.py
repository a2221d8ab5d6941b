"""One call that runs a Flower app, on this machine or a Ray cluster, in a script or a notebook."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import Result

from flower_dp.core import checks
from flower_dp.core.environment import RESUME, RESUMED, RUN_FOLDER
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.running import apps, modules, preflight, run_folder, run_recorder, run_workdir
from flower_dp.running import progress as screen
from flower_dp.simulation import local_grid, worker
from flower_dp.simulation.cluster import Cluster, address_of, bundled
from flower_dp.simulation.grid import RayGrid
from flower_dp.simulation.workers import warm_workers
from flower_dp.strategies.checkpoint import CheckpointFolder

if TYPE_CHECKING:
    from flower_dp.apps.user_app import Apps


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SimulationResult:
    """The result of a run that has ended.

    Attributes:
        folder: run folder; None if the app starts no strategy of this package, and then the next three are empty.
        rounds: one row per round, with metrics, epsilon and time; `pandas.DataFrame(run.rounds)` shows them as a table.
        statement: privacy statement.
        result: Flower's result, with the final model.
    """

    folder: Path | None
    rounds: tuple[Mapping[str, Any], ...]
    statement: PrivacyStatement | None
    result: Result | None

    def __repr__(self) -> str:
        """Return the last numbers of the rounds, and the folder."""
        last = {name: value for row in self.rounds for name, value in row.items()}
        outcome = [screen.round_text(last), *screen.quantities(last)] if last else ["no recorded rounds"]
        return f"<run: {', '.join(outcome)}; folder: {self.folder}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """The apps and settings to run."""

    server: ServerApp
    client: ClientApp | Callable[[], ClientApp]
    run_config: Mapping[str, worker.Value]
    name: str
    num_clients: Any = None  # of the settings, unchecked; None if each node is one client, or the number is not known
    bundle: bytes = b""  # the app's files, for a cluster


def simulate(
    app: "Apps | ServerApp | str | os.PathLike[str]",
    client_app: ClientApp | None = None,
    *,
    num_nodes: int | None = None,
    run_config: Mapping[str, worker.Value] | None = None,
    seed: int | None = None,
    cpus_per_node: float = 1.0,
    gpus_per_node: float = 0.0,
    node_config: Callable[[int], Mapping[str, worker.Value]] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    ray_address: str = "",
    progress: bool = True,
) -> SimulationResult:
    """Run a Flower app on this machine's cores, or on those of a Ray cluster, and return the result.

    The first call starts Ray and one worker per core. They stay for the next call, which then begins at once and uses your
    current code: functions of a notebook or script are sent by value, and changed modules are imported again. Ctrl-C, the end of
    the program, or `flower_dp.simulation.stop_ray()` ends Ray and the workers.

    Noise is as in a deployment: each worker draws it from its operating system. No setting, seed or copy repeats it.

    Args:
        app: result of `flower_dp.app`; or a ServerApp, with `client_app`; or the folder of a Flower app; or the name of one of
            flower-dp's presets.
        client_app: ClientApp that belongs to a ServerApp.
        num_nodes: number of SuperNodes to simulate; None for one per worker. A node of `flower_dp.app` hosts at least one
            client. If a stock client or your own `client_fn` stands for one client, give the number of clients.
        run_config: settings of the run, by flat key (`{"num-rounds": 10, "dp-fedavg.clip-norm": 0.5}`).
        seed: value of `seed` in the run-config, for data split, initial model and order of records in apps of this package. It
            never sets noise, and never who takes part.
        cpus_per_node: CPU cores of a worker, which runs one node at a time.
        gpus_per_node: fraction of a GPU for each worker; with 0 a worker sees no GPU.
        node_config: function, partition -> further settings of that node, as a device's owner would set them (for example
            `ledger-path`).
        output_dir: run folder, new or empty; None for a new one under `~/.flower-dp/runs`.
        resume: folder of a run that was interrupted or failed, to continue from its last checkpoint with the same app and
            settings. If the run has ended, return the contents of its folder, without Ray.
        ray_address: HOST:PORT of a Ray cluster to which this machine belongs, or "auto"; "" for Ray on this machine alone. The
            files of an app's folder are sent. All other imports of a ClientApp must be installed on every machine, with the same
            versions of Python, Ray, Flower, torch, NumPy and this package. Anyone who can read the cluster's traffic reads what
            clients send (docs/simulation.md).
        progress: whether to show a progress bar: in a notebook one line that changes, without a terminal one line per round.

    Raises:
        ValueError: naming the settings that are invalid, or the machine of the cluster that has other versions.
        ConnectionError: if no cluster answers, or this process can't join it.
        ImportError: if Ray is not installed.
        Exception: any error of the ServerApp; the run folder has the statement of everything released before.

    Example:
        >>> import flower_dp, torch
        >>> app = flower_dp.app(
        ...     model_fn=lambda: torch.nn.Linear(3, 2),
        ...     data_fn=lambda client, num_clients: (torch.randn(20, 3), torch.randint(0, 2, (20,))),
        ... )
        >>> def go():
        ...     run = flower_dp.simulate(app, run_config={"method": "dp-fedavg", "num-rounds": 5})
        ...     print(run.statement)
    """
    if num_nodes is not None:
        checks.integer("num_nodes", num_nodes, at_least=1)
    checks.number("cpus_per_node", cpus_per_node, above=0)
    checks.number("gpus_per_node", gpus_per_node, at_least=0)
    if seed is not None:
        checks.integer("seed", seed, at_least=0)
    if not isinstance(run_config, Mapping | None):
        raise ValueError(f"run_config: is a {type(run_config).__name__}; must be a dict of settings by flat key")
    if not (node_config is None or callable(node_config)):
        raise ValueError(f"node_config: is a {type(node_config).__name__}; must be a function partition -> settings of that node")
    values = {**(run_config or {}), **({} if seed is None else {"seed": seed})}
    with ExitStack() as stack:
        loaded = stack.enter_context(_loaded(app, client_app, values, away=bool(ray_address)))
        preflight.nodes_among(loaded.num_clients, num_nodes, 1, option="num_nodes")  # a check, before anything starts
        folder = _folder(output_dir, resume, loaded.name)
        if folder is not None:
            stack.callback(_remove_if_empty, folder)  # a run that did not begin leaves no folder
            passed = {RUN_FOLDER: str(folder), RESUME: "" if resume is None else RESUMED}
            stack.enter_context(run_workdir.environment(passed))
            if resume is not None and _has_ended(folder):
                return _run(loaded, local_grid.LocalGrid(ClientApp(), 0, loaded.run_config), None)
        cluster = Cluster(address=address_of(ray_address), bundle=loaded.bundle) if ray_address else None
        workers = stack.enter_context(warm_workers(cpus=cpus_per_node, gpus=gpus_per_node, at_most=num_nodes, cluster=cluster))
        nodes = preflight.nodes_among(loaded.num_clients, num_nodes, len(workers.actors), option="num_nodes")
        grid = stack.enter_context(
            RayGrid(loaded.client, workers, num_nodes=nodes, run_config=loaded.run_config, node_config=node_config)
        )
        return _run(loaded, grid, stack.enter_context(screen.display()) if progress else None)


def _run(loaded: _Loaded, grid: local_grid.SimulatedGrid, display: screen.Display | None) -> SimulationResult:
    with run_recorder.watched(loaded.run_config, loaded.name, display.show if display else lambda line: None) as watch:
        try:
            loaded.server(grid, grid.server_context())
        except (Exception, KeyboardInterrupt) as error:
            if watch.statement is not None and watch.folder is not None:
                error.add_note(f"What the run released before is in {watch.folder / run_folder.STATEMENT_TEXT}")
                if (
                    not isinstance(error, checks.SettingsError)
                    and not CheckpointFolder(watch.folder / run_folder.CHECKPOINT).resume_blocker()
                ):
                    remedy = "Unless its settings caused the failure, resume" if isinstance(error, Exception) else "Resume"
                    error.add_note(f"{remedy} it with simulate(..., resume={str(watch.folder)!r})")
            raise
    return SimulationResult(folder=watch.folder, rounds=tuple(watch.rounds), statement=watch.statement, result=watch.result)


@contextmanager
def _loaded(app: Any, client_app: ClientApp | None, values: Mapping[str, worker.Value], *, away: bool) -> Iterator[_Loaded]:
    if isinstance(app, str | os.PathLike):
        if client_app is not None:
            raise ValueError("client_app: the app's folder names its own; leave it out")
        target = apps.resolve(str(app), [])
        flower_app, config = target.app, apps.with_values(target, values)
        try:
            yield _Loaded(
                server=flower_app.server_app(),
                client=flower_app.client_app(away=away),
                run_config=config,
                name=target.name,
                num_clients={**flower_app.settings(), **config}["num-clients"] if flower_app.own or flower_app.built else None,
                bundle=bundled(flower_app) if away else b"",
            )
        finally:
            if not flower_app.own:
                modules.forget(str(flower_app.folder))  # another app may have modules of the same names
        return
    server, client = app, client_app
    if not isinstance(app, ServerApp):
        server, client = getattr(app, "server", None), getattr(app, "client", None)
    if not isinstance(server, ServerApp):
        raise ValueError(f"app: is a {type(app).__name__}; must be flower_dp.app(...), a ServerApp, or the folder of an app")
    if not isinstance(client, ClientApp):
        raise ValueError(f"client_app: is a {type(client).__name__}; must be the ClientApp that belongs to the ServerApp")
    count = getattr(app, "num_clients", None)  # a method of the result of `flower_dp.app`
    num_clients = count(values) if callable(count) else None
    yield _Loaded(server=server, client=client, run_config=values, name="run", num_clients=num_clients)


def _folder(output_dir: Any, resume: Any, name: str) -> Path | None:
    """Return the run folder; None if the app makes it."""
    if resume is None:
        return run_folder.new_folder(output_dir, name) if output_dir is not None else None
    folder = Path(resume).expanduser().absolute()
    if output_dir is not None:
        raise ValueError(f"output_dir={str(output_dir)!r}: the run stays in resume={str(resume)!r}; leave output_dir out")
    if not (folder / run_folder.CHECKPOINT).is_dir():
        raise ValueError(f"resume={str(resume)!r}: has no checkpoint; must be the folder of a run that was interrupted or failed")
    return folder


def _has_ended(folder: Path) -> bool:
    """Return whether the run in a folder has ended. Its ServerApp then returns the folder's contents, and sends nothing."""
    checkpoints = CheckpointFolder(folder / run_folder.CHECKPOINT)
    return not checkpoints.is_empty and checkpoints.read().ended


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()

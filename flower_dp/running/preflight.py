"""What is known of a run before anything starts: whether its settings fit its method, and its workers and nodes this machine."""

import ast
from contextlib import suppress
from typing import Any

from flower_dp.core import checks
from flower_dp.running.apps import Target, own_app, own_module
from flower_dp.running.built import tree_of
from flower_dp.running.launch import default_workers

# The package whose classes are strategies of methods.
_STRATEGIES = "flower_dp.strategies"


def check_settings(target: Target) -> None:
    """Refuse settings with which no round can be run; only those of apps that have flower-dp's settings are known.

    Raises:
        SettingsError: with all that is wrong, a line each.
    """
    app = target.app
    if not app.built and not (app.own and app.check and target.overrides):  # the defaults are valid
        return
    config = {**app.defaults, **target.overrides}
    own_module("refusals").check(config, defaults=own_app().defaults, given=target.given, built=app.built)


def workers_of(workers: int | None, gpus_per_worker: float) -> int:
    """Return how many workers to start: as many as asked for, else one per core, as far as the GPUs go.

    Raises:
        ValueError: they need more GPUs than there are.
    """
    checks.number("gpus_per_worker", gpus_per_worker, at_least=0)
    gpus = num_gpus() if gpus_per_worker else None
    if gpus is None:
        return workers or default_workers()
    # A GPU is never shared by fractions of two.
    fit = gpus * int(1 / gpus_per_worker) if gpus_per_worker <= 1 else int(gpus / gpus_per_worker)
    if fit < (workers or 1):
        raise ValueError(
            f"--gpus-per-worker={gpus_per_worker:g}: {workers or 1} workers need more GPUs than Ray finds here ({gpus})"
        )
    return workers or min(default_workers(), fit)


def nodes_of(target: Target, nodes: int | None, workers: int) -> int:
    """Return how many SuperNodes to simulate: as many as asked for, else one per worker, or per client of a stock app.

    A stock app has one client a node; how many, is read from the call of its strategy, if that says it in so many words.

    Raises:
        ValueError: there are more nodes than clients.
    """
    app, config = target.app, {**target.app.settings(), **target.overrides}
    if app.own or app.built:
        return nodes_among(config.get("num-clients"), nodes, workers, option="--supernodes")
    clients = _num_clients(target, config)
    return nodes or (clients if _is_count(clients) else workers)


def nodes_among(clients: Any, nodes: int | None, workers: int, *, option: str) -> int:
    """Return how many SuperNodes host these clients, at least one each: as many as asked for, else one per worker.

    Args:
        clients: how many, as the settings have it; what is no such number is refused elsewhere.
        nodes: as asked for.
        workers: how many there are.
        option: how `nodes` is asked for.

    Raises:
        ValueError: there are more nodes than clients.
    """
    if not _is_count(clients):
        return nodes or workers
    if nodes is not None and nodes > clients:
        raise ValueError(f"{option}={nodes}: must be at most num-clients={clients}; without it, one node a worker hosts them all")
    return nodes or min(workers, clients)


def _is_count(clients: Any) -> bool:
    return isinstance(clients, int) and not isinstance(clients, bool) and clients >= 1


def num_gpus() -> int | None:
    """Return how many GPUs Ray will find; None if that can't be told."""
    with suppress(ImportError, AttributeError):
        from ray._private.accelerators import get_accelerator_manager_for_resource  # noqa: PLC0415

        manager: Any = get_accelerator_manager_for_resource("GPU")
        found, visible = manager.get_current_node_num_accelerators(), manager.get_current_process_visible_accelerator_ids()
        return int(found if visible is None else min(found, len(visible)))
    return None


def _num_clients(target: Target, config: dict[str, Any]) -> Any:
    """Return the `num_clients` that an app's ServerApp gives a strategy; None if it isn't a number or a setting."""
    tree = tree_of(target.app.folder, target.app.server)
    if tree is None:
        return None
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == _STRATEGIES)
    names = {one.asname or one.name for node in imports for one in node.names}
    constants = {
        name.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for name in node.targets
        if isinstance(name, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            for word in node.keywords:
                if word.arg == "num_clients":
                    return _value(word.value, constants, config)
    return None


def _value(node: ast.expr, constants: dict[str, ast.expr], config: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        node = constants.get(node.id, node)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):  # context.run_config["num-clients"]
        return config.get(str(node.slice.value))
    return node.value if isinstance(node, ast.Constant) else None

"""What is known of a run before anything starts: whether its settings fit its method, and its workers and nodes this machine."""

import os
from contextlib import suppress
from typing import Any

from flower_dp.core import checks
from flower_dp.running.apps import Target, own_app, own_module


def check_settings(target: Target) -> None:
    """Refuse settings with which no round can be run; only those of apps that have flower-dp's settings are known.

    Raises:
        SettingsError: with all that is wrong, a line each.
    """
    app = target.app
    if not app.built and not (app.own and app.check and target.overrides):  # the defaults are valid
        return
    own_module("refusals").check(target.config, defaults=own_app().defaults, given=target.given, built=app.built)


def workers_of(workers: int | None, gpus_per_worker: float) -> int:
    """Return how many workers to start: as many as asked for, else one per core, as far as the GPUs go.

    Raises:
        ValueError: they need more GPUs than there are.
    """
    checks.number("--gpus-per-worker", gpus_per_worker, at_least=0)
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


def default_workers() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def nodes_of(target: Target, nodes: int | None, workers: int) -> int | None:
    """Return how many SuperNodes to simulate: as many as asked for, else one per worker; None: one per client of a stock app.

    Raises:
        ValueError: there are more nodes than clients.
    """
    if not (target.app.own or target.app.built):
        return nodes
    clients = {**target.app.settings(), **target.overrides}.get("num-clients")
    return nodes_among(clients, nodes, workers, option="--supernodes")


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
    if not isinstance(clients, int) or isinstance(clients, bool) or clients < 1:
        return nodes or workers
    if nodes is not None and nodes > clients:
        raise ValueError(f"{option}={nodes}: must be at most num-clients={clients}; without it, one node a worker hosts them all")
    return nodes or min(workers, clients)


def num_gpus() -> int | None:
    """Return how many GPUs Ray will find; None if that can't be told."""
    with suppress(ImportError, AttributeError):
        from ray._private.accelerators import get_accelerator_manager_for_resource  # noqa: PLC0415

        manager: Any = get_accelerator_manager_for_resource("GPU")
        found, visible = manager.get_current_node_num_accelerators(), manager.get_current_process_visible_accelerator_ids()
        return int(found if visible is None else min(found, len(visible)))
    return None

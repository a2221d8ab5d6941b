"""Checks before a run starts: settings against the method, workers against this machine, nodes against clients."""

import os
from contextlib import suppress
from typing import Any

from flower_dp.core import checks
from flower_dp.running.apps import Target, own_app, own_module


def check_settings(target: Target) -> None:
    """Refuse settings with which no round can run. Only apps with flower-dp's settings are checked.

    Raises:
        SettingsError: naming all errors, one per line.
    """
    app = target.app
    if not app.built and not (app.own and app.check and target.overrides):  # the defaults are valid
        return
    own_module("refusals").check(target.config, defaults=own_app().defaults, given=target.given, built=app.built)


def workers_of(workers: int | None, gpus_per_worker: float) -> int:
    """Return the number of workers to start: the given one, else one per core, limited by the GPUs.

    Raises:
        ValueError: if the workers need more GPUs than Ray finds.
    """
    checks.number("--gpus-per-worker", gpus_per_worker, at_least=0)
    gpus = num_gpus() if gpus_per_worker else None
    if gpus is None:
        return workers or default_workers()
    # As in `cluster.fitting`: no worker gets parts of two GPUs.
    fit = gpus * int(1 / gpus_per_worker) if gpus_per_worker <= 1 else int(gpus / gpus_per_worker)
    if fit < (workers or 1):
        raise ValueError(
            f"--gpus-per-worker={gpus_per_worker:g}: {workers or 1} workers need more GPUs than Ray finds here ({gpus}); "
            "give fewer --workers or a smaller fraction"
        )
    return workers or min(default_workers(), fit)


def default_workers() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def nodes_of(target: Target, nodes: int | None, workers: int) -> int | None:
    """Return the number of SuperNodes: the given one, else one per worker; of a stock app None, for one per client.

    Raises:
        ValueError: if there are more nodes than clients.
    """
    if not (target.app.own or target.app.built):
        return nodes
    clients = {**target.app.settings(), **target.overrides}.get("num-clients")
    return nodes_among(clients, nodes, workers, option="--supernodes")


def nodes_among(clients: Any, nodes: int | None, workers: int, *, option: str) -> int:
    """Return the number of SuperNodes for these clients, with at least one client each: the given one, else one per worker.

    Args:
        clients: number of clients, from the settings. Another check refuses a value that is not a positive whole number.
        nodes: number of nodes that the user gave; None for one per worker.
        workers: number of workers.
        option: the user's name of `nodes`, for errors.

    Raises:
        ValueError: if there are more nodes than clients.
    """
    if not isinstance(clients, int) or isinstance(clients, bool) or clients < 1:
        return nodes or workers
    if nodes is not None and nodes > clients:
        raise ValueError(f"{option}={nodes}: must be at most num-clients={clients}; leave it out for one node per worker")
    return nodes or min(workers, clients)


def num_gpus() -> int | None:
    """Return the number of GPUs that Ray will find; None if Ray can't tell."""
    with suppress(ImportError, AttributeError):
        from ray._private.accelerators import get_accelerator_manager_for_resource  # noqa: PLC0415

        manager: Any = get_accelerator_manager_for_resource("GPU")
        present, visible = manager.get_current_node_num_accelerators(), manager.get_current_process_visible_accelerator_ids()
        return int(present if visible is None else min(present, len(visible)))
    return None

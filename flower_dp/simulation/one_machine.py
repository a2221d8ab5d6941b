"""Ray on one machine, without what serves a cluster."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

# Ray asks whether its raylet is there after a tenth of a second, and then once a second.
_PAUSE, _LONGEST = 0.02, 10.0


@contextmanager
def lean(ray: Any) -> Iterator[None]:
    """Start Ray within this context without its dashboard and its autoscaler, with a small agent, and no later than it can.

    `ray.init` has no setting for it: with `include_dashboard=False` too it starts the dashboard's process and waits for it. What
    is replaced here is private to Ray. Where a version of Ray does not have it, Ray starts as usual.
    """
    node, utils = getattr(getattr(ray._private, "node", None), "Node", None), getattr(ray._private, "utils", None)
    with ExitStack() as stack:
        replace = partial(_replace, stack)
        replace(node, "start_api_server", _no_dashboard)
        replace(node, "start_monitor", lambda node: None)  # the autoscaler
        # What the agent's pages need counts as not installed; without them it imports less.
        replace(utils, "get_dashboard_dependency_error", lambda: ImportError("there is no dashboard"))
        replace(node, "start_ray_processes", _and_wait(getattr(node, "start_ray_processes", lambda node: None)))
        yield


def _replace(stack: ExitStack, owner: Any, name: str, own: Any) -> None:
    """Replace an attribute until the stack is left; nothing where there is none."""
    if hasattr(owner, name):
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, own)


def _no_dashboard(node: Any, *_: Any, **__: Any) -> None:
    node._webui_url = ""


def _and_wait(start: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return what starts a node's processes and waits until its raylet has registered."""

    def start_and_wait(node: Any) -> None:
        start(node)
        deadline = time.monotonic() + _LONGEST
        with suppress(Exception):  # Ray waits for it itself, and says what is wrong
            while not node.get_gcs_client().get_all_node_info() and time.monotonic() < deadline:
                time.sleep(_PAUSE)

    return start_and_wait

"""Ray on one machine, without what serves a cluster."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, cast

# Ray asks whether its raylet is there after a tenth of a second, and then once a second.
_PAUSE, _LONGEST = 0.02, 10.0
_AGENT = "--dashboard_agent_command="


@contextmanager
def lean(ray: Any) -> Iterator[None]:
    """Start Ray within this context without its dashboard, the dashboard's agent and its autoscaler, and no later than it can.

    `ray.init` has no setting for it: with `include_dashboard=False` too it starts the dashboard's process and waits for it, and
    its raylet waits for the agent. What is replaced here is private to Ray; a version of Ray without it starts as usual.
    """
    node, services = getattr(getattr(ray._private, "node", None), "Node", None), getattr(ray._private, "services", None)
    with ExitStack() as stack:
        replace = partial(_replace, stack)
        replace(node, "start_api_server", _no_dashboard)
        replace(node, "start_monitor", lambda node: None)  # the autoscaler
        replace(services, "start_ray_process", _without_agent(ray, getattr(services, "start_ray_process", None)))
        replace(node, "start_ray_processes", _and_wait(getattr(node, "start_ray_processes", lambda node: None)))
        yield


def _replace(stack: ExitStack, owner: Any, name: str, own: Any) -> None:
    """Replace an attribute until the stack is left; nothing where there is none."""
    if hasattr(owner, name):
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, own)


def _no_dashboard(node: Any, *_: Any, **__: Any) -> None:
    node._webui_url = ""


def _without_agent(ray: Any, start: Any) -> Callable[..., Any]:
    """Return what starts one of Ray's processes; of a raylet, the agent is a process that waits for the raylet's end."""

    def start_process(command: Sequence[str], *arguments: Any, **keywords: Any) -> Any:
        return start(_with_idle_agent(ray, command), *arguments, **keywords)

    return start_process


def _with_idle_agent(ray: Any, command: Sequence[str]) -> Sequence[str]:
    """Return a raylet's command with `cat` for the agent, and say for it that it has no ports; any other command as it is.

    A raylet ends with its agent, and does not start without one. Its end closes the agent's input.
    """
    options = dict(word.removeprefix("--").split("=", 1) for word in command if word.startswith("--") and "=" in word)
    idle, private = shutil.which("cat"), cast("Any", getattr(ray, "_raylet", None))
    if idle is None or not any(word.startswith(_AGENT) for word in command):
        return command
    try:
        ports = (private.METRICS_AGENT_PORT_NAME, private.METRICS_EXPORT_PORT_NAME, private.DASHBOARD_AGENT_LISTEN_PORT_NAME)
        for port in ports:
            private.persist_port(options["session_dir"], options["node_id"], port, -1)
    except (AttributeError, KeyError):  # another version of Ray
        return command
    return [f"{_AGENT}{idle}" if word.startswith(_AGENT) else word for word in command]


def _and_wait(start: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return what starts a node's processes and waits until its raylet has registered."""

    def start_and_wait(node: Any) -> None:
        start(node)
        deadline = time.monotonic() + _LONGEST
        with suppress(Exception):  # Ray waits for it itself, and says what is wrong
            while not node.get_gcs_client().get_all_node_info() and time.monotonic() < deadline:
                time.sleep(_PAUSE)

    return start_and_wait

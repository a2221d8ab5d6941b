"""Ports that stay free until a program that a test starts takes them."""

import random
import socket
from contextlib import suppress

# Below the ports that systems hand out by themselves (32768 on, on Linux): those of a free one, given back, may go to another test's
# programs before the right one takes it.
_FIRST, _END = 20_000, 32_000


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nobody uses."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(_FIRST, _END), _END - _FIRST):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"fewer than {count} ports of {_FIRST} to {_END - 1} are free")


def listens(port: int) -> bool:
    """Tell whether somebody listens to a port of the loopback interface."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

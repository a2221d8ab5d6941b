import gc
import socket
import warnings

import pytest


@pytest.fixture(scope="package")
def ray_here():
    """Ray in this process, the same for all tests here: the first of them starts it. This process connects to nobody else."""
    from flower_dp.simulation import stop_ray

    connect = socket.socket.connect

    def refuse(self, address):
        if self.family != socket.AF_UNIX and not address[0].startswith("127."):
            raise AssertionError(f"Ray, or a test, connects to {address}")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Ray forgets the processes that it has ended
        stop_ray()
        gc.collect()


@pytest.fixture(scope="module")
def workers(ray_here):
    """Two actors, the same for all tests of a file."""
    from flower_dp.simulation import Workers

    made = Workers(num_workers=2)
    yield made
    made.close()

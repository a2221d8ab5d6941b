import pytest


@pytest.fixture(scope="module")
def workers():
    """Two actors, the same for all tests of a file."""
    from flower_dp.simulation import Workers, stop_ray

    made = Workers(num_workers=2)
    yield made
    made.close()
    stop_ray()

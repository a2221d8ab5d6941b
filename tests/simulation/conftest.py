import gc
import warnings

import pytest


@pytest.fixture(scope="module")
def workers():
    """Two actors, the same for all tests of a file."""
    from flower_dp.simulation import Workers, stop_ray

    made = Workers(num_workers=2)
    yield made
    made.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Ray forgets the processes that it has ended
        stop_ray()
        gc.collect()

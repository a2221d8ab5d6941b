"""docs/your-own-app.md, on Flower's own differential privacy: its code runs, and what it says of Flower's own accountant is so."""

import re
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping, FedAvg
from flwr.supercore.differential_privacy import compute_stdv  # noqa: TID251
from torch import nn

from flower_dp.privacy import planned_run
from tests.grids import LocalGrid

GUIDE = (Path(__file__).resolve().parent.parent / "docs" / "your-own-app.md").read_text()


def blocks():
    """The guide's code that stands under `# after`."""
    return re.findall(r"^```python\n# after\n(.*?)^```", GUIDE, re.M | re.S)


class Stock(NumPyClient):
    def fit(self, parameters, config):
        return [array + 0.1 for array in parameters], 10, {}


@pytest.mark.slow
def test_the_code_after_the_change_runs_with_the_clients_of_before():
    answer = {"make_model": lambda: nn.Linear(3, 2)}
    for block in blocks():
        exec(block.replace("num_clients=100", "num_clients=4").replace("sampling_rate=0.1", "sampling_rate=0.9"), answer)  # noqa: S102
    grid = LocalGrid(ClientApp(client_fn=lambda context: Stock().to_client()), 4)
    answer["app"](grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={}))
    statement = answer["strategy"].statement
    assert (statement.num_charged_rounds, statement.delta) == (3, 1e-4)
    assert sum(report.replies for report in answer["strategy"].rounds) > 0


def test_the_noise_multipliers_are_the_same():
    """Flower's std on the mean of m replies is that of this package on the sum, over m."""
    assert compute_stdv(1.5, 0.5, 10) == pytest.approx(1.5 * 0.5 / 10)


@pytest.mark.exact
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "epsilon"),
    [
        ({"sampling": "poisson", "sampling_rate": 0.01}, 0.72),
        ({"sampling": "fixed-size", "cohort_size": 10, "num_clients": 1000}, 6.64),
        ({"sampling": "full"}, 91.8),
    ],
)
def test_the_numbers(arguments, epsilon):
    options = {"mechanism": "gaussian", "sampling_rate": None, "cohort_size": None, "num_clients": None, "relation": None}
    cost = planned_run.from_options(**options | arguments, num_rounds=100, delta=1e-5).cost(1.0)
    assert cost["epsilon"] == pytest.approx(epsilon, rel=6e-3)
    assert f"{epsilon:g}" in GUIDE


def test_flowers_adaptive_bound_falls_where_many_updates_are_clipped():
    wrapper = DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 0.0, 10, initial_clipping_norm=1.0)
    wrapper._geometric_update(1.0)
    assert wrapper.clipping_norm < 1.0
    assert np.isclose(wrapper.clipping_norm, np.exp(-0.2 * 0.5))

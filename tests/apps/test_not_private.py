"""Presets without privacy, to compare with: they say so everywhere, and no clip touches an update."""

import json
import math

import pytest

from flower_dp.apps.methods import ParsedRunConfig
from flower_dp.running.apps import description, presets
from tests.app_runs import DEFAULTS, PRESETS, play

NOT_PRIVATE = [name for name in sorted(PRESETS) if name.endswith("-not-private")]
FED = [f"mnist-{name}-not-private" for name in ("fedavg", "fedprox", "fedsgd", "fedsam")]


def run_of(name, **changes):
    return ParsedRunConfig.of({**DEFAULTS, **PRESETS[name], **changes})


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_called_not_private_if_and_only_if_it_is(name):
    own = run_of(name).own
    private = own.noise_multiplier > 0 if hasattr(own, "noise_multiplier") else math.isfinite(own.epsilon)
    assert private == (name not in NOT_PRIVATE)
    assert private == ("NOT PRIVATE" not in description(presets()[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", FED)
def test_a_run_is_not_private_and_says_so_and_no_update_is_clipped(name, tmp_path):
    fewer = {"num-clients": 20, "num-rounds": 3, "records-per-client": 40, "sampling": "full", "report-client-metrics": True}
    folder = play(tmp_path / "run", {**PRESETS[name], **fewer})
    statement = json.loads((folder / "statement.json").read_text())
    guarantee = statement["guarantee"]
    assert (guarantee["private"], guarantee["epsilon"], guarantee["protected_against"]) == (False, None, "nobody")
    assert (folder / "statement.txt").read_text().splitlines()[2].startswith("GUARANTEE      NOT PRIVATE. Epsilon is infinite: ")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    assert [line["epsilon"] for line in lines] == [None] * 3
    # No update is longer than the square root of the sum of all squares.
    longest = math.sqrt(20 * max(line["client-update-norm-squared"] for line in lines))
    assert 0 < longest < 0.2 * statement["mechanism"]["noise"]["clip_norm"]
    assert lines[-1]["accuracy"] > 0.3  # of ten classes

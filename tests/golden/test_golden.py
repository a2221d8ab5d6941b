"""Today's code gives what was recorded: models, metrics, charges, epsilons, statements and plans of runs with fixed draws.

`python -m tests.golden.record` records all of them anew, `python -m tests.golden.record TEXT` those with TEXT in their name. A
record that changes is a change of what users get: look at each, and say in the change log why.
"""

import json
import math

import pytest

from tests.golden.runs import PLAYS, RECORDED, file_of, play

pytestmark = pytest.mark.exact
# Models are trained in float32, by other libraries on other machines.
TRAINED, COMPUTED = 1e-4, 1e-6


def differences(found, recorded, *, rel, scale=0.0, place=""):
    """Return where two records differ, and how; numbers by a relative tolerance, where `scale` is the least size that counts."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        names = dict.fromkeys([*recorded, *found])
        pairs = [(f"{place}.{name}", found.get(name, "nothing"), recorded.get(name, "nothing")) for name in names]
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        pairs = [(f"{place}[{index}]", *both) for index, both in enumerate(zip(found, recorded, strict=True))]
    else:
        exact = not (isinstance(found, float) and isinstance(recorded, float))
        same = found == recorded if exact else math.isclose(found, recorded, rel_tol=rel, abs_tol=rel * scale)
        return [] if same else [f"{place}: is {found!r}, was {recorded!r}"]
    return [line for where, *both in pairs for line in differences(*both, rel=rel, scale=scale, place=where)]


def changed(found, recorded):
    """Return where a run differs from its record: models and metrics within the rounding of their training, all else exactly."""
    lines = []
    for part in dict.fromkeys([*recorded, *found]):
        rel, scale = COMPUTED, 0.0
        if part == "model":
            rel, scale = TRAINED, recorded["model"]["norm"] / math.sqrt(recorded["model"]["size"])
        elif part == "rounds":
            rel = TRAINED
        lines += differences(found.get(part, "nothing"), recorded.get(part, "nothing"), rel=rel, scale=scale, place=part)
    return lines


@pytest.mark.parametrize("name", PLAYS)
def test_a_run_is_what_was_recorded(name, tmp_path):
    recorded = json.loads(file_of(name).read_text(encoding="utf-8"))
    assert not changed(play(name, tmp_path), recorded)


def test_every_record_is_of_a_run():
    assert {file_of(name) for name in PLAYS} == set(RECORDED.glob("*.json"))
    assert len({file_of(name) for name in PLAYS}) == len(PLAYS)


RECORD = {
    "model": {"size": 4, "norm": 2.0, "coordinates": [1.0, 0.0]},
    "rounds": [{"round": 1, "loss": 0.5}],
    "costs": [[1.5, 1e-3]],
    "charges": [{"owners": {"Gaussian(noise_multiplier=4)": ["a", "b"]}}],
    "statement": ["one", "two"],
}


@pytest.mark.parametrize(
    ("part", "value", "is_a_change"),
    [
        ("model", {"size": 4, "norm": 2.0 + 1e-4, "coordinates": [1.0, 9e-5]}, False),
        ("model", {"size": 4, "norm": 2.0, "coordinates": [1.0, 2e-4]}, True),
        ("rounds", [{"round": 1, "loss": 0.50001}], False),
        ("rounds", [{"round": 1, "loss": 0.501}], True),
        ("rounds", [{"round": 1, "loss": 0.5}] * 2, True),
        ("costs", [[1.5000001, 1e-3]], False),
        ("costs", [[1.50001, 1e-3]], True),
        ("charges", [{"owners": {"Gaussian(noise_multiplier=3.999999999)": ["a", "b"]}}], True),
        ("statement", ["one", "two."], True),
        ("views", [{}], True),
    ],
)
def test_what_counts_as_a_change(part, value, is_a_change):
    assert not changed(RECORD, RECORD)
    assert bool(changed(RECORD | {part: value}, RECORD)) is is_a_change

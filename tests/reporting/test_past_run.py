"""What a run folder's files must be to be read: anything else is refused with the name of the file."""

import json
import math

import pytest
import tomli_w

from flower_dp.reporting.past_run import read_past_run
from tests.reporting.conftest import stated

DEEP = "[" * 100_000


@pytest.fixture
def write(tmp_path):
    """Write a run's folder, with some of its files as they are given, and return its path."""

    def written(**files):
        honest = {
            "config": tomli_w.dumps({"method": "dp-fedavg"}),
            "metrics": json.dumps({"round": 1, "accuracy": 0.5}) + "\n",
            "statement": json.dumps(stated()),
        }
        names = {"config": "run-config.toml", "metrics": "metrics.jsonl", "statement": "statement.json"}
        for key, content in (honest | files).items():
            (tmp_path / names[key]).write_text(content, encoding="utf-8")
        return tmp_path

    return written


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"config": "a = " + DEEP}, "can't be read: "),
        ({"config": "a = "}, "can't be read: "),
        ({"metrics": DEEP + "\n"}, r"metrics\.jsonl, line 1: must be a JSON object"),
        ({"metrics": '{"round": NaN}\n'}, r"metrics\.jsonl, line 1: round=nan: must be a whole number"),
        ({"metrics": '{"round": 1' + "0" * 30 + "}\n"}, r"metrics\.jsonl, line 1: round=10*: must be a whole number"),
        ({"statement": DEEP}, r"statement\.json: must be a JSON object"),
        ({"statement": '{"private": true}'}, r"statement\.json: must have format 2"),
        ({"statement": '{"format": 2, "guarantee": 1}'}, r"statement\.json: guarantee must be a JSON object"),
        ({"statement": '{"format": 2, "mechanism": {"noise": 1}}'}, r"statement\.json: noise must be a JSON object"),
    ],
)
def test_a_file_that_is_not_a_runs_is_refused_by_its_name(write, files, why):
    folder = write(**files)
    with pytest.raises(ValueError, match=why) as refused:
        read_past_run(folder)
    assert str(folder) in str(refused.value)


def test_a_number_that_no_float_holds_counts_as_not_finite(write):
    metrics = '{"round": 1, "accuracy": 1' + "0" * 400 + ', "epsilon": null}\n{"round": 2, "accuracy": 0.5, "epsilon": NaN}\n'
    past = read_past_run(write(metrics=metrics))
    assert math.isnan(past.series("accuracy")[1])
    assert past.series("accuracy")[2] == 0.5
    assert past.series("epsilon", otherwise=math.inf) == {1: math.inf, 2: math.inf}


@pytest.mark.parametrize("private", ["yes", 1, None, [], "false"])
def test_only_a_statement_that_says_so_is_of_a_private_run(write, private):
    """Any text counted as true, "false" too."""
    past = read_past_run(write(statement=json.dumps(stated(private=private, delta=[]))))
    assert past.epsilon == math.inf
    assert past.delta is None
    past = read_past_run(write())
    assert (past.epsilon, past.delta) == (1.5, 1e-3)


def test_texts_of_somebody_elses_run_control_no_terminal(write):
    """A bell, two ways to begin a command, a line's end, what turns the direction of text, and half a character, which can't be shown."""
    bad, half = "\a\x1b\x9b\u2028\u202e", "\ud800"
    folder = write(
        config=tomli_w.dumps({"method": f"dp{bad}\u4e2d", f"a{bad}b": [bad]}),
        metrics=json.dumps({"round": 1, f"loss{bad}": 0.5}) + "\n",
        statement=json.dumps(stated(protected_against=bad, unit=half) | {"incidents": [{bad: f"x{bad}"}]}),
    )
    past = read_past_run(folder)
    assert not set(bad) & set("".join([*past.config, past.config["method"], *past.rows[0], past.guarantee["protected_against"]]))
    assert past.config["method"] == "dp     \u4e2d"
    assert past.statement["incidents"] == [{"     ": "x     "}]
    assert past.guarantee["unit"] == " "

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from flower_dp.methods import METHODS
from flower_dp.planning import fedsgd_dpc, nbafl
from flower_dp.planning.command import planner_of, run
from flower_dp.planning.constants import NOT_PRIVATE
from flower_dp.planning.planner import share_above
from flower_dp.planning.plot import figure
from tests.planning.problems import BOUND, FEDPAQ, FTRL, LAPLACE, NOISE, PAGE, PASGD

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def call(tmp_path):
    def called(method: str, problem: dict[str, Any] | str | bytes, **options: Any) -> tuple[int, str, str]:
        path = tmp_path / "problem.toml"
        text = tomli_w.dumps(problem) if isinstance(problem, dict) else problem
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        out, err = io.StringIO(), io.StringIO()
        status = run(method, path, out=out, err=err, **options)
        return status, out.getvalue(), err.getvalue()

    return called


def test_an_answer_in_json(call):
    status, out, err = call("fedsgd-dpc", LAPLACE, as_json=True)
    content = json.loads(out)
    assert (status, err) == (0, "")
    assert content["method"] == "fedsgd-dpc"
    assert (content["num_rounds"], content["cohort_size"]) == (82, 1)
    assert content["bound"] == min(candidate["bound"] for candidate in content["candidates"])
    assert content["num_replies"] == 9  # ceil(82 / 10)
    assert sum(content["bound_parts"].values()) == pytest.approx(content["bound"])


def test_nothing_feasible_is_status_2_with_the_reasons(call):
    status, out, err = call("nbafl", BOUND | {"proximal": 1.0}, as_json=True)
    assert (status, json.loads(out)["best_num_rounds"], err.count("\n")) == (2, None, 1)
    assert "P = 1.8" in err
    assert "log argument" in err


@pytest.mark.parametrize(
    ("method", "problem", "named"),
    [
        ("fedsgd-dpc", LAPLACE | {"epsilon": [1.0, 2.0]}, "epsilon: the list has length 2, num_clients=10 needs length 10"),
        ("fedsgd-dpc", LAPLACE | {"a\nb": 1}, "unknown key"),
        ("nbafl", {}, "num_clients: missing"),
        ("fedsgd", LAPLACE, "method='fedsgd': has no planner; did you mean fedsgd-dpc?"),
        ("fedsgd-dpc", "num_clients = ", "is not a TOML file"),
        ("fedsgd-dpc", b"\xff\xfe", "is not a TOML file"),
    ],
)
def test_refusals_are_one_line_that_names_the_key(call, method, problem, named):
    status, out, err = call(method, problem)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert named in err


def test_no_file(tmp_path):
    err = io.StringIO()
    assert run("nbafl", tmp_path / "absent.toml", err=err) == 2
    assert "can't be read: No such file" in err.getvalue()
    assert run("nbafl", err=err) == 2
    assert err.getvalue().endswith("problem: missing; give --problem FILE.toml, or --estimate-from PRESET\n")


def test_estimates_complete_a_file_which_wins(call):
    estimates = {key: value for key, value in LAPLACE.items() if key not in {"mechanism", "epsilon"}}
    own = {"mechanism": "laplace", "epsilon": 10.0, "clip_norm": 0.5}
    status, out, err = call("fedsgd-dpc", own, estimates=estimates, as_json=True)
    content = json.loads(out)
    assert (status, err, content["warning"]) == (0, "", NOT_PRIVATE)
    assert content["bound"] == fedsgd_dpc.plan(estimates | own).best.bound
    assert f"Warning: {NOT_PRIVATE}" in call("fedsgd-dpc", own, estimates=estimates)[1]


@pytest.mark.parametrize(
    ("method", "problem"), [("fedsgd-dpc", LAPLACE), ("nbafl", BOUND), ("dp-pasgd", PASGD), ("dp-fedpaq", FEDPAQ)]
)
def test_every_diagram_has_the_optimum_on_its_curve(method, problem):
    panels = planner_of(method).plan(problem).panels
    for axes, panel in zip(figure(planner_of(method).plan(problem)).axes, panels, strict=True):
        *curves, star = axes.lines
        assert (star.get_xdata()[0], star.get_ydata()[0]) == panel.optimum
        there = [curve.get_ydata()[curve.get_xdata() == panel.optimum[0]].item() for curve in curves]
        assert min(there) == pytest.approx(panel.optimum[1]) or "relaxed" in panel.curves


def test_diagrams_of_what_is_left(call, tmp_path):
    nothing = fedsgd_dpc.plan(LAPLACE | {"epsilon": 0.01, "initial_distance": 0.0})
    assert nothing.best.num_rounds == 0
    assert len(figure(nothing).axes) == 1
    assert len(figure(nbafl.plan(BOUND | {"num_clients": 1, "cohort_size": 1, "max_rounds": 1})).axes) == 2
    assert call("nbafl", BOUND | {"proximal": 1.0}, plot=tmp_path / "bound.png")[0] == 2
    assert (tmp_path / "bound.png").read_bytes().startswith(PNG)
    for problem, name, why in (
        (NOISE, "bound.png", "plot: there is no bound to draw"),
        (BOUND, "bound.pdf", "must end in .png"),
        (BOUND, "absent/bound.png", "can't be written"),
    ):
        status, out, err = call("nbafl", problem, plot=tmp_path / name)
        assert (status, out, why in err) == (2, "", True)


@pytest.mark.slow
def test_planning_needs_neither_flwr_nor_torch_nor_matplotlib():
    code = (
        "import sys, flower_dp.planning.command, flower_dp.planning.constants;"
        "print(sorted({'flwr', 'torch', 'typer', 'matplotlib'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[]"


@pytest.mark.exact
def test_the_examples_in_the_docs_are_real(call):
    answers = re.findall(r"```\n\$ flower-dp plan (\S+) [^\n]*\n(.*?)```", PAGE, re.DOTALL)
    assert [method for method, _ in answers] == ["fedsgd-dpc", "nbafl", "dp-pasgd", "dp-fedpaq", "dp-ftrl"]
    assert {method for method, _ in answers} == {name for name, method in METHODS.items() if method.planner}
    for problem, (method, answer) in zip((LAPLACE, BOUND, PASGD, FEDPAQ, FTRL), answers, strict=True):
        assert call(method, problem) == (0, answer, "")


def test_by_how_much_a_bound_is_above_the_least_one():
    shown = [share_above(value, 2.0) for value in (2.002, 2.038, 3.12, 4.26)]
    assert shown == ["0.1 % more", "1.9 % more", "56 % more", "113 % more"]

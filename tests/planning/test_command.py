import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from flower_dp.methods import METHODS
from flower_dp.planning import ProblemError, fedsgd_dpc, nbafl, read_problem
from flower_dp.planning.command import run
from flower_dp.planning.constants import NOT_PRIVATE, estimate
from flower_dp.planning.planner import share_above
from flower_dp.planning.plot import figure
from tests.planning.problems import BOUND, LAPLACE, NOISE

NEAR = LAPLACE | {"epsilon": 20.0, "gradient_bound": 3.0}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def call(tmp_path):
    def called(method: str, problem: dict[str, Any] | str, **options: Any) -> tuple[int, str, str]:
        path = tmp_path / "problem.toml"
        path.write_text(problem if isinstance(problem, str) else tomli_w.dumps(problem))
        out, err = io.StringIO(), io.StringIO()
        status = run(method, path, out=out, err=err, **options)
        return status, out.getvalue(), err.getvalue()

    return called


def no_nan(text: str) -> Any:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


class TestJson:
    def test_fedsgd_dpc(self, call):
        status, out, err = call("fedsgd-dpc", NEAR, as_json=True)
        content = no_nan(out)
        assert (status, err) == (0, "")
        assert content["method"] == "fedsgd-dpc"
        assert (content["num_rounds"], content["cohort_size"]) == (82, 1)
        assert [candidate["name"] for candidate in content["candidates"]] == ["b = 1", "b = 10", "T = 0"]
        assert content["bound"] == min(candidate["bound"] for candidate in content["candidates"])
        # ceil(82 / 10)
        assert content["num_replies"] == 9
        assert sum(content["bound_parts"].values()) == pytest.approx(content["bound"])

    def test_nothing_feasible_is_status_2_with_the_reasons(self, call):
        status, out, err = call("nbafl", BOUND | {"proximal": 1.0}, as_json=True)
        content = no_nan(out)
        assert status == 2
        assert content["best_num_rounds"] is None
        assert err.count("\n") == 1
        assert "P = 1.8" in err
        assert "log argument" in err


class TestRefusals:
    @pytest.mark.parametrize(
        ("method", "problem", "named"),
        [
            (
                "fedsgd-dpc",
                LAPLACE | {"epsilon": [1.0, 2.0]},
                "epsilon: the list has length 2, num_clients=10 asks for length 10",
            ),
            ("fedsgd-dpc", LAPLACE | {"a\nb": 1}, "unknown key"),
            ("nbafl", {}, "num_clients: missing"),
            ("fedsgd", LAPLACE, "method='fedsgd': has no planner; did you mean fedsgd-dpc?"),
            ("fedsgd-dpc", "num_clients = ", "is not a TOML file"),
            ("fedsgd-dpc", 'mechanism = "laplace"\nmechanism = "gaussian"\n', "is not a TOML file"),
        ],
    )
    def test_are_one_line_that_names_the_key(self, call, method, problem, named):
        status, out, err = call(method, problem)
        assert status == 2
        assert out == ""
        assert err.count("\n") == 1
        assert named in err

    def test_no_file(self, tmp_path):
        with pytest.raises(ProblemError, match=r"^problem=.*can't be read: No such file"):
            read_problem(tmp_path / "absent.toml")
        err = io.StringIO()
        assert run("nbafl", err=err) == 2
        assert err.getvalue() == "problem: missing; give --problem FILE.toml, or --estimate-from PRESET\n"

    def test_not_text(self, tmp_path):
        path = tmp_path / "problem.toml"
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(ProblemError, match="is not a TOML file"):
            read_problem(path)


class TestEstimates:
    def test_complete_a_file_which_wins(self, call):
        rng = np.random.default_rng(0)
        clients = [(rng.standard_normal((20, 3)), rng.integers(0, 2, 20)) for _ in range(4)]
        estimates = estimate(clients, l2=0.1, num_classes=2).fedsgd_dpc()
        status, out, err = call(
            "fedsgd-dpc", {"mechanism": "laplace", "epsilon": 10.0, "clip_norm": 0.5}, estimates=estimates, as_json=True
        )
        content = no_nan(out)
        assert (status, err) == (0, "")
        assert content["warning"] == NOT_PRIVATE
        given = fedsgd_dpc.plan(estimates | {"mechanism": "laplace", "epsilon": 10.0, "clip_norm": 0.5})
        assert content["bound"] == given.best.bound
        status, out, _ = call("fedsgd-dpc", {"mechanism": "laplace", "epsilon": 10.0}, estimates=estimates)
        assert f"Warning: {NOT_PRIVATE}" in out


class TestPlot:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("method", "problem"),
        [
            ("fedsgd-dpc", LAPLACE),
            ("nbafl", BOUND | {"proximal": 1.0}),
        ],
    )
    def test_writes_a_png(self, call, tmp_path, method, problem):
        path = tmp_path / "bound.png"
        call(method, problem, plot=path)
        assert path.read_bytes().startswith(PNG)

    def test_marks_the_optimum(self):
        plan = fedsgd_dpc.plan(NEAR)
        by_rounds, by_cohort = figure(plan).axes
        star = by_rounds.lines[-1]
        assert (star.get_xdata()[0], star.get_ydata()[0]) == (82, plan.best.bound)
        for line in by_rounds.lines[:-1]:
            assert np.min(line.get_ydata()) >= plan.best.bound
        star = by_cohort.lines[-1]
        assert (star.get_xdata()[0], star.get_ydata()[0]) == (1, plan.best.bound)

    def test_draws_what_is_left(self):
        nothing = fedsgd_dpc.plan(NEAR | {"epsilon": 0.01, "initial_distance": 0.0})
        assert nothing.best.num_rounds == 0
        assert len(figure(nothing).axes) == 1
        assert len(figure(nbafl.plan(BOUND)).axes) == 2
        single = nbafl.plan(BOUND | {"num_clients": 1, "cohort_size": 1, "max_rounds": 1})
        assert len(figure(single).axes) == 2

    def test_refuses_what_it_cant_draw_or_write(self, call, tmp_path):
        status, out, err = call("nbafl", NOISE, plot=tmp_path / "bound.png")
        assert (status, out) == (2, "")
        assert err.startswith("plot: there is no bound to draw")
        status, _, err = call("fedsgd-dpc", LAPLACE, plot=tmp_path / "bound.pdf")
        assert (status, "must end in .png" in err) == (2, True)
        status, _, err = call("fedsgd-dpc", LAPLACE, plot=tmp_path / "absent" / "bound.png")
        assert (status, "can't be written" in err) == (2, True)


@pytest.mark.slow
def test_planning_needs_neither_flwr_nor_torch_nor_matplotlib():
    code = (
        "import sys, flower_dp.planning.command, flower_dp.planning.constants;"
        "print(sorted({'flwr', 'torch', 'typer', 'matplotlib'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[]"


def test_the_examples_in_the_docs_are_real(call):
    text = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text()
    problems = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    answers = re.findall(r"```\n\$ flower-dp plan (\S+) [^\n]*\n(.*?)```", text, re.DOTALL)
    assert [method for method, _ in answers] == ["fedsgd-dpc", "nbafl", "dp-pasgd", "dp-fedpaq"]
    assert {method for method, _ in answers} == {name for name, method in METHODS.items() if method.planner}
    for problem, (method, answer) in zip(problems, answers, strict=True):
        assert call(method, problem) == (0, answer, "")


def test_by_how_much_a_bound_is_above_the_least_one():
    shown = [share_above(value, 2.0) for value in (2.002, 2.038, 3.12, 4.26)]
    assert shown == ["0.1 % more", "1.9 % more", "56 % more", "113 % more"]

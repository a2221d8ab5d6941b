import io
import json
import math
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

LAPLACE: dict[str, Any] = {
    "mechanism": "laplace",
    "num_clients": 10,
    "num_records": 6000,
    "dimension": 7840,
    "clip_norm": 300.0,
    "epsilon": 20.0,
    "strong_convexity": 0.5,
    "smoothness": 1.5,
    "gradient_bound": 3.0,
    "heterogeneity": 0.4,
    "initial_distance": 30.0,
}
NBAFL: dict[str, Any] = {
    "num_clients": 50,
    "cohort_size": 20,
    "num_rounds": 25,
    "uplink_exposures": 1,
    "epsilon": 60.0,
    "delta": 0.01,
    "clip_norm": 20.0,
    "min_records": 100,
}
NBAFL_BOUND: dict[str, Any] = NBAFL | {
    "smoothness": 1.0,
    "lipschitz": 0.5,
    "pl_constant": 0.8,
    "proximal": 3.0,
    "dissimilarity": 1.0,
    "initial_gap": 2.3,
    "max_rounds": 200,
}
PASGD: dict[str, Any] = {
    "cost_per_aggregation": 100.0,
    "cost_per_step": 1.0,
    "max_cost": 1000.0,
    "epsilon": 4.0,
    "delta": 1e-4,
    "learning_rate": 0.05,
    "strong_convexity": 0.1,
    "smoothness": 1.0,
    "initial_gap": 0.69,
    "gradient_variance": 0.01,
    "dimension": 100,
    "batch_size": 256,
    "clip_norm": 1.0,
    "num_clients": 16,
}
FEDPAQ: dict[str, Any] = {
    "bits_budget": 30_000_000,
    "num_iterations": 1000,
    "dimension": 7850,
    "num_clients": 100,
    "batch_size": 12,
    "num_records": 600,
    "epsilon": 10.0,
    "delta": 1e-4,
    "strong_convexity": 0.5,
    "smoothness": 5.0,
    "gradient_bound": 1.0,
    "gradient_variance": 1.0,
    "heterogeneity": 0.5,
    "initial_distance": 30.0,
}
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
        status, out, err = call("fedsgd-dpc", LAPLACE, as_json=True)
        content = no_nan(out)
        assert (status, err) == (0, "")
        assert content["method"] == "fedsgd-dpc"
        assert (content["num_rounds"], content["cohort_size"]) == (82, 1)
        assert [candidate["name"] for candidate in content["candidates"]] == ["b = 1", "b = 10", "T = 0"]
        assert content["bound"] == min(candidate["bound"] for candidate in content["candidates"])
        # ceil(82 / 10)
        assert content["num_replies"] == 9
        assert sum(content["bound_parts"].values()) == pytest.approx(content["bound"])

    def test_nbafl(self, call):
        status, out, err = call("nbafl", NBAFL_BOUND, as_json=True)
        content = no_nan(out)
        assert (status, err) == (0, "")
        assert {"uplink_noise_std", "downlink_noise_std", "best_num_rounds", "best_cohort_size"} <= content.keys()
        assert all(point["reason"] for point in content["infeasible"])

    def test_dp_pasgd(self, call):
        status, out, err = call("dp-pasgd", PASGD, as_json=True)
        content = no_nan(out)
        assert (status, err) == (0, "")
        keys = ["num_steps", "steps_per_round", "num_rounds", "noise_std", "bound", "cost", "epsilon", "epsilon_tight"]
        assert content.keys() >= set(keys)
        assert isinstance(content["noise_std"], float)
        status, out, _ = call("dp-pasgd", PASGD | {"batch_size": [256] * 16}, as_json=True)
        assert no_nan(out)["noise_std"] == [content["noise_std"]] * 16

    def test_dp_fedpaq(self, call):
        status, out, err = call("dp-fedpaq", FEDPAQ, as_json=True)
        content = no_nan(out)
        assert (status, err) == (0, "")
        keys = ["num_local_steps", "cohort_size", "quantization_levels", "num_rounds", "bits_used", "bound"]
        assert content.keys() >= set(keys)
        assert sum(content["bound_parts"].values()) == pytest.approx(content["bound"])

    def test_too_few_bits_are_status_2_with_how_many_it_takes(self, call):
        status, out, err = call("dp-fedpaq", FEDPAQ | {"bits_budget": 1000}, as_json=True)
        content = no_nan(out)
        assert status == 2
        assert content["num_rounds"] is content["bound"] is None
        # 20 rounds of 50 steps, one client, s = 1: 20 (7850 log2(3) + 32) = 249479.1
        assert content["smallest_bits_budget"] == 249480
        assert err == "bits_budget=1000: nothing is feasible; the smallest feasible bits_budget is 249480\n"
        assert call("dp-fedpaq", FEDPAQ | {"bits_budget": 249480})[0] == 0
        status, out, _ = call("dp-fedpaq", FEDPAQ | {"bits_budget": 1000})
        assert status == 2
        assert "smallest_bits_budget  249480" in out

    def test_nothing_feasible_is_status_2_with_the_reasons(self, call):
        status, out, err = call("nbafl", NBAFL_BOUND | {"proximal": 1.0}, as_json=True)
        content = no_nan(out)
        assert status == 2
        assert content["best_num_rounds"] is None
        assert err.count("\n") == 1
        assert "P = 1.8" in err
        assert "log argument" in err


class TestText:
    def test_fedsgd_dpc_gives_the_reasons(self, call):
        status, out, err = call("fedsgd-dpc", LAPLACE)
        assert (status, err) == (0, "")
        assert "num_rounds   82" in out
        assert "b=1, T=82 has the least bound" in out
        assert "parts of the bound" in out
        assert "the bound takes 8.2 replies of a client; the noise must be calibrated to the most, 9" in out

    def test_gaussian_says_why(self, call):
        gaussian = {
            "mechanism": "gaussian",
            "delta": 1e-5,
            "sampling_rate": 0.01,
            "gradient_variance": 4.0,
            "noise_constant": 1.5,
        }
        status, out, _ = call("fedsgd-dpc", LAPLACE | gaussian | {"clip_norm": 10.0, "max_rounds": 100})
        assert status == 0
        assert "num_rounds   100" in out
        assert "every round lowers the bound" in out

    def test_nbafl_says_what_is_infeasible(self, call):
        status, out, _ = call("nbafl", NBAFL_BOUND)
        assert status == 0
        assert "K and T as given" in out
        assert "infeasible: log argument" in out
        assert "K=1..45" in out
        assert "not proved there" in out

    def test_nbafl_noise_alone(self, call):
        status, out, _ = call("nbafl", NBAFL)
        assert status == 0
        assert "downlink_noise_std  0\n" in out
        assert "best_num_rounds" not in out


class TestRefusals:
    @pytest.mark.parametrize(
        ("method", "problem", "named"),
        [
            ("fedsgd-dpc", {key: value for key, value in LAPLACE.items() if key != "epsilon"}, "epsilon: missing"),
            (
                "fedsgd-dpc",
                LAPLACE | {"epsilon": [1.0, 2.0]},
                "epsilon: the list has length 2, num_clients=10 asks for length 10",
            ),
            ("fedsgd-dpc", LAPLACE | {"smoothnes": 1.0}, "smoothnes: unknown key for fedsgd-dpc; did you mean smoothness?"),
            ("fedsgd-dpc", LAPLACE | {"epsilon": math.inf}, "epsilon=inf: must be a finite number > 0"),
            ("fedsgd-dpc", LAPLACE | {"a\nb": 1}, "unknown key"),
            ("nbafl", NBAFL | {"cohort_size": 51}, "cohort_size=51: must be a whole number >= 1 and <= 50"),
            ("nbafl", {}, "num_clients: missing"),
            ("fedsgd", LAPLACE, "method='fedsgd': has no planner; did you mean fedsgd-dpc?"),
            ("dp-pasgd", PASGD | {"max_cost": 100}, "max_cost=100.0: must pay for one round of one step"),
            ("dp-pasgd", PASGD | {"max_costs": 1}, "max_costs: unknown key for dp-pasgd; did you mean max_cost?"),
            ("dp-fedpaq", FEDPAQ | {"batch_size": 601}, "batch_size=601: must be a whole number >= 1 and <= 600"),
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
            ("nbafl", NBAFL_BOUND | {"proximal": 1.0}),
        ],
    )
    def test_writes_a_png(self, call, tmp_path, method, problem):
        path = tmp_path / "bound.png"
        call(method, problem, plot=path)
        assert path.read_bytes().startswith(PNG)

    def test_marks_the_optimum(self):
        plan = fedsgd_dpc.plan(LAPLACE)
        by_rounds, by_cohort = figure(plan).axes
        star = by_rounds.lines[-1]
        assert (star.get_xdata()[0], star.get_ydata()[0]) == (82, plan.best.bound)
        for line in by_rounds.lines[:-1]:
            assert np.min(line.get_ydata()) >= plan.best.bound
        star = by_cohort.lines[-1]
        assert (star.get_xdata()[0], star.get_ydata()[0]) == (1, plan.best.bound)

    def test_draws_what_is_left(self):
        nothing = fedsgd_dpc.plan(LAPLACE | {"epsilon": 0.01, "initial_distance": 0.0})
        assert nothing.best.num_rounds == 0
        assert len(figure(nothing).axes) == 1
        assert len(figure(nbafl.plan(NBAFL_BOUND)).axes) == 2
        single = nbafl.plan(NBAFL_BOUND | {"num_clients": 1, "cohort_size": 1, "max_rounds": 1})
        assert len(figure(single).axes) == 2

    def test_refuses_what_it_cant_draw_or_write(self, call, tmp_path):
        status, out, err = call("nbafl", NBAFL, plot=tmp_path / "bound.png")
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

import json
from pathlib import Path

import pytest

from flower_dp.apps import pilot as pilots
from flower_dp.apps.pilot import pilot
from flower_dp.apps.tasks import load_task
from flower_dp.apps.tasks.partitions import partition
from flower_dp.cli import main as cli
from flower_dp.planning import fedsgd_dpc, nbafl
from flower_dp.planning.constants import NOT_PRIVATE, estimate
from tests.app_runs import DEFAULTS, with_table

CHECKOUT = Path(__file__).parents[2]
PRESET = ["--estimate-from", "mnist-dp-fedavg"]
# Clients that draw from the pool: dealing them takes no time.
SMALL = {"num-clients": 4, "partition": "sample", "records-per-client": 25, "seed": 3, "model-bias": False}
FEDSGD = SMALL | {"method": "fedsgd-dpc", "sampling": "round-robin", "cohort-size": 2, "num-rounds": 30}
FEDSGD |= {"epsilon": 5.0, "clip-norm": 300.0}
NBAFL = SMALL | {"method": "nbafl", "sampling": "full", "num-rounds": 20}
NBAFL |= {"paper-epsilon": 50.0, "delta": 0.01, "clip-norm": 20.0, "uplink-exposures": 2}


def config(settings):
    return {**DEFAULTS, **with_table(settings)}


@pytest.fixture(scope="module")
def by_hand():
    """The constants from a deal of our own: what each client draws, standardized as MNIST is."""
    task = load_task("mnist")
    rest = {"dirichlet_alpha": 0.3, "classes_per_client": 2, "records_per_client": 25}
    dealt = partition("sample", task.train_labels, num_clients=4, seed=3, **rest)
    pixels = (task.train_inputs.reshape(-1, 784) / 255 - 0.1307) / 0.3081
    return estimate([(pixels[rows], task.train_labels[rows]) for rows in dealt], l2=0.1, num_classes=10)


def same(got, wanted):
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        # The app standardizes in float32.
        assert got[key] == (pytest.approx(value, rel=1e-4) if isinstance(value, float | list) else value), key


# what the values are


@pytest.mark.slow
def test_a_fedsgd_dpc_preset_gives_a_whole_laplace_problem(by_hand):
    found = pilot("fedsgd-dpc", config(FEDSGD))
    own = {"mechanism": "laplace", "epsilon": 5.0, "clip_norm": 300.0, "num_records": 25}
    same(dict(found.values), by_hand.fedsgd_dpc() | own)
    assert found.values["dimension"] == 7840
    plan = fedsgd_dpc.plan(found.values)  # rounds and cohort are what it looks for: the preset's do not fix them
    assert plan.problem.num_rounds is plan.problem.cohort_size is None


@pytest.mark.slow
def test_a_nbafl_preset_gives_a_whole_problem(by_hand):
    found = pilot("nbafl", config(NBAFL))
    rho, b = by_hand.smoothness, by_hand.dissimilarity
    own = {"num_rounds": 20, "cohort_size": 4, "uplink_exposures": 2, "epsilon": 50.0, "delta": 0.01, "clip_norm": 20.0}
    same(dict(found.values), by_hand.nbafl() | own | {"max_rounds": 200, "proximal": rho * (b**2 + 2 * b)})
    plan = nbafl.plan(found.values)
    assert plan.candidates[0].feasible


@pytest.mark.slow
def test_the_l2_coefficient_and_the_budgets_of_each_client_are_the_presets():
    found = pilot("fedsgd-dpc", config(FEDSGD | {"client-epsilons": "1,2,4,8"}))
    assert (found.values["epsilon"], found.values["strong_convexity"]) == ([1.0, 2.0, 4.0, 8.0], 0.1)
    for l2, expected in ((None, 0.5), (2.0, 2.0)):
        assert pilot("fedsgd-dpc", config(NBAFL | {"weight-decay": 0.5}), l2=l2).values["strong_convexity"] == expected


@pytest.mark.slow
def test_a_preset_of_another_method_gives_its_data_only(by_hand):
    found = pilot("fedsgd-dpc", config(SMALL))
    same(dict(found.values), by_hand.fedsgd_dpc() | {"num_records": 25})
    assert "the preset's method is dp-fedsam: only its settings of the data were used" in found.notes


# what is given already


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "proximal"),
    [(0.0, 3.0), (1.5, 3.0), (2.0, 2.0)],  # P = 1 + 2l (-1/mu + 1.5/mu^2) for rho = B = 1: below 1 from mu = 1.5, least at 3
)
def test_the_proximal_coefficient_is_the_presets_where_the_bound_holds(preset, proximal):
    given = {"smoothness": 1.0, "dissimilarity": 1.0}
    assert pilot("nbafl", config(NBAFL | {"proximal-mu": preset}), given=given).values["proximal"] == proximal


@pytest.mark.slow
def test_what_follows_from_given_keys_follows_from_them():
    values = pilot("nbafl", config(NBAFL | {"uplink-exposures": 0}), given={"num_rounds": 7, "proximal": 1.0}).values
    assert (values["uplink_exposures"], values["max_rounds"], "proximal" in values) == (7, 70, False)
    gaussian = {"mechanism": "gaussian", "num_rounds": 7}
    values = pilot("fedsgd-dpc", config(FEDSGD), given=gaussian).values
    assert "max_rounds" not in values  # it would forbid more rounds than the preset has
    assert "gradient_variance" in values


# large tasks


def test_large_tasks_are_thinned(monkeypatch):
    monkeypatch.setattr(pilots, "MOST_CLIENTS", 3)
    monkeypatch.setattr(pilots, "MOST_RECORDS", 30)
    seen = []
    monkeypatch.setattr(pilots, "estimate", lambda clients, **rest: seen.append(clients) or estimate(clients, **rest))
    found = pilot("fedsgd-dpc", config(FEDSGD | {"mechanism": "gaussian"}))
    assert [features.shape for features, _ in seen[0]] == [(10, 784)] * 3
    assert (found.values["num_clients"], found.values["num_records"]) == (4, 25)
    assert isinstance(found.values["gradient_variance"], float)  # for all four
    assert "30 records of 3 clients, dealt as in a run (partition=sample, seed=3), a random part of the 100" in found.notes[0]
    assert pilot("fedsgd-dpc", config(FEDSGD | {"mechanism": "gaussian"})).values == found.values


# the command


@pytest.fixture
def call(capsys, monkeypatch):
    monkeypatch.chdir(CHECKOUT)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
        return ended.value.code, *capsys.readouterr()

    return run


def settings(values):
    text = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in with_table(values).items()}
    return [word for key, value in text.items() for word in ("--set", f"{key}={value}")]


@pytest.mark.slow
def test_plan_from_a_preset(call, tmp_path):
    (tmp_path / "p.toml").write_text("epsilon = 7\ncohort_size = 3\n")
    arguments = ["plan", "fedsgd-dpc", *PRESET, *settings(FEDSGD)]
    status, out, err = call(*arguments, "--problem", str(tmp_path / "p.toml"), "--json")
    assert (status, err) == (0, "")
    got = json.loads(out)
    assert (got["warning"], got["cohort_size"], got["inputs_from"]) == (NOT_PRIVATE, 3, "mnist-dp-fedavg")
    assert (got["inputs"]["num_clients"], got["inputs"]["clip_norm"], "epsilon" in got["inputs"]) == (4, 300.0, False)
    direct = fedsgd_dpc.plan({**got["inputs"], "epsilon": 7, "cohort_size": 3})
    assert (got["num_rounds"], got["bound"]) == (direct.best.num_rounds, direct.best.bound)


@pytest.fixture
def own_app(tmp_path):
    """An app of its own, with a pilot that its pyproject.toml names."""

    def made(named):
        (tmp_path / "pyproject.toml").write_text(
            f'[project]\nname = "own"\n[tool.flwr.app.config]\nclients = 4\n[tool.flower-dp]\npilot = "{named}"\n'
        )
        (tmp_path / "own_pilot.py").write_text(
            "from flower_dp.planning.planner import Inputs\n"
            "def constants(method, run_config, *, given, l2):\n"
            "    values = {'num_clients': run_config['clients'], 'initial_gap': l2, 'epsilon': 99.0}\n"
            "    return Inputs(values=values, notes=(f'a pilot for {method}, which knew {sorted(given)}',))\n"
        )
        (tmp_path / "p.toml").write_text(
            "cost_per_aggregation = 10\ncost_per_step = 1\nmax_resource_cost = 100\nepsilon = 4\ndelta = 1e-4\nlearning_rate = 0.1\n"
            "strong_convexity = 0.1\nsmoothness = 1\ngradient_variance = 0.1\ndimension = 10\nbatch_size = 100\nclip_norm = 1\n"
        )
        return ["plan", "dp-pasgd", "--estimate-from", str(tmp_path), "--problem", str(tmp_path / "p.toml"), "--l2", "0.5"]

    return made


def test_an_app_of_its_own_can_have_a_pilot(call, own_app):
    status, out, err = call(*own_app("own_pilot:constants"), "--set", "clients=5", "--json")
    assert (status, err) == (0, "")
    got = json.loads(out)
    assert got["inputs"] == {"num_clients": 5, "initial_gap": 0.5}  # the file's epsilon won
    assert got["notes"][0].startswith("a pilot for dp-pasgd, which knew ['batch_size', 'clip_norm', 'cost_per_aggregation'")
    for absent in ("no_such_module:pilot", "own_pilot:no_such_function"):
        status, out, err = call(*own_app(absent))
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert f"--estimate-from: {absent}: " in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["--estimate-from", "tests/foreign/tiny"],
            "--estimate-from=tests/foreign/tiny: has no pilot; name one in its pyproject.toml",
        ),
        ([*PRESET, "--l2", "0"], "--l2=0.0: must be"),
        ([*PRESET, "--set", "partition=odd"], "partition='odd': must be one of"),
        ([*PRESET, "--problem", "/nowhere.toml"], "problem='/nowhere.toml': can't be read"),
        ([*PRESET, *settings(SMALL)], "mechanism: missing"),
        ([*PRESET, *settings(FEDSGD | {"epsilon": "inf"})], "epsilon=inf: must be"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(call, arguments, named):
    status, out, err = call("plan", "fedsgd-dpc", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert named in err

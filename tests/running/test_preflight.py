from contextlib import nullcontext

import pytest

from flower_dp.running import apps, preflight
from tests.own_apps import write_app

BUILT = "import flower_dp\nserver = flower_dp.app().server"


@pytest.fixture
def target(tmp_path):
    return lambda text, *settings: apps.resolve(str(write_app(tmp_path, "num-clients = 8", my_app=text)), list(settings))


@pytest.mark.parametrize(
    ("text", "built"),
    [
        (BUILT, True),
        ("from flower_dp import app as make\nprint('loading')\nserver = make().server", True),
        ("import flower_dp\nfrom flwr.serverapp import ServerApp\nserver = ServerApp()", False),
        ("this is no Python", False),
        ("raise SystemExit", False),
    ],
)
def test_an_app_itself_says_who_has_made_it(target, capsys, text, built):
    made = target(text).app
    assert made.built is built
    assert capsys.readouterr().out == ""  # which may be read as JSON
    assert not (made.folder / "__pycache__").exists()


WITHOUT = {
    "sampling=full": "sampling = 'poisson'\nsampling-rate = 0.2",
    "dp-fedavg.epsilon=4": "dp-fedavg.noise-multiplier = 3.0\ndp-fedavg.target-epsilon = 2.0",
    "fed-smp.mask=rand-k": "method = 'fed-smp'\nfed-smp.mask = 'top-k'\nfed-smp.random-ratio = 0.2\nfed-smp.delta = 1e-3",
    "method=nbafl": "momentum = 0.9\nbatch-size = 3\nnbafl.epsilon = 5.0\nnbafl.delta = 1e-3",
}


@pytest.mark.parametrize("given", WITHOUT)
def test_a_choice_unsets_what_the_apps_file_sets_and_nothing_reads_beside_it(given, target, tmp_path):
    made = target(BUILT)
    file = tmp_path / "pyproject.toml"
    own = "" if "method =" in WITHOUT[given] else "method = 'dp-fedavg'\ndp-fedavg.delta = 1e-3\n"
    file.write_text(file.read_text() + own + WITHOUT[given] + "\n")
    preflight.check_settings(apps.resolve(str(made.app.folder), []))
    preflight.check_settings(apps.resolve(str(made.app.folder), [given]))
    # What stands there and is read stays.
    assert apps.resolve(str(made.app.folder), ["num-rounds=2"]).overrides == {"num-rounds": 2}


def test_an_empty_value_unsets_what_a_preset_or_the_apps_file_sets(target, tmp_path):
    assert apps.resolve("mnist-blur", []).overrides["blur-strength"] == 3.0
    assert "blur-bound" not in apps.resolve("mnist-blur", ["blur-strength=0"]).overrides
    made = target(BUILT)
    file = tmp_path / "pyproject.toml"
    file.write_text(file.read_text() + "learning-rate = 0.9\ndata-dir = 'there'\n")
    found = apps.resolve(str(made.app.folder), ["learning-rate=", "data-dir=", "seed="])
    assert found.overrides == {"learning-rate": apps.own_app().defaults["learning-rate"], "data-dir": ""}
    assert found.given == ()
    # The default of an app that flower-dp does not make is what its file says.
    with pytest.raises(ValueError, match="num-clients=: must be a whole number"):
        target("server = 3", "num-clients=")


def test_nodes_of_flower_dps_apps_host_all_clients(target):
    stock = target("server = 3")  # it has as many nodes as its strategy expects clients
    assert (preflight.nodes_of(stock, None, 2), preflight.nodes_of(stock, 5, 2)) == (None, 5)
    made = target(BUILT, "num-clients=3")
    assert (preflight.nodes_of(made, None, 2), preflight.nodes_of(made, None, 16), preflight.nodes_of(made, 3, 2)) == (2, 3, 3)
    with pytest.raises(ValueError, match="--supernodes=4: must be at most num-clients=3"):
        preflight.nodes_of(made, 4, 2)


@pytest.mark.parametrize(
    ("gpus", "each", "workers", "fit"),
    [(1, 0.5, None, 2), (2, 1, 2, 2), (None, 1, 3, 3), (0, 0, 3, 3), (0, 1.0, None, 0), (1, 2.0, None, 0), (1, 0.6, 2, 0)],
)
def test_workers_fit_on_the_gpus_or_are_refused(monkeypatch, gpus, each, workers, fit):
    monkeypatch.setattr(preflight, "num_gpus", lambda: gpus)
    monkeypatch.setattr(preflight, "default_workers", lambda: 16)
    refused = pytest.raises(ValueError, match=f"--gpus-per-worker={each:g}: .* need more GPUs than Ray finds here")
    with nullcontext() if fit else refused:
        assert preflight.workers_of(workers, each) == fit


def test_all_settings_that_an_app_can_not_take_are_named(target):
    with pytest.raises(ValueError, match="a: must be key=value\nnum-clients=x: must be a whole number\nb: unknown") as error:
        target("server = 3", "a", "num-clients=x", "b=1")
    assert str(error.value).count("\n") == 2

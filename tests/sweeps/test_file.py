"""The file of a sweep: its points, and what is refused."""

import re

import pytest

from flower_dp.sweeps.file import SelectionRule, read


def settings(file):
    return [dict(point.settings) for point in file.points]


def test_a_grid_is_a_product_and_each_point_is_multiplied_by_it(write):
    file = read(
        write("""
            seeds = [3, 5]
            [settings]
            num-rounds = 7
            [grid]
            "METHOD.epsilon" = [1.0, 2.0]
            [[points]]
            method = "dp-fedavg"
            [[points]]
            method = "dp-fedsam"
            dp-fedsam.sam-radius = [0.1, 0.2]
        """)
    )
    assert settings(file) == [
        {"num-rounds": 7, "dp-fedavg.epsilon": 1.0, "method": "dp-fedavg"},
        {"num-rounds": 7, "dp-fedavg.epsilon": 2.0, "method": "dp-fedavg"},
        {"num-rounds": 7, "dp-fedsam.epsilon": 1.0, "method": "dp-fedsam", "dp-fedsam.sam-radius": 0.1},
        {"num-rounds": 7, "dp-fedsam.epsilon": 1.0, "method": "dp-fedsam", "dp-fedsam.sam-radius": 0.2},
        {"num-rounds": 7, "dp-fedsam.epsilon": 2.0, "method": "dp-fedsam", "dp-fedsam.sam-radius": 0.1},
        {"num-rounds": 7, "dp-fedsam.epsilon": 2.0, "method": "dp-fedsam", "dp-fedsam.sam-radius": 0.2},
    ]
    assert (file.seeds, file.metric, file.select) == ((3, 5), "accuracy", None)


def test_a_methods_key_in_the_settings_of_all_runs_holds_for_that_method_alone(write):
    file = read(
        write("""
            [settings]
            sampling-rate = 0.2
            momentum = 0.5
            nbafl.clip-norm = 3.0
            dp-fedavg.clip-norm = 0.5
            vehicle.own = 1
            [[points]]
            method = ["dp-fedavg", "dp-fedsam"]
            [[points]]
            method = "dp-fedavg"
            sampling = "fixed-size"
            cohort-size = 9
            nbafl.delta = 0.1
            [[points]]
            method = "nbafl"
        """)
    )
    assert settings(file) == [
        {"sampling-rate": 0.2, "momentum": 0.5, "dp-fedavg.clip-norm": 0.5, "vehicle.own": 1, "method": "dp-fedavg"},
        {"sampling-rate": 0.2, "momentum": 0.5, "vehicle.own": 1, "method": "dp-fedsam"},
        # What a point itself says is kept, and refused if its method does not read it.
        {"momentum": 0.5, "dp-fedavg.clip-norm": 0.5, "vehicle.own": 1, "method": "dp-fedavg"}
        | {"sampling": "fixed-size", "cohort-size": 9, "nbafl.delta": 0.1},
        {"sampling-rate": 0.2, "momentum": 0.5, "nbafl.clip-norm": 3.0, "vehicle.own": 1, "method": "nbafl"},
    ]
    with pytest.raises(ValueError, match=r"nbafl.clip-norm=3.0: is in \[settings\], and no point reads it"):
        read(write("[settings]\nmethod = 'dp-fedavg'\nnbafl.clip-norm = 3.0"))


def test_what_a_file_says_by_default_and_not(write):
    file = read(write(""))
    assert (settings(file), file.seeds, file.select) == ([{}], (0,), None)
    assert (file.workers, file.supernodes, file.jobs, file.gpus_per_worker) == (None, None, None, 0.0)
    text = "seeds = 3\nmetric = 'loss'\nselect = {metric = 'validation-loss', mode = 'min'}\n"
    file = read(write(f"{text}workers = 2\nsupernodes = 4\njobs = 3\ngpus-per-worker = 0.5"))
    assert (file.seeds, file.metric, file.select) == ((0, 1, 2), "loss", SelectionRule(metric="validation-loss", mode="min"))
    assert (file.workers, file.supernodes, file.jobs, file.gpus_per_worker) == (2, 4, 3, 0.5)
    # Without a known method all settings hold.
    assert settings(read(write("[settings]\nmethod = 'mine'\ndp-fedavg.x = 2"))) == [{"method": "mine", "dp-fedavg.x": 2}]


def test_folders_are_relative_to_the_file(write, own_app, tmp_path):
    file = read(write('app = "mine"\n[settings]\ndata-dir = "data"\nout = "data"'))
    assert file.points[0].app == str(own_app)
    assert settings(file) == [{"data-dir": str(tmp_path / "data"), "out": "data"}]
    assert read(write('app = "mnist-dp-fedavg"')).points[0].app == "mnist-dp-fedavg"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("seeds = ", "must be TOML"),
        ("num-rounds = 3", "num-rounds: is not a key of a sweep; put settings of runs into [settings]"),
        ("seeds = true", "seeds=True: must be a whole number >= 1"),
        ("seeds = [1, 1]", "seeds=[1, 1]: must be the number of seeds, or an array of different whole numbers"),
        ("workers = 0", "workers=0: must be a whole number >= 1"),
        ("select = {mode = 'max'}", "select.metric: is missing"),
        ("select = {metric = 'a', mode = 'best'}", "select.mode='best': must be one of max, min"),
        ("select = {metric = 'a', by = 'best'}", "select.by: is not a key of [select]"),
        ("points = []", "points: must be one [[points]] table or more"),
        ("[grid]\na = []", "a=[]: must have one value or more"),
        ("[grid]\na = [1]\n[[points]]\na = 2", "a: is in [grid] and in point 1"),
        ("[grid]\na = [[1]]", "a=[1]: must be a string, a number, true or false"),
        ("[settings]\nseed = 1", "seed: set seeds instead"),
        ("[grid]\noutput-dir = ['a']", "output-dir: the sweep gives each run its folder"),
        ("[grid]\n'METHOD.epsilon' = [1.0]", "METHOD.epsilon: needs a method"),
        ("[grid]\napp = [1]", "app=1: must be a preset, a task, or the folder of an app"),
    ],
)
def test_what_is_refused(write, text, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        read(write(text))


def test_all_that_is_wrong_is_told_at_once(write, tmp_path):
    with pytest.raises(ValueError, match="workers=0") as caught:
        read(write("workers = 0\nseeds = 0\njobs = 0\n[grid]\nseed = [1]"))
    assert [re.match("[a-z-]+", line)[0] for line in str(caught.value).splitlines()] == ["workers", "seeds", "jobs", "seed"]
    with pytest.raises(ValueError, match="can't be read"):
        read(tmp_path / "none.toml")

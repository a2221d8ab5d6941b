"""The package without a checkout: the wheel is built, installed beside the dependencies, and used from an empty folder."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from flower_dp.running.run_folder import RESULTS

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def wheel(tmp_path_factory):
    """The wheel of a copy of the sources: building leaves folders behind."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(REPOSITORY / "flower_dp", source / "flower_dp", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    built = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), str(source))
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture
def installed(wheel, tmp_path_factory):
    """Run `flower-dp` of an environment that has the wheel and the dependencies, but not the checkout."""
    room = tmp_path_factory.mktemp("installed")
    venv.create(room / "venv", symlinks=True)
    python = room / "venv" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(room / "venv")}))
    # Folders that a .pth names are searched last, and their own .pth files, such as an editable install's, are not read.
    (site / "dependencies.pth").write_text("".join(f"{sysconfig.get_path(name)}\n" for name in ("purelib", "platlib")))
    _pip("--python", str(python), "install", "--no-deps", "--no-index", "--no-compile", str(wheel))
    for program in metadata.entry_points(group="console_scripts"):
        if program.name.startswith(("flwr", "flower-super")):
            script = python.with_name(program.name)
            script.write_text(f"#!{python}\nimport sys\nfrom {program.module} import {program.attr} as main\nsys.exit(main())\n")
            script.chmod(0o755)
    empty, home = room / "empty", room / "home"
    empty.mkdir()
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}
    environment |= {"HOME": str(home), "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}

    def run(*arguments, program="flower-dp"):
        command = [python.with_name(program), *arguments]
        return subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)

    where = run("-c", "import flower_dp; print(flower_dp.__file__)", program="python")
    assert where.stdout == f"{site / 'flower_dp' / '__init__.py'}\n"
    return run


def _pip(*arguments):
    subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, check=True)


def assert_holds_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = [REPOSITORY / "flower_dp" / "py.typed", *(REPOSITORY / "flower_dp").rglob("*.py")]
    wanted += [path for room in ("apps/presets", "templates") for path in (REPOSITORY / "flower_dp" / room).iterdir()]
    assert {name for name in names if ".dist-info/" not in name} == {str(path.relative_to(REPOSITORY)) for path in wanted}


def assert_a_new_app_runs_at_once(installed, tmp_path):
    """`flower_dp.app` around a model and data, in a folder outside of the checkout: results, and what is shown."""
    app = tmp_path / "mine"
    done = installed("new", str(app))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"Run it with: flower-dp run {app}"
    assert {path.name for path in app.iterdir()} == {"README.md", "mine", "pyproject.toml"}
    done = installed("run", str(app), "--workers", "1", "--set", "num-rounds=2")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("results: ")
    run = Path(lines[-1].removeprefix("results: "))
    assert run.parts[-3:-1] == (".flower-dp", "runs")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows if {"loss", "accuracy", "epsilon"} <= set(row)] == [0, 1, 2]
    assert json.loads((run / "statement.json").read_text())["guarantee"]["private"]
    assert {path.name for path in run.iterdir()} == set(RESULTS)
    assert sum("Privacy statement: DP-FedAvg" in line for line in lines) == 1


def assert_a_plan_from_a_preset(installed):
    done = installed(
        *("plan", "fedsgd-dpc", "--estimate-from", "mnist-fedsgd-dpc-laplace", "--json"),
        *("--set", "num-clients=4", "--set", "cohort-size=2", "--set", "partition=sample", "--set", "records-per-client=25"),
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert json.loads(done.stdout)["inputs"]["num_clients"] == 4


@pytest.mark.wheel
@pytest.mark.flwr_run
def test_the_wheel_without_the_checkout(wheel, installed, tmp_path):
    """One test, so that one process of pytest-xdist makes the wheel, once."""
    assert_holds_the_package_and_nothing_else(wheel)
    done = installed("presets")
    presets = {path.stem for path in (REPOSITORY / "flower_dp" / "apps" / "presets").glob("*.toml")}
    assert {line.split()[0] for line in done.stdout.splitlines()} == presets
    assert_a_plan_from_a_preset(installed)
    assert_a_new_app_runs_at_once(installed, tmp_path)

"""What is optional is not needed: the library without the command line's packages, and the command line's word about them."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
# Makes the imports of these packages fail as if they were not installed, for flower_dp; Flower itself needs some of them.
BLOCK = """
import builtins, sys
blocked, original = set({packages!r}), builtins.__import__
def absent(name, globals=None, *rest, **more):
    package = name.partition(".")[0]
    if package in blocked and (globals or {{}}).get("__name__", "").startswith("flower_dp"):
        raise ModuleNotFoundError(f"No module named {{package!r}}", name=package)
    return original(name, globals, *rest, **more)
builtins.__import__ = absent
"""
COMMAND_LINE = ["click", "psutil", "rich", "safetensors", "tomli_w", "typer"]


def without(packages, code, *arguments):
    code = BLOCK.format(packages=packages) + code
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
def test_a_server_needs_neither_the_command_line_nor_pictures_nor_torch():
    code = (
        "import pkgutil, importlib, flower_dp\n"
        "rooms = ('core', 'privacy', 'planning', 'wire', 'strategies')\n"
        "for module in pkgutil.walk_packages(flower_dp.__path__, 'flower_dp.'):\n"
        "    if module.name.split('.')[1] in rooms and module.name != 'flower_dp.planning.plot':\n"
        "        importlib.import_module(module.name)\n"
        "print(sorted({'matplotlib', 'torch', 'psutil', 'safetensors', 'ray'} & set(sys.modules)), len(sys.modules) > 100)"
    )
    done = without([*COMMAND_LINE, "matplotlib", "torch", "opacus", "ray"], code)
    assert (done.stdout, done.stderr) == ("[] True\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "arguments", "message"),
    [
        ("typer", ["presets"], "typer is not installed: pip install 'flower-dp[cli]'"),
        ("rich", ["run"], "rich is not installed: pip install 'flower-dp[cli]'"),
        ("matplotlib", ["compare", "nowhere"], "matplotlib is not installed: pip install 'flower-dp[plot]'"),
    ],
)
def test_the_command_line_says_which_extra_it_needs(missing, arguments, message):
    done = without([missing], "from flower_dp.cli.entry import main; main()", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {message}\n")


def test_pip_takes_no_torchvision_of_its_own_choice_for_a_first_try():
    """It would be a CUDA build, which does not import beside torch's CPU build."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name for name, needs in extras.items() if any(need.startswith("torchvision") for need in needs)] == ["vision"]
    assert [name for name, needs in extras.items() if any("vision" in need.partition("[")[2] for need in needs)] == ["dev"]

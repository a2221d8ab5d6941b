"""The docs site builds without a warning, and what is broken stops it."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from flower_dp import clients, strategies
from flower_dp.cli.main import app
from flower_dp.methods import METHODS
from flower_dp.privacy import planned_run
from flower_dp.running.apps import flatten
from flower_dp.sweeps.sweep import Sweep

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
SITE = ("mkdocs", "material", "mkdocstrings", "mkdocs_jupyter")
needs_mkdocs = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in SITE), reason="the extra flower-dp[docs] is not installed"
)


# The broken links that a hook of the test adds, each to the page that it is for.
FAULTS = {"benchmarks.md": "[a](no-page.md)", "settings.md": "[b](privacy.md#no-part)", "planning.md": "[c](../README.md)"}
HOOK = f"""
def on_page_markdown(markdown, *, page, **_):
    return markdown + "\\n\\n" + {FAULTS!r}.get(page.file.src_uri, "")
"""


@needs_mkdocs
@pytest.mark.slow
def test_the_site_has_every_page_and_the_public_classes_and_broken_links_stop_its_build(tmp_path):
    """Built with the project's own settings, three broken links and no search: the links are all that is wrong."""
    (tmp_path / "faults.py").write_text(HOOK)
    settings = (REPOSITORY / "mkdocs.yml").read_text()
    for own, here in (
        ("docs_dir: docs\n", f"docs_dir: {DOCS}\n"),
        ("hooks: [docs/hooks.py]\n", f"hooks: [{DOCS}/hooks.py, faults.py]\n"),
        ("paths: [.]\n", f"paths: [{REPOSITORY}]\n"),
        ("docs/api/docstrings.py]\n", f"{DOCS}/api/docstrings.py]\n"),
        ("  - search\n", ""),
    ):
        assert settings.count(own) == 1
        settings = settings.replace(own, here)
    (tmp_path / "mkdocs.yml").write_text(settings)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=tmp_path,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Aborted with 3 warnings in strict mode!" in done.stdout + done.stderr
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    for target in ("no-page.md", "#no-part", "../README.md"):
        assert sum(target in line for line in warnings) == 1, done.stderr
    for page in (*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")):
        place = page.relative_to(DOCS).with_suffix("")
        assert (tmp_path / "site" / (place.parent if place.name == "index" else place) / "index.html").exists(), page
    for room in (strategies, clients):
        text = (tmp_path / "site" / "api" / room.__name__.rpartition(".")[2] / "index.html").read_text()
        assert [name for name in room.__all__ if f'id="{room.__name__}.{name}"' not in text] == []


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_settings_has_every_setting_with_its_default_and_a_meaning(hooks):
    config = flatten(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"])
    rows = re.findall(r"^\| `([\w.-]+)` \| `(.*?)` \| .+? \| (.+) \|$", hooks.settings(), re.MULTILINE)
    shown = {key: str(value).lower() if isinstance(value, bool) else str(value) or '""' for key, value in config.items()}
    assert {key: default for key, default, _ in rows} == shown
    assert len(rows) == len(shown)
    meanings = {key: meaning for key, _, meaning in rows}
    assert meanings["scaffold.clip-norm"] == meanings["dp-fedpaq.clip-norm"]
    assert not any(meaning.startswith("as for") for meaning in meanings.values())


def test_the_page_of_commands_has_every_command_and_option(hooks):
    text = hooks.command_line()
    for name, command in typer.main.get_command(app).commands.items():
        assert f"## `flower-dp {name}`" in text
        for options in (parameter.opts for parameter in command.params if parameter.opts[0].startswith("--")):
            assert f"`{options[0]}" in text, (name, options)


def test_code_with_dollars_is_no_formula_and_a_formula_is_a_picture_with_its_source(hooks):
    code = "`$HOME`, `a $x$ b`\n\n```sh\necho $A $B\n```\n"
    assert hooks.with_formulas(code) == code
    page = hooks.on_page_content(hooks.with_formulas("of $z \\leq C$\n\n$$\n\\sqrt{d}\n$$\n"))
    assert re.findall(r"<title>(.*?)</title>", page) == [r"z \leq C", r"\sqrt{d}"]
    assert page.count("<svg ") == page.count("</svg>") == 2
    with pytest.raises(ValueError, match=r"the formula '\\\\nowhere' can't be drawn"):
        hooks.drawn(r"\nowhere", block=False)


def test_the_tutorial_has_the_outputs_of_a_whole_run_in_order():
    cells = json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {(output["output_type"], output["name"]) for output in outputs} == {("stream", "stdout")}
    assert any("Privacy statement: FedSGD-DPC" in "".join(output["text"]) for output in outputs)


@pytest.mark.slow
def test_the_tables_of_choosing_parameters():
    """Noise multipliers meet their epsilon and are hardly larger; the ratios are theirs."""
    text = (DOCS / "choosing-parameters.md").read_text(encoding="utf-8")
    noise, ratios = (
        [[cell.strip(" *").replace(",", "") for cell in line.split("|")[1:-1]] for line in part.splitlines()]
        for part in re.findall(r"^\| N \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)[:2]
    )
    assert [row[0] for row in noise] == [row[0] for row in ratios] == ["100", "1000", "10000", "100000"]
    for row, ratio in zip(noise, ratios, strict=True):
        clients, multiplier = int(row[0]), float(row[-1])
        assert float(row[1]) == pytest.approx(clients**-1.1, rel=5e-3)
        for cell, size in zip(ratio[1:], (1e3, 1e4, 1e5, 1e6, 1e7), strict=True):
            assert float(cell) == pytest.approx(multiplier * size**0.5 / (0.1 * clients), rel=0.06)
    for row, epsilon, column in ((noise[0], 1, 2), (noise[1], 8, 5), (noise[3], 4, 4)):
        options = {"mechanism": "gaussian", "sampling": "poisson", "sampling_rate": 0.1, "cohort_size": None, "num_clients": None}
        run = planned_run.from_options(**options, relation=None, num_rounds=100, delta=float(row[1]))
        multiplier = float(row[column])
        assert run.cost(multiplier)["epsilon"] <= epsilon < run.cost(multiplier - 0.011)["epsilon"]


def test_no_page_names_a_machine():
    for page in (*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb"), REPOSITORY / "README.md"):
        found = re.findall(r"/(?:home|tmp|root|work|Users)/[\w./-]*", page.read_text(encoding="utf-8"))
        assert not found, (page, found)


METHOD_PAGES = ("client-level-methods.md", "dp-ftrl.md", "local-methods.md")
# A picture, and the paragraph below it: its caption.
PICTURE = re.compile(r"^!\[[^\]]+\]\(([\w./-]+\.png)\)\n\n((?:.+\n?)+)", re.MULTILINE)


def fault(command):
    """Return what a caption's command names that does not exist, if anything."""
    program, *words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    if program == "python":
        file = REPOSITORY / words[0]
        known = set(re.findall(r'"(--[\w-]+)"', file.read_text(encoding="utf-8"))) if file.is_file() else set()
    else:
        command = typer.main.get_command(app).commands.get(words[0]) if program == "flower-dp" else None
        known = {option for parameter in command.params for option in parameter.opts} if command else set()
    named = {word.partition("=")[0] for word in words if word.startswith("--")}
    files = [word for word in words if word.endswith((".toml", ".py")) and not (REPOSITORY / word).is_file()]
    return [*files, *sorted(named - known), *([] if known else [f"{program} {words[0]}"])]


def test_the_site_has_at_most_26_pages_and_each_begins_with_whom_it_is_for():
    pages = [*DOCS.glob("*.md"), *DOCS.glob("*.ipynb"), DOCS / "api"]
    assert len(pages) <= 26
    for page in pages:
        if page.suffix == ".md" and page.stem not in ("index", "changes"):
            assert re.match(r"# .+\n\nFor (everyone|reviewers)", page.read_text(encoding="utf-8")), page


def test_all_methods_have_a_section():
    text = "".join((DOCS / page).read_text(encoding="utf-8").lower() for page in METHOD_PAGES)
    assert [name for name in METHODS if f"\n## {name}" not in text] == []


def test_pictures_name_the_command_that_makes_them():
    found = PICTURE.findall((DOCS / "benchmarks.md").read_text(encoding="utf-8"))
    assert [name for name in METHODS if not any(picture.startswith(name) for picture, _ in found)] == []
    for picture, caption in found:
        assert (DOCS / picture).read_bytes().startswith(b"\x89PNG\r\n")
        commands = [span for span in re.findall(r"`([^`]+)`", caption) if " " in span]
        assert commands, picture
        for command in commands:
            assert fault(command) == [], command


@pytest.mark.parametrize("path", sorted((REPOSITORY / "benchmarks").glob("*.toml")), ids=lambda path: path.stem)
def test_the_sweeps_of_tables_and_pictures_can_be_made(path):
    """All settings of all points are known and fit together."""
    assert Sweep.read(path).runs

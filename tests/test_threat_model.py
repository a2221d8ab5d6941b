"""docs/threat-model.md has a row for everything that crosses a boundary, and names checks and tests that there are."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.threat_fields import NOT_SENT, PACKAGE, ROOT, SECTIONS, SENT, everywhere, wire_dataclasses

PAGE = ROOT / "docs" / "threat-model.md"
# Sections of rows that people have thought of, and of which the code has no list.
FREE = ("Timing",)
BOUNDARIES = (
    "Server to device",
    "Device to server",
    "Participant to participant",
    "Run to the reader of its files",
    "Run to run",
    "Timing",
)
CODE = re.compile(r"`([^`]+)`")


class Row:
    """A row of the page: what crosses, who sets it, what it could hurt, checks and tests."""

    def __init__(self, cells: list[str]) -> None:
        self.cells = cells
        self.names = CODE.findall(cells[0]) or [cells[0]]
        self.checks, self.tests = CODE.findall(cells[3]), CODE.findall(cells[4])


def rows_of(page: str) -> dict[str, list[Row]]:
    """The rows of every section with a table of five columns."""
    found: dict[str, list[Row]] = {}
    for part in re.split(r"^#{2,3} ", page, flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        lines = [re.split(r" +\| +", line.strip().strip("|").strip()) for line in text.splitlines() if line.startswith("| ")]
        first, *others = [Row(cells) for cells in lines if len(cells) == 5] or [None]
        if first:
            assert first.cells == ["what", "set by", "could hurt", "bounded by", "attacked by"], title
            found[title] = others
    return found


@cache
def rows() -> dict[str, list[Row]]:
    return rows_of(PAGE.read_text(encoding="utf-8"))


def differences(section: list[Row], fields: set[str]) -> list[str]:
    """What is wrong with a section, a line each: fields without a row or with two, rows of a field that there is not."""
    names = [name for row in section for name in row.names]
    return [
        *(f"{name}: is in the code, and has no row" for name in sorted(fields - set(names))),
        *(f"{name}: has a row, and is not in the code" for name in sorted(set(names) - fields)),
        *(f"{name}: has two rows" for name in sorted({name for name in names if names.count(name) > 1})),
    ]


@pytest.mark.parametrize("title", SECTIONS)
def test_every_field_that_crosses_a_boundary_has_a_row(title: str) -> None:
    fields = SECTIONS[title]()
    assert fields
    assert not differences(rows()[title], fields)


def test_every_table_is_compared_with_the_code_but_for_those_without_a_list() -> None:
    assert set(rows()) - set(FREE) == set(SECTIONS)
    page = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", page, re.MULTILINE)[1:] == list(BOUNDARIES)


def test_every_dataclass_of_the_wire_is_in_a_section() -> None:
    """So that a new one is no way around the page."""
    assert wire_dataclasses() == SENT | NOT_SENT
    named = {name.partition(".")[0] for section in rows().values() for row in section for name in row.names}
    assert named >= SENT


def test_every_row_is_whole_and_names_a_test() -> None:
    assert [row.names for section in rows().values() for row in section if not (all(row.cells) and row.tests)] == []


def defined_tests() -> set[str]:
    files = (ROOT / "tests").rglob("test_*.py")
    return {name for file in files for name in re.findall(r"^def (test_\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE)}


def test_every_test_that_a_row_names_exists() -> None:
    named = {test for section in rows().values() for row in section for test in row.tests}
    assert sorted(named - defined_tests()) == []


@cache
def defined() -> set[str]:
    """What the code defines: functions, classes and constants, alone and behind their class or module."""
    found = set()
    for place, node in everywhere(PACKAGE):
        for name in names_defined(node):
            behind = place.split(".")
            found |= {name, f"{behind[-1]}.{name}"}
            if isinstance(node, ast.FunctionDef) and len(behind) > 1:
                found.add(f"{behind[-2]}.{name}" if behind[-1][:1].islower() else f"{behind[-1]}.{name}")
    return found | {file.stem for file in PACKAGE.rglob("*.py")}


def names_defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from (one.id for one in ast.walk(target) if isinstance(one, ast.Name))


def test_every_check_that_a_row_names_exists() -> None:
    """Names of code are those that look like it: others are words of the wire, files and settings, which the tables list."""
    listed = {name for section in rows().values() for row in section for name in row.names}
    words = listed | {
        "central",
        "local",
        "timeout",
        "num-clients",
        "num-partitions",
        "noise_seed",
        "create-server",
        "create-device",
    }
    named = {check for section in rows().values() for row in section for check in row.checks}
    assert sorted(named - words - defined()) == []

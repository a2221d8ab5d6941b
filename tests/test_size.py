"""The size of the house: lines of code a package and a file, members of the spine, and no circle of imports.

A line of code has a token that is neither a comment nor part of a docstring. Whoever makes a package smaller lowers its number
here. The goal is 18,500 lines; no file may be over 350 lines.
"""

import ast
import graphlib
import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest

from flower_dp.strategies.releases.release import Release
from flower_dp.strategies.rules import MethodRules

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "flower_dp").rglob("*.py"))

LIMITS = {
    "flower_dp/strategies": 6275,
    "flower_dp/clients": 4910,
    "flower_dp/privacy": 2643,
    "flower_dp/apps": 2219,
    "flower_dp/planning": 1904,
    "flower_dp/running": 1544,
    "flower_dp/audit": 1097,
    "flower_dp/sweeps": 1296,
    "flower_dp/simulation": 1200,
    "flower_dp/cli": 1266,
    "flower_dp/core": 1158,
    "flower_dp/reporting": 977,
    "flower_dp/wire": 637,
    "flower_dp/methods": 229,
    "flower_dp": 19,
}

LONGEST_FILE = 350
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> int:
    """Count the lines of code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def package_of(path: Path) -> str:
    """Return the package that a file counts for: a folder of `flower_dp`, or its modules beside those."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def imports_of(text: str, modules: set[str]) -> set[str]:
    """Return the modules among these that a text imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


def import_graph() -> dict[str, set[str]]:
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    return {name: imports_of(path.read_text(encoding="utf-8"), set(files)) for name, path in files.items()}


def test_no_package_is_larger_than_its_limit():
    sizes: Counter[str] = Counter()
    for path in FILES:
        sizes[package_of(path)] += code_lines(path.read_text(encoding="utf-8"))
    assert set(sizes) == set(LIMITS)
    assert {name: size for name, size in sizes.items() if size > LIMITS[name]} == {}


def test_no_file_is_too_long():
    sizes = {str(path.relative_to(ROOT)): code_lines(path.read_text(encoding="utf-8")) for path in FILES}
    assert {name: size for name, size in sizes.items() if size > LONGEST_FILE} == {}


def test_there_is_no_circle_of_imports():
    """Those under TYPE_CHECKING and in functions counted; the error names one."""
    graphlib.TopologicalSorter(import_graph()).prepare()


@pytest.mark.parametrize("kind", [MethodRules, Release])
def test_what_a_method_must_have_is_little(kind):
    assert len([name for name in vars(kind) if not name.startswith("_")]) <= 8


def test_code_lines_by_hand():
    text = '"""Module.\n\nMore."""\n\nimport os  # why\n\n# A comment.\n\n\ndef f(\n    a,\n):\n    """Docstring."""\n    return """text\n\n    """\n'
    assert code_lines(text) == 1 + 3 + 3
    assert code_lines('class A:\n    """Docstring\n    of two lines."""\n\n    x = 1\n') == 2
    assert code_lines("") == 0


def test_imports_that_count():
    modules = {"p.a", "p.b", "p"}
    text = "import os\nfrom p import a\nif TYPE_CHECKING:\n    from p.b import B\ndef f():\n    import p\n"
    assert imports_of(text, modules) == {"p.a", "p.b", "p"}

"""No code reads a sentence: what one part of the package tells another about an error is a type, a code or a field, never its text."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "flower_dp"
# Functions that read what somebody else says, who has no code for it; each says why.
ALLOWED = {
    "apps.tasks.vision.import_torchvision": "torchvision says by a text alone that it is of another torch",
    "clients.training.devices.is_out_of_memory": "CUDA's libraries say by a text alone that an allocation has failed",
    "strategies.population.client_query._unknown": "Flower has one code for all errors of an app",
}
_READS = {"startswith", "endswith", "find", "index", "count", "partition", "rpartition", "split", "rsplit", "removeprefix"}


def reads_a_sentence(scope: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function compares, searches or takes apart the text of an error."""
    caught = {node.name for node in ast.walk(scope) if isinstance(node, ast.ExceptHandler) and node.name}
    caught |= {one.arg for one in scope.args.args if one.annotation is not None and "Exception" in ast.unparse(one.annotation)}
    return any(is_sentence(part, caught) for node in ast.walk(scope) for part in parts_read(node))


def parts_read(node: ast.AST) -> list[ast.expr]:
    """Return what an expression reads as text."""
    if isinstance(node, ast.Compare) and any(isinstance(op, ast.In | ast.NotIn | ast.Eq | ast.NotEq) for op in node.ops):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in _READS and (node.args or node.func.attr != "split"):  # by white space: to show it on one line
            return [node.func.value]
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "re":
            return list(node.args)
    return []


def is_sentence(node: ast.expr, caught: set[str]) -> bool:
    """Return whether an expression is the text of an error, or named as one."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr") and node.args:
        return isinstance(node.args[0], ast.Name) and node.args[0].id in caught
    if isinstance(node, ast.Attribute):
        return node.attr in ("reason", "args") or is_sentence(node.value, caught)
    if isinstance(node, ast.Subscript):
        return is_sentence(node.value, caught)
    return isinstance(node, ast.Name) and node.id == "reason"


def found() -> set[str]:
    places = set()
    for file in PACKAGE.rglob("*.py"):
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and reads_a_sentence(node):
                places.add(f"{module}.{node.name}")
    return places


def test_no_code_reads_a_sentence() -> None:
    """Those that are allowed are found, so that the search is known to work."""
    assert found() == set(ALLOWED)

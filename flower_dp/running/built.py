"""Which apps `flower_dp.app` makes: found in the text of a ServerApp's module, without importing it."""

import ast
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

# The module that makes one from functions that the run-config names.
FROM_CONFIG = "flower_dp.from_config"


def is_built(folder: Path, server: str) -> bool:
    """Return whether `flower_dp.app` makes an app's ServerApp, as far as the text of its module says.

    Args:
        folder: of the app's pyproject.toml.
        server: the ServerApp, as "module:name".

    Example:
        >>> from pathlib import Path
        >>> from flower_dp.running.built import is_built
        >>> is_built(Path("."), "flower_dp.from_config:app.server"), is_built(Path("."), "nowhere:app")
        (True, False)
    """
    if server.partition(":")[0] == FROM_CONFIG:
        return True
    tree = tree_of(folder, server)
    return tree is not None and _calls_app(tree)


def tree_of(folder: Path, server: str) -> ast.Module | None:
    """Return the syntax tree of the module that has an app's ServerApp; None if it can't be read."""
    place = folder.joinpath(*server.partition(":")[0].split("."))
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        with suppress(OSError, SyntaxError, ValueError):
            return _parsed(file.read_bytes())
    return None


# A sweep asks for each of its runs.
@lru_cache(maxsize=16)
def _parsed(source: bytes) -> ast.Module:
    return ast.parse(source)


@lru_cache(maxsize=16)
def _calls_app(tree: ast.Module) -> bool:
    names = _names(tree)
    return any(isinstance(node, ast.Call) and _named(node.func) in names for node in ast.walk(tree))


def _names(tree: ast.Module) -> set[str]:
    """Return what `flower_dp.app` is called in a module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name == "flower_dp":
                    found.add(f"{one.asname or one.name}.app")
        elif isinstance(node, ast.ImportFrom) and node.module == "flower_dp" and not node.level:
            found |= {one.asname or one.name for one in node.names if one.name == "app"}
    return found


def _named(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{_named(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""

"""Every public class shows how it is used, and every example in a docstring says what comes out."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import flower_dp

ROOT = Path(flower_dp.__file__).parents[1]
SHOWING = sorted(path for path in (ROOT / "flower_dp").rglob("*.py") if ">>> " in path.read_text())

# Where users find the classes; each has an __all__, or holds parts that users build runs of.
EXPORTING = ["strategies", "clients"]
PARTS = [
    "wire",
    "core.sampling",
    "core.vectors",
    "privacy.charges",
    "privacy.mechanisms",
    "privacy.release",
    "privacy.planned_run",
]


def public_classes():
    for room in EXPORTING:
        module = importlib.import_module(f"flower_dp.{room}")
        exported = (getattr(module, name) for name in module.__all__)
        yield from (item for item in exported if inspect.isclass(item) and not getattr(item, "_is_protocol", False))
    for name in PARTS:
        module = importlib.import_module(f"flower_dp.{name}")
        own = (item for word, item in inspect.getmembers(module, inspect.isclass) if word[0] != "_")
        yield from (
            item for item in own if item.__module__.startswith(module.__name__) and not getattr(item, "_is_protocol", False)
        )


@pytest.mark.parametrize("shown_class", list(dict.fromkeys(public_classes())), ids=lambda item: item.__name__)
def test_every_public_class_has_an_example(shown_class):
    assert ">>> " in (inspect.getdoc(shown_class) or ""), f"{shown_class.__name__} has no example"


@pytest.mark.exact
@pytest.mark.parametrize("path", SHOWING, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples(path):
    """pytest collects them too (`--doctest-modules`), but looks for them in every file of tests, in every process."""
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed

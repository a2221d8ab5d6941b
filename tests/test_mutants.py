"""The list of planted bugs is one that can be planted; `make mutants` plants it."""

import functools
import importlib.util
import sys
from pathlib import Path

import pytest

PLANT = Path(__file__).parent / "mutants" / "plant.py"
spec = importlib.util.spec_from_file_location("plant", PLANT)
plant = importlib.util.module_from_spec(spec)
sys.modules["plant"] = plant  # where dataclasses look their own module up
spec.loader.exec_module(plant)
MUTANTS = plant.mutants()


def test_no_two_planted_bugs_are_the_same():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.place, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_every_bug_can_be_planted_once_and_its_tests_exist():
    """All of them in one test: most of the time of a test of its own would be pytest's."""
    wrong = []
    text = functools.cache(lambda file: (plant.ROOT / file).read_text(encoding="utf-8"))
    sources = plant.sources_of(plant.ROOT)
    for mutant in MUTANTS:
        try:
            file, planted = mutant.planted(sources)
            assert planted != sources.text(file), "changes nothing"
            assert mutant.name.endswith("."), "the name must end with a full stop"
            assert mutant.tests, "names no test"
            for test in mutant.tests:
                file, _, function = test.partition("::")
                assert f"def {function.partition('[')[0]}(" in text(file), f"no such test: {test}"
        except (AssertionError, OSError, ValueError) as error:
            wrong.append(f"{mutant.place}: {mutant.name} {error}")
    assert not wrong, "\n".join(wrong)


SOURCE = """
import os


class A:
    x: int = 1

    @property
    def f(self):
        if self.x:
            return 2
        return (self.x
                + 3)


def f():
    def g():
        return 4
    return g() + g()
"""


def planted(tmp_path, **arguments):
    (tmp_path / "part.py").write_text(SOURCE)
    (tmp_path / "apps").mkdir(exist_ok=True)
    (tmp_path / "apps" / "other.py").write_text("def f():\n    return 5\n")
    mutant = plant.Mutant(**{"name": "A bug.", "tests": ("t",), **arguments})
    file, text = mutant.planted(plant.Sources(tmp_path))
    return file.name, text


@pytest.mark.parametrize(
    ("arguments", "changed", "to"),
    [
        (
            {"function": "A.f", "old": "return (self.x + 3)", "new": "return 3"},
            "return (self.x\n                + 3)",
            "return 3",
        ),
        ({"function": "A.f", "old": "@property", "new": ""}, "@property", ""),
        ({"function": "A.f", "old": "return 2", "new": "y = 1\n        return y"}, "return 2", "y = 1\n            return y"),
        ({"function": "f", "old": "g() + g()", "new": "0"}, "g() + g()", "0"),
        ({"module": "part", "old": "import os", "new": "import sys"}, "import os", "import sys"),
        ({"module": "part", "function": "f", "old": "return 4", "new": "return 5"}, "return 4", "return 5"),
    ],
)
def test_a_bug_is_planted_in_its_function_wherever_that_is(tmp_path, arguments, changed, to):
    assert planted(tmp_path, **arguments) == ("part.py", SOURCE.replace(changed, to, 1))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"function": "f", "old": "return", "new": ""}, "3 times in f: must be once; name the module"),
        ({"function": "f", "old": "g()+", "new": "g()-", "module": "apps.other"}, "0 times in apps.other:f"),
        ({"function": "A.f", "old": "return", "new": ""}, "2 times in A.f: must be once$"),
        ({"module": "gone", "function": "f", "old": "g() + g()", "new": ""}, "no function, class or module gone:f"),
        ({"old": "return 5", "new": ""}, "no function, class or module"),
    ],
)
def test_a_text_that_is_not_exactly_once_in_its_function_is_refused(tmp_path, arguments, reason):
    with pytest.raises(ValueError, match=reason):
        planted(tmp_path, **arguments)


TESTS = "def test_one():\n    from part import ONE\n    assert ONE == 1\n\ndef test_any():\n    import part\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "caught"),
        ({"tests": ("test_part.py::test_any",)}, "SURVIVED"),
        ({"old": "TWO"}, "BROKEN"),
        ({"tests": ("test_part.py::test_none",)}, "BROKEN"),
        ({"module": "test_part", "old": "def test_any():", "new": "def test_any(:"}, "BROKEN"),
    ],
)
def test_a_bug_is_caught_only_by_a_test_that_fails(tmp_path, monkeypatch, changes, word):
    monkeypatch.syspath_prepend(str(PLANT.parent))  # where its processes look for what they run
    monkeypatch.setitem(sys.modules, "plant", plant)  # tests of changed modules import modules again
    (tmp_path / "part.py").write_text("ONE = 1\n")
    (tmp_path / "test_part.py").write_text(TESTS)
    arguments = {"name": "One is two.", "module": "part", "old": "1", "new": "2", "tests": ("test_part.py",)}
    assert plant.plant(plant.Mutant(**arguments | changes), tmp_path)[0] == word
    assert (tmp_path / "part.py").read_text() == "ONE = 1\n"
    assert (tmp_path / "test_part.py").read_text() == TESTS


def test_the_tree_itself_is_not_what_bugs_are_planted_in():
    file = "flower_dp/strategies/strategy.py"
    with plant.copied_tree() as tree:
        assert plant.ROOT not in (tree, *tree.parents)
        assert (tree / file).read_bytes() == (plant.ROOT / file).read_bytes()
    assert not tree.exists()

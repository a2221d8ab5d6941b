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
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_every_bug_can_be_planted_once_and_its_tests_exist():
    """All of them in one test: most of the time of a test of its own would be pytest's."""
    wrong = []
    text = functools.cache(lambda file: (plant.ROOT / file).read_text(encoding="utf-8"))
    for mutant in MUTANTS:
        try:
            planted = mutant.planted(text(mutant.file))
            assert planted != text(mutant.file), "changes nothing"
            assert mutant.name.endswith("."), "the name must end with a full stop"
            assert mutant.tests, "names no test"
            for test in mutant.tests:
                file, _, function = test.partition("::")
                assert f"def {function.partition('[')[0]}(" in text(file), f"no such test: {test}"
        except (AssertionError, OSError, ValueError) as error:
            wrong.append(f"{mutant.file}: {mutant.name} {error}")
    assert not wrong, "\n".join(wrong)


def test_a_text_that_is_not_exactly_once_in_its_file_is_refused():
    mutant = plant.Mutant(name="A bug.", file="f.py", old="x", new="y", tests=("t",))
    assert mutant.planted("x = 1") == "y = 1"
    for text in ("z", "x x"):
        with pytest.raises(ValueError, match="must be once"):
            mutant.planted(text)


TESTS = "def test_one():\n    from part import ONE\n    assert ONE == 1\n\ndef test_any():\n    import part\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "caught"),
        ({"tests": ("test_part.py::test_any",)}, "SURVIVED"),
        ({"old": "TWO"}, "BROKEN"),
        ({"tests": ("test_part.py::test_none",)}, "BROKEN"),
        ({"file": "test_part.py", "old": "def test_any():", "new": "def test_any(:"}, "BROKEN"),
    ],
)
def test_a_bug_is_caught_only_by_a_test_that_fails(tmp_path, monkeypatch, changes, word):
    monkeypatch.syspath_prepend(str(PLANT.parent))  # where its processes look for what they run
    monkeypatch.setitem(sys.modules, "plant", plant)  # tests of changed modules import modules again
    (tmp_path / "part.py").write_text("ONE = 1\n")
    (tmp_path / "test_part.py").write_text(TESTS)
    arguments = {"name": "One is two.", "file": "part.py", "old": "1", "new": "2", "tests": ("test_part.py",)}
    assert plant.plant(plant.Mutant(**arguments | changes), tmp_path).word == word
    assert (tmp_path / "part.py").read_text() == "ONE = 1\n"
    assert (tmp_path / "test_part.py").read_text() == TESTS


def test_the_tree_itself_is_not_what_bugs_are_planted_in():
    with plant.copied_tree() as tree:
        assert plant.ROOT not in (tree, *tree.parents)
        assert (tree / "flower_dp" / "strategies" / "strategy.py").read_bytes() == (
            plant.ROOT / "flower_dp" / "strategies" / "strategy.py"
        ).read_bytes()
    assert not tree.exists()

"""Plant known bugs one by one, and report those that no test notices.

    python tests/mutants/plant.py [--only TEXT] [--tests TEXT] [--list]

First all named tests run without any bug, and must pass. Then each bug of the lists is planted in a temporary copy of the tree, never
in the tree itself, and its tests run. `caught` is a failed test; `SURVIVED` is none; `BROKEN` is a bug that can't be planted,
or tests that can't be collected under it. Exits 1 if any survived or broke.

The lists are the .toml files beside this program, one a package of `flower_dp`, and `rest.toml`. An entry has:

    name      the bug, in one sentence
    function  the function or class where it is planted, by its qualified name (`Class.method`, `function.inner`); none at module
              level
    module    the module of that function: only where another one has a function of the same name with the same text; or the module
              itself
    old       the text that is replaced: exactly once there, white space apart
    new       what stands in its place; lines after the first are indented as if the function began at the left margin
    tests     pytest node ids, all of which pass without the bug, and at least one of which fails with it; narrow ones, so that a
              run of all stays short
"""

import argparse
import ast
import functools
import itertools
import multiprocessing
import os
import queue
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Folders with code in which bugs are planted.
TOPS = ("flower_dp", "apps", "benchmarks", "examples")
HERE = Path(__file__).parent
NOT_COPIED = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "build", "dist", "*.egg-info")
MOST_PROCESSES = 2
MOST_SECONDS = 600
# What most tests import: loaded once, in a process from which those that run tests fork.
LIBRARIES = ["torch", "flwr.app", "flwr.serverapp", "flwr.clientapp", "flwr.client", "scipy.stats", "dp_accounting.pld"]
# What pytest exits with: all passed; some failed.
PASSED, FAILED = 0, 1
_CONTEXT = multiprocessing.get_context("forkserver")


class Sources:
    """The Python files of a tree in which bugs are planted, and what they define; each is read when it is first needed."""

    def __init__(self, tree: Path) -> None:
        files = [*tree.glob("*.py"), *(file for top in TOPS for file in (tree / top).rglob("*.py"))]
        self.files = {
            ".".join(file.relative_to(tree).with_suffix("").parts).removesuffix(".__init__"): file
            for file in files
            if not file.is_symlink()
        }
        self.text = functools.cache(lambda file: file.read_text(encoding="utf-8"))
        self._spans = functools.cache(self._defined)

    def find(self, function: str, module: str) -> list[tuple[Path, int, int, int]]:
        """Return all definitions of a qualified name, in one module or in all: file, start, end and column of each.

        Two functions may share a name, as the getter and the setter of a property do. Without a name it is the module itself.
        """
        word = function.rpartition(".")[2]
        files = [self.files[module]] if module in self.files else [] if module or not function else self.files.values()
        return [(file, *span) for file in files if word in self.text(file) for span in self._spans(file).get(function, ())]

    def _defined(self, file: Path) -> dict[str, list[tuple[int, int, int]]]:
        text = self.text(file)
        starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
        found = {"": [(0, len(text), 0)]}

        def walk(node: ast.AST, name: str) -> None:
            for child in ast.iter_child_nodes(node):
                own = name
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    own = f"{name}.{child.name}".lstrip(".")
                    first = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                    found.setdefault(own, []).append((starts[first - 1], starts[child.end_lineno or first], child.col_offset))
                walk(child, own)

        walk(ast.parse(text), "")
        return found


@functools.cache
def sources_of(tree: Path) -> Sources:
    """Return the sources of a tree, which nobody but `plant` changes, and only for a while."""
    return Sources(tree)


def places_of(quote: str, text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Return where a text has a quotation, white space apart: from its first character to the end of its last one."""
    positions = [place for place in range(start, end) if not text[place].isspace()]
    bare, wanted = "".join(text[place] for place in positions), "".join(quote.split())
    if not wanted:
        return []
    firsts = [match.start() for match in re.finditer(f"(?={re.escape(wanted)})", bare)]
    return [(positions[first], positions[first + len(wanted) - 1] + 1) for first in firsts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A planted bug: in one sentence, the change of one function, and the tests of which at least one must fail."""

    name: str
    function: str = ""
    module: str = ""
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def place(self) -> str:
        """Where it is planted, in words."""
        return ":".join(filter(None, (self.module, self.function)))

    def planted(self, sources: Sources) -> tuple[Path, str]:
        """Return the file that is changed, and its text with the bug.

        Raises:
            ValueError: if there is no such function, or the text to replace is not exactly once in it.
        """
        found = sources.find(self.function, self.module)
        if not found:
            raise ValueError(f"no function, class or module {self.place}")
        matches = {
            (file, *span, column)
            for file, start, end, column in found
            for span in places_of(self.old, sources.text(file), start, end)
        }
        if len(matches) != 1:
            hint = "; name the module" if len({match[0] for match in matches}) > 1 else ""
            raise ValueError(f"old text is {len(matches)} times in {self.place}: must be once{hint}")
        ((file, start, end, column),) = matches
        first, *others = self.new.strip().split("\n")
        new = "\n".join([first, *(" " * column + line if line.strip() else line for line in others)])
        text = sources.text(file)
        return file, text[:start] + new + text[end:]


def mutants() -> list[Mutant]:
    """Return the planted bugs of all lists."""
    listed = [one for file in sorted(HERE.glob("*.toml")) for one in tomllib.loads(file.read_text(encoding="utf-8"))["mutant"]]
    return [Mutant(**{**arguments, "tests": tuple(arguments["tests"])}) for arguments in listed]


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A temporary copy of the working tree, without what is made of it."""
    with tempfile.TemporaryDirectory(prefix="flower-dp-mutant-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        yield tree


def run_tests(tree: Path, tests: Iterable[str], *options: str) -> tuple[int, str]:
    """Run tests in a copy of the tree; return pytest's exit status and what it said.

    Raises:
        TimeoutError: if they take too long.
    """
    # With files of their own: pytest removes those of older runs, and a run that does so at the same time would fail.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        said = Path(folder, "said")
        child = _CONTEXT.Process(target=_pytest_in, args=(str(tree), str(said), [f"--basetemp={folder}/tests", *options, *tests]))
        child.start()
        child.join(MOST_SECONDS)
        if child.exitcode is None:
            child.kill()
            child.join()
            raise TimeoutError(f"its tests took more than {MOST_SECONDS} s")
        return child.exitcode, said.read_text(encoding="utf-8", errors="replace")


def _pytest_in(tree: str, said: str, arguments: list[str]) -> None:
    """Be a process that runs pytest in a tree, and exit as it does."""
    with Path(said).open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(tree)
    # No bytecode: that of a file without the bug could pass for the same file with it.
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.pathsep.join([tree, os.environ.get("PYTHONPATH", "")])}
    sys.path = [tree, *(entry for entry in sys.path if entry not in ("", str(HERE), str(ROOT)))]
    import pytest

    sys.exit(int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments])))


def plant(mutant: Mutant, tree: Path) -> tuple[str, str]:
    """Plant one bug in a copy of the tree, run its tests, and take it out again; return what became of it, and by what."""
    sources = sources_of(tree)
    try:
        target, planted = mutant.planted(sources)
    except ValueError as error:
        return "BROKEN", str(error).splitlines()[0]
    try:
        target.write_text(planted, encoding="utf-8")
        status, said = run_tests(tree, mutant.tests, "-x", "--tb=no")
    except TimeoutError as error:
        return "BROKEN", str(error)
    finally:
        target.write_text(sources.text(target), encoding="utf-8")
    if status == PASSED:
        return "SURVIVED", ", ".join(mutant.tests)
    failed = re.search(r"^FAILED (\S+)", said, re.MULTILINE)
    if status != FAILED or failed is None:
        return "BROKEN", f"pytest exited with {status}: {''.join(said.strip().splitlines()[-1:])}"
    return "caught", failed[1]


def check_unplanted(chosen: list[Mutant], num_processes: int) -> bool:
    """Run all tests that the mutants name, without any bug; tell whether they pass."""
    by_file: dict[str, dict[str, None]] = {}
    for test in (test for mutant in chosen for test in mutant.tests):
        by_file.setdefault(test.partition("::")[0], {})[test] = None
    with copied_tree() as tree, ThreadPoolExecutor(num_processes) as pool:
        runs = list(pool.map(lambda tests: run_tests(tree, tests, "--tb=short"), by_file.values()))
    sys.stdout.writelines(said for status, said in runs if status != PASSED)
    return all(status == PASSED for status, _ in runs)


def plant_all(chosen: list[Mutant], num_processes: int) -> Counter[str]:
    """Plant each of the bugs by itself, in one copy of the tree a process; tell of each as it comes, and count verdicts."""
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def one(mutant: Mutant) -> str:
        tree, started = trees.get(), time.monotonic()
        try:
            word, why = plant(mutant, tree)
        finally:
            trees.put(tree)
        told = "" if word == "caught" else f"          {why}\n"
        sys.stdout.write(f"{word:8}  {time.monotonic() - started:5.1f} s  {mutant.place}: {mutant.name}\n{told}")
        sys.stdout.flush()
        return word

    with copied_tree() as first, copied_tree() as second, ThreadPoolExecutor(num_processes) as pool:
        for tree in (first, second)[:num_processes]:
            trees.put(tree)
        return Counter(pool.map(one, chosen))


def main() -> int:
    """Plant what was chosen; return 1 if any of it survived or broke."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="TEXT", help="only bugs with this text in their name or place")
    parser.add_argument("--tests", metavar="TEXT", help="only bugs with this text in one of the tests that they name")
    parser.add_argument("--list", action="store_true", help="show the bugs and plant none")
    arguments = parser.parse_args()
    chosen = [
        mutant
        for mutant in mutants()
        if (arguments.only is None or arguments.only in f"{mutant.place}: {mutant.name}")
        and (arguments.tests is None or any(arguments.tests in test for test in mutant.tests))
    ]
    if arguments.list or not chosen:
        sys.stdout.writelines(f"{mutant.place}: {mutant.name}\n" for mutant in chosen)
        return 0 if chosen else 1
    _CONTEXT.set_forkserver_preload(LIBRARIES)
    num_processes = min(MOST_PROCESSES, os.cpu_count() or 1)
    started = time.monotonic()
    if not check_unplanted(chosen, num_processes):
        sys.stdout.write("tests fail without any bug: nothing was planted\n")
        return 1
    counts = plant_all(chosen, num_processes)
    answer = ", ".join(f"{counts[word]} {word}" for word in ("caught", "SURVIVED", "BROKEN"))
    sys.stdout.write(f"{len(chosen)} planted bugs: {answer}; {(time.monotonic() - started) / 60:.1f} minutes\n")
    return 0 if counts["caught"] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())

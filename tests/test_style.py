"""The style guide of CONTRIBUTING.md, as far as a program can check it: docstrings, banned words, lengths, spelling, names."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = sorted((ROOT / "flower_dp").rglob("*.py"))
# Pages of users; notebooks and recorded figures are made by programs.
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
# Question words and relative clauses begin no docstring: an IDE shows its first line alone.
NO_FIRST_WORD = {
    "What",
    "Whether",
    "Why",
    "How",
    "Whose",
    "Who",
    "Whom",
    "Which",
    "Of",
    "Where",
    "When",
    "All",
    "That",
    "As",
    "If",
}
# Fragments: in a tooltip an attribute's text stands alone.
NO_FIRST_WORD_OF_ATTRIBUTES = {
    *("of", "by", "at", "on", "for", "from", "to", "with", "as", "that", "than", "its"),
    *("what", "who", "whose", "whom", "where", "when", "why", "how"),
}
MOST_WORDS = 30
BANNED = {
    r"makes? no sense": "say which values are valid",
    r"made[- ]up": "synthetic",
    r"(?:go|goes|going|went|gone) on\b": "resume, continue",
    r"no news": "say what is missing",
    r"tight": "upper bound",
    r"untrusted": "say what the server is not trusted with",
    r"missing shares|shares that are missing|noise of missing clients": "every noise share that a sum lacks",
    r"whose turn": "name the fixed order",
    r"nobody who is protected against": "outsiders and participants",
    r"lowers? no cost": "claims no amplification by sampling",
    r"in so many words": "as a literal",
    r"private (?:on its own|by itself|one by one)": "local DP",
}
# Stems of British spellings; identifiers are American.
BRITISH = re.compile(
    r"\b\w*(?:neighbour|behaviour|colour|favour|licence|centred|(?<!epi)centre\b|labelled|modelled|modelling|artefact|\bgrey\b|analyse"
    r"|(?:quanti|optimi|regulari|normali|initiali|vectori|standardi|randomi|seriali|discreti|recogni|summari|minimi|maximi|organi"
    r"|reali|generali|customi|utili|synchroni|authori|parameteri|categori|tokeni|speciali|materiali|penali|paralleli)s(?:e|ing|ation))",
    re.IGNORECASE,
)


def docstrings(file: Path) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield the place, the definition and the docstring of everything that has one."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node, text


def is_property(node: ast.AST) -> bool:
    """Return whether a definition is read as an attribute."""
    return isinstance(node, ast.FunctionDef) and any("property" in ast.unparse(one) for one in node.decorator_list)


def test_first_lines_say_what_a_thing_is_or_does() -> None:
    wrong = [
        f"{place}: {text.splitlines()[0]}"
        for file in CODE
        for place, node, text in docstrings(file)
        if text.split()[0].strip(",:") in NO_FIRST_WORD - ({"Whether"} if is_property(node) else set())
    ]
    assert wrong == []


def test_attributes_and_arguments_begin_with_a_noun() -> None:
    wrong = []
    for file in CODE:
        for place, _, text in docstrings(file):
            for section in re.findall(r"(?ms)^(?:Attributes|Args):\n(.*?)(?=^\S|\Z)", text):
                for line in re.findall(r"(?m)^    \w+: (.*)", section):
                    if line.split()[0].strip(",:;") in NO_FIRST_WORD_OF_ATTRIBUTES:
                        wrong.append(f"{place}: {line}")
    assert wrong == []


def test_sentences_of_docstrings_are_short() -> None:
    wrong = []
    for file in CODE:
        for place, _, text in docstrings(file):
            prose = re.sub(r"(?s)\bExample:.*", "", text)
            for sentence in re.split(r"(?<=[.:;?])\s+|\n\n", prose):
                if len(sentence.split()) > MOST_WORDS:
                    wrong.append(f"{place}: {len(sentence.split())} words: {' '.join(sentence.split()[:8])} ...")
    assert wrong == []


def prose_of(file: Path) -> Iterator[tuple[int, str]]:
    """Yield what people read, by line: comments, docstrings and other texts of code; pages without their code."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        text = re.sub(r"(?ms)^```.*?^```", lambda block: "\n" * block[0].count("\n"), text)
        text = re.sub(r"`[^`\n]*`", "``", text)
        yield from enumerate(text.splitlines(), 1)
        return
    yield from (
        (node.lineno, node.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    yield from ((number, line.partition("# ")[2]) for number, line in enumerate(text.splitlines(), 1) if "# " in line)


@pytest.mark.parametrize("word", BANNED)
def test_no_banned_words(word: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{number}: {found[0]!r}: {BANNED[word]}"
        for file in (*CODE, *PAGES)
        for number, text in prose_of(file)
        if (found := re.search(rf"\b(?:{word})", " ".join(text.split()), re.IGNORECASE))
    ]
    assert wrong == []


def test_spelling_is_american() -> None:
    files = [*CODE, *PAGES, ROOT / "pyproject.toml", *sorted((ROOT / "tests").glob("**/*.py"))]
    wrong = Counter(
        f"{file.relative_to(ROOT)}: {found[0]}"
        for file in files
        if file != Path(__file__)
        for found in BRITISH.finditer(file.read_text(encoding="utf-8"))
    )
    assert list(wrong) == []


def test_names_are_no_questions() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for file in CODE
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and re.match(r"_?(?:why|what|who|whose|whom|how)_", node.name)
    ]
    assert wrong == []


def test_every_public_name_is_in_one_row_of_the_glossary() -> None:
    """The names of packages that users import from; the glossary gives each its noun of the field."""
    page = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\|.*\|$", page.partition("## Glossary")[2].partition("\n## ")[0])
    named = Counter(name for row in rows for name in set(re.findall(r"`(\w+)`", row)))
    public: set[str] = set()
    for package in ("", "strategies", "clients", "simulation", "audit", "planning"):
        tree = ast.parse((ROOT / "flower_dp" / package / "__init__.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" and isinstance(node.value, ast.List):
                public |= {str(ast.literal_eval(one)) for one in node.value.elts}
    assert {name for name in public if not name.startswith("__") and named[name] != 1} == set()


def test_settings_of_pyproject_have_a_comment() -> None:
    """The comments of the settings are their reference."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    settings = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    lines = {line.split(" = ")[0]: line for line in text.splitlines() if " = " in line}
    assert [key for key, value in settings.items() if not isinstance(value, dict) and "#" not in lines[key]] == []

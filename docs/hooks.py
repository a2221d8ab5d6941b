"""For mkdocs: the pages that are made from the code, and formulas as pictures that need neither a network nor a script."""

import html
import io
import re
import tomllib
import warnings
from functools import cache
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_ROW = re.compile(r"^(?P<key>[\w-]+) = (?:\"[^\"]*\"|[^#\s]+)\s*#\s*(?P<meaning>.*)$")
_TABLE = re.compile(r"^\[tool\.flwr\.app\.config(?:\.([\w-]+))?\](?: *# *(.*))?\n((?:[^\[\n].*\n|\n)*)", re.M)
_OR = "\\|"
_FORMULA = re.compile(
    r"(?P<code>(?P<ticks>`+).*?(?P=ticks))|\$\$\s*(?P<block>.+?)\s*\$\$|\$(?P<inline>[^\s$](?:[^$\n]*[^\s$])?)\$", re.S
)
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2[ \t]*$", re.S | re.M)
_TYPES = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_MARK = re.compile("\ue000([bi])([0-9a-f]+)\ue001")  # a formula that Markdown must not read: its source in hexadecimal digits
_POINTS = 12


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fill in what is made from the code, and draw formulas."""
    made = {"settings.md": settings, "command-line.md": command_line, "changes.md": changes}
    name = page.file.src_uri
    if name in made:
        markdown = markdown.replace("<!-- made by docs/hooks.py -->", made[name]())
    return with_formulas(markdown) if name.endswith(".md") else markdown


def settings() -> str:
    """Return tables of all settings of flower-dp's app, with type, default and the comment in pyproject.toml.

    Raises:
        ValueError: a setting has no comment.
    """
    text = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    config = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    meanings: dict[str, str] = {}
    parts = []
    for name, about, body in _TABLE.findall(text):
        prefix, lines = f"{name}." if name else "", body.splitlines()
        table = config[name] if name else {key: value for key, value in config.items() if not isinstance(value, dict)}
        told = {found["key"]: found["meaning"] for line in lines if (found := _ROW.match(line))}
        rows, like = ["| setting | default | type | meaning |", "|---|---|---|---|"], ""
        for key, value in table.items():
            meaning = told.get(key, "")
            if as_in := re.match(r"as for ([\w-]+)", meaning):
                like = as_in[1]
            if (not meaning or as_in) and (meaning := meanings.get(f"{like}.{key}", "")) == "":
                raise ValueError(f"pyproject.toml: {prefix}{key} has no comment, nor has a table that it refers to")
            meanings[prefix + key] = meaning
            default = str(value).lower() if isinstance(value, bool) else str(value) or '""'
            rows.append(f"| `{prefix}{key}` | `{default}` | {_TYPES[type(value)]} | {meaning.replace('|', _OR)} |")
        parts.append(
            "\n".join([f"## {f'`{name}`' if name else 'All methods'}\n", *([f"{about}.\n"] if about else []), *rows, ""])
        )
    return "\n".join(parts)


def command_line() -> str:
    """Return every command with its arguments and options, from typer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # typer uses what click 8.5 deprecates
        import typer
        from typer.cli import get_docs_for_click

        from flower_dp.cli.main import app

    command = typer.main.get_command(app)
    made = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="flower-dp"), name="flower-dp", title="-")
    return html.unescape(made.partition("\n")[2])


def changes() -> str:
    """Return CHANGELOG.md without its title; its links to pages lead to these pages."""
    text = (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n")[2]
    return re.sub(r"\]\(docs/", "](", text)


def with_formulas(markdown: str) -> str:
    r"""Return the text with a mark for each formula, $...$ in a line and $$...$$ on lines of its own; code is left alone."""
    done, at = [], 0
    for fence in _FENCE.finditer(markdown):
        done += [_FORMULA.sub(_marked, markdown[at : fence.start()]), fence.group()]
        at = fence.end()
    return "".join([*done, _FORMULA.sub(_marked, markdown[at:])])


def on_page_content(content: str, **_: Any) -> str:
    """Draw the formulas of a page."""
    return _MARK.sub(lambda found: drawn(bytes.fromhex(found[2]).decode(), block=found[1] == "b"), content)


@cache
def drawn(source: str, *, block: bool) -> str:
    """Return a formula as SVG in the color and size of the text, with its source for those who can't see it.

    Raises:
        ValueError: matplotlib's mathtext does not know it.
    """
    from matplotlib import rc_context
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import math_to_image

    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "flower-dp", "mathtext.fontset": "cm"}):
        try:
            depth = math_to_image(f"${source}$", buffer, FontProperties(size=_POINTS), dpi=72, format="svg")
        except ValueError as error:
            raise ValueError(f"the formula {source!r} can't be drawn: {error}") from None
    picture = buffer.getvalue()
    view = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture)
    if view is None:
        raise ValueError(f"the formula {source!r} has no size")
    width, height = (float(number) / _POINTS for number in view.groups())
    body = re.sub(
        r"<metadata>.*?</metadata>|<!--.*?-->|<path [^>]*#ffffff\"/>| id=\"(?:figure|text|patch|axes)_\d+\"",
        "",
        picture[view.end() :],
        flags=re.S,
    )
    style = f"width:{width:.3f}em;height:{height:.3f}em;vertical-align:{-depth / _POINTS:.3f}em;fill:currentColor"
    inside = re.sub(r">\s+<", "><", body[body.index(">") + 1 :].strip())
    label = html.escape(source)
    svg = f'<svg role="img" aria-label="{label}" {view[0]} style="{style}"><title>{label}</title>{inside}'
    return f'<span style="display:block;text-align:center;overflow-x:auto">{svg}</span>' if block else svg


def _marked(found: re.Match[str]) -> str:
    if found["code"]:
        return found["code"]
    source = " ".join((found["block"] or found["inline"]).split())
    return f"\ue000{'b' if found['block'] else 'i'}{source.encode().hex()}\ue001"

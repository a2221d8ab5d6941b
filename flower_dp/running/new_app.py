"""A new Flower app around a model and data, from the templates that the package carries."""

import importlib.util
import keyword
import re
from importlib import resources
from pathlib import Path
from string import Template

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_OUTSIDE = ("README.md", "pyproject.toml")


def write_app(folder: Path) -> str:
    """Write a complete app into a new folder: pyproject.toml, README.md and a package with app, data and model.

    Args:
        folder: new folder; its name becomes the app's.

    Returns:
        The name of the app's package.

    Raises:
        ValueError: if the folder is not empty, or its name is invalid for an app or hides an installed package.
        OSError: if the folder can't be written.
    """
    package = _package(folder.name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: exists already; must be a new or empty folder")
    templates = [file for file in resources.files("flower_dp").joinpath("templates").iterdir() if file.name.endswith(".txt")]
    (folder / package).mkdir(parents=True)
    for template in templates:
        name = template.name.removesuffix(".txt")
        text = Template(template.read_text(encoding="utf-8")).substitute(name=folder.name, package=package)
        ((folder if name in _OUTSIDE else folder / package) / name).write_text(text, encoding="utf-8")
    (folder / package / "__init__.py").touch()
    return package


def _package(name: str) -> str:
    """Return the name of an app's package."""
    package = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(package):
        raise ValueError(f"{name!r}: must be lowercase letters and digits, with single hyphens between them, such as my-app")
    if importlib.util.find_spec(package) is not None:
        raise ValueError(f"{name!r}: is the name of an installed package, which the app would hide; choose another name")
    return package

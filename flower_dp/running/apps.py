"""The Flower app that `flower-dp run` runs, its settings, and the presets that change them."""

import contextlib
import difflib
import importlib.util
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = Path(__file__).resolve().parent.parent
# The app's folder in an installed wheel; a checkout has none here.
_INSTALLED = _PACKAGE / "_app"

# Settings of a method's table in whose place its `epsilon` stands.
_OF_NOISE = ("noise-multiplier", "target-epsilon", "paper-epsilon")
Value = bool | int | float | str
_TYPES: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """A Flower app on disk: its absolute folder, its name and the run-config defaults by flat key.

    `pilot`, `check` and `public_test` are functions that the app's pyproject.toml names under [tool.flower-dp], as
    "module:function"; empty if there is none. `flower-dp plan --estimate-from` calls `pilot` for the keys of a planning problem.
    `flower-dp run` calls `check` with the run-config before it starts Flower; it raises ValueError for invalid settings.
    `flower-dp epsilon` and `flower-dp calibrate` call `cost` with it, for the statement that the run will end with.
    `flower-dp figure landscape` calls `public_test` with a run's config, for its model, loss and public test records. `server`
    and `client` are the app's components, as "module:name".
    """

    folder: Path
    name: str
    defaults: Mapping[str, Value]
    pilot: str = ""
    check: str = ""
    cost: str = ""
    public_test: str = ""
    server: str = ""
    client: str = ""

    @property
    def own(self) -> bool:
        """Whether it is flower-dp's own app."""
        return self.name == "flower-dp"

    def presets(self) -> dict[str, Path]:
        """Return the app's presets by name."""
        return {path.stem: path for path in sorted((self.folder / "apps" / "presets").glob("*.toml"))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An app and the run-config values that differ from its defaults; `name` is the name of the run."""

    app: App
    name: str
    overrides: Mapping[str, Value]


def resolve(target: str | None, settings: Sequence[str]) -> Target:
    """Find the app to run. A target is None for flower-dp's own app, an app's folder, or the name of one of flower-dp's presets.

    Args:
        target: None, a folder or a preset's name; a folder with a Flower app takes precedence over a preset of the same name.
        settings: `key=value` texts, which take precedence over the preset. Relative paths (keys that end in `-dir`) are relative
            to the working directory, those in a preset to the app's folder.

    Raises:
        ValueError: there is no such app or preset, or a key or value that the app cannot take.
    """
    if target is not None and (app := read_app(Path(target).expanduser())) is not None:
        preset: Mapping[str, Any] = {}
        name = app.name
    else:
        app = own_app()
        name = target or app.name
        if target is not None and target not in app.presets():
            names = ", ".join(app.presets()) or "none"
            raise ValueError(f"{target}: is neither a folder of a Flower app nor a preset; presets: {names}")
        preset = flatten(_read_toml(app.presets()[target])) if target is not None else {}
    overrides = {key: _from_toml(app, key, value, app.folder) for key, value in preset.items()}
    given: dict[str, Value] = {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign:
            raise ValueError(f"--set {setting}: must be key=value")
        given[key.strip()] = _from_text(app, key.strip(), text.strip())
    for key, value in given.items():
        table, _, field = key.rpartition(".")
        if field == "epsilon" and value:  # it determines the noise, in place of what the preset says
            for one in _OF_NOISE:
                overrides.pop(f"{table}.{one}", None)
    overrides |= given
    return Target(app=app, name=name, overrides=overrides)


def with_values(target: Target, values: Mapping[str, Any]) -> dict[str, Value]:
    """Return a target's whole run-config with some values, in the types of its settings.

    Relative paths are relative to the working directory.

    Raises:
        ValueError: a key or value that the app cannot take.
    """
    own = {key: _from_toml(target.app, key, value, Path.cwd()) for key, value in values.items()}
    return {**target.app.defaults, **target.overrides, **own}


def own_app() -> App:
    """Return flower-dp's own app, from the checkout around the working directory or else from the running package.

    Raises:
        ValueError: the package is neither in a checkout nor completely installed.
    """
    here = Path.cwd()
    for folder in [here, *here.parents, _PACKAGE.parent, _INSTALLED]:
        if (app := read_app(folder)) is not None and app.own:
            return app
    raise ValueError(f"flower-dp's app is missing in {_INSTALLED}: install flower-dp again, or name an app's folder")


def own_module(name: str) -> ModuleType:
    """Return a module of the package `apps`, which is next to this package in a checkout, else inside it, never on sys.path.

    Raises:
        ImportError: there is none, or another package is called `apps`.
    """
    folder = next((place / "apps" for place in (_PACKAGE.parent, _INSTALLED) if (place / "apps" / "methods").is_dir()), None)
    if folder is None:
        raise ImportError(f"flower-dp's app is missing in {_INSTALLED}: install flower-dp again")
    if "apps" not in sys.modules:
        spec = importlib.util.spec_from_file_location("apps", folder / "__init__.py", submodule_search_locations=[str(folder)])
        if spec is None or spec.loader is None:
            raise ImportError(f"{folder}: can't be imported")
        sys.modules["apps"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["apps"])
    if Path(str(sys.modules["apps"].__file__)).resolve().parent != folder.resolve():
        raise ImportError(f"{sys.modules['apps'].__file__}: another package is called apps, as flower-dp's own; rename it")
    return importlib.import_module(f"apps.{name}")


@dataclass(frozen=True, slots=True)
class OwnFunction:
    """A function of the package `apps`, with its first arguments; it is imported when it is called.

    Flower pickles a simulation's ClientApp for Ray's workers, which can't import `apps` by its name.
    """

    module: str
    name: str
    arguments: tuple[Any, ...]

    def __call__(self, *more: Any) -> Any:
        """Return what the function returns."""
        return getattr(own_module(self.module), self.name)(*self.arguments, *more)


@contextlib.contextmanager
def unpacked(app: App) -> Iterator[Path]:
    """Yield the folder from which `flwr run` can bundle an app.

    The files of flower-dp's own app are copied to a temporary folder, with the library: an installed package holds the two in
    different places, and in a checkout `flwr run` would examine every file, those of a virtual environment among them.
    """
    if not app.own:
        yield app.folder
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) / "flower-dp"  # Flower takes no folder with an underscore in its name
        bundled = _read_toml(app.folder / "pyproject.toml")["tool"]["flwr"]["app"].get("fab-include", ["**/*"])
        for file in (file for pattern in ["pyproject.toml", *bundled] for file in app.folder.glob(pattern) if file.is_file()):
            copy = folder / file.relative_to(app.folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        if not (folder / _PACKAGE.name).exists():
            shutil.copytree(_PACKAGE, folder / _PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", _INSTALLED.name))
        yield folder


def read_app(folder: Path) -> App | None:
    """Return the Flower app in a folder, or None if its pyproject.toml is missing or no Flower app's.

    Raises:
        ValueError: pyproject.toml is not TOML.
    """
    file = folder / "pyproject.toml"
    if not file.is_file():
        return None
    content = _read_toml(file)
    app = content.get("tool", {}).get("flwr", {}).get("app")
    if not isinstance(app, dict):
        return None
    name = str(content.get("project", {}).get("name", folder.resolve().name))
    plugins = content.get("tool", {}).get("flower-dp", {})
    return App(
        folder=folder.resolve(),
        name=name,
        defaults=flatten(app.get("config", {})),
        pilot=str(plugins.get("pilot", "")),
        check=str(plugins.get("check", "")),
        cost=str(plugins.get("cost", "")),
        public_test=str(plugins.get("public-test", "")),
        server=str(app.get("components", {}).get("serverapp", "")),
        client=str(app.get("components", {}).get("clientapp", "")),
    )


def description(preset: Path) -> str:
    """Return the first comment line of a preset's file, without its `#`."""
    for line in preset.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            return line.lstrip("# ").strip()
    return ""


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested table with one level: keys joined by dots, as Flower does it."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: is not TOML: {error}") from None


def _default(app: App, key: str) -> Value:
    if key not in app.defaults:
        close = difflib.get_close_matches(key, app.defaults, n=1, cutoff=0.0)
        hint = f"; did you mean {close[0]}?" if close else f"; {app.name} has no settings"
        raise ValueError(f"{key}: unknown setting of {app.name}{hint}")
    return app.defaults[key]


def _from_toml(app: App, key: str, value: Any, base: Path) -> Value:
    """Return a value in the type of the setting's default."""
    wanted = type(_default(app, key))
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise ValueError(f"{key}={value!r}: must be {_TYPES[wanted]}")
    return _absolute(key, value, base)


def _from_text(app: App, key: str, text: str) -> Value:
    """Return a value from the command line in the type of the setting's default; a string needs no quotes."""
    wanted = type(_default(app, key))
    if wanted is str:
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
        return _absolute(key, text[1:-1] if quoted else text, Path.cwd())
    try:
        if wanted is bool:
            return {"true": True, "false": False}[text.lower()]
        return int(text) if wanted is int else float(text)
    except (KeyError, ValueError):
        raise ValueError(f"{key}={text}: must be {_TYPES[wanted]}") from None


def _absolute(key: str, value: Value, base: Path) -> Value:
    # The app runs in another working directory, where a relative path would be wrong.
    if not isinstance(value, str) or not key.endswith("-dir"):
        return value
    # A prefix before a colon says how the folder is to be filled; a single letter is a drive.
    how = prefix.group() if (prefix := re.match("[a-z]{2,}:", value)) else ""
    folder = value.removeprefix(how)
    return how + str(base / Path(folder).expanduser()) if folder else value

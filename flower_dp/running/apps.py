"""The Flower app that `flower-dp run` runs, its settings, and the presets that change them."""

import difflib
import importlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from flower_dp.core import checks
from flower_dp.running import modules, values
from flower_dp.running.modules import InFolder
from flower_dp.running.values import Value

_PACKAGE = Path(__file__).resolve().parent.parent
PRESETS = _PACKAGE / "apps" / "presets"
# The module that makes an app from functions that the run-config names.
_FROM_CONFIG = "flower_dp.from_config"

# Settings of a method's table that its `epsilon` replaces.
_OF_NOISE = ("noise-multiplier", "target-epsilon", "paper-epsilon")


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """A Flower app on disk: its absolute folder, its name and the run-config defaults by flat key.

    The app's pyproject.toml names four functions under [tool.flower-dp], as "module:function"; each is empty if there is none.

    Attributes:
        folder: absolute folder of the app.
        name: name of the app.
        defaults: run-config defaults, by flat key.
        pilot: function that `flower-dp plan --estimate-from` calls for the keys of a planning problem.
        check: function that `flower-dp run` calls with the run-config before it starts Flower. It raises ValueError for invalid
            settings.
        cost: function that `flower-dp epsilon` and `flower-dp calibrate` call with the run-config. It returns the statement that
            the run will end with.
        public_test: function that `flower-dp figure landscape` calls with a run's config. It returns model, loss and public test
            records.
        server: ServerApp, as "module:name".
        client: ClientApp, as "module:name".
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

    @property
    def built(self) -> bool:
        """Whether `flower_dp.app` makes it, so that it has all settings of flower-dp's own app; its modules are imported."""
        if self.own or not self.server:
            return False
        return self.server.partition(":")[0] == _FROM_CONFIG or modules.is_built(self.components[1])

    @property
    def components(self) -> tuple[InFolder, InFolder]:
        """The loaders of its ClientApp and ServerApp from its folder."""
        folder = str(self.folder)
        return (
            InFolder(folder=folder, key="clientapp", reference=self.client, type_name="ClientApp"),
            InFolder(folder=folder, key="serverapp", reference=self.server, type_name="ServerApp"),
        )

    def client_app(self, *, away: bool = False) -> Callable[[], Any]:
        """Return the loader of its ClientApp in a worker: from its folder, or on a cluster from the working directory."""
        if self.own:
            return own_client_app
        return replace(self.components[0], folder=".") if away else self.components[0]

    def server_app(self) -> Any:
        """Return its ServerApp.

        Raises:
            ValueError: see `InFolder`.
            Exception: any error of its modules.
        """
        return own_module("server_app").app if self.own else modules.served(self.components[1])

    def settings(self) -> dict[str, Value]:
        """Return every setting of the app, with its default."""
        return {**(own_app().defaults if self.built else {}), **self.defaults}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An app and the run-config values that differ from its defaults.

    Attributes:
        app: the app.
        name: name of the run.
        overrides: run-config values that differ from the app's defaults.
        given: keys that the user set one by one, not by a preset.
    """

    app: App
    name: str
    overrides: Mapping[str, Value]
    given: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Value]:
        """The whole run-config."""
        return {**self.app.defaults, **self.overrides}


def resolve(target: str | None, settings: Sequence[str]) -> Target:
    """Find the app to run.

    Args:
        target: folder of a Flower app, or the name of one of flower-dp's presets or tasks; None for flower-dp's own app. If the
            settings choose another method than the preset's, the preset loses the settings that only its own method needs. If
            the folder is a checkout of flower-dp, its pyproject.toml acts as a preset, with the values that differ.
        settings: `key=value` texts, which override the preset and the app's file. `key=` gives a setting of flower-dp's own apps
            its default. Relative paths (keys that end in `-dir`) start at the working directory, those in a preset at the app's
            folder.

    Raises:
        ValueError: if there is no such app or preset; or naming unknown keys and invalid values, one per line.
    """
    errors = checks.ErrorCollector()
    given: dict[str, str] = {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        if sign:
            given[key.strip()] = text.strip()
        else:
            errors.errors.append(ValueError(f"--set {setting}: must be key=value"))
    if target is not None and (app := read_app(Path(target).expanduser())) is not None:
        name, preset = app.name, dict[str, Any]()
        if app.own:
            file, app = app.defaults, own_app()
            preset = {key: value for key, value in file.items() if value != app.defaults.get(key)}
    else:
        app = own_app()
        name, preset = target or app.name, {} if target is None else _preset(target)
        method = given.get("method", "").strip("'\"")
        if method and preset and method != preset.get("method", app.defaults.get("method")):
            preset = own_module("unread_settings").with_method({"method": app.defaults.get("method"), **preset}, method)
    known, overrides = app.settings(), {}
    method = given.get("method") or str({**known, **preset}.get("method", ""))
    for key, value in preset.items():
        with errors.collect_errors():
            overrides[key] = values.from_toml(key, value, _default(app, known, key, method), app.folder)
    before = {**known, **overrides}
    unset = [key for key, text in given.items() if not text and key in _defaults(app)]
    for key in unset:
        del given[key]
        _unset(app, key, overrides)
    for key, text in given.items():
        with errors.collect_errors():
            overrides[key] = values.from_text(key, text, _default(app, known, key, method))
    _make_way(app, before, overrides, given)
    errors.raise_if_any()
    return Target(app=app, name=name, overrides=overrides, given=tuple(given))


def _make_way(app: App, before: Mapping[str, Value], overrides: dict[str, Value], given: Mapping[str, str]) -> None:
    """Unset values of a preset or the app's file that a given key replaces, or that no code reads beside the given keys."""
    for key in given:
        table, _, setting = key.rpartition(".")
        if setting == "epsilon" and overrides.get(key):  # it determines the noise
            for replaced in (f"{table}.{name}" for name in _OF_NOISE):
                if replaced not in given:
                    _unset(app, replaced, overrides)
    if given and _defaults(app):
        for key in own_module("unread_settings").made_unread(before, {**before, **overrides}) - given.keys():
            _unset(app, key, overrides)


def _unset(app: App, key: str, overrides: dict[str, Value]) -> None:
    """Give a setting its default, as if neither a preset nor the app's file set it."""
    overrides.pop(key, None)
    default = _defaults(app).get(key)
    if default is not None and app.settings()[key] != default:
        overrides[key] = default


def _defaults(app: App) -> Mapping[str, Value]:
    """Return the defaults of flower-dp's settings, if the app has them."""
    return own_app().defaults if app.own or app.built else {}


def with_values(target: Target, more: Mapping[str, Any]) -> dict[str, Value]:
    """Return a target's whole run-config, updated with some values in the types of its settings.

    Relative paths start at the working directory.

    Raises:
        ValueError: naming the key that is unknown or whose value is invalid.
    """
    known = target.app.settings()
    method = str({**known, **target.overrides, **more}.get("method", ""))
    typed = {
        key: values.from_toml(key, value, _default(target.app, known, key, method), Path.cwd()) for key, value in more.items()
    }
    return {**target.config, **typed}


def presets() -> dict[str, Path]:
    """Return the presets of flower-dp's own app by name."""
    return {path.stem: path for path in sorted(PRESETS.glob("*.toml"))}


def _preset(target: str) -> dict[str, Any]:
    """Return the settings of a preset, or those that a task needs."""
    known = presets()
    if target in known:
        return flatten(_read_toml(known[target]))
    of_tasks = own_module("tasks")
    tasks: tuple[str, ...] = of_tasks.TASKS
    if target not in tasks:
        close = difflib.get_close_matches(target, [*known, *tasks], n=1)
        hint = f"did you mean {close[0]}?" if close else f"`flower-dp presets` lists the presets; tasks are {', '.join(tasks)}"
        raise ValueError(f"{target}: is neither a folder of a Flower app, nor a preset, nor a task; {hint}")
    return {"task": target, **of_tasks.module_of(target).NEEDS}


def _default(app: App, known: Mapping[str, Value], key: str, method: str) -> Value:
    if key in known:
        return known[key]
    where = f"they are in {app.folder / 'pyproject.toml'}" if known else f"{app.name} has no settings"
    hint = values.suggestion_for(key, known, method, otherwise=f"{values.SETTINGS_PAGE if app.own else where}.")
    if not (app.own or app.built):
        hint += " Flower passes only settings that are listed under [tool.flwr.app.config] of its pyproject.toml."
    raise ValueError(f"{key}: unknown setting of {app.name}; {hint.rstrip('.')}")


def own_app() -> App:
    """Return the app of the running flower-dp package. The defaults of its settings are in the code, not in a file."""
    return App(
        folder=_PACKAGE.parent,
        name="flower-dp",
        defaults=own_module("methods").defaults(),
        pilot="flower_dp.apps.pilot:pilot",
        check="flower_dp.apps.commands:check",
        cost="flower_dp.apps.commands:cost",
        public_test="flower_dp.apps.commands:public_test",
    )


def own_module(name: str) -> ModuleType:
    """Import and return a module of flower-dp's own app."""
    return importlib.import_module(f"flower_dp.apps.{name}")


def own_client_app() -> Any:
    """Return the ClientApp of flower-dp's own app."""
    return own_module("client_app").app


def read_app(folder: Path) -> App | None:
    """Return the Flower app in a folder, or None if the folder has no pyproject.toml of a Flower app.

    Raises:
        ValueError: if pyproject.toml is not TOML.
    """
    file = folder / "pyproject.toml"
    if not file.is_file():
        return None
    content = _read_toml(file)
    tools = content.get("tool", {})
    app = tools.get("flwr", {}).get("app")
    if not isinstance(app, dict):
        return None
    plugins, components = tools.get("flower-dp", {}), app.get("components", {})
    return App(
        folder=folder.resolve(),
        name=str(content.get("project", {}).get("name", folder.resolve().name)),
        defaults=flatten(app.get("config", {})),
        server=str(components.get("serverapp", "")),
        client=str(components.get("clientapp", "")),
        **{name.replace("-", "_"): str(plugins.get(name, "")) for name in ("pilot", "check", "cost", "public-test")},
    )


def description(preset: Path) -> str:
    """Return the first comment line of a preset's file, without its `#`."""
    lines = preset.read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), "")


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested table as one level, with keys joined by dots, as Flower does."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _read_toml(file: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Callers must not change them: the same text gives the same objects."""
    try:
        return _parsed(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: is not TOML: {error}") from None


# A sweep reads its app's file for each of its runs.
@lru_cache(maxsize=16)
def _parsed(text: str) -> dict[str, Any]:
    return tomllib.loads(text)

"""Runs of the app in this process, which leave a run folder."""

import tomllib
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from flower_dp.apps.client_app import app as client_app
from flower_dp.apps.server_app import app as server_app
from flower_dp.running.apps import flatten
from tests.grids import LocalGrid

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS = flatten(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"])
PRESETS = {
    path.stem: flatten(tomllib.loads(path.read_text())) for path in (ROOT / "flower_dp" / "apps" / "presets").glob("*.toml")
}


def play(folder: Path, settings: dict[str, Any]) -> Path:
    """Run the app with settings that differ from its defaults, on two nodes; return the run folder."""
    config = {**DEFAULTS, **settings, "output-dir": str(folder)}
    grid = LocalGrid(client_app, 2, **config)
    server_app(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config))
    return folder


def with_table(settings: dict[str, Any]) -> dict[str, Any]:
    """Put the method's name before keys of its own table."""
    method = settings.get("method", DEFAULTS["method"])
    own = {key for key in settings if f"{method}.{key}" in DEFAULTS}
    return {f"{method}.{key}" if key in own and key not in DEFAULTS else key: value for key, value in settings.items()}

"""The console script: it runs the command line, or names the extra that is not installed."""

import sys
from typing import NoReturn

_EXTRAS = {
    **dict.fromkeys(("click", "psutil", "rich", "safetensors", "tomli_w", "typer"), "cli"),
    "matplotlib": "plot",
    **dict.fromkeys(("opacus", "torch"), "torch"),
    "ray": "simulation",
    **dict.fromkeys(("datasets", "flwr_datasets", "mlxtend"), "app"),
    "torchvision": "vision",
}


def main() -> NoReturn:
    """Run the command line and exit; a package that is not installed ends it with status 1 and one line."""
    try:
        from flower_dp.cli.main import main as run

        run()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        sys.exit(f"error: {package} is not installed: pip install 'flower-dp[{_EXTRAS[package]}]'")

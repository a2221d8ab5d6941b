"""What a run costs, before it is started."""

from typing import Any

from flower_dp.core import dp
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.running import apps, plugins
from flower_dp.running.apps import Target


def statement_of(target: Target) -> PrivacyStatement:
    """Return the statement that a run will end with.

    Raises:
        ValueError: its app does not say what a run costs.
    """
    statement: PrivacyStatement = _called(target, "cost")
    return statement


def outside_of(target: Target) -> tuple[dp.DpEvent, PrivacyStatement]:
    """Return the event of a whole run against those who are no clients, and the run's statement.

    Raises:
        ValueError: for an app whose runs nobody here can plan, or a method in which every device has a ledger of its own.
    """
    if not (target.app.own or target.app.built):
        raise ValueError(
            f"{target.app.name}: what its runs cost is not known before them; it is known of apps of `flower_dp.app`"
        )
    planned: tuple[dp.DpEvent, PrivacyStatement] = _called(target, "outside")
    return planned


def _called(target: Target, name: str) -> Any:
    """Return what `cost`, or a function beside it, says of a run.

    An app of `flower_dp.app` has the settings of flower-dp's own.
    """
    app = apps.own_app() if target.app.built else target.app
    if not app.cost:
        raise ValueError(
            f"{app.name}: its pyproject.toml names no function `cost` under [tool.flower-dp]; in its place describe what its "
            "strategy releases, as --noise-multiplier 1 --num-rounds 50 --delta 1e-5"
        )
    reference = app.cost if name == "cost" else f"{app.cost.partition(':')[0]}:{name}"
    with plugins.loaded(app, reference) as function:
        return function(target.config, own_model=True) if target.app.built else function(target.config)

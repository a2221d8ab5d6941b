"""What a run is charged with, before it is started."""

from flower_dp.core import dp
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.running import apps, plugins
from flower_dp.running.apps import Target


def outside_of(target: Target) -> tuple[dp.DpEvent, PrivacyStatement]:
    """Return the event of a whole run against those who are no clients, and the run's statement.

    Raises:
        ValueError: for an app whose runs nobody here can plan, or a method in which every device has a ledger of its own.
    """
    if not (target.app.own or target.app.built):
        raise ValueError(
            f"{target.app.name}: what its runs cost is not known before them; it is known of apps of `flower_dp.app`"
        )
    with plugins.loaded(apps.own_app() if target.app.built else target.app, "flower_dp.apps.commands:outside") as outside:
        config = {**target.app.defaults, **target.overrides}
        planned: tuple[dp.DpEvent, PrivacyStatement] = outside(config, own_model=True) if target.app.built else outside(config)
        return planned

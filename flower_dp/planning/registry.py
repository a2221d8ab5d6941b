"""All planners, by method: adding one is a line here."""

from flower_dp.planning import dp_fedpaq, dp_pasgd, fedsgd_dpc, nbafl
from flower_dp.planning.planner import Planner

_ALL: tuple[Planner, ...] = (
    fedsgd_dpc,
    nbafl,
    dp_pasgd,
    dp_fedpaq,
)
PLANNERS: dict[str, Planner] = {planner.METHOD: planner for planner in _ALL}

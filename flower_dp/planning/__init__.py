"""Planners: the best configuration of a method under the convergence bound of its paper.

A planner is a module named like its method (`fedsgd_dpc`, `nbafl`, `dp_pasgd`, `dp_fedpaq`): its problem, the bound, the search
for the optimum, and the reasons. `planner` has what they share, `constants` estimates a problem's constants from data, `command`
is what `flower-dp plan` calls, and `plot` draws.
"""

from flower_dp.planning.planner import ProblemError, read_problem

__all__ = ["ProblemError", "read_problem"]

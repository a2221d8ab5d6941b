"""Planners: the best configuration of a method under the convergence bound of its paper.

A planner is a module named like its method (`fedsgd_dpc`, `nbafl`, `dp_pasgd`, `dp_fedpaq`). It has the problem, the bound, the
search for the optimum, and the reasons. `planner` has the parts that planners share. `constants` estimates a problem's constants
from data. `flower-dp plan` calls `command`. `plot` draws.
"""

from flower_dp.planning.planner import ProblemError, read_problem

__all__ = ["ProblemError", "read_problem"]

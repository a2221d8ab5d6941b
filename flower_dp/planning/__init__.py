"""Planners: the best configuration of a method under the convergence bound of its paper.

`fedsgd_dpc` and `nbafl` hold one paper each: its noise as pure functions and the optimum under its bound, which stands
in `fedsgd_dpc_bound` and `nbafl_bound`. `problem` reads a problem file, `constants` estimates a problem's constants
from data, `command` is what `flower-dp plan` calls, and `plot` draws.
"""

from flower_dp.planning.problem import ProblemError, read_problem

__all__ = ["ProblemError", "read_problem"]

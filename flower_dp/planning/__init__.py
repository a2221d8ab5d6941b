"""Planners: the best configuration of a method under the convergence bound of its paper.

A planner is a module named like its method (`fedsgd_dpc`, `nbafl`, `dp_pasgd`, `dp_fedpaq`): noise formulas and the optimum. Its
problem and bound are in `..._bound`, its answer in `..._plan`. `planner` defines the interface of a planner, `registry` lists
them all. `problem` reads a problem file, `constants` estimates a problem's constants from data, `command` is what `flower-dp
plan` calls, and `plot` draws.
"""

from flower_dp.planning.problem import ProblemError, read_problem

__all__ = ["ProblemError", "read_problem"]

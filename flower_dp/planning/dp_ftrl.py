"""DP-FTRL: the planner of correlated noise."""

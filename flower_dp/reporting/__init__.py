"""Comparison of runs, and figures."""

"""Comparing runs, and figures."""

"""Differential privacy for clients of other apps and frameworks."""

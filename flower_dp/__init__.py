"""Differential privacy for Flower: strategies and clients, and a truthful account of how private they were."""

__version__ = "0.1.0"

"""Sweeps: all runs of settings x seeds in one folder, on warm engines (`flower-dp sweep`)."""

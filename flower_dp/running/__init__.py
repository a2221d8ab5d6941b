"""Runs of an app: its settings, its process, the run folder, and progress on the screen."""

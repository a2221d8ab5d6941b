"""The commands of `flower-dp`, one file a group; `flower_dp.cli` puts them together.

Libraries heavier than typer are imported inside the commands, so that `--help` is fast.
"""

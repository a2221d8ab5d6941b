"""The folders here are apps, not tests."""

collect_ignore_glob = ["*/*.py"]

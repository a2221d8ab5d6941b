"""Running an app: processes, the SuperLink, run folders, progress."""

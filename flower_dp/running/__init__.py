"""Running an app: processes, the SuperLink, a run's folder, its progress."""

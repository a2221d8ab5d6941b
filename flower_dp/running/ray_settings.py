"""What Ray reads from the environment of its processes."""

# In every process: messages of up to 4 MiB go directly to the worker, not through Ray's object store.
MESSAGES = {"RAY_max_direct_call_object_size": str(2**22)}
# When it starts.
STARTED = {
    **MESSAGES,
    # Ray starts workers at niceness 15, so other programs would take the cores from the training.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # How often a process tries to reach another one of this machine that starts: by default once a second, ten times. A busy
    # machine takes longer, as it may for a worker's imports.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "3000",
    "RAY_worker_register_timeout_seconds": "180",
    # Otherwise Ray looks for a `uv run` among the parents of this process.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
# On Linux Ray would take the address by which others reach this machine in place of its own, and listen to all, but for this.
ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

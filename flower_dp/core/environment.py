"""The environment variables in which `flower-dp run` passes an app what belongs to its run."""

# The run folder.
RUN_FOLDER = "FLOWER_DP_RUN_FOLDER"
# The run's settings, as JSON.
RUN_CONFIG = "FLOWER_DP_RUN_CONFIG"
# The function that makes the observers of a run, as "module:function" (`flower_dp.strategies.journal`).
OBSERVERS = "FLOWER_DP_OBSERVERS"
# Set where the run in the run folder goes on: `RESUMED`, or `STATED` where its statement is made and it ends there.
RESUME = "FLOWER_DP_RESUME"
RESUMED, STATED = "resume", "statement"

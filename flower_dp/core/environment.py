"""The environment variables that pass a run's folder and mode to a ServerApp."""

# The run folder.
RUN_FOLDER = "FLOWER_DP_RUN_FOLDER"
# Set if the run in the run folder exists already: `RESUMED` resumes it, `STATED` only rebuilds its statement.
RESUME = "FLOWER_DP_RESUME"
RESUMED, STATED = "resume", "statement"

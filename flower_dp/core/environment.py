"""The environment variables in which whoever calls a ServerApp passes it what belongs to its run."""

# The run folder.
RUN_FOLDER = "FLOWER_DP_RUN_FOLDER"
# Set where the run in the run folder goes on: `RESUMED`, or `STATED` where its statement is made and it ends there.
RESUME = "FLOWER_DP_RESUME"
RESUMED, STATED = "resume", "statement"

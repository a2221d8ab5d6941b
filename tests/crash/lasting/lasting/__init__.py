"""A run that outlives its SuperLink."""

"""Privacy statements: what a run's releases have cost, and what is not covered."""

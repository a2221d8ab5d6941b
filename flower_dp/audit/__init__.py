"""Audits: lower bounds on the epsilon of what really runs. Nothing but the command line imports this package."""

"""Tables and figures of recorded runs."""

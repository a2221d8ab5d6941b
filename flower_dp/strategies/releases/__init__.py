"""Releases: what a round asks of its clients, the limits of their replies, what it costs, and the noise of the server."""

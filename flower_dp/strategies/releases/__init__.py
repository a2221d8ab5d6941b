"""Releases: the requests of a round, the limits of replies, the charges, and the server's noise."""

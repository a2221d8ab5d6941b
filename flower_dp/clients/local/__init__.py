"""Clients whose every message is private on its own, by their own terms and account."""

"""Clients under local DP: each adds its full noise, by its own terms, and keeps its own account."""

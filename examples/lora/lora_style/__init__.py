"""A language model that learns its clients' style."""

"""An app: a language model that learns its clients' style."""

"""Protection around other people's apps and frameworks."""

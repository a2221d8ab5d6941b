"""The mathematics: vectors, clipping, noise, sampling, compression. Imports neither Flower nor torch."""

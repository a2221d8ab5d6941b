"""The mathematics: vectors, clipping, noise, sampling, compression. Neither Flower nor torch is imported here."""

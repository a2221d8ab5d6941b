"""A client's reply: training, clip, noise and encoding, as a pipeline with named slots."""

"""The methods with one noised sum of clipped updates, by their names: one line a method. Without torch."""

# What `DPClient` and `privacy_mod` run: their clients differ in the recipe of training alone.
CLIENT_LEVEL = ("dp-fedavg", "dp-fedsam", "fed-smp")

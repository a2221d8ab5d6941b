"""Made-up records: the same question everywhere, other patients in each place.

    python make_data.py device-1 records.csv

Each record is eight measurements and a diagnosis, 0 or 1. Places differ in what they measure on average and in how many of their
patients are ill. `public` is the set that the server tests on.
"""

import argparse
from pathlib import Path

import numpy as np

NUM_FEATURES = 8
# Mean of all measurements, and what it adds to the odds of an illness.
PLACES = {"device-1": (-0.8, -1.0), "device-2": (0.0, 0.0), "device-3": (0.8, 1.0), "public": (0.0, 0.0)}


def main() -> None:
    """Write the records of one place."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("place", choices=list(PLACES))
    parser.add_argument("output", type=Path)
    parser.add_argument("--records", type=int, default=300)
    arguments = parser.parse_args()
    mean, odds = PLACES[arguments.place]
    rng = np.random.default_rng(list(PLACES).index(arguments.place))
    features = rng.normal(mean, 1.0, (arguments.records, NUM_FEATURES))
    effects = np.where(np.arange(NUM_FEATURES) % 2, -1.0, 1.0)
    ill = rng.random(arguments.records) < 1 / (1 + np.exp(-2 * features @ effects - odds))
    header = ",".join([*(f"m{index}" for index in range(1, NUM_FEATURES + 1)), "ill"])
    np.savetxt(arguments.output, np.column_stack([features, ill]), delimiter=",", header=header, comments="", fmt="%.6g")


if __name__ == "__main__":
    main()

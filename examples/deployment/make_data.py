"""Made-up records: the same question everywhere, other patients in each place.

    python make_data.py device-1 records.csv

Each record is eight measurements and a diagnosis, 0 or 1. Places differ in what they measure on average and in how many of their
patients are ill; a place's name, any text, determines its records. `public` is the set that the server tests on.
"""

import argparse
import zlib
from pathlib import Path

import numpy as np

NUM_FEATURES = 8


def main() -> None:
    """Write the records of one place."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("place", help="the device's name; or public")
    parser.add_argument("output", type=Path)
    parser.add_argument("--records", type=int, default=300)
    arguments = parser.parse_args()
    rng = np.random.default_rng(zlib.crc32(arguments.place.encode()))
    # Mean of all measurements, and what the place adds to the odds of an illness.
    odds = 0.0 if arguments.place == "public" else rng.uniform(-1.0, 1.0)
    features = rng.normal(0.8 * odds, 1.0, (arguments.records, NUM_FEATURES))
    effects = np.where(np.arange(NUM_FEATURES) % 2, -1.0, 1.0)
    ill = rng.random(arguments.records) < 1 / (1 + np.exp(-2 * features @ effects - odds))
    header = ",".join([*(f"m{index}" for index in range(1, NUM_FEATURES + 1)), "ill"])
    np.savetxt(arguments.output, np.column_stack([features, ill]), delimiter=",", header=header, comments="", fmt="%.6g")


if __name__ == "__main__":
    main()

"""Write synthetic records: the same question everywhere, other patients at each place.

    python make_data.py device-1 records.csv

Each record is eight measurements and a diagnosis, 0 or 1. Places differ in their mean measurements and in their fraction of ill
patients. A place's name, any text, determines its records. `public` is the server's test set.
"""

import argparse
import zlib
from pathlib import Path

import numpy as np

NUM_FEATURES = 8


def main() -> None:
    """Write the records of one place."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("place", help="name of the device, or public")
    parser.add_argument("output", type=Path)
    parser.add_argument("--records", type=int, default=300)
    arguments = parser.parse_args()
    rng = np.random.default_rng(zlib.crc32(arguments.place.encode()))
    # Shifts the mean of all measurements, and the log-odds of an illness.
    odds = 0.0 if arguments.place == "public" else rng.uniform(-1.0, 1.0)
    features = rng.normal(0.8 * odds, 1.0, (arguments.records, NUM_FEATURES))
    effects = np.where(np.arange(NUM_FEATURES) % 2, -1.0, 1.0)
    ill = rng.random(arguments.records) < 1 / (1 + np.exp(-2 * features @ effects - odds))
    header = ",".join([*(f"m{index}" for index in range(1, NUM_FEATURES + 1)), "ill"])
    np.savetxt(arguments.output, np.column_stack([features, ill]), delimiter=",", header=header, comments="", fmt="%.6g")


if __name__ == "__main__":
    main()

"""Measure time, memory and bits of QSGD: one core, NumPy.

    python benchmarks/quantization.py [--coordinates N]

The program prints a Markdown table: seconds to encode and to decode (the least of three), memory allocated besides the vector as
a multiple of the float32 vector, and bits per coordinate, as sent and at most.
"""

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flower_dp.core.compression import decode, qsgd, qsgd_bytes
from flower_dp.core.noise import noise_generator


def timed(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return the least of three times, the peak memory and the result."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - started)
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return min(times), peak, result


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinates", type=int, default=10_000_000)
    size = parser.parse_args().coordinates
    vector = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    print("| levels | encode s | decode s | encode memory | decode memory | bits | most bits |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for levels in (1, 10, 100, 1000):
        rng = noise_generator()
        encode, encode_peak, payload = timed(lambda levels=levels, rng=rng: qsgd(vector, levels, rng))
        read, read_peak, _ = timed(lambda payload=payload: decode(payload, size))
        memory = f"{encode_peak / vector.nbytes:.2f} | {read_peak / vector.nbytes:.2f}"
        bits = f"{8 * payload.num_bytes / size:.3f} | {8 * qsgd_bytes(size, levels) / size:.3f}"
        print(f"| {levels} | {encode:.2f} | {read:.2f} | {memory} | {bits} |")


if __name__ == "__main__":
    main()

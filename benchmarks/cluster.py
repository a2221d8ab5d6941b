"""Measure seconds per round by the number of workers of a cluster, and the part that the driver adds for each node.

    python benchmarks/cluster.py [--workers 2 4 8] [--parameters N] [--rounds N] [--ray-address HOST:PORT]

Every worker serves one node, and replies in each round with an array of N float32 values that takes no computing. So the time is
that of messages, Ray and the server's sum. For every number of workers the program prints the median seconds of a round, the
bytes to and from one node, and the seconds in which the driver reads and sums the replies. Without an address the workers share
the cores of this machine. A round can't be shorter there than their work one after another: the lines then show how much the
driver adds for each node, not how fast a cluster is. The program prints how busy the machine was before.
"""

import argparse
import os
import platform
import statistics
import time

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_dp.simulation import RayGrid, Workers
from flower_dp.simulation.cluster import Cluster, address_of

WARM_UP = 3


def answering(parameters: int) -> ClientApp:
    """Return an app whose nodes reply with an array at once."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"sum": ArrayRecord([np.ones(parameters, np.float32)])}), reply_to=message)

    return app


def measured(workers: Workers, parameters: int, num_rounds: int) -> tuple[float, float]:
    """Return the seconds of a round with one node per worker, and the seconds of its sum."""
    model = ArrayRecord([np.zeros(parameters, np.float32)])
    seconds, adding = [], []
    with RayGrid(answering(parameters), workers, num_nodes=len(workers.actors)) as grid:
        for _ in range(num_rounds + WARM_UP):
            started = time.perf_counter()
            replies = grid.send_and_receive(
                [Message(RecordDict({"model": model}), node, "train") for node in grid.get_node_ids()]
            )
            there = time.perf_counter()
            total = np.zeros(parameters, np.float64)
            for reply in replies:
                total += next(iter(reply.content.array_records.values())).to_numpy_ndarrays()[0]
            if not np.array_equal(total, np.full(parameters, len(workers.actors))):
                raise SystemExit("a reply is missing")
            adding.append(time.perf_counter() - there)
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[WARM_UP:]), statistics.median(adding[WARM_UP:])


def main() -> None:
    """Measure every number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--parameters", type=int, default=203_530, help="length of the array; default: the MLP 784-256-10")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ray-address", default="")
    options = parser.parse_args()
    print(
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} before"
    )
    cluster = Cluster(address=address_of(options.ray_address)) if options.ray_address else None
    for number in options.workers:
        # On one machine they share cores.
        share = 1.0 if cluster else min(1.0, (os.cpu_count() or 1) / max(options.workers))
        workers = Workers(num_workers=number, cpus=share, cluster=cluster)
        seconds, adding = measured(workers, options.parameters, options.rounds)
        workers.close()
        print(
            f"{number} workers: {1000 * seconds:.1f} ms a round, of which the sum {1000 * adding:.1f} ms; "
            f"{4 * options.parameters / 1e6:.2f} MB to each node and back"
        )


if __name__ == "__main__":
    main()

"""Compare the batched engine with one client after another, for the local training of one round, in one process.

    python benchmarks/engines.py [default] [mlp] [mlp-module] [cnn] [cnn-small] [resnet] [--clients N]
        [--device cuda] [--repeats N] [--threads N] [--check]

For every job the program prints the seconds of both engines and their ratio. It takes the fastest of some rounds, in which the
engines alternate, after a first round apart, in which the batched engine traces and checks its program. Records are random
numbers; rows are discarded. With --check the program also trains one client alone, first, in the middle and in a second group,
and compares the bits.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from flower_dp.apps.tasks.models import make  # noqa: E402
from flower_dp.clients.training.engines import ENGINES, local_updates  # noqa: E402
from flower_dp.clients.training.engines.batched import num_slots  # noqa: E402
from flower_dp.clients.training.recipe import FlatModel, Training  # noqa: E402
from flower_dp.clients.training.records import TensorRecords  # noqa: E402


class Perceptron(nn.Module):
    """A hand-written MLP 784-256-10."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(784, 256), nn.Linear(256, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        outputs: Tensor = self.output(torch.relu(self.hidden(inputs.flatten(1))))
        return outputs


class Block(nn.Module):
    """Two 3 x 3 convolutions with GroupNorm and a shortcut, which may have a norm too."""

    def __init__(self, before: int, after: int, stride: int, groups: int, *, is_normed: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(groups, after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(groups, after)
        norm = nn.GroupNorm(groups, after) if is_normed else nn.Identity()
        shorter = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm)
        self.shortcut = nn.Identity() if before == after and stride == 1 else shorter

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the activations."""
        hidden = torch.relu(self.first_norm(self.first(inputs)))
        return torch.relu(self.second_norm(self.second(hidden)) + self.shortcut(inputs))


def resnet(groups: int = 8, *, is_normed: bool = False) -> nn.Module:
    """ResNet-18 with GroupNorm for 3 x 32 x 32 images: a first convolution of 3 x 3, and no first pooling."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(groups, 64), nn.ReLU()]
    for before, after, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [Block(*sizes, groups, is_normed=is_normed) for sizes in ((before, after, stride), (after, after, 1))]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, its recipe and its clients' records."""

    name: str
    model: Callable[[], nn.Module]
    training: Training
    records_per_client: int
    shape: tuple[int, ...] = (784,)


PLAIN = Training(learning_rate=0.1, batch_size=10)
JOBS = (
    Job(
        name="default",
        model=lambda: make("logistic", seed=0),
        training=Training(learning_rate=0.15, batch_size=4, momentum=0.5, sam_radius=0.05),
        records_per_client=5,
    ),
    Job(name="mlp", model=lambda: make("mlp", seed=0), training=PLAIN, records_per_client=60),
    Job(name="mlp-module", model=Perceptron, training=PLAIN, records_per_client=60),
    Job(name="cnn", model=lambda: make("cnn", seed=0), training=PLAIN, records_per_client=60),
    Job(name="cnn-small", model=lambda: make("cnn-small", seed=0), training=PLAIN, records_per_client=60),
    Job(name="resnet", model=resnet, training=PLAIN, records_per_client=30, shape=(3, 32, 32)),
)


def clients_of(job: Job, num_clients: int, device: torch.device | str = "cpu") -> list[TensorRecords]:
    """Return clients that share 10,000 random uint8 records, which are on a device."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randint(256, (10_000, *job.shape), generator=rng, dtype=torch.uint8)
    targets = torch.randint(10, (10_000,), generator=rng)
    rows = torch.randint(10_000, (num_clients, job.records_per_client), generator=rng)
    inputs, targets = inputs.to(device), targets.to(device)
    return [TensorRecords(inputs=inputs, targets=targets, indices=own, transform=_scaled) for own in rows]


def _scaled(raw: Tensor) -> Tensor:
    return raw.to(torch.float32) / 127.5 - 1


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of some work, until the device has finished it."""
    _synchronize(device)
    started = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Runner:
    """One job on one device, with the records on this or another device."""

    def __init__(self, job: Job, num_clients: int, device: torch.device, records_on: torch.device | str = "cpu") -> None:
        self._training, self._device = job.training, device
        torch.manual_seed(0)
        self.model = FlatModel(job.model(), device)
        self._vector = self.model.vector.clone()
        self._clients = clients_of(job, num_clients, records_on)

    @property
    def fell_back(self) -> bool:
        """Whether the batched engine has trained clients one by one."""
        return any(program is None for program in self.model.programs.values())

    @property
    def slots(self) -> int:
        """The number of clients that the batched engine trains at once."""
        return num_slots(self.model.layout.size, self._device, len(self._clients))

    def rows(self, engine: str, places: list[int]) -> Any:
        """Return the rows of some clients, one at a time."""
        clients, group_size = [self._clients[place] for place in places], len(self._clients)
        arguments: dict[str, Any] = {"model": self.model, "server_round": 1, "seeds": places, "engine": engine}
        return local_updates(self._vector, clients, self._training, group_size=group_size, **arguments)

    def train(self, engine: str) -> None:
        """Train all clients, and discard their rows."""
        for row in self.rows(engine, list(range(len(self._clients)))):
            if isinstance(row, Exception):
                raise row

    def seconds(self, engine: str) -> float:
        """Train all clients; return the seconds."""
        return seconds_of(lambda: self.train(engine), self._device)

    def same_bits(self) -> bool:
        """Return whether a client's row is the same alone, first, in the middle and in a second group."""
        full = self.slots
        others = [1 + place % (len(self._clients) - 1) for place in range(2 * full)]
        (alone,) = self.rows("batched", [0])
        for before in {0, 1, full - 1, full // 2, full + 1}:
            places = [*others[:before], 0, *others[before:]]
            for place, row in zip(places, self.rows("batched", places), strict=True):
                if place == 0 and not torch.equal(row, alone):
                    return False
        return True


def measure(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a job."""
    device = torch.device(options.device)
    runner = Runner(job, options.clients, device)
    first = {engine: runner.seconds(engine) for engine in ENGINES}
    times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for _ in range(options.repeats):
        for engine in ENGINES:
            times[engine].append(runner.seconds(engine))
    best = {engine: min(seconds) for engine, seconds in times.items()}
    result: dict[str, Any] = {
        "job": job.name,
        "clients": options.clients,
        "parameters": runner.model.layout.size,
        "slots": runner.slots,
        "batched": not runner.fell_back,
        "seconds": best,
        "first_seconds": first,
        "ratio": best["one_by_one"] / best["batched"],
    }
    return result | ({"same_bits": runner.same_bits()} if options.check else {})


def main() -> None:
    """Run the jobs asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", help="names of jobs; all by default")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="also compare bits")
    options = parser.parse_args()
    if unknown := set(options.jobs) - {job.name for job in JOBS}:
        parser.error(f"unknown jobs {sorted(unknown)}; known are {', '.join(job.name for job in JOBS)}")
    torch.set_num_threads(options.threads)
    machine = torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else platform.processor() or "CPU"
    print(
        f"{platform.platform()}, {machine}, {os.cpu_count()} cores, {options.threads} torch threads, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
    for job in JOBS:
        if options.jobs and job.name not in options.jobs:
            continue
        result = measure(job, options)
        one, batched = (result["seconds"][engine] for engine in ENGINES)
        print(
            f"{job.name}: {options.clients} clients in groups of {result['slots']}, "
            f"one_by_one {one:.4f} s, batched {batched:.4f} s, ratio {result['ratio']:.2f}; "
            f"first round {result['first_seconds']['batched']:.2f} s"
            + ("" if result["batched"] else "; fell back")
            + (f"; same bits: {result['same_bits']}" if options.check else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()

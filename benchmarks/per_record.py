"""Compare ways to sum clipped per-record gradients, `torch.func`, opacus' three ways and a plain loop, by time and memory.

    python benchmarks/per_record.py [logistic] [mlp] [cnn] [resnet18] [--device cpu|cuda] [--rounds N]

Every way makes the same sum: gradients of cross-entropy, clipped to L2 norm 1, over random records. The table has one line per
model and way. It gives milliseconds per record, peak memory beyond model and records, and the difference of the sum from the
plain loop's. The time is that of the fastest round with the fastest number of records at once; on a CPU it is processor time of
one thread. Ghost clipping gives only the sum, without the rows that noise on a lattice needs.

The last column shows whether a row of the two engines of `flower_dp.clients.training.per_record` has the same bits at every
position among other records.
"""

import argparse
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engines import resnet

from flower_dp.apps.tasks.models import make
from flower_dp.clients.training.per_record import record_gradients
from flower_dp.clients.training.recipe import FlatModel
from flower_dp.core.clipping import clip_l2

CLIP_NORM = 1.0
PLAIN_LOOP = "plain loop"
ENGINES = {"torch.func": "torch.func", "expanded weights": "expanded-weights"}


# Records by device, and what a record looks like.
JOBS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, int]]] = {
    "logistic": (lambda: make("logistic", seed=0), (784,), {"cpu": 256, "cuda": 4096}),
    "mlp": (lambda: make("mlp", seed=0), (784,), {"cpu": 256, "cuda": 4096}),
    "cnn": (lambda: make("cnn", seed=0), (784,), {"cpu": 32, "cuda": 1024}),
    "resnet18": (lambda: resnet(32, is_normed=True), (3, 32, 32), {"cpu": 8, "cuda": 256}),
}
CHUNKS = {"cpu": (1, 2, 4, 8, 16, 64, 256), "cuda": (16, 64, 256, 1024, 4096)}
LARGEST_MATRIX = {"cpu": 2**26, "cuda": 2**32}


def summed(model: FlatModel, inputs: Tensor, targets: Tensor, chunk: int, rows_of: Callable[..., Tensor]) -> Tensor:
    """Return the clipped sum from rows."""
    total = torch.zeros_like(model.vector, dtype=torch.float64)
    for x, y in zip(torch.split(inputs, chunk), torch.split(targets, chunk), strict=True):
        total += clip_l2(rows_of(model, x, y), CLIP_NORM).sum(dim=0, dtype=torch.float64)
    return total


def by_engine(engine: str) -> Callable[..., Tensor]:
    """Return the clipped sum of one of the package's engines."""

    def rows_of(model: FlatModel, inputs: Tensor, targets: Tensor) -> Tensor:
        return record_gradients(model, inputs, targets, loss=nn.functional.cross_entropy, engine=engine)[0]

    return lambda model, inputs, targets, chunk: summed(model, inputs, targets, chunk, rows_of)


def by_hooks(model: FlatModel, inputs: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return the clipped sum by opacus' GradSampleModule."""
    from opacus import GradSampleModule  # noqa: PLC0415

    wrapped = GradSampleModule(model.module, loss_reduction="sum")

    def rows_of(model: FlatModel, inputs: Tensor, targets: Tensor) -> Tensor:
        nn.functional.cross_entropy(wrapped(inputs), targets, reduction="sum").backward()
        rows = torch.cat([parameter.grad_sample.flatten(1) for parameter in model.parameters], dim=1)
        wrapped.zero_grad(set_to_none=True)
        return rows

    try:
        return summed(model, inputs, targets, chunk, rows_of)
    finally:
        wrapped.to_standard_module()


def by_ghost_clipping(model: FlatModel, inputs: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return the clipped sum by opacus' ghost clipping: norms first, then one weighted backward pass."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping  # noqa: PLC0415
    from opacus.optimizers import DPOptimizerFastGradientClipping  # noqa: PLC0415
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping  # noqa: PLC0415

    wrapped = GradSampleModuleFastGradientClipping(model.module, loss_reduction="sum", max_grad_norm=CLIP_NORM)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters, lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=None,
        loss_reduction="sum",
    )
    loss = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum")
    total = torch.zeros_like(model.vector, dtype=torch.float64)
    try:
        for x, y in zip(torch.split(inputs, chunk), torch.split(targets, chunk), strict=True):
            loss(wrapped(x), y).backward()
            total += torch.cat([parameter.grad.flatten() for parameter in model.parameters])
            wrapped.zero_grad(set_to_none=True)
    finally:
        wrapped.to_standard_module()
    return total


def one_by_one(model: FlatModel, inputs: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return the clipped sum with one backward pass per record."""

    def rows_of(model: FlatModel, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model.module(inputs), targets)
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, model.parameters)])[None]

    return summed(model, inputs, targets, 1, rows_of)


WAYS: dict[str, Callable[[FlatModel, Tensor, Tensor, int], Tensor]] = {
    PLAIN_LOOP: one_by_one,
    **{way: by_engine(engine) for way, engine in ENGINES.items()},
    "GradSampleModule": by_hooks,
    "ghost clipping": by_ghost_clipping,
}


def job_of(name: str, device: str) -> tuple[FlatModel, Tensor, Tensor]:
    """Return a model with random weights and random records."""
    build, shape, sizes = JOBS[name]
    torch.manual_seed(0)
    model = FlatModel(build(), torch.device(device))
    inputs = torch.randn(sizes[device], *shape, device=device)
    return model, inputs, torch.randint(10, (sizes[device],), device=device)


def settle(device: str) -> None:
    """Wait until a GPU has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def resident(field: str) -> int:
    """Return this process's current (VmRSS) or peak (VmHWM) bytes in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@contextmanager
def peak(device: str, found: list[int]) -> Iterator[None]:
    """Append the peak number of bytes in use beyond those at the start."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        found.append(torch.cuda.max_memory_allocated() - before)
        return
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    yield
    found.append(resident("VmHWM") - before)


def peak_of(name: str, way: str, chunk: int, device: str) -> int:
    """Return the peak memory of one way, beyond the model, the records and the libraries that a first record loads."""
    model, inputs, targets = job_of(name, device)
    WAYS[way](model, inputs[:1], targets[:1], 1)
    found: list[int] = []
    with peak(device, found):
        WAYS[way](model, inputs, targets, chunk)
        settle(device)
    return found[0]


def peak_elsewhere(name: str, way: str, chunk: int, device: str) -> int:
    """Return `peak_of`; on a CPU from a new process, in which no other way has left memory."""
    if device == "cuda":
        return peak_of(name, way, chunk, device)
    command = [sys.executable, __file__, name, "--peak", way, str(chunk)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def same_bits_at_every_place(model: FlatModel, inputs: Tensor, targets: Tensor, engine: str, chunk: int) -> bool:
    """Return whether rows have the same bits if the records change positions."""
    inputs, targets = inputs[:chunk], targets[:chunk]

    def rows_of(inputs: Tensor, targets: Tensor) -> Tensor:
        return record_gradients(model, inputs, targets, loss=nn.functional.cross_entropy, engine=engine)[0]

    rows, moved = rows_of(inputs, targets), rows_of(inputs.roll(1, 0), targets.roll(1, 0))
    return torch.equal(rows, moved.roll(-1, 0))


def measure(name: str, device: str, rounds: int) -> list[str]:
    """Return one line of the table per way."""
    model, inputs, targets = job_of(name, device)
    seconds: dict[tuple[str, int], list[float]] = {}
    sums: dict[str, Tensor] = {}
    now = time.perf_counter if device == "cuda" else time.process_time
    for _ in range(rounds + 1):  # ways take turns; the first round is for warming up
        for way, clipped_sum in WAYS.items():
            for chunk in CHUNKS[device][:1] if way == PLAIN_LOOP else CHUNKS[device]:
                if chunk > len(inputs) or chunk * model.layout.size > LARGEST_MATRIX[device]:
                    continue
                settle(device)
                started = now()
                sums[way] = clipped_sum(model, inputs, targets, chunk)
                settle(device)
                seconds.setdefault((way, chunk), []).append(now() - started)
    lines = []
    for way in WAYS:
        best, chunk = min((min(times[1:]), chunk) for (timed, chunk), times in seconds.items() if timed == way)
        reference, bits = sums[PLAIN_LOOP], ""
        if way in ENGINES:
            bits = "yes" if same_bits_at_every_place(model, inputs, targets, ENGINES[way], chunk) else "no"
        difference = float(torch.linalg.vector_norm(sums[way] - reference) / torch.linalg.vector_norm(reference))
        lines.append(
            f"| {name} | {way} | {1000 * best / len(inputs):.3g} | {1 if way == PLAIN_LOOP else chunk} "
            f"| {peak_elsewhere(name, way, chunk, device) / 1e6:.0f} MB | {difference:.0e} | {bits} |"
        )
    return lines


def processor() -> str:
    """Return the processor's name, or its architecture if the system does not give the name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(JOBS)}; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", nargs=2, metavar=("WAY", "CHUNK"), help="print the peak memory of one way, in bytes")
    args = parser.parse_args()
    for name in args.models:
        if name not in JOBS:
            parser.error(f"MODEL={name!r}: must be one of {', '.join(JOBS)}")
    if args.rounds < 1:
        parser.error(f"--rounds={args.rounds}: must be >= 1")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # opacus' hooks on a first layer
    if args.peak:
        print(peak_of(args.models[0], args.peak[0], int(args.peak[1]), args.device))
        return
    from opacus import __version__ as opacus_version  # noqa: PLC0415

    machine = torch.cuda.get_device_name() if args.device == "cuda" else f"{processor()}, one thread"
    print(f"{machine}; Python {platform.python_version()}, torch {torch.__version__}, opacus {opacus_version}\n")
    print("| model | way | ms a record | records together | peak memory | difference | same bits at every place |")
    print("|---|---|---|---|---|---|---|")
    for name in args.models or JOBS:
        for line in measure(name, args.device, args.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()

"""Runs whose every number is fixed: what is recorded of them, and how they are played.

All are played in this process, by the interfaces that a user has: strategies, clients and grids, `record_run`, the app, the
command line. Secret draws are replaced by fixed ones (`fixed_draws`): a run does not know of it, so that its statement is the
one that a user gets.
"""

import contextlib
import hashlib
import io
import itertools
import json
import logging
import re
import secrets
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import numpy as np
import tomli_w
import torch
from flwr.app import ArrayRecord, MetricRecord
from safetensors.numpy import load_file

from flower_dp import record_run
from flower_dp.cli import main as cli
from flower_dp.clients import model_arrays
from flower_dp.core import dp_events, noise
from flower_dp.privacy.store import Store
from flower_dp.running import plot
from tests import app_runs
from tests.contract_runs import SMALL, grid_of
from tests.contracts import METHODS, Method, Words

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("recorded")
SEED = 7
NUM_COORDINATES = 6
# Of a round's line: how long it took, and how long its messages were.
NOT_RECORDED = ("elapsed", "seconds", "bytes-down", "bytes-up")
EXACT = ("epsilon", "delta")


# All that knows the inside of the package: a change of the inside changes these functions, and no record.


@contextlib.contextmanager
def fixed_draws() -> Iterator[None]:
    """Replace noise, secret choices and secret numbers by fixed ones, different for every purpose, round and client."""
    fresh, drawn = noise.noise_generator, itertools.count()

    def generator(seed: int | None = None, *purpose: object, **options: Any) -> Any:
        return fresh(SEED if seed is None else seed, *purpose, **options)

    def randbits(num_bits: int) -> int:
        digest = hashlib.sha256(f"{SEED} {next(drawn)}".encode()).digest()
        return int.from_bytes(digest) % 2**num_bits

    def put(new: Any, old: Any) -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("flower_dp.") and getattr(module, "__dict__", {}).get("noise_generator") is old:
                module.noise_generator = new

    try:
        put(generator, fresh)
        with mock.patch.object(secrets, "randbits", randbits):
            yield
    finally:
        put(fresh, generator)  # a module that was imported meanwhile has it too


def charges_of(folder: Path) -> list[dict[str, Any]]:
    """Return the charges of a recorded run: whom each round's release was charged to, and what."""
    with Store(folder / "checkpoint" / "ledger.sqlite", read_only=True) as ledger:
        (run,) = ledger.runs
        charges = ledger.read(run)
    of_events = [(charge, sorted(set(charge.by_owner.values()), key=text_of)) for charge in charges]
    return [
        {"round": charge.server_round, "release": charge.release, "number": charge.number}
        | {"unit": charge.scope.unit, "relation": charge.scope.relation}
        | {"owners": {text_of(one): sorted(name for name, own in charge.by_owner.items() if own == one) for one in events}}
        for charge, events in of_events
    ]


def views_of(method: Method, strategy: Any) -> list[dict[str, int]]:
    """Return, for every adversary, what each owner was charged in the whole run, with the number of owners."""
    return [dict(Counter(total_of(ledger.event) for ledger in charge.ledgers(strategy))) for charge in method.charges]


def epsilons_of(statement: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a statement, as `statement.json` has it."""
    by_adversary = {one["name"]: [one["epsilon"], one["accountant"], one["lowest_noise_std"]] for one in statement["adversaries"]}
    told = statement["guarantee"]
    return {"private": told["private"], "epsilon": told["epsilon"], "adversaries": by_adversary} | (
        {"joint": told["joint"]} if told["joint"] else {}
    )


def planned(method: str, problem: Path) -> str:
    """Return what `flower-dp plan` writes, and its exit status."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            cli.main(["plan", method, "--problem", str(problem)])
        except SystemExit as ended:
            return f"{out.getvalue()}\nexit status {ended.code}"
    return out.getvalue()


# Events as text


def text_of(event: Any) -> str:
    """Return an event with ten digits of its numbers: the last ones are the machine's."""
    if isinstance(event, float):
        return f"{event:.10g}"
    if isinstance(event, list | tuple):
        return f"[{', '.join(map(text_of, event))}]"
    if attrs.has(type(event)):
        fields = ", ".join(f"{field.name}={text_of(getattr(event, field.name))}" for field in attrs.fields(type(event)))
        return f"{type(event).__name__.removesuffix('DpEvent')}({fields})"
    return str(event)


def total_of(event: dp_events.DpEvent) -> str:
    """Return a composition as its parts and how often each is in it, in an order of their own."""
    counts = Counter(dict(_leaves(event)))
    return " + ".join(f"{count} x {text}" for text, count in sorted(counts.items()))


def _leaves(event: dp_events.DpEvent) -> Counter[str]:
    if isinstance(event, dp_events.ComposedDpEvent):
        return sum((_leaves(part) for part in event.events), Counter())
    if isinstance(event, dp_events.SelfComposedDpEvent):
        return Counter({text: count * event.count for text, count in _leaves(event.event).items()})
    return Counter({text_of(event): 1})


# A run folder as a record


def record_of(folder: Path) -> dict[str, Any]:
    """Return what is recorded of a run that has left a run folder."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    statement = json.loads((folder / "statement.json").read_text(encoding="utf-8"))
    arrays = load_file(folder / "model.safetensors")
    vector = np.concatenate([arrays[name].ravel() for name in sorted(arrays)]).astype(np.float64)
    places = np.linspace(0, len(vector) - 1, NUM_COORDINATES).astype(int)
    return {
        "model": {
            "size": len(vector),
            "norm": float(np.linalg.norm(vector)),
            "coordinates": vector[places].tolist(),
        },
        "rounds": [{name: value for name, value in line.items() if name not in (*NOT_RECORDED, *EXACT)} for line in lines],
        "costs": [[line.get(name) for name in EXACT] for line in lines],
        "charges": charges_of(folder),
        "epsilons": epsilons_of(statement),
        "statement": (folder / "statement.txt").read_text(encoding="utf-8").splitlines(),
    }


def play_app(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Run the app on two nodes with settings that differ from its defaults."""
    return record_of(app_runs.play(folder / "run", dict(settings)))


def play_method(method: Method, arguments: Words, folder: Path, *, times: int = 1) -> dict[str, Any]:
    """Run a method of the contract suite; several times with one strategy, of which the last one is recorded."""
    strategy = method.strategy(arguments)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model, public = SMALL.model(), SMALL.data("c0")
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.inference_mode():
            return MetricRecord({"loss": torch.nn.functional.cross_entropy(model(public.inputs), public.targets).item()})

    for time in range(times):
        record_run(
            strategy,
            grid_of(method, arguments, SMALL, num_nodes=2 if method.client else None, noise_seed=arguments.noise_seed),
            model_arrays(SMALL.model()),
            num_rounds=arguments.num_rounds,
            config={},
            path=folder / f"run{time}",
            evaluate_fn=evaluate,
        )
    return record_of(folder / f"run{times - 1}") | {"views": views_of(method, strategy)}


def play_plan(method: str, problem: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    (folder / "problem.toml").write_text(tomli_w.dumps(problem), encoding="utf-8")
    return {"answer": planned(method, folder / "problem.toml").splitlines()}


# Which runs


# Fewer rounds and clients than any preset has; from 100 clients on there is a default delta.
ROUNDS, FEW, MANY = 3, 4, 100
ELSEWHERE = {"adult": "breast-cancer", "vehicle": "breast-cancer", "fashion-mnist": "mnist"}


def scaled_down(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset's settings with fewer clients and rounds, and data that packages carry in place of a data folder."""
    found = {**settings, "num-rounds": ROUNDS, "seed": SEED}
    if found.pop("data-dir", "") and found.get("task") in ELSEWHERE:
        found |= {"task": ELSEWHERE[found["task"]], "model": "logistic"}
    method = found.get("method")
    # Natural ones are of data that are not here, Dirichlet's by a library that takes seconds to import; where noise follows from
    # a client's number of records, clients of one size have one cost, and its accounting takes half of the time.
    if found.get("partition") in ("natural", "dirichlet") or method in ("fedsgd-dpc", "dp-fedpaq"):
        found["partition"] = "iid"
        found.pop("dirichlet-alpha", None)
        found.pop("classes-per-client", None)
    few = method not in ("dp-fedavg", "dp-fedsam", "dp-ftrl", "fed-smp")
    found["num-clients"] = FEW if few else MANY
    found["cohort-size"] = min(found.get("cohort-size", 0), FEW // 2)
    if found.get("local-epochs", 1) > 2:
        found["local-epochs"] = 2
    for key, most in (("nbafl.num-replies", ROUNDS), ("scaffold.num-local-steps", 4), ("dp-pasgd.num-local-steps", 10)):
        if key in found:
            found[key] = most
    return found


def further(method: str, own: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """Return settings of a run on the breast cancer records: those of the method's table, and others."""
    common = {"method": method, "task": "breast-cancer", "num-rounds": ROUNDS, "num-clients": FEW, "seed": SEED}
    return common | {"learning-rate": 0.1} | {f"{method}.{key}": value for key, value in own.items()} | settings


THREE = {"cohort-size": 3}
# What no preset has.
FURTHER: dict[str, dict[str, Any]] = {
    "private evaluation of one sum": further(
        "dp-fedavg",
        {"delta": 1e-3},
        **{"sampling-rate": 0.5, "private-evaluation.every": 2, "private-evaluation.metrics": "loss=5,accuracy=1"},
    ),
    "private evaluation of every client": further(
        "fedsgd-dpc",
        {"mechanism": "gaussian", "delta": 1e-4, "client-epsilons": "0.5,2,8,2"},
        **{"private-evaluation.every": 1, "private-evaluation.epsilon": 0.5},
    ),
    "epsilon given, fixed-size cohorts": further("dp-fedavg", {"epsilon": 3.0, "delta": 1e-3}, sampling="fixed-size", **THREE),
    "a target that ends the run": further("dp-fedavg", {"target-epsilon": 6.0, "delta": 1e-3}, sampling="full"),
    "quantized shares of an untrusted server": further(
        "dp-fedsam",
        {"delta": 1e-3, "target-epsilon": 0.0, "server-completes-noise": False, "keep-ratio": 0.5, "quantization-levels": 8},
        **THREE | {"sampling": "round-robin", "report-client-metrics": True},
    ),
    "dp-fedpaq with clipped updates and the paper's noise": further(
        "dp-fedpaq", {"update-clip-norm": 0.15, "calibration": "paper", "num-local-steps": 2}, sampling="fixed-size", **THREE
    ),
    "scaffold with noise": further("scaffold", {"sensitivity": "per-step", "num-local-steps": 2}, **{"batch-size": 38}),
    "dp-pasgd by the paper's accountant": further("dp-pasgd", {"calibration": "zcdp", "num-local-steps": 2}),
    "nbafl with a proved epsilon": further("nbafl", {"epsilon": 20.0, "paper-epsilon": 50.0}, **{"proximal-mu": 0.1}),
}

# The examples of docs/planning.md, and two changes of them.
_LAPLACE, _BOUND, _PASGD, _FEDPAQ, _ = (
    tomllib.loads(block)
    for block in re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "planning.md").read_text(encoding="utf-8"), re.M | re.S)
)
_GAUSSIAN = {"delta": 1e-5, "sampling_rate": 0.1, "gradient_variance": 0.5, "noise_constant": 1.5, "max_rounds": 60}
PROBLEMS: dict[str, dict[str, Any]] = {
    "fedsgd-dpc laplace": _LAPLACE,
    "fedsgd-dpc gaussian": _LAPLACE | {"mechanism": "gaussian", "clip_norm": 10.0, "epsilon": 2.0} | _GAUSSIAN,
    "nbafl noise": dict(list(_BOUND.items())[:8]),
    "nbafl bound": _BOUND,
    "dp-pasgd": _PASGD,
    "dp-fedpaq": _FEDPAQ,
}

Play = Callable[[Path], dict[str, Any]]
_FIRST = METHODS[0]


def _plays() -> Iterator[tuple[str, Play]]:
    for method in METHODS:
        yield f"contract: {method.label}", partial(play_method, method, Words())
        if method.poisson and not method.variant:
            yield f"contract: {method.label}, poisson", partial(play_method, method, Words(sampling_rate=0.5))
    yield "contract: a fixed seed", partial(play_method, _FIRST, Words(noise_seed=SEED))
    yield "contract: the second run of a strategy", partial(play_method, _FIRST, Words(), times=2)
    for name, preset in sorted(app_runs.PRESETS.items()):
        yield f"preset: {name}", partial(play_app, scaled_down(preset))
    for name, settings in FURTHER.items():
        yield f"app: {name}", partial(play_app, settings)
    for name, problem in PROBLEMS.items():
        yield f"plan: {name}", partial(play_plan, name.partition(" ")[0], problem)


PLAYS: dict[str, Play] = dict(_plays())


def file_of(name: str) -> Path:
    """Return the file of a run's record."""
    return RECORDED / ("".join(letter if letter.isalnum() else "-" for letter in name).replace("--", "-") + ".json")


def play(name: str, folder: Path) -> dict[str, Any]:
    """Play a run in an empty folder, without its picture; return its record, as JSON would have it."""
    logging.disable(logging.WARNING)
    try:
        with fixed_draws(), mock.patch.object(plot, "png", return_value=b""):
            found: dict[str, Any] = json.loads(json.dumps(PLAYS[name](folder)))
            return found
    finally:
        logging.disable(logging.NOTSET)

"""What crosses a boundary, as the code itself says: the names that must have a row in docs/threat-model.md.

A section of the page has one function here. To give another part of the package a section, add a function to `SECTIONS`.
"""

import ast
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import msgspec
import numpy as np
import torch
from dp_accounting import GaussianDpEvent
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

from flower_dp import wire
from flower_dp.apps.settings import FUNCTIONS
from flower_dp.cli import ledgers
from flower_dp.clients import ClientPolicy, DPClient, TensorRecords, Training, client_app, model_arrays, refusal_messages
from flower_dp.clients.account import KEY as ACCOUNT_KEY
from flower_dp.clients.account import LEDGER_PATH, NodeStateAccounts
from flower_dp.clients.client_vectors import KEY as KEPT_KEY
from flower_dp.core import environment, metric_columns, serialization
from flower_dp.core.compression import CODECS
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.methods import METHODS
from flower_dp.privacy import charges, ledger_tables, statement
from flower_dp.privacy.budget import LedgerBudget
from flower_dp.privacy.charges import ALL_CLIENTS, Charge, Charges, CostScope
from flower_dp.privacy.device_store import ClientAccount
from flower_dp.privacy.private_file import LastCharge
from flower_dp.privacy.store import RunRow, Store
from flower_dp.running import launch_record, run_folder, trackers
from flower_dp.running.apps import flatten
from flower_dp.running.run_folder import RunFolder
from flower_dp.strategies.checkpoint import NEWEST, PREVIOUS, Checkpoint
from flower_dp.strategies.population import client_query
from flower_dp.strategies.population.client_manager import KnownClients
from flower_dp.strategies.releases.replies import CollectedReplies
from flower_dp.strategies.writer import LEDGER
from flower_dp.wire import (
    MESSAGE_API,
    NUMPY_CLIENT,
    Indicator,
    Instruction,
    LocalRequest,
    Promise,
    ReleaseRequest,
    RoundMask,
    SentMask,
    Separation,
)
from tests.local_grids import context_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "flower_dp"
PROMISE = Promise(clip_norm=1.0, noise_multiplier=1.0)
CENTRAL = partial(ReleaseRequest, promise=PROMISE, placement="central")
# Every kind of ask, so that every key that can be sent is.
ASKS = (
    CENTRAL(step=0.5, mask=RoundMask(seed=1, keep_ratio=0.5), vectors={"v": np.zeros(8, np.float32)}),
    CENTRAL(mask=SentMask.of([0], length=8)),
    CENTRAL(separation=Separation(number=1, min_separation=2, max_participations=3, whole_run=True, run="r")),
    CENTRAL(indicator=Indicator(clip_norm=0.5, scale=0.1)),
    ReleaseRequest(promise=PROMISE, placement="distributed", noise_std=1.0, keep_ratio=0.5, quantization_levels=4),
    ReleaseRequest(
        promise=PROMISE,
        placement="local",
        own={"a": LocalRequest(weight=1.0, terms="t", noise_multiplier=1.0, number=1, run="r")},
    ),
    CENTRAL(metrics=MetricBounds(bounds={"loss": 1.0})),
)
# What of a logger writes.
LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log", "handle")
# Dataclasses and structs of `flower_dp.wire` that do not cross themselves, or stand for one that does.
NOT_SENT = {"Model", "RecordNames", "Part", "_Protocol", "_Answer", "_Refused"}
SENT = {
    *("Instruction", "ReleaseRequest", "Promise", "LocalRequest", "RoundMask", "SentMask", "Indicator"),
    "Separation",
    *("ReplyHeader", "Refusal", "HostedClients"),
}


def fields_of(*kinds: type) -> set[str]:
    """The fields of dataclasses and structs, as `Class.field`."""
    return {f"{kind.__name__}.{name}" for kind in kinds for name in names_of(kind)}


def names_of(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass or of a struct."""
    names: tuple[str, ...] = getattr(kind, "__struct_fields__", ())
    return names or tuple(one.name for one in fields(kind))


def besides(keys: Iterable[str], *kinds: type) -> set[str]:
    """The keys that are no field's name: those that a reader of the page would not find under their field."""
    return set(keys) - {name for kind in kinds for name in names_of(kind)}


def constants(module: ModuleType) -> set[str]:
    """The texts that a module has as constants."""
    return {name for name, value in vars(module).items() if name.isupper() and isinstance(value, str)}


def wire_dataclasses() -> set[str]:
    """The dataclasses and structs that modules of `flower_dp.wire` define."""
    modules = [module for name, module in sys.modules.items() if name.startswith(wire.__name__)]
    kinds = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    kinds = [kind for kind in kinds if is_dataclass(kind) or issubclass(kind, msgspec.Struct)]
    return {kind.__name__ for kind in kinds if kind.__module__.startswith(wire.__name__)}


def instructed(ask: ReleaseRequest) -> Instruction:
    method = wire.EVALUATION if ask.metrics is not None else "dp-fedavg"
    return Instruction(server_round=1, method=method, clients=("a",), ask=ask)


# What a server sends


def messages() -> set[str]:
    """Kinds of messages, records in them, their keys, and what of Flower's metadata the package reads or sets."""
    model = ArrayRecord({"w": Array(np.zeros(8, np.float32))})
    sent: list[Message] = [question(1) for question, _ in client_query._QUESTIONS]
    for names in (MESSAGE_API, NUMPY_CLIENT):
        sent.append(wire.train_message(1, names, model, {}, instructed(ASKS[0])))
        sent.append(wire.evaluate_message(1, names, model, {}, instructed(ASKS[-1])))
    found = {message.metadata.message_type for message in sent}
    for message in sent:
        for name, record in message.content.items():
            keys = set(record) - {"w"}
            found |= {name, *(key.replace(f"{wire.KEY}.v", f"{wire.KEY}.*") for key in keys)}
    return found | {wire.BASE} | metadata()


def metadata() -> set[str]:
    """The fields of Flower's metadata that the code names."""
    found = set()
    for _, node in everywhere(PACKAGE / "wire", PACKAGE / "strategies", PACKAGE / "clients"):
        if isinstance(node, ast.Attribute) and "metadata" in (getattr(node.value, "attr", ""), getattr(node.value, "id", "")):
            found.add(f"metadata.{node.attr}")
        if isinstance(node, ast.keyword) and node.arg in ("group_id", "reply_to", "ttl"):
            found.add(f"metadata.{'reply_to_message_id' if node.arg == 'reply_to' else node.arg}")
    return found


def instruction() -> set[str]:
    keys = json.loads(instructed(ASKS[0]).to_json())
    return fields_of(Instruction) | besides(keys, Instruction)


def ask() -> set[str]:
    kinds = (ReleaseRequest, Promise, LocalRequest, RoundMask, SentMask, Indicator, Separation, MetricBounds)
    tables = [json.loads(instructed(one).to_json())["ask"] for one in ASKS]
    keys = {key for table in tables for key in (*table, *table.get("mask", {}))}
    return fields_of(*kinds) | besides(keys, *kinds)


def run_config() -> set[str]:
    """The settings of the app; `*.key` is the key of one method's table or of several."""
    config = flatten(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"])
    found = {*config, *FUNCTIONS}
    return {re.sub(rf"^({'|'.join(METHODS)})\.", "*.", key) for key in found}


def node_config() -> set[str]:
    """The keys that functions with a node's config name, besides those of the run-config and the names of its tables."""
    found = {LEDGER_PATH, "the app's settings"}
    for folder in (PACKAGE / "clients", PACKAGE / "apps"):
        for _, node in everywhere(folder):
            if isinstance(node, ast.FunctionDef) and "node_config" in names_in(node):
                texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                found |= {text for text in texts if re.fullmatch(r"[a-z]+(-[a-z]+)+", text)}
    keys = run_config()
    return found - keys - {key.partition(".")[0] for key in keys if "." in key}


# What a device sends


def answer() -> set[str]:
    text = wire.ReplyHeader(refused={}, payload={}, seeded_noise=False, metrics={}).to_json(("a",))
    return fields_of(wire.ReplyHeader, wire.Refusal) | besides(json.loads(text), wire.ReplyHeader)


def payload_header() -> set[str]:
    found = {"encoding", "length"} | {key for codec in CODECS.values() for key in codec.keys}
    return found | {f"arrays of {name}" for name, codec in CODECS.items() if codec.num_arrays}


def reply() -> set[str]:
    """Records in the replies of a client that may send metrics, its metrics, and what of an error reply the server reads."""
    contents = list(replied())
    found = {wire.REFUSED} | {name for content in contents for name in content}
    found |= {key for content in contents for record in content.config_records.values() for key in record}
    texts = [content.config_records[wire.KEY][wire.KEY] for content in contents]
    metrics = {name for text in texts for name in json.loads(str(text)).get("metrics", {})}
    read = {f"error.{node.attr}" for _, node in everywhere(PACKAGE / "strategies") if is_error(node)}
    found |= {"a stock client's arrays", "a stock client's metrics", "metadata.src_node_id", "metadata.reply_to_message_id"}
    return found | {f"metrics.{name}" for name in metrics} | read


def is_error(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "error"


def device(policy: ClientPolicy | None = None) -> DPClient:
    records = TensorRecords(inputs=torch.zeros(4, 3), targets=torch.zeros(4, dtype=torch.long))
    own = {"policy": policy} if policy else {}
    training = Training(learning_rate=0.1)
    return DPClient(model=torch.nn.Linear(3, 2), clients={"a": records}, training=training, device="cpu", **own)


def replied() -> Iterator[RecordDict]:
    """The contents of a client's replies to a query, to training and to an evaluation."""
    app = client_app(lambda _: device(ClientPolicy(allow_metrics=True)))
    model = model_arrays(torch.nn.Linear(3, 2))
    asked = Instruction(server_round=1, method="dp-fedavg", clients=("a",), ask=CENTRAL(step=2.0**-12), report_metrics=True)
    for message in (
        wire.client_query(1, "query"),
        wire.train_message(1, MESSAGE_API, model, {}, asked),
        wire.evaluate_message(1, MESSAGE_API, model, {}, instructed(ASKS[-1])),
    ):
        yield app(message, context_of()).content


def client_query_answer() -> set[str]:
    """The keys of a node's answer, also of one that can't train and of one that can't make its client."""

    def failing(_: Context) -> DPClient:
        raise ValueError("no data")

    failed = client_app(failing)(wire.client_query(1, "query"), context_of()).content
    keys = {*json.loads(device().describe_hosted("unfit")), *json.loads(str(failed.config_records[wire.KEY][wire.KEY]))}
    return fields_of(wire.HostedClients) | besides(keys, wire.HostedClients)


def told() -> set[str]:
    """The functions that make a text which a server may see."""
    found = set()
    for place, node in everywhere(PACKAGE / "clients", PACKAGE / "privacy"):
        makes = called(node) in (
            "Declined",
            "Failed",
            "Refusal",
            "ChargeRefusal",
            "redact_errors",
            "replied",
            "client_fn_refusal",
        )
        if makes or (isinstance(node, ast.Name) and node.id == "refused" and isinstance(node.ctx, ast.Store)):
            found.add(place)
    return found


def own_classes(module: ModuleType) -> list[type]:
    """The classes that a module itself defines."""
    return [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]


def statement_fields() -> set[str]:
    return fields_of(*filter(is_dataclass, own_classes(statement))) | {"private"}


def model_json() -> set[str]:
    with TemporaryDirectory() as folder:
        RunFolder(Path(folder)).write_results({"w": np.zeros(1)}, unfinished="after round 1")
        said = json.loads((Path(folder) / run_folder.MODEL_JSON).read_text(encoding="utf-8"))
    return {*said, *said["arrays"]["w"]}


def node_state() -> set[str]:
    state = RecordDict()
    NodeStateAccounts(state).note({"a": (1, "terms", 1)})
    return {KEPT_KEY, *(f"{ACCOUNT_KEY}.{key}" for key in state.config_records[ACCOUNT_KEY])}


def run_state() -> set[str]:
    kinds = {kind for kind, *_ in serialization._KINDS.values() if kind.__module__.startswith("flower_dp.")}
    # Not those of a doctest, which no module has.
    kinds = {kind for kind in kinds if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind}
    return fields_of(*kinds - {Checkpoint, Charge, Charges, CostScope, charges._Histories})


def server_ledger() -> set[str]:
    """The columns of the tables of a server's ledger, and what its lock file remembers."""
    columns = {f"{table}.{column.split()[0]}" for table, text in ledger_tables.TABLES.items() for column in text.split(", ")}
    return columns | fields_of(LastCharge, Charge, CostScope, LedgerBudget, RunRow)


def checkpoints() -> set[str]:
    """The fields of a checkpoint, and the files beside it."""
    names = {NEWEST, PREVIOUS, LEDGER, f"{LEDGER}.mark", launch_record._FILE}
    return fields_of(Checkpoint) | names | fields_of(launch_record.LaunchRecord)


def ledger_told() -> set[str]:
    """What `flower-dp ledger show --json` tells of a server's ledger: keys, those of the lists by their list."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        Store.create(path)
        with Store(path) as ledger:
            words = {"release": "r", "number": 1, "server_round": 1, "fingerprint": "k"}
            scope, event = CostScope(unit="client", relation="add-or-remove-one"), GaussianDpEvent(noise_multiplier=1.0)
            for name in ("a", ALL_CLIENTS):
                run = ledger.begin(method="m", delta=1e-5)
                ledger.append(run, Charge(owners=(name,), events=(event,), scope=scope, **words))
        told, _ = ledgers._read(path)
    runs, clients = list(told["runs"].values()), [one for entries in told["clients"].values() for one in entries]
    inner = {"runs": runs, "clients": clients, "joint": told["joint"]}
    return {*told} | {f"{name}.{key}" for name, entries in inner.items() for entry in entries for key in entry}


# By the title of the section.
SECTIONS: Mapping[str, Callable[[], set[str]]] = {
    "Messages": messages,
    "Instruction": instruction,
    "Ask": ask,
    "Run-config": run_config,
    "Node-config": node_config,
    "Reply": reply,
    "Answer": answer,
    "Payload header": payload_header,
    "Answer to the client query": client_query_answer,
    "Fixed reasons": lambda: constants(refusal_messages),
    "Texts for the server": told,
    "A device's log": lambda: logging_in(PACKAGE / "clients"),
    "What a reply becomes": lambda: fields_of(CollectedReplies, KnownClients),
    "Files of a run folder": lambda: set(run_folder.RESULTS),
    "Columns of metrics.jsonl": lambda: {
        *metric_columns.OWN,
        *(f"{one}*" for one in metric_columns.PREFIXES),
        "metrics of evaluate_fn",
    },
    "Privacy statement": statement_fields,
    "model.json": model_json,
    "Trackers": lambda: {kind.__name__ for kind in own_classes(trackers)} | {"on_round"},
    "The server's log": lambda: logging_in(*(one for one in PACKAGE.iterdir() if one.is_dir() and one.name != "clients")),
    "Environment": lambda: {getattr(environment, name) for name in constants(environment)},
    "A device's ledger file": lambda: fields_of(ClientAccount),
    "A node's state": node_state,
    "The state of a run": run_state,
    "A server's ledger": server_ledger,
    "What a server's ledger tells": ledger_told,
    "Checkpoints": checkpoints,
}


# Reading code


def everywhere(*folders: Path) -> Iterator[tuple[str, ast.AST]]:
    """Every node of every module in some folders, with the innermost function that it is in, below `flower_dp`."""
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            yield from _nodes_of(file)


@cache
def _nodes_of(file: Path) -> list[tuple[str, ast.AST]]:
    place = ".".join(file.relative_to(PACKAGE if PACKAGE in file.parents else ROOT).with_suffix("").parts)
    found: list[tuple[str, ast.AST]] = []
    _note(ast.parse(file.read_text(encoding="utf-8")), place.removesuffix(".__init__"), "", found)
    return found


def _note(node: ast.AST, module: str, function: str, found: list[tuple[str, ast.AST]]) -> None:
    for child in ast.iter_child_nodes(node):
        found.append((f"{module}.{function}".rstrip("."), child))
        inner = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{function}.{child.name}".lstrip(".")
        _note(child, module, inner, found)


def called(node: ast.AST) -> str | None:
    """The name of the function that is called here, without what it belongs to."""
    if not isinstance(node, ast.Call):
        return None
    return node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else None


def logging_in(*folders: Path) -> set[str]:
    """The functions that write to a log."""
    return {place for place, node in everywhere(*folders) if isinstance(node, ast.Call) and is_log(node.func)}


def is_log(function: ast.expr) -> bool:
    of_log = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "log"
    return of_log and function.attr in LEVELS  # type: ignore[attr-defined]


def names_in(node: ast.AST) -> set[str]:
    """The names, attributes and arguments in a part of the code."""
    return {getattr(one, key) for one in ast.walk(node) for key in ("id", "attr", "arg") if getattr(one, key, None)}

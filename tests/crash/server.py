"""A server that is killed: real methods on an in-process grid, started again until the run ends, and what must hold then."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAdam, Result

from flower_dp import wire
from flower_dp.clients import (
    DPClient,
    DPFedPAQRecipe,
    LocalDPClient,
    ScaffoldRecipe,
    Training,
    client_app,
    model_arrays,
)
from flower_dp.core.participation import MinimumSeparationSampling
from flower_dp.core.sampling import FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.privacy import accounting
from flower_dp.privacy.charges import ALL_CLIENTS, Charge
from flower_dp.privacy.device_store import DeviceLedger
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.privacy.evaluation_budget import EvaluationBudget
from flower_dp.privacy.events import Relation
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.privacy.store import Store
from flower_dp.strategies import (
    DPFTRL,
    AdaptiveClip,
    DPFedAvg,
    DPFedPAQ,
    DPStrategy,
    LocalEvaluation,
    PrivateEvaluation,
    Scaffold,
    writer,
)
from flower_dp.strategies.journal import OBSERVERS
from flower_dp.strategies.releases.participation_state import ParticipationState
from flower_dp.strategies.session import Session
from flower_dp.strategies.writer import CheckpointPlace
from tests.crash.points import Points
from tests.crash.witness import Heard, Witness
from tests.grids import LocalGrid, asks_to_train
from tests.local_grids import linear, records

NUM_CLIENTS, NUM_NODES, NUM_ROUNDS, NUM_RECORDS = 6, 3, 4, 8
NAMES = tuple(f"c{index}" for index in range(NUM_CLIENTS))
# An evaluation in which fewer than none seem to have taken part is left out: its noise is too small for that.
DELTA, NOISE, RATE, EVALUATION_NOISE = 1e-3, 2.0, 0.5, 0.5
EVALUATION = "private-evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A method that is killed.

    Attributes:
        strategy: makes it.
        client: makes the client of a node: model=, clients= -> a client; with the path of the devices' ledger, for methods that
            have one.
        event: what a message of a release costs whom it is sent to, or who might have been drawn for it.
        relation: neighboring relation of the events.
        local: whether every device has a ledger of its own.
        drawn: whether every round costs all clients alike, whether they are asked or not.
        separation: least difference of two rounds in which a client is asked.
    """

    strategy: Callable[[], DPStrategy]
    client: Callable[..., Any]
    event: Callable[[str], DpEvent]
    relation: Relation = "add-or-remove-one"
    local: bool = False
    drawn: bool = False
    separation: int = 1


# The methods

_POISSON = PoissonSampling(sampling_rate=RATE)
_STEPS = FedPAQSteps(learning_rate=0.1, num_local_steps=2, batch_size=4, clip_norm=0.5, sensitivity="per-step")
_BUDGET = EvaluationBudget(epsilon=0.5, num_evaluations=NUM_ROUNDS)
_TURNS = RoundRobinSampling(cohort_size=3)
_ADAPTIVE = AdaptiveClip(initial_clip_norm=0.5, min_clip_norm=0.1, max_clip_norm=2.0)
_SEPARATED = MinimumSeparationSampling(cohort_size=3, min_separation=2)
_EVALUATION = PrivateEvaluation(noise_multiplier=EVALUATION_NOISE, sampling=FullSampling())


def central(**own: Any) -> Callable[[], DPStrategy]:
    common = {"clip_norm": 0.5, "noise_multiplier": NOISE, "sampling": _POISSON, "num_clients": NUM_CLIENTS, "delta": DELTA}
    return lambda: DPFedAvg(**common | own)


def _dp_client(**node: Any) -> DPClient:
    node.pop("ledger")
    return DPClient(training=Training(learning_rate=0.1, batch_size=4), device="cpu", **node)


def local(cls: type[DPStrategy], recipe: Any, budget: EvaluationBudget | None = None) -> Setup:
    """A method whose devices have ledgers of their own, with evaluations by this budget."""
    words: dict[str, Any] = {
        "steps": _STEPS,
        "epsilon": 4.0,
        "delta": DELTA,
        "quantization_levels": None,
        "num_replies": NUM_ROUNDS,
    }
    made, own = recipe(**words), words | {"num_clients": NUM_CLIENTS, "num_records": NUM_RECORDS}
    if budget is not None:
        own["evaluation"] = LocalEvaluation(budget=budget, metrics={"accuracy": 1.0})
    return Setup(
        strategy=lambda: cls(**own, sampling=FullSampling()),
        client=lambda **node: LocalDPClient(recipe=made, device="cpu", evaluation=budget, **node),
        event=_charged,
        relation="replace-one",
        local=True,
    )


def _half(_: str) -> DpEvent:
    return PoissonSampledDpEvent(RATE, GaussianDpEvent(NOISE))


def _or_evaluated(release: str) -> DpEvent:
    return GaussianDpEvent(EVALUATION_NOISE) if release == EVALUATION else _half(release)


def correlated() -> DPStrategy:
    words = {"clip_norm": 0.5, "noise_multiplier": NOISE, "num_clients": NUM_CLIENTS, "delta": DELTA}
    return DPFTRL(**words, num_rounds=NUM_ROUNDS, sampling=_SEPARATED, server_momentum=0.5)


def _of_two(_: str) -> DpEvent:
    """Two participations in four rounds, each half of the variance of the whole run."""
    sensitivity: Any = correlated().rules.noise
    return GaussianDpEvent(NOISE * 2**0.5 / sensitivity.run_sensitivity)


def _charged(release: str) -> None:
    """The noise of these devices follows from a calibration that other tests check: here only their counts do."""


SETUPS: Mapping[str, Setup] = {
    "DP-FedAvg": Setup(strategy=central(), client=_dp_client, event=_half, drawn=True),
    "DP-FedAvg, round robin": Setup(strategy=central(sampling=_TURNS), client=_dp_client, event=lambda _: GaussianDpEvent(NOISE)),
    "adaptive clip": Setup(strategy=central(clip_norm=_ADAPTIVE), client=_dp_client, event=_half, drawn=True),
    "private evaluation": Setup(strategy=central(evaluation=_EVALUATION), client=_dp_client, event=_or_evaluated, drawn=True),
    "FedAdam": Setup(strategy=central(server_optimizer=FedAdam()), client=_dp_client, event=_half, drawn=True),
    "DP-FTRL": Setup(strategy=correlated, client=_dp_client, event=_of_two, separation=_SEPARATED.min_separation),
    "DP-FedPAQ": local(DPFedPAQ, DPFedPAQRecipe),
    "DP-FedPAQ, evaluation": local(DPFedPAQ, DPFedPAQRecipe, _BUDGET),
    "SCAFFOLD": local(Scaffold, ScaffoldRecipe),
}


# One life


class TellingGrid(LocalGrid):
    """Tells the witness of every message of a round before it leaves; its messages and replies are points."""

    witness: Witness
    points: Points

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies: list[Message] = []
        for message in messages:
            evaluates = message.metadata.message_type == "evaluate"
            if evaluates or asks_to_train(message):
                text = next(iter(message.content.config_records.values()))[wire.KEY]
                said = json.loads(text)
                self.points.here("before message")
                self.witness.say("sent", release=said["method"], round=said["server_round"], owners=said["clients"])
            replies += super().send_and_receive([message], timeout=timeout)
            self.points.here("after reply")
        return replies


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Tells the witness of the statement that a run leaves behind; its checkpoints are where it says, as those of a run folder are."""

    witness: Witness
    checkpoints: CheckpointPlace

    def line(self, line: Mapping[str, Any]) -> None:
        self.witness.say("line", round=line["round"])

    def end(self, statement: PrivacyStatement, result: Result | None) -> None:
        told = statement.to_dict()
        guarantee = {name: told["guarantee"][name] for name in ("epsilon", "delta", "num_charged_rounds")}
        self.witness.say("stated", **guarantee, incidents=told["incidents"])


def digest(arrays: ArrayRecord) -> str:
    return hashlib.sha256(b"".join(array.numpy().tobytes() for array in arrays.values())).hexdigest()


def grid_of(setup: Setup, folder: Path) -> TellingGrid:
    def client_fn(context: Any) -> Any:
        part = int(context.node_config["partition-id"])
        hosted = {name: records(name, NUM_RECORDS) for name in NAMES[part::NUM_NODES]}
        return setup.client(model=linear(), clients=hosted, ledger=folder / f"node-{part}.sqlite" if setup.local else None)

    return TellingGrid(client_app(client_fn), NUM_NODES)


def create(setup: Setup, folder: Path) -> None:
    """Make what is there before the first life: the devices' ledgers."""
    folder.mkdir(mode=0o700)
    if setup.local:
        for part in range(NUM_NODES):
            DeviceLedger.create(folder / f"node-{part}.sqlite", NAMES[part::NUM_NODES])


def warm(setup: Setup, folder: Path) -> None:
    """Run once without a checkpoint in this process: what is computed once in a process is known to those that it forks."""
    create(setup, folder)
    grid, strategy = grid_of(setup, folder), setup.strategy()
    grid.witness, grid.points = Witness(folder / "witness", 0), Points(folder, None, print)
    strategy.start(grid, model_arrays(linear()), num_rounds=NUM_ROUNDS)
    epsilon_of({setup.event(strategy.rules.training.name) or GaussianDpEvent(NOISE): 1}, DELTA, setup.relation)


def run(setup: Setup, folder: Path, life: int, at: int | None, *, interrupts: bool = False, often: bool = False) -> None:
    """Run, or go on, until the end or the point `at`; `often`: with a checkpoint after every round, however short."""
    witness = Witness(folder / "witness", life)
    points = Points(folder, at, lambda kind: witness.say("killed", kind=kind), interrupts=interrupts)
    grid, strategy = grid_of(setup, folder), setup.strategy()
    grid.witness, grid.points = witness, points
    learn = Session.next_model

    def learnt(self: Session, server_round: int, replies: Any) -> Any:
        learned = learn(self, server_round, replies)
        witness.say("noised", round=server_round)
        points.here("after learning")
        return learned

    row = ParticipationState.row

    def drawn(self: ParticipationState, matrix: Any, number: int, length: int, rng: Any) -> Any:
        made, after = row(self, matrix, number, length, rng)
        witness.say("drawn", round=number, seeds=[hashlib.sha256(seed.encode()).hexdigest() for seed in after.seeds])
        return made, after

    setattr(ParticipationState, "row", drawn)  # noqa: B010

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        witness.say("model", round=server_round, digest=digest(arrays))
        points.here("evaluate_fn")
        return MetricRecord({"loss": 0.0})

    setattr(Session, "next_model", learnt)  # noqa: B010
    place = CheckpointPlace(folder=folder / "checkpoint", resume=life > 1)
    OBSERVERS.set(lambda: (Reader(witness=witness, checkpoints=place),))
    if often:
        setattr(writer, "_SHARE", 1.0)  # noqa: B010
    points.install()
    try:
        result = strategy.start(grid, model_arrays(linear()), num_rounds=NUM_ROUNDS, evaluate_fn=evaluate)
    finally:
        witness.say("points", passed=dict(points.passed))
    reported = [report.server_round for report in strategy.rounds]
    witness.say("ended", digest=digest(result.arrays), reported=reported, evaluated=list(strategy.evaluations))


# What must hold


@dataclass(slots=True)
class Holes:
    """What does not hold."""

    found: list[str] = field(default_factory=list)

    def unless(self, holds: bool, what: str) -> None:
        if not holds:
            self.found.append(what)


def charges_of(folder: Path) -> list[tuple[int, Charge]]:
    """The charges of a run, with their rounds; none before its ledger is there."""
    path = folder / "checkpoint" / "ledger.sqlite"
    if not path.exists():
        return []
    with Store(path, read_only=True) as ledger:
        found = [(charge.server_round, charge) for one in ledger.runs for charge in ledger.read(one)]
        if len([one for one in ledger.runs if ledger.read(one)]) > 1:
            raise ValueError("the ledger has the charges of two runs, and there was one")
        return found


def check_now(setup: Setup, folder: Path, holes: Holes) -> None:
    """After any life: the ledgers of server and devices have all that was released, and no round was released twice."""
    heard = Heard.of(folder / "witness")
    charged = {(charge.release, number): set(charge.owners) for number, charge in charges_of(folder)}
    holes.unless(len(charged) == len(charges_of(folder)), "a release of a round was charged twice")
    first: dict[tuple[str, int], int] = {}
    told = Counter((line["release"], line["round"], owner) for line in heard.all("sent") for owner in line["owners"])
    for line in heard.all("sent"):
        key = (line["release"], line["round"])
        owners = charged.get(key, set())
        holes.unless(ALL_CLIENTS in owners or owners.issuperset(line["owners"]), f"{key}: was sent and not charged")
        holes.unless(first.setdefault(key, line["life"]) == line["life"], f"{key}: was sent in two lives")
    for key, count in told.items():
        holes.unless(count == 1, f"{key}: was asked {count} times")
    models: dict[int, set[str]] = {}
    for line in heard.all("model"):
        models.setdefault(line["round"], set()).add(line["digest"])
    for number, digests in models.items():
        holes.unless(len(digests) == 1, f"round {number} has {len(digests)} models")
    rounds: set[int] = set()
    for line in heard.lines:
        if line["what"] == "sent" and line["release"] != EVALUATION:
            rounds.add(line["round"])
        if line["what"] == "stated":
            holes.unless(
                line["num_charged_rounds"] >= len(rounds),
                f"{line['num_charged_rounds']} rounds are stated, and {sorted(rounds)} were asked",
            )
    noised = Counter(line["round"] for line in heard.all("noised"))
    holes.unless(all(count == 1 for count in noised.values()), f"noise was added twice in a round: {dict(noised)}")
    check_separation(setup, heard, holes)
    if setup.local:
        check_devices(folder, heard, told, charged, holes)


def check_separation(setup: Setup, heard: Heard, holes: Holes) -> None:
    """Nobody is asked too early, and the noise of all rounds whose messages left is of one seed, each round once."""
    last: dict[tuple[str, str], int] = {}
    seeds: list[str] = []
    sent = {(line["life"], line["round"]) for line in heard.all("sent")}
    for line in heard.all("sent"):
        for owner in line["owners"]:
            gap = line["round"] - last.get((line["release"], owner), -setup.separation)
            holes.unless(gap >= setup.separation, f"{owner}: was asked again after {gap} rounds")
            last[line["release"], owner] = line["round"]
    for line in heard.all("drawn"):
        if (line["life"], line["round"]) in sent:
            holes.unless(line["seeds"][: len(seeds)] == seeds, f"round {line['round']}: goes on from other noise")
            holes.unless(len(line["seeds"]) == line["round"] > len(seeds), f"round {line['round']}: its noise was drawn before")
            seeds = line["seeds"]


def check_devices(folder: Path, heard: Heard, told: Counter[Any], charged: Mapping[Any, set[str]], holes: Holes) -> None:
    """A device counts no more than the server has charged it with, and a death keeps it from one reply at most.

    The witness hears of a message before it leaves: a server that dies between the two has asked nobody.
    """
    ended = {line["life"] for line in heard.all("ended")}
    lives = {owner: {line["life"] for line in heard.all("sent") if owner in line["owners"]} - ended for owner in NAMES}
    for part in range(NUM_NODES):
        for account, entry in DeviceLedger(folder / f"node-{part}.sqlite").read().items():
            name, _, evaluations = account.partition(", ")
            asked = sum(
                count
                for (release, _, owner), count in told.items()
                if owner == name and (release == EVALUATION) == bool(evaluations)
            )
            paid = sum(name in owners for (release, _), owners in charged.items() if (release == EVALUATION) == bool(evaluations))
            holes.unless(entry.replies <= paid, f"{account}: counts {entry.replies} replies, and the server has charged {paid}")
            holes.unless(
                asked - len(lives[name]) <= entry.replies,
                f"{account}: counts {entry.replies} replies, and was asked {asked} times",
            )


def check_end(setup: Setup, folder: Path, holes: Holes) -> None:
    """After the last life: every round was charged, the statement has the cost of all that was released, and names what is not finished."""
    heard = Heard.of(folder / "witness")
    if not list(heard.all("ended")):
        holes.found.append("the run did not end")
        return
    ended = {**list(heard.all("stated"))[-1], **list(heard.all("ended"))[-1]}
    charges = charges_of(folder)
    trained = {number for number, charge in charges if charge.release != EVALUATION}
    evaluated = {number for number, charge in charges if charge.release == EVALUATION}
    holes.unless(trained == set(range(1, NUM_ROUNDS + 1)), f"rounds {sorted(trained)} were charged")
    holes.unless(
        ended["num_charged_rounds"] == len(trained), f"the statement has {ended['num_charged_rounds']} rounds of {len(trained)}"
    )
    for what, of, finished in (("", trained, ended["reported"]), ("the evaluation of ", evaluated, ended["evaluated"])):
        told = unfinished(ended["incidents"], what)
        holes.unless(
            told == of - set(finished),
            f"{what}rounds {sorted(told)} are stated as not finished; of {sorted(of)}, {sorted(finished)} are",
        )
    holes.unless(len(set(ended["incidents"])) == len(ended["incidents"]), "an incident is stated twice")
    epsilon = released_epsilon(setup, heard, ended["delta"])
    holes.unless(ended["epsilon"] >= epsilon * (1 - 1e-6), f"epsilon {ended['epsilon']} is stated, and {epsilon} was released")
    owned = max((epsilon_of(events, ended["delta"], setup.relation) for events in owners_events(charges)), default=0.0)
    holes.unless(ended["epsilon"] >= owned * (1 - 1e-6), f"epsilon {ended['epsilon']} is stated, and the ledger has {owned}")


def unfinished(incidents: Iterable[str], what: str) -> set[int]:
    """The rounds that a statement says were charged and not finished."""
    pattern = re.compile(rf"{what}rounds? (\d+)(?: to (\d+))? (?:was|were) charged and not finished")
    found = (pattern.fullmatch(line) for line in incidents)
    return {number for one in found if one for number in range(int(one[1]), int(one[2] or one[1]) + 1)}


def released_epsilon(setup: Setup, heard: Heard, delta: float) -> float:
    """What the messages that were sent cost the client whom they cost most, by hand."""
    counts: dict[str, Counter[str]] = {}
    sent = {
        (line["release"], line["round"], owner)
        for line in heard.all("sent")
        for owner in (["all"] if setup.drawn else line["owners"])
    }
    for release, _, owner in sent:
        counts.setdefault(owner, Counter())[release] += 1
    distinct = {tuple(sorted(one.items())) for one in counts.values()}
    if any(setup.event(release) is None for one in distinct for release, _ in one):
        return 0.0
    events = ({setup.event(release): count for release, count in one} for one in distinct)
    return max((epsilon_of(one, delta, setup.relation) for one in events), default=0.0)


def owners_events(charges: list[tuple[int, Charge]]) -> list[dict[DpEvent, int]]:
    """What every owner was charged with for training: the statement has evaluations of local placement apart."""
    found: dict[str, Counter[DpEvent]] = {}
    for _, charge in charges:
        for owner, event in charge.by_owner.items():
            if charge.scope.unit == "client" or charge.release != EVALUATION:
                found.setdefault(owner, Counter())[event] += 1
    return [dict(one) for one in {tuple(one.items()) for one in found.values()}]


_KNOWN: dict[Any, float] = {}


def epsilon_of(events: Mapping[DpEvent, int], delta: float, relation: Relation) -> float:
    key = (tuple(sorted(events.items(), key=repr)), delta, relation)
    if key not in _KNOWN:
        event = ComposedDpEvent([SelfComposedDpEvent(one, count) for one, count in events.items()])
        _KNOWN[key] = accounting.epsilon(event, delta=delta, relation=relation).epsilon
    return _KNOWN[key]

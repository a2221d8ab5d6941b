"""A device that is killed: its ledger file must count all replies that left it, over all its lives, and its budget must hold."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from flwr.app import Message

from flower_dp import wire
from flower_dp.clients import model_arrays
from flower_dp.privacy.device_store import DeviceLedger
from tests.crash.points import Points
from tests.crash.server import EVALUATION, NUM_NODES, NUM_ROUNDS, SETUPS, Holes, Setup, TellingGrid, grid_of
from tests.crash.witness import Heard, Witness
from tests.grids import asks_to_train
from tests.local_grids import linear

DEVICES = {name: setup for name, setup in SETUPS.items() if setup.local}


class ReplyingGrid(TellingGrid):
    """Tells the witness of every client whose reply leaves its device."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies: list[Message] = []
        for message in messages:
            answered = list(super().send_and_receive([message], timeout=timeout))
            asks = asks_to_train(message) or message.metadata.message_type == "evaluate"
            for reply in answered if asks else ():
                asked = json.loads(_text(message))
                if reply.has_content():
                    refused = wire.ReplyHeader.from_json(_text(reply), asked["clients"]).refused
                    left = [name for name in asked["clients"] if name not in refused]
                    self.witness.say("replied", evaluation=asked["method"] == EVALUATION, clients=left)
                    self.points.here("after a reply has left")
            replies += answered
        return replies


def _text(message: Message) -> str:
    return next(str(record[wire.KEY]) for record in message.content.config_records.values() if wire.KEY in record)


def run(setup: Setup, folder: Path, life: int, at: int | None, *, interrupts: bool = False, often: bool = False) -> None:
    """Reply to a server that begins anew in every life, until the run ends, the budget is spent, or the point `at`."""
    witness = Witness(folder / "witness", life)
    points = Points(folder, at, lambda kind: witness.say("killed", kind=kind), interrupts=interrupts)
    like = grid_of(setup, folder)
    grid, strategy = ReplyingGrid(like.app, NUM_NODES), setup.strategy()
    grid.witness, grid.points = witness, points
    points.install()
    try:
        strategy.start(grid, model_arrays(linear()), num_rounds=NUM_ROUNDS)
    except RuntimeError as error:
        if "its budget is spent" not in str(error):
            raise
    finally:
        witness.say("points", passed=dict(points.passed))


def check_now(setup: Setup, folder: Path, holes: Holes) -> None:
    """After any life: no fewer replies are counted than left, no more than the budget pays, and a death wastes one at most."""
    heard = Heard.of(folder / "witness")
    left = Counter((name, line["evaluation"]) for line in heard.all("replied") for name in line["clients"])
    lives = 1 + max((line["life"] for line in heard.lines), default=0)
    for part in range(NUM_NODES):
        for account, entry in DeviceLedger(folder / f"node-{part}.sqlite").read().items():
            name, _, evaluation = account.partition(", ")
            count = left[name, bool(evaluation)]
            holes.unless(entry.replies >= count, f"{account}: {count} replies have left, and the ledger counts {entry.replies}")
            holes.unless(
                entry.replies <= NUM_ROUNDS, f"{account}: the budget pays {NUM_ROUNDS} replies, and {entry.replies} are counted"
            )
            holes.unless(entry.replies - count <= lives, f"{account}: {entry.replies - count} replies were lost in {lives} lives")
    for part in range(NUM_NODES):
        left_over = [path.name for path in folder.glob(f"node-{part}.sqlite.*.new")]
        holes.unless(len(left_over) <= 1, f"half-written files stay: {left_over}")


def check_end(setup: Setup, folder: Path, holes: Holes) -> None:
    """Nothing more: a run whose devices have died may end without a reply."""

"""The content of a ledger file: every account, as JSON with a checksum.

The checksum is against damage, not against people: anyone can compute it. A file of format 1, from an earlier release, has none.
It is read as it is, and the next charge writes it with a checksum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from flower_dp.core import checks, dp
from flower_dp.privacy.client_terms import Spent, Terms, noise_multiplier_of
from flower_dp.privacy.events import RELATIONS, Relation, as_json, of_json
from flower_dp.privacy.private_file import LedgerError

FORMAT = 2
# What the server learns of a number that is not larger than the last one; it looks for this part.
CHARGED_BEFORE = "was charged before: the server's ledger is an older copy, or the message came twice"
_WITHOUT_CHECKSUM = 1
_EVALUATION = ", evaluation"
_KEY = "flower-dp-ledger"


def evaluation_account(name: str) -> str:
    """Return the name of the account of a client's evaluations, beside that of its replies in training."""
    return name + _EVALUATION


def owner_of(account: str) -> str:
    """Return the client whose account this is."""
    return account.removesuffix(_EVALUATION)


class Numbered(NamedTuple):
    """Which reply of a client it is by the server's count: the id of the run, and 1, 2, ... in it."""

    run: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One client's account.

    Attributes:
        replies: how many replies the client has been charged for.
        terms: the terms with which it was opened, as one line; None before the first reply. They can't change.
        num_replies: the most replies that the terms allow.
        relation: the neighbouring relation of the terms.
        event: what one reply costs, of all that were charged the one with the least noise.
        runs: the largest number of a reply by the server's count, by the run's id; of runs that have numbered their replies.
    """

    replies: int = 0
    terms: str | None = None
    num_replies: int = 0
    relation: Relation = "add-or-remove-one"
    event: dp.DpEvent | None = None
    runs: Mapping[str, int] = field(default_factory=dict)

    def why_repeated(self, asked: Numbered) -> Spent | None:
        """Return why this is no new reply by the server's own count; None if it is one.

        A round that was charged and never arrived makes the next number larger, and never smaller.
        """
        if asked.number > self.runs.get(asked.run, 0):
            return None
        reason = f"reply {asked.number} of run {asked.run} {CHARGED_BEFORE}"
        return Spent(public=reason, own=f"{reason}; the last one was {self.runs[asked.run]}")

    def noted(self, asked: Numbered) -> Entry:
        """Return the account with the number of the reply that it is charged for."""
        return replace(self, runs={**self.runs, asked.run: asked.number})

    def charged(self, terms: Terms) -> Entry:
        """Return the account with one more reply.

        The terms stay those of its opening, so that many small differences never add up to a large one. Old replies are charged
        with their own noise: the event is the costliest of all.
        """
        if self.terms is None:
            return Entry(
                replies=1,
                terms=terms.text,
                num_replies=terms.num_replies,
                relation=terms.release.relation,
                event=terms.event,
            )
        less = float(terms.release.mechanism.noise_multiplier) < noise_multiplier_of(self.terms)
        return replace(self, replies=self.replies + 1, event=terms.event if less else self.event)

    @property
    def spent(self) -> dp.DpEvent:
        """All that was charged, as one event."""
        return dp.SelfComposedDpEvent(self.event, self.replies) if self.event is not None and self.replies else dp.NoOpDpEvent()


def content_of(entries: Mapping[str, Entry]) -> bytes:
    """Return the content of a file with these accounts."""
    clients = {name: _entry_as_json(entry) for name, entry in entries.items()}
    document = {_KEY: FORMAT, "clients": clients, "sha256": _checksum(clients)}
    return json.dumps(document, indent=1).encode() + b"\n"


def _checksum(clients: Mapping[str, Any]) -> str:
    """Return the checksum of all accounts, however the file spaces them."""
    return hashlib.sha256(json.dumps(clients, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def entries_of(content: bytes) -> dict[str, Entry]:
    """Read the accounts off a file's content.

    Raises:
        LedgerError: if it is damaged.
    """
    try:
        data = json.loads(content)
        if type(data[_KEY]) is not int or data[_KEY] not in (_WITHOUT_CHECKSUM, FORMAT):
            raise ValueError(f"format {data[_KEY]!r}: must be {FORMAT}")
        clients = data["clients"]
        if not isinstance(clients, dict) or not clients:
            raise ValueError("clients: must be at least one")
        # A file of format 1 has no other keys, so that damage of the format alone does not switch the check off.
        if set(data) != ({_KEY, "clients"} if data[_KEY] == _WITHOUT_CHECKSUM else {_KEY, "clients", "sha256"}):
            raise ValueError(f"keys {sorted(data)[:8]}: are not those of format {data[_KEY]}")
        if data[_KEY] == FORMAT and data["sha256"] != _checksum(clients):
            raise ValueError("its checksum is not that of its accounts")
        return {name: _entry(table) for name, table in clients.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LedgerError(f"is damaged, or no ledger ({type(error).__name__}: {error})") from error


def _entry_as_json(entry: Entry) -> dict[str, Any]:
    if entry.terms is None:
        return {"replies": 0, "terms": None}
    return {
        "replies": entry.replies,
        "terms": entry.terms,
        "num_replies": entry.num_replies,
        "relation": entry.relation,
        "event": as_json(entry.event),
        "runs": dict(entry.runs),
    }


def _entry(table: Mapping[str, Any]) -> Entry:
    replies = checks.integer("replies", table["replies"], at_least=0)
    if table["terms"] is None:
        if replies:
            raise ValueError(f"replies={replies}: without terms")
        return Entry()
    if not isinstance(table["terms"], str):
        raise TypeError("terms: must be text")
    return Entry(
        replies=replies,
        terms=table["terms"],
        num_replies=checks.integer("num_replies", table["num_replies"], at_least=1),
        relation=cast("Relation", checks.one_of("relation", table["relation"], RELATIONS)),
        event=of_json(table["event"]),
        runs=_runs(table.get("runs", {}), replies),
    )


def _runs(table: Mapping[str, Any], replies: int) -> dict[str, int]:
    """Read the numbers by runs; a file of an earlier release has none."""
    if not isinstance(table, dict) or len(table) > replies:
        raise ValueError(f"runs: must be a table of at most {replies}, one run for each reply")
    return {
        checks.line("runs", run, most=checks.MOST_ID): checks.integer("runs", number, at_least=1, at_most=checks.MOST_COUNT)
        for run, number in table.items()
    }

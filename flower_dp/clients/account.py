"""A client's own account: how many replies it has paid for, kept in the node's Flower state.

The state outlives client objects and worker processes within one run, so a client that is made anew for every message still
knows what it has spent. It does not outlive the run: budgets of several runs on the same records add up.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.app import ConfigRecord, Context, RecordDict

from flower_dp.privacy.client_terms import Terms

log = logging.getLogger("flwr")

KEY = "flower-dp.account"


class Account:
    """The account of every client that a node hosts.

    Raises:
        ValueError: if the state's record isn't one that this class has written.
    """

    def __init__(self, state: RecordDict) -> None:
        self._state = state
        record = dict(state.config_records[KEY]) if KEY in state.config_records else {"clients": [], "replies": [], "terms": []}
        columns: list[Any] = [record.get(key) for key in ("clients", "replies", "terms")]
        if not all(isinstance(column, list) for column in columns) or len({len(column) for column in columns}) != 1:
            raise ValueError(f"state {KEY!r}: is damaged; this node can't know what it has paid, and pays nothing")
        names, replies, terms = columns
        self._entries: dict[str, tuple[int, str]] = dict(zip(names, zip(replies, terms, strict=True), strict=True))

    def replies(self, name: str) -> int:
        """Return how many replies a client has paid for."""
        return self._entries.get(name, (0, ""))[0]

    def charge(self, asked: Mapping[str, Terms]) -> dict[str, str]:
        """Charge one reply to each client that can pay it, on the node's state when this returns.

        To be called before anything is computed from the clients' records.

        Returns:
            Why each of the others can't pay; they must not reply.
        """
        refused = {}
        for name, terms in asked.items():
            spent, opened = self._entries.get(name, (0, terms.text))
            if opened != terms.text:
                refused[name] = f"its account was opened on other terms ({opened}), not {terms.text}"
            elif spent >= terms.num_replies:
                refused[name] = f"its budget is spent: num_replies={terms.num_replies}, all of them sent"
            else:
                self._entries[name] = (spent + 1, opened)
        names = list(self._entries)
        self._state[KEY] = ConfigRecord(
            {
                "clients": names,
                "replies": [self._entries[name][0] for name in names],
                "terms": [self._entries[name][1] for name in names],
            }
        )
        return refused


@contextmanager
def kept_account(context: Context) -> Iterator[None]:
    """Lend a node's context to an app that may do with its state what it likes; the account is in it again afterwards."""
    record = dict(context.state.config_records[KEY]) if KEY in context.state.config_records else None
    try:
        yield
    finally:
        left = context.state.config_records.get(KEY)
        if record is not None and (left is None or dict(left) != record):
            log.warning("the app has changed %r in the node's state, which is this client's account; it was put back", KEY)
            context.state[KEY] = ConfigRecord(record)

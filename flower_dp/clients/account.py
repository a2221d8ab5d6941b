"""A client's own account: how many replies it has been charged for, in the node's Flower state or in a file on the device.

The state outlives client objects and worker processes within one run, so a client object that is created for every message still
knows what the client has spent. It is empty in the next run, and after a restart of the SuperNode: budgets of several runs on the
same records add up. A file keeps one count for all of them: `flower_dp.privacy.ledger_file`.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from flwr.app import ConfigRecord, Context, RecordDict

from flower_dp.privacy.client_terms import Terms, value_of
from flower_dp.privacy.ledger_file import LedgerFile, owner_of

log = logging.getLogger("flwr")

KEY = "flower-dp.account"
# The key of the node's config, which the device's owner writes and no server can change.
LEDGER_PATH = "ledger-path"

# One file for all clients of a node, or one each, by the client's name.
LedgerPaths = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]


class Account(Protocol):
    """An account that counts the replies of a node's clients."""

    def charge(self, asked: Mapping[str, Terms]) -> dict[str, str]:
        """Charge one reply to each client whose budget covers it, for good; return why the others do not reply."""


class StateAccount:
    """The account of every client that a node hosts, in the node's state: it lasts one run.

    Raises:
        ValueError: if the state's record isn't one that this class has written.
    """

    def __init__(self, state: RecordDict) -> None:
        self._state = state
        record = dict(state.config_records[KEY]) if KEY in state.config_records else {"clients": [], "replies": [], "terms": []}
        columns: list[Any] = [record.get(key) for key in ("clients", "replies", "terms")]
        if not all(isinstance(column, list) for column in columns) or len({len(column) for column in columns}) != 1:
            raise ValueError(f"state {KEY!r}: is damaged; the number of replies sent is not known, so this node does not reply")
        names, replies, terms = columns
        self._entries: dict[str, tuple[int, str]] = dict(zip(names, zip(replies, terms, strict=True), strict=True))

    def replies(self, name: str) -> int:
        """Return how many replies a client has been charged for."""
        return self._entries.get(name, (0, ""))[0]

    def charge(self, asked: Mapping[str, Terms]) -> dict[str, str]:
        """Charge one reply to each client whose budget covers it, in the node's state when this returns.

        To be called before anything is computed from the clients' records.

        Returns:
            Why each of the others can't pay; they must not reply.
        """
        refused, paid = {}, {}
        for name, terms in asked.items():
            spent, opened = self._entries.get(name, (0, None))
            if reason := terms.why_not(spent, opened):
                refused[name] = reason
            else:
                paid[name] = (spent + 1, terms.text)
        self.note(paid)
        return refused

    def note(self, paid: Mapping[str, tuple[int, str]]) -> None:
        """Record how many replies clients have been charged for, and their terms."""
        self._entries |= paid
        names = list(self._entries)
        self._state[KEY] = ConfigRecord(
            {
                "clients": names,
                "replies": [self._entries[name][0] for name in names],
                "terms": [self._entries[name][1] for name in names],
            }
        )


class FileAccount:
    """The account of every client that a node hosts, in files on the device: it lasts as long as the files.

    A client whose file can't be used does not reply. The server learns no more than that; the node's own log has the reason. The
    node's state remembers the counts in the files during this run: a file with a smaller count later is an older copy, and is
    refused.

    Args:
        files: every client's file; several may share one.
        state: the node's state; None if there is none, and then older copies are not noticed.
    """

    def __init__(self, files: Mapping[str, LedgerFile], state: RecordDict | None) -> None:
        self._files = files
        self._seen = StateAccount(RecordDict() if state is None else state)

    def charge(self, asked: Mapping[str, Terms]) -> dict[str, str]:
        """Charge one reply to each client whose budget covers it, on the disk when this returns.

        To be called before anything is computed from the clients' records.

        Returns:
            Why each of the others can't pay; they must not reply.
        """
        refused: dict[str, str] = {}
        for file, names in self._by_file(asked):
            known = {name: self._seen.replies(name) for name in names}
            try:
                spent, counts = file.charge({name: asked[name] for name in names}, at_least=known)
            except Exception as error:  # after any error there is no account
                log.error("%s: no reply of %s", error, ", ".join(names))
                refused |= dict.fromkeys(names, f"its ledger can't be used ({type(error).__name__}); the node's own log says why")
                continue
            self._seen.note({name: (count, asked[name].text) for name, count in counts.items()})
            refused |= spent
        return refused

    def _by_file(self, names: Iterable[str]) -> list[tuple[LedgerFile, list[str]]]:
        groups: dict[str, tuple[LedgerFile, list[str]]] = {}
        for name in names:
            file = self._files[owner_of(name)]
            groups.setdefault(str(file.path), (file, []))[1].append(name)
        return list(groups.values())


def account_of(ledger: object, names: Iterable[str], state: RecordDict | None) -> Account:
    """Return the account of a node's clients: in files if there is a ledger, else in the node's state.

    Args:
        ledger: a path, or one for each client; None for none.
        names: of the node's clients.
        state: the node's state.

    Raises:
        ValueError: if there is neither, or the ledger is not a path.
    """
    if ledger is not None:
        return FileAccount(ledger_files(ledger, names), state)
    if state is None:
        raise ValueError("state: this client has no account; pass state=context.state, or use flower_dp.clients.client_app")
    return StateAccount(state)


def ledger_files(ledger: object, names: Iterable[str]) -> dict[str, LedgerFile]:
    """Return every client's ledger file.

    Raises:
        ValueError: if a value is not a path, or a client has no file.
    """
    files = {}
    for name in names:
        path = value_of("ledger", ledger, name)
        if not isinstance(path, str | os.PathLike) or not str(path):
            raise ValueError(f"ledger={path!r}: must be the path of a file; create it with `flower-dp ledger FILE --create NAME`")
        files[name] = LedgerFile(path)
    return files


@contextmanager
def kept_account(context: Context) -> Iterator[None]:
    """Let an app use the node's context, and restore the account in the node's state if the app has changed it."""
    record = dict(context.state.config_records[KEY]) if KEY in context.state.config_records else None
    try:
        yield
    finally:
        left = context.state.config_records.get(KEY)
        if record is not None and (left is None or dict(left) != record):
            log.warning("the app has changed %r in the node's state, which is this client's account; it was put back", KEY)
            context.state[KEY] = ConfigRecord(record)

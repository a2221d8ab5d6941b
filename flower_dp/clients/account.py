"""A client's own account: how many replies it has been charged for, in the node's Flower state or in a file on the device.

The state outlives client objects and worker processes within one run, so a client object that is created for every message still
knows what the client has spent. It is empty in the next run, and after a restart of the SuperNode: budgets of several runs on the
same records add up. A file keeps one count for all of them: `flower_dp.privacy.device_store`.
"""

import copy
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from flower_dp.clients.reasons import SEE_LOG, Declined
from flower_dp.privacy.client_terms import Spent, Terms, value_of
from flower_dp.privacy.device_store import DeviceLedger, Numbered, owner_of
from flower_dp.wire import DECLINED, REPEATED, Refusal

log = logging.getLogger("flwr")

KEY = "flower-dp.account"
# The key of the node's config, which the device's owner writes and no server can change.
LEDGER_PATH = "ledger-path"

_COLUMNS = ("clients", "replies", "terms")
_Columns = tuple[list[str], list[Annotated[int, msgspec.Meta(ge=1)]], list[str]]

# One file for all clients of a node, or one each, by the client's name.
LedgerPaths = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]


class Account(Protocol):
    """An account that counts the replies of a node's clients."""

    def charge(self, asked: Mapping[str, Terms], numbered: Mapping[str, Numbered]) -> dict[str, Refusal]:
        """Charge one reply to each client whose budget covers it, for good.

        To be called before anything is computed from the clients' records.

        Args:
            asked: the terms of the clients that are asked.
            numbered: which reply of each it is by the server's count.

        Returns:
            Why each of the others can't pay; they must not reply.
        """


class StateAccount:
    """The account of every client that a node hosts, in the node's state: it lasts one run.

    Raises:
        Declined: if the state's record isn't one that this class has written.
    """

    def __init__(self, state: RecordDict) -> None:
        self._state = state
        record: Mapping[str, Any] = state.config_records.get(KEY, {name: [] for name in _COLUMNS})
        try:
            columns = msgspec.convert([record.get(name) for name in _COLUMNS], _Columns)
            self._entries: dict[str, tuple[int, str]] = {
                name: (replies, terms) for name, replies, terms in zip(*columns, strict=True)
            }
            whole = len(self._entries) == len(columns[0])  # no client twice
        except (ValueError, msgspec.ValidationError):
            whole = False
        if not whole:
            raise Declined(f"state {KEY!r}: is damaged; the number of replies sent is not known, so this node does not reply")

    def replies(self, name: str) -> int:
        """Return how many replies a client has been charged for."""
        return self._entries.get(name, (0, ""))[0]

    def charge(self, asked: Mapping[str, Terms], numbered: Mapping[str, Numbered]) -> dict[str, Refusal]:
        """Charge as `Account.charge`; it is in the node's state when this returns. It keeps no count of the server's."""
        refused, paid = {}, {}
        for name, terms in asked.items():
            spent, opened = self._entries.get(name, (0, None))
            if reason := terms.why_not(spent, opened):
                refused[name] = _refusal(name, reason)
            else:
                paid[name] = (spent + 1, opened or terms.text)
        self.note(paid)
        return refused

    def note(self, paid: Mapping[str, tuple[int, str]]) -> None:
        """Record how many replies clients have been charged for, and their terms."""
        self._entries |= paid
        replies, terms = [count for count, _ in self._entries.values()], [text for _, text in self._entries.values()]
        self._state[KEY] = ConfigRecord(dict(zip(_COLUMNS, (list(self._entries), replies, terms), strict=True)))


class FileAccount:
    """The account of every client that a node hosts, in files on the device: it lasts as long as the files.

    A client whose file can't be used does not reply. The server learns no more than that; the node's own log has the reason. The
    node's state remembers the counts in the files during this run: a file with a smaller count later is an older copy, and is
    refused.

    Args:
        files: every client's file; several may share one.
        state: the node's state.
    """

    def __init__(self, files: Mapping[str, DeviceLedger], state: RecordDict) -> None:
        self._files = files
        self._seen = StateAccount(state)

    def charge(self, asked: Mapping[str, Terms], numbered: Mapping[str, Numbered]) -> dict[str, Refusal]:
        """Charge as `Account.charge`; it is on the disk when this returns."""
        refused: dict[str, Refusal] = {}
        by_file: dict[Path, list[str]] = {}
        for name in asked:
            by_file.setdefault(self._files[owner_of(name)].path, []).append(name)
        for path, names in by_file.items():
            known = {name: self._seen.replies(name) for name in names}
            try:
                spent, counts = DeviceLedger(path).charge({name: asked[name] for name in names}, numbered, at_least=known)
            except Exception as error:  # after any error there is no account
                log.error("%s: no reply of %s", error, ", ".join(names))
                refused |= dict.fromkeys(names, Refusal(reason=f"its ledger can't be used; {SEE_LOG}"))
                continue
            self._seen.note({name: (count, asked[name].text) for name, count in counts.items()})
            for name, reason in spent.items():
                refused[name] = _refusal(name, reason)
        return refused


def _refusal(name: str, spent: Spent) -> Refusal:
    """Log why a client can't pay; return what the server learns."""
    log.warning("client %s: no reply: %s", name, spent.own)
    return Refusal(code=REPEATED if spent.repeated else DECLINED, reason=spent.public)


def account_of(own: LedgerPaths | None, names: Iterable[str], context: Context | None) -> Account:
    """Return the account of a node's clients: in files if app or device have a ledger, else in the node's state.

    Args:
        own: the app's own ledger, a path or one for each client; None for none.
        names: of the node's clients.
        context: of the node. Its config has the ledger of the device's owner, if there is one.

    Raises:
        Declined: if there is no context, so that nobody knows what was charged, and what the device's owner has set; or if the
            ledger is no path, or there are two.
    """
    listed = list(names)
    if context is None:
        raise Declined("context: this client has no account; pass context=context to it, or use flower_dp.clients.client_app")
    if taken := next((name for name in listed if owner_of(name) != name), None):
        raise Declined(f"client {taken!r}: its name is that of an account of evaluations; choose another")
    ledger = ledger_of(own, listed, context)
    return StateAccount(context.state) if ledger is None else FileAccount(ledger_files(ledger, listed), context.state)


def ledger_of(own: LedgerPaths | None, names: Iterable[str], context: Context) -> LedgerPaths | None:
    """Return the ledger of a node's clients: that of its owner, in the node's config, or the app's own; None for none.

    Raises:
        Declined: if the owner's is no path, or not the app's; the path is in the node's own log alone.
    """
    owners: Any = context.node_config.get(LEDGER_PATH)
    if owners is None:
        return own
    if own not in (None, owners):
        log.error("%s=%r: the app has its own, ledger=%r; give one of them", LEDGER_PATH, owners, own)
        raise Declined(f"{LEDGER_PATH}: the app has its own ledger, and the device another; {SEE_LOG}")
    try:
        ledger_files(owners, names)
    except ValueError as error:
        log.error("%s: %s", LEDGER_PATH, error)
        raise Declined(f"{LEDGER_PATH}: must be the path of a file; {SEE_LOG}") from error
    path: LedgerPaths = owners
    return path


def refuse_ledger(context: Context) -> None:
    """Refuse a node whose owner has named a ledger, for a client that keeps no account.

    Raises:
        Declined: if there is one.
    """
    if (path := context.node_config.get(LEDGER_PATH)) is not None:
        log.error("%s=%r: this client keeps no account", LEDGER_PATH, path)
        raise Declined(f"{LEDGER_PATH}: this client keeps no account, so its replies would not be counted")


def ledger_files(ledger: object, names: Iterable[str]) -> dict[str, DeviceLedger]:
    """Return every client's ledger file.

    Raises:
        ValueError: if a value is not a path, or a client has no file.
    """
    files = {}
    for name in names:
        path = value_of("ledger", ledger, name)
        if not isinstance(path, str | os.PathLike) or not str(path):
            raise ValueError(f"ledger={path!r}: must be the path of a file; create it with `flower-dp ledger FILE --create NAME`")
        files[name] = DeviceLedger(path)
    return files


@contextmanager
def kept_account(context: Context) -> Iterator[None]:
    """Let an app use the node's context, and restore the account and the ledger's path if the app has changed them."""
    state, path = context.state, context.node_config.get(LEDGER_PATH)
    # A deep copy: an app may change the lists in the record in place.
    record = copy.deepcopy(dict(state.config_records[KEY])) if KEY in state.config_records else None
    try:
        yield
    finally:
        if not isinstance(context.state, RecordDict):
            context.state = state
        left = context.state.config_records.get(KEY)
        if (None if left is None else dict(left)) != record or (KEY in context.state and left is None):
            log.warning("the app has changed %r in the node's state, which is this client's account; it was put back", KEY)
            if record is not None:
                context.state[KEY] = ConfigRecord(record)
            else:
                del context.state[KEY]
        if path is not None and context.node_config.get(LEDGER_PATH) != path:
            log.warning("the app has changed %r in the node's config; it was put back", LEDGER_PATH)
            context.node_config[LEDGER_PATH] = path


def keeping_account(app: ClientAppCallable) -> ClientAppCallable:
    """Return an app that can't change the account of its node's client, whatever kind of message it gets."""

    def kept(message: Message, context: Context) -> Message:
        with kept_account(context):
            return app(message, context)

    return kept

"""A client's own account: the number of replies that it was charged for, in the node's Flower state or in a file on the device.

Within one run the state outlives client objects and worker processes, so a client object that is created for every message still
knows what the client has spent. The state is empty in the next run, and after a restart of the SuperNode: the costs of several
runs on the same records add up. A file keeps one count for all runs: `flower_dp.privacy.device_store`.
"""

import copy
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from flower_dp.clients.answering import NOT_HOSTED
from flower_dp.clients.policy import ClientPolicy
from flower_dp.clients.refusal_messages import SEE_LOG, Declined, contained
from flower_dp.clients.reply.pipeline import failure
from flower_dp.core import checks
from flower_dp.privacy.client_terms import ChargeRefusal, ClientTerms, ReplyTerms, value_of
from flower_dp.privacy.device_store import DeviceLedger, ReplyNumber, evaluation_account, owner_of
from flower_dp.wire import DECLINED, REPEATED, Instruction, LocalRequest, Promise, Refusal

log = logging.getLogger("flwr")

KEY = "flower-dp.account"
# The key of the node's config, which the device's owner writes and no server can change.
LEDGER_PATH = "ledger-path"

_COLUMNS = ("clients", "replies", "terms", "last")
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Columns = tuple[list[str], list[Annotated[int, msgspec.Meta(ge=1)]], list[str], list[_Count]]

# One file for all clients of a node, or one each, by the client's name.
LedgerPaths = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]


class NodeStateAccounts:
    """The accounts of all clients that a node hosts, in the node's state, which lasts one run.

    Raises:
        Declined: if the state's record isn't one that this class has written.
    """

    def __init__(self, state: RecordDict) -> None:
        self._state = state
        record: Mapping[str, Any] = state.config_records.get(KEY, {name: [] for name in _COLUMNS})
        try:
            columns = msgspec.convert([record.get(name) for name in _COLUMNS], _Columns)
            self._entries: dict[str, tuple[int, str, int]] = {
                name: (replies, terms, last) for name, replies, terms, last in zip(*columns, strict=True)
            }
            whole = len(self._entries) == len(columns[0])  # no client twice
        except (ValueError, msgspec.ValidationError):
            whole = False
        if not whole:
            raise Declined(f"state {KEY!r}: is damaged; the number of replies sent is not known, so this node does not reply")

    def replies(self, name: str) -> int:
        """Return the number of replies that a client has been charged for."""
        return self._entries.get(name, (0, "", 0))[0]

    def charge(self, asked: Mapping[str, ReplyTerms], numbered: Mapping[str, ReplyNumber]) -> dict[str, Refusal]:
        """Charge one reply to each client whose budget covers it, for good: the charge is in the node's state on return.

        Call it before anything is computed from the clients' records.

        Args:
            asked: terms of the requested clients, by name.
            numbered: number of each reply by the server's count; the state keeps the last one, for clients with a separation.

        Returns:
            Refusals of the clients that can't pay, by name; they must not reply.
        """
        refused, paid = {}, {}
        for name, terms in asked.items():
            (spent, opened, last), of = self._entries.get(name, (0, None, 0)), numbered[name]
            reason = terms.refusal_reason(spent, opened) or of.early_reason(last)
            if of.separation and of.number <= last:
                public = f"reply in round {of.number} of run {of.run} was counted before, or comes before one that was"
                reason = ChargeRefusal(public=public, own=f"{public}; the last one was in round {last}", repeated=True)
            if reason:
                refused[name] = _refusal(name, reason)
            else:
                paid[name] = (spent + 1, opened or terms.text, of.number)
        self.note(paid)
        return refused

    def note(self, paid: Mapping[str, tuple[int, str, int]]) -> None:
        """Record numbers of replies that clients have been charged for, their terms, and the numbers of their last replies."""
        self._entries |= paid
        entries = self._entries.values()
        replies, terms, last = [each[0] for each in entries], [each[1] for each in entries], [each[2] for each in entries]
        self._state[KEY] = ConfigRecord(dict(zip(_COLUMNS, (list(self._entries), replies, terms, last), strict=True)))


class LedgerFileAccounts:
    """The accounts of all clients that a node hosts, in files on the device; they last as long as the files.

    A client whose file can't be used does not reply. The server learns no more than that; the node's own log has the reason. The
    node's state remembers the files' counts during this run. A file with a smaller count later is an older copy, and is refused.

    Args:
        files: every client's file; several clients may share one.
        state: the node's state.
    """

    def __init__(self, files: Mapping[str, DeviceLedger], state: RecordDict) -> None:
        self._files = files
        self._seen = NodeStateAccounts(state)

    def charge(self, asked: Mapping[str, ReplyTerms], numbered: Mapping[str, ReplyNumber]) -> dict[str, Refusal]:
        """Charge as `NodeStateAccounts.charge`; the charge is on the disk on return."""
        refused: dict[str, Refusal] = {}
        by_file: dict[Path, list[str]] = {}
        for name in asked:
            by_file.setdefault(self._files[owner_of(name)].path, []).append(name)
        for path, names in by_file.items():
            known = {name: self._seen.replies(name) for name in names}
            try:
                spent, counts = DeviceLedger(path).charge({name: asked[name] for name in names}, numbered, at_least=known)
            except Exception as error:  # after any error the account is unknown, so nobody may reply
                log.error("%s: no reply of %s", error, ", ".join(names))
                refused |= dict.fromkeys(names, Refusal(reason=f"its ledger can't be used; {SEE_LOG}"))
                continue
            self._seen.note({name: (count, asked[name].text, numbered[name].number) for name, count in counts.items()})
            for name, reason in spent.items():
                refused[name] = _refusal(name, reason)
        return refused


AccountStore = NodeStateAccounts | LedgerFileAccounts


def _refusal(name: str, spent: ChargeRefusal) -> Refusal:
    """Log why a client can't pay; return the refusal that the server receives."""
    log.warning("Client %s: no reply: %s", name, spent.own)
    return Refusal(code=REPEATED if spent.repeated else DECLINED, reason=spent.public)


def account_of(own: LedgerPaths | None, names: Iterable[str], context: Context | None) -> AccountStore:
    """Return the accounts of a node's clients: in files if app or device have a ledger, else in the node's state.

    Args:
        own: the app's own ledger, a path or one for each client; None for none.
        names: names of the node's clients.
        context: the node's context, whose config may have the ledger of the device's owner.

    Raises:
        Declined: if there is no context: then past charges and the settings of the device's owner are unknown. Or if the ledger
            is not a path, or there are two.
    """
    listed = list(names)
    if context is None:
        raise Declined("context: this client has no account; pass context=context to it, or use flower_dp.clients.client_app")
    if taken := next((name for name in listed if owner_of(name) != name), None):
        raise Declined(f"client {taken!r}: its name is that of another account of a client; choose another")
    ledger = ledger_of(own, listed, context)
    return NodeStateAccounts(context.state) if ledger is None else LedgerFileAccounts(ledger_files(ledger, listed), context.state)


def ledger_of(own: LedgerPaths | None, names: Iterable[str], context: Context) -> LedgerPaths | None:
    """Return the ledger of a node's clients: its owner's, from the node's config, or the app's own; None for none.

    Raises:
        Declined: if the owner's ledger is not a path, or not the app's; the path is in the node's own log alone.
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
        Declined: if the node's config names a ledger.
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
            raise ValueError(
                f"ledger={path!r}: must be the path of a file; create it with `flower-dp ledger create-device FILE NAME`"
            )
        files[name] = DeviceLedger(path)
    return files


def keeping_account(app: ClientAppCallable) -> ClientAppCallable:
    """Return an app that can't change its client's account or the ledger's path, whatever message it gets."""

    def kept(message: Message, context: Context) -> Message:
        state, path = context.state, context.node_config.get(LEDGER_PATH)
        # Copy deeply: an app may change the lists in the record in place.
        record = copy.deepcopy(dict(state.config_records[KEY])) if KEY in state.config_records else None
        try:
            return app(message, context)
        finally:
            if not isinstance(context.state, RecordDict):
                context.state = state
            left = context.state.config_records.get(KEY)
            if (None if left is None else dict(left)) != record or (KEY in context.state and left is None):
                log.warning("The app has changed %r in the node's state, which is this client's account; it was restored", KEY)
                context.state.pop(KEY, None)
                if record is not None:
                    context.state[KEY] = ConfigRecord(record)
            if path is not None and context.node_config.get(LEDGER_PATH) != path:
                log.warning("The app has changed %r in the node's config; it was restored", LEDGER_PATH)
                context.node_config[LEDGER_PATH] = path

    return kept


# Comparison of a client's own terms with the server's: if they differ, the server might state too small an epsilon.

# The relative difference allowed between the noise multipliers that two machines compute from one budget.
_TOLERANCE = 1e-6
# Characters of a reason: honest terms have fewer.
_MAX_CHARACTERS = 1000


def verify_terms(
    instruction: Instruction, name: str, terms_of: Callable[[], ClientTerms], policy: ClientPolicy
) -> ClientTerms | Refusal:
    """Return one client's own terms if the server's are the same and its policy allows them, else its refusal.

    Args:
        instruction: the server's instruction.
        name: the client.
        terms_of: function that makes the client's own terms.
        policy: the client's policy.

    Raises:
        Declined: if the server requests anything but local DP.
    """
    ask = instruction.ask
    if ask.placement != "local":
        raise Declined(f"placement={ask.placement!r}: must be 'local', since this client adds all noise by its own terms")
    if name not in ask.own:
        return NOT_HOSTED
    try:
        with contained():
            terms = terms_of()
        if ask.metrics is None:
            policy.check_own(terms.release)
        else:
            policy.check_own_evaluation(terms.release)
    except Exception as error:
        return failure(name, error, "this client's terms can't be made", code=DECLINED)
    reason = refusal_reason(terms, ask.promise, ask.own[name])
    return Refusal(reason=reason) if reason else terms


def charged(account: AccountStore, due: Mapping[str, ClientTerms], instruction: Instruction) -> dict[str, Refusal]:
    """Charge one reply, or one evaluation, to each client; return the refusals of those that can't pay and must not reply."""
    numbered = {name: ReplyNumber(run=request.run, number=request.number) for name, request in instruction.ask.own.items()}
    if instruction.ask.metrics is not None:
        due = {evaluation_account(name): terms for name, terms in due.items()}
        numbered = {evaluation_account(name): number for name, number in numbered.items()}
    return {owner_of(name): refusal for name, refusal in account.charge(due, numbered).items()}


def refusal_reason(terms: ClientTerms, promise: Promise, asked: LocalRequest) -> str | None:
    """Return why a client must not reply, in a text that the server may see; None if the client may reply.

    The text has the server's values alone: the client's own may follow from its number of records. The node's own log has them.

    Args:
        terms: the client's own terms.
        promise: the server's clip norm.
        asked: terms as the server knows them. It charges by their noise multiplier; the client's own may be larger.
    """
    clip_norm, fingerprint, noise_multiplier = promise.clip_norm, asked.terms, asked.noise_multiplier
    own = terms.release.mechanism.noise_multiplier
    if clip_norm != terms.release.clip_norm:
        return _mismatch(f"clip_norm={clip_norm:g}: is not this client's own", f"{terms.release.clip_norm:g}")
    if fingerprint != terms.fingerprint:
        return _mismatch(f"the server's terms ({fingerprint}) are not this client's own", terms.fingerprint)
    if not own >= noise_multiplier * (1 - _TOLERANCE):
        return _mismatch(f"noise_multiplier={noise_multiplier:g}: by this client's own budget it is less", f"{own:g}")
    return None


def _mismatch(reason: str, own: str) -> str:
    """Log a reason with the client's own value; return the reason without that value, for the server."""
    line = checks.one_line(reason, most=_MAX_CHARACTERS)  # it has the server's text
    log.warning("No reply: %s; the client's own: %s", line, own)
    return f"{line}; {SEE_LOG}"

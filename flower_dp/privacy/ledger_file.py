"""A client's account in a file on its device: how many replies it has been charged for, over all runs, restarts and crashes.

The file is JSON. A charge takes a lock (flock), reads the file, writes a new one beside it, and renames that over the old one.
File and folder are on the disk (fsync) before it returns. A file that fails any check is an error, and without an account there
is no reply.

An older copy of the file that is restored between runs can't be noticed. Anyone who may write the file can reset the budgets of
its clients.
"""

import json
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import dp_accounting as dp

from flower_dp.core import checks
from flower_dp.privacy.client_terms import Terms
from flower_dp.privacy.events import RELATIONS, Relation

FORMAT = 1
_KEY = "flower-dp-ledger"
_LOCK_SECONDS, _POLL_SECONDS = 10.0, 0.02
_EVENTS = {
    event.__name__: event
    for event in (
        dp.GaussianDpEvent,
        dp.LaplaceDpEvent,
        dp.NoOpDpEvent,
        dp.NonPrivateDpEvent,
        dp.PoissonSampledDpEvent,
        dp.SampledWithoutReplacementDpEvent,
    )
}


class LedgerError(ValueError):
    """A ledger file that can't be used; nothing that it should count may be released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One client's account.

    Attributes:
        replies: how many replies the client has been charged for.
        terms: the terms with which it was opened, as one line; None before the first reply. They can't change.
        num_replies: the most replies that the terms allow.
        relation: the neighbouring relation of the terms.
        event: what one reply costs.
    """

    replies: int = 0
    terms: str | None = None
    num_replies: int = 0
    relation: Relation = "add-or-remove-one"
    event: dp.DpEvent | None = None

    def charged(self, terms: Terms) -> "Entry":
        """Return the account with one more reply."""
        return Entry(
            replies=self.replies + 1,
            terms=terms.text,
            num_replies=terms.num_replies,
            relation=terms.release.relation,
            event=terms.event,
        )

    @property
    def spent(self) -> dp.DpEvent:
        """All that was charged, as one event."""
        return dp.SelfComposedDpEvent(self.event, self.replies) if self.event is not None and self.replies else dp.NoOpDpEvent()


class LedgerFile:
    """The accounts of a device's clients in one file, which the device's owner creates.

    It is an error, and never a new account, if the file is missing, unreadable, damaged, locked by another process for 10
    seconds, owned by another user, writable by others, or without an account of a client that is asked.

    Args:
        path: of the file. Its folder must be writable by this user alone: others could restore an older copy. Links are followed;
            a file with a second hard link is refused, because after a rename the two would differ.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from flower_dp.privacy.ledger_file import LedgerFile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ledger = LedgerFile.create(Path(folder) / "ledger.json", ["hospital-7"])
        ...     ledger.read()["hospital-7"].replies
        0
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | os.PathLike[str], names: Iterable[str]) -> "LedgerFile":
        """Create the file with an empty account for each client, readable and writable by this user alone.

        Raises:
            LedgerError: if the file exists, or can't be written.
            ValueError: if there is no name, an empty one, or one twice.
        """
        listed = list(names)
        if not listed or not all(isinstance(name, str) and name.strip() for name in listed) or len(set(listed)) != len(listed):
            raise ValueError(f"names={listed}: must be names of clients, at least one, none of them empty or twice")
        ledger = cls(path)
        with ledger._naming_file():
            if not ledger.path.parent.is_dir():
                raise LedgerError("its folder does not exist")
            _check_folder(ledger.path.parent)
            descriptor = os.open(ledger.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            _write(descriptor, dict.fromkeys(listed, Entry()))
            _sync_folder(ledger.path.parent)
        return ledger

    def read(self) -> dict[str, Entry]:
        """Return every client's account, without a lock: the file is whole at any time.

        Raises:
            LedgerError: if it is missing, unreadable or damaged.
        """
        with self._naming_file():
            return _entries(self.path.read_bytes())

    def charge(
        self, asked: Mapping[str, Terms], *, at_least: Mapping[str, int] | None = None
    ) -> tuple[dict[str, str], dict[str, int]]:
        """Charge one reply to each client that can pay it, on the disk when this returns.

        To be called before anything is computed from the clients' records.

        Args:
            asked: the terms of the clients that are asked.
            at_least: how many replies clients are known to have been charged for; a file with fewer is an older copy.

        Returns:
            Why some clients can't be charged, and how many replies each of the others has been charged for, including this one.

        Raises:
            LedgerError: if the file can't be used; no client may reply then.
        """
        refused: dict[str, str] = {}
        with self._naming_file(), self._locked() as (path, file):
            entries = _entries(file.read())
            for name in asked:
                if name not in entries:
                    raise LedgerError(f"has no account of client {name!r}; it is the ledger of {', '.join(sorted(entries))}")
                if entries[name].replies < (known := (at_least or {}).get(name, 0)):
                    raise LedgerError(
                        f"counts {entries[name].replies} replies of client {name!r}: it is an older copy, for there were {known}"
                    )
            for name, terms in asked.items():
                if reason := terms.why_not(entries[name].replies, entries[name].terms):
                    refused[name] = reason
                else:
                    entries[name] = entries[name].charged(terms)
            if len(refused) < len(asked):
                _replace(path, entries, stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        return refused, {name: entries[name].replies for name in asked if name not in refused}

    @contextmanager
    def _naming_file(self) -> Iterator[None]:
        """Turn every error into a `LedgerError` that names this file."""
        try:
            yield
        except LedgerError as error:
            raise LedgerError(f"ledger {self.path}: {error}") from None
        except FileNotFoundError as error:
            raise LedgerError(
                f"ledger {self.path}: does not exist; create it with `flower-dp ledger {self.path} --create NAME`"
            ) from error
        except OSError as error:
            raise LedgerError(f"ledger {self.path}: {error.strerror or error}") from error

    @contextmanager
    def _locked(self) -> Iterator[tuple[Path, IO[bytes]]]:
        """Hold the lock of the file that is at the path now; try again if a rename has replaced the locked file."""
        import fcntl  # noqa: PLC0415 (Windows has none, and no ledger then)

        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            # Follow links: otherwise a rename would replace a link, and its target would keep the old count.
            path = self.path.resolve(strict=True)
            with os.fdopen(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK), "rb+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise LedgerError(f"is locked by another process for {_LOCK_SECONDS:g} s") from None
                else:
                    here, held = path.stat(), os.fstat(file.fileno())
                    if (here.st_dev, here.st_ino) == (held.st_dev, held.st_ino):
                        _check_owner(held)
                        _check_folder(path.parent)
                        yield path, file
                        return
            time.sleep(_POLL_SECONDS)


def _check_owner(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise LedgerError("is no regular file")
    if status.st_uid != os.geteuid():
        raise LedgerError(f"belongs to user {status.st_uid}; this process is user {os.geteuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise LedgerError(
            f"can be written by others (mode {stat.S_IMODE(status.st_mode):o}); chmod 600 makes it the owner's alone"
        )
    if status.st_nlink != 1:
        raise LedgerError(f"has {status.st_nlink} hard links: must have one")


def _check_folder(folder: Path) -> None:
    """Refuse a folder in which others could rename an older copy over the file; where the sticky bit is set they can't."""
    mode = folder.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise LedgerError(
            f"is in a folder that others can write to (mode {stat.S_IMODE(mode):o}); chmod 700 makes it the owner's alone"
        )


def _replace(path: Path, entries: Mapping[str, Entry], mode: int) -> None:
    """Put a new file in the place of the one at the path, on the disk when this returns."""
    new = path.with_name(path.name + ".new")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        os.fchmod(descriptor, mode)
        _write(descriptor, entries)
        os.replace(new, path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise
    _sync_folder(path.parent)


def _write(descriptor: int, entries: Mapping[str, Entry]) -> None:
    """Write a file, and close it when it is on the disk."""
    as_json = {name: _entry_as_json(entry) for name, entry in entries.items()}
    with os.fdopen(descriptor, "wb") as file:
        file.write(json.dumps({_KEY: FORMAT, "clients": as_json}, indent=1).encode() + b"\n")
        file.flush()
        _sync(file.fileno())


def _sync(descriptor: int) -> None:
    import fcntl  # noqa: PLC0415

    os.fsync(descriptor)
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync alone leaves it in the drive's cache
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entries(content: bytes) -> dict[str, Entry]:
    """Read the accounts off a file's content."""
    try:
        data = json.loads(content)
        if data[_KEY] != FORMAT:
            raise ValueError(f"format {data[_KEY]!r}: must be {FORMAT}")
        clients = data["clients"]
        if not isinstance(clients, dict) or not clients:
            raise ValueError("clients: must be at least one")
        return {name: _entry(told) for name, told in clients.items()}
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
        "event": _event_as_json(entry.event),
    }


def _entry(told: Mapping[str, Any]) -> Entry:
    replies = checks.integer("replies", told["replies"], at_least=0)
    if told["terms"] is None:
        if replies:
            raise ValueError(f"replies={replies}: without terms")
        return Entry()
    if not isinstance(told["terms"], str):
        raise TypeError("terms: must be text")
    return Entry(
        replies=replies,
        terms=told["terms"],
        num_replies=checks.integer("num_replies", told["num_replies"], at_least=1),
        relation=cast("Relation", checks.one_of("relation", told["relation"], RELATIONS)),
        event=_event(told["event"]),
    )


def _event_as_json(event: dp.DpEvent) -> Any:
    if type(event).__name__ not in _EVENTS:
        raise LedgerError(f"can't hold event {event}")
    fields = {field: getattr(event, field) for field in event.__annotations__}
    told = {name: _event_as_json(value) if isinstance(value, dp.DpEvent) else value for name, value in fields.items()}
    return {"kind": type(event).__name__, **told}


def _event(told: Mapping[str, Any]) -> dp.DpEvent:
    values = {name: _event(value) if isinstance(value, dict) else value for name, value in told.items() if name != "kind"}
    return _EVENTS[told["kind"]](**values)

"""A client's account in a file on its device: how many replies it has been charged for, over all runs, restarts and crashes.

The file is JSON with a checksum. A charge takes a lock (flock), reads the file, writes a new one beside it, and renames that over
the old one. File and folder are on the disk (fsync) before it returns. A file that fails any check is an error, and without an
account there is no reply. The file is its owner's alone, to read too: whoever can open it can hold the lock.

An older copy of the file that is restored between runs can't be noticed. Anyone who may write the file can reset the budgets of
its clients.
"""

import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from flower_dp.privacy.client_terms import Spent, Terms
from flower_dp.privacy.ledger_format import Entry, LedgerError, content_of, entries_of, evaluation_account, owner_of

__all__ = ["Entry", "LedgerError", "LedgerFile", "evaluation_account", "owner_of"]

_LOCK_SECONDS, _POLL_SECONDS = 10.0, 0.02


class LedgerFile:
    """The accounts of a device's clients in one file, which the device's owner creates.

    It is an error, and never a new account, if the file is missing, unreadable, damaged, locked by another process for 10
    seconds, owned by another user, open to others, or without an account of a client that is asked.

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
            _write(_create(ledger.path), dict.fromkeys(listed, Entry()))
            _sync_folder(ledger.path.parent)
        return ledger

    def read(self) -> dict[str, Entry]:
        """Return every client's account, without a lock: the file is whole at any time.

        Raises:
            LedgerError: if it is missing, unreadable or damaged.
        """
        with self._naming_file(), os.fdopen(_open(self.path, os.O_RDONLY), "rb") as file:
            return entries_of(file.read())

    def charge(
        self, asked: Mapping[str, Terms], *, at_least: Mapping[str, int] | None = None
    ) -> tuple[dict[str, Spent], dict[str, int]]:
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
        refused: dict[str, Spent] = {}
        with self._naming_file(), self._locked() as (path, file):
            entries = entries_of(file.read())
            for name in asked:
                if name not in entries and owner_of(name) in entries:
                    entries[name] = Entry()  # no evaluation yet; an account that was there before is in `at_least`
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
                _replace(path, entries)
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
            with os.fdopen(_open(path, os.O_RDWR | os.O_NOFOLLOW), "rb+") as file:
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
                        _clear(path)
                        yield path, file
                        return
            time.sleep(_POLL_SECONDS)


def _open(path: Path, flags: int) -> int:
    """Open a regular file; anything else, which might block or never end, is an error."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise LedgerError("is no regular file")
    return descriptor


def _check_owner(status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise LedgerError(f"belongs to user {status.st_uid}; this process is user {os.geteuid()}")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise LedgerError(
            f"is open to others (mode {stat.S_IMODE(status.st_mode):o}): who can write it can change it, and who can read it can "
            "hold its lock; chmod 600 makes it the owner's alone"
        )
    if status.st_nlink != 1:
        raise LedgerError(f"has {status.st_nlink} hard links: must have one")


def _check_folder(folder: Path) -> None:
    """Refuse a folder in which others could rename an older copy over the file; with the sticky bit only its owner could."""
    status = folder.stat()
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(status.st_mode)
        raise LedgerError(f"is in a folder that others can write to (mode {mode:o}); chmod 700 makes it the owner's alone")
    if status.st_uid not in (os.geteuid(), 0):
        raise LedgerError(f"is in a folder of user {status.st_uid}; this process is user {os.geteuid()}")


def _clear(path: Path) -> None:
    """Remove what processes that died have left beside the file; called with the lock, so that none of it is in use."""
    half_written = re.compile(re.escape(path.name) + r"(\.[0-9a-f]{32})?\.new")
    for name in os.listdir(path.parent):
        if half_written.fullmatch(name):
            with suppress(OSError):  # in a sticky folder it may be another user's, and is in nobody's way
                (path.parent / name).unlink()


def _replace(path: Path, entries: Mapping[str, Entry]) -> None:
    """Put a new file in the place of the one at the path, on the disk when this returns."""
    # A name that nobody else can guess and take first, in a sticky folder.
    new = path.with_name(f"{path.name}.{secrets.token_hex(16)}.new")
    try:
        _write(_create(new), entries)
        os.replace(new, path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise
    _sync_folder(path.parent)


def _create(path: Path) -> int:
    """Create a file that is this user's alone; it must not be there yet, not even as a link."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def _write(descriptor: int, entries: Mapping[str, Entry]) -> None:
    """Write a file, and close it when it is on the disk."""
    content = content_of(entries)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
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

"""A client's account in a file on its device: how many replies it has been charged for, over all runs, restarts and crashes.

The file is JSON with a checksum. A charge takes a lock (flock), reads the file, writes a new one beside it, and renames that over
the old one. File and folder are on the disk (fsync) before it returns. A file that fails any check is an error, and without an
account there is no reply. The file is its owner's alone, to read too: whoever can open it can hold the lock. With a charge the
server's own number of the reply is kept: a server that goes on from an older copy of its ledger repeats one, and is refused.

An older copy of the file that is restored between runs can't be noticed. Anyone who may write the file can reset the budgets of
its clients.
"""

import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from flower_dp.privacy.client_terms import Spent, Terms
from flower_dp.privacy.ledger_format import Entry, Numbered, content_of, entries_of, evaluation_account, owner_of
from flower_dp.privacy.private_file import (
    LedgerError,
    check_folder,
    check_owner,
    create_private,
    open_regular,
    sync,
    sync_folder,
)

__all__ = ["Entry", "LedgerError", "LedgerFile", "Numbered", "evaluation_account", "owner_of"]

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
            check_folder(ledger.path.parent)
            _write(create_private(ledger.path), dict.fromkeys(listed, Entry()))
            sync_folder(ledger.path.parent)
        return ledger

    def read(self) -> dict[str, Entry]:
        """Return every client's account, without a lock: the file is whole at any time.

        Raises:
            LedgerError: if it is missing, unreadable or damaged.
        """
        with self._naming_file(), os.fdopen(open_regular(self.path, os.O_RDONLY), "rb") as file:
            return entries_of(file.read())

    def charge(
        self,
        asked: Mapping[str, Terms],
        *,
        at_least: Mapping[str, int] | None = None,
        numbered: Mapping[str, Numbered] | None = None,
    ) -> tuple[dict[str, Spent], dict[str, int]]:
        """Charge one reply to each client that can pay it, on the disk when this returns.

        To be called before anything is computed from the clients' records.

        Args:
            asked: the terms of the clients that are asked.
            at_least: how many replies clients are known to have been charged for; a file with fewer is an older copy.
            numbered: which reply of each client it is by the server's count. One that is not larger than the last one is refused
                and not charged; the larger one is written with the charge.

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
                entry, number = entries[name], (numbered or {}).get(name)
                if reason := (number and entry.why_repeated(number)) or terms.why_not(entry.replies, entry.terms):
                    refused[name] = reason
                else:
                    entry = entry.charged(terms)
                    entries[name] = entry.noted(number) if number else entry
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
            with os.fdopen(open_regular(path, os.O_RDWR | os.O_NOFOLLOW), "rb+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise LedgerError(f"is locked by another process for {_LOCK_SECONDS:g} s") from None
                else:
                    here, held = path.stat(), os.fstat(file.fileno())
                    if (here.st_dev, here.st_ino) == (held.st_dev, held.st_ino):
                        check_owner(held)
                        check_folder(path.parent)
                        _clear(path)
                        yield path, file
                        return
            time.sleep(_POLL_SECONDS)


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
        _write(create_private(new), entries)
        os.replace(new, path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise
    sync_folder(path.parent)


def _write(descriptor: int, entries: Mapping[str, Entry]) -> None:
    """Write a file, and close it when it is on the disk."""
    content = content_of(entries)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        sync(file.fileno())

"""A file of one user alone, in a folder that nobody else can change, and its lock: one process at a time writes it."""

import os
import re
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Suffix of the file beside a ledger: its lock, with number and digest of the last charge.
_MARK = ".mark"
_LINE = re.compile(rb"(\d{20}) ([0-9a-f]{64})\n")
_POLL_SECONDS = 0.02


class LedgerError(ValueError):
    """Raised if a ledger can't be used. Nothing that it should count may be released."""


class BudgetSpentError(LedgerError):
    """Raised if a ledger's budget does not cover a charge. The charge was not written, and its release may not be made."""


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file; anything else, which might block or never end, is an error."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise LedgerError("is not a regular file")
    return descriptor


def check_owner(status: os.stat_result) -> None:
    """Refuse a file that is not this user's alone."""
    if status.st_uid != os.geteuid():
        raise LedgerError(f"belongs to user {status.st_uid}; this process is user {os.geteuid()}")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        harm = "others could change it, or hold its lock; chmod 600 makes it the owner's alone"
        raise LedgerError(f"is open to others (mode {stat.S_IMODE(status.st_mode):o}): {harm}")
    if status.st_nlink != 1:
        raise LedgerError(f"has {status.st_nlink} hard links: must have one")


def check_folder(folder: Path) -> None:
    """Refuse a folder in which others could rename an older copy over the file; with the sticky bit only its owner could."""
    status = folder.stat()
    if error := ownership_error(status, sticky=bool(status.st_mode & stat.S_ISVTX)):
        raise LedgerError(f"its folder: {error}")


def ownership_error(status: os.stat_result, *, sticky: bool = False) -> str | None:
    """Return the reason why another user could have written a file, or into a folder; None if only this user, or root, could.

    Others may write to a folder that is `sticky`: they can't replace what is not theirs.
    """
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
        return f"others can write to it (mode {stat.S_IMODE(status.st_mode):o}); chmod go-w makes it its owner's alone"
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}; this process is user {os.geteuid()}"
    return None


def create_private(path: Path) -> int:
    """Create a file of this user alone; its name must not exist yet, not even as a link."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def sync_folder(folder: Path) -> None:
    """Force the names in a folder onto the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCharge:
    """The last charge of a ledger when it was last written.

    Attributes:
        number: number of charges.
        digest: digest of the last charge.
    """

    number: int
    digest: bytes

    @classmethod
    def read(cls, descriptor: int) -> "LastCharge | None":
        """Return the mark in an open file; None in an empty one.

        Raises:
            LedgerError: if the mark is damaged.
        """
        if not (line := os.pread(descriptor, 200, 0)):
            return None
        if not (match := _LINE.fullmatch(line)):
            raise LedgerError("is not safe: its .mark file is damaged; remove that if you know the ledger is not an older copy")
        return cls(number=int(match[1]), digest=bytes.fromhex(match[2].decode()))


class Lock:
    """An exclusive lock (flock) on the file PATH.mark, and the mark in it.

    The lock ends with the process that holds it. If somebody removes the file, a second process gets in; the ledger then notices
    the change.

    Args:
        path: path of the ledger.
        seconds: longest wait for another process.

    Raises:
        LedgerError: if another process holds the lock for longer.
    """

    def __init__(self, path: Path, *, seconds: float) -> None:
        import fcntl  # noqa: PLC0415 (Windows has none, and no ledger then)

        self._path = path.with_name(path.name + _MARK)
        deadline = time.monotonic() + seconds
        while True:
            with suppress(FileExistsError):
                os.close(create_private(self._path))
            self._descriptor = open_regular(self._path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                check_owner(os.fstat(self._descriptor))
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_here:  # else another file took its place after it was opened
                    return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self.close()
                    raise LedgerError("is in use: another process writes to it") from None
            except BaseException:
                self.close()
                raise
            self.close()
            time.sleep(_POLL_SECONDS)

    @staticmethod
    def mark_of(path: Path) -> LastCharge | None:
        """Return the mark of a ledger, without its lock; None if there is none."""
        try:
            descriptor = open_regular(path.with_name(path.name + _MARK), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return LastCharge.read(descriptor)
        finally:
            os.close(descriptor)

    @property
    def mark(self) -> LastCharge | None:
        """Mark in the file; None if there is none."""
        return LastCharge.read(self._descriptor)

    @mark.setter
    def mark(self, mark: LastCharge) -> None:
        # Not forced onto the disk: after a crash of the machine it may be an earlier mark, which is no less true.
        # All marks have one length, so that one write replaces another.
        os.pwrite(self._descriptor, f"{mark.number:020d} {mark.digest.hex()}\n".encode(), 0)

    @property
    def _is_here(self) -> bool:
        try:
            here = self._path.stat()
        except FileNotFoundError:
            return False
        held = os.fstat(self._descriptor)
        return (here.st_dev, here.st_ino) == (held.st_dev, held.st_ino)

    def forget(self) -> None:
        """Remove the mark, for a ledger that is created anew."""
        os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        """Let other processes write."""
        os.close(self._descriptor)

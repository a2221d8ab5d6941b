"""A file that is its owner's alone, in a folder that nobody else can change."""

import os
import stat
from pathlib import Path


class LedgerError(ValueError):
    """A ledger file that can't be used; nothing that it should count may be released."""


class BudgetSpentError(LedgerError):
    """A charge that a ledger's budget does not cover; it was not written, and nothing that it should count may be released."""


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file; anything else, which might block or never end, is an error."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise LedgerError("is no regular file")
    return descriptor


def check_owner(status: os.stat_result) -> None:
    """Refuse a file that is not this user's alone."""
    if status.st_uid != os.geteuid():
        raise LedgerError(f"belongs to user {status.st_uid}; this process is user {os.geteuid()}")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise LedgerError(
            f"is open to others (mode {stat.S_IMODE(status.st_mode):o}): who can write it can change it, and who can read it can "
            "hold its lock; chmod 600 makes it the owner's alone"
        )
    if status.st_nlink != 1:
        raise LedgerError(f"has {status.st_nlink} hard links: must have one")


def check_folder(folder: Path) -> None:
    """Refuse a folder in which others could rename an older copy over the file; with the sticky bit only its owner could."""
    status = folder.stat()
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(status.st_mode)
        raise LedgerError(f"is in a folder that others can write to (mode {mode:o}); chmod 700 makes it the owner's alone")
    if status.st_uid not in (os.geteuid(), 0):
        raise LedgerError(f"is in a folder of user {status.st_uid}; this process is user {os.geteuid()}")


def why_not_own(status: os.stat_result) -> str | None:
    """Return why somebody else could have written a file, or into a folder; None if only this user, or root, could."""
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to it (mode {stat.S_IMODE(status.st_mode):o}); chmod go-w makes it its owner's alone"
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}; this process is user {os.geteuid()}"
    return None


def create_private(path: Path) -> int:
    """Create a file that is this user's alone; it must not be there yet, not even as a link."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

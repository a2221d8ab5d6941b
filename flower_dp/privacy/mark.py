"""The file beside a ledger: its lock, for one process at a time, and what was written to the ledger last."""

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flower_dp.privacy.private_file import LedgerError, check_owner, create_private, open_regular

_POLL_SECONDS = 0.02
_LINE = re.compile(rb"(\d{20}) ([0-9a-f]{64})\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a ledger had when it was last written.

    Attributes:
        number: number of charges.
        digest: of the last one.
    """

    number: int
    digest: bytes

    @classmethod
    def of(cls, line: bytes) -> "Mark | None":
        """Return the mark of a file's content; None for an empty file.

        Raises:
            LedgerError: if it is damaged.
        """
        if not line:
            return None
        if not (found := _LINE.fullmatch(line)):
            raise LedgerError("is not safe: its .mark file is damaged; remove that if you know that the ledger is no older copy")
        return cls(number=int(found[1]), digest=bytes.fromhex(found[2].decode()))

    @property
    def line(self) -> bytes:
        """The content of a file: of one length, so that one write replaces another."""
        return f"{self.number:020d} {self.digest.hex()}\n".encode()


class Lock:
    """An exclusive lock (flock) on the file PATH.mark, and the mark in it.

    The lock ends with the process that holds it. Whoever removes the file lets a second process in; the ledger then notices
    that it has changed.

    Args:
        path: of the ledger.
        seconds: for which to wait for another process.

    Raises:
        LedgerError: if another process holds it for longer.
    """

    def __init__(self, path: Path, *, seconds: float) -> None:
        import fcntl  # noqa: PLC0415 (Windows has none, and no ledger then)

        self._path = _beside(path)
        deadline = time.monotonic() + seconds
        while True:
            with suppress(FileExistsError):
                os.close(create_private(self._path))
            self._descriptor = open_regular(self._path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                check_owner(os.fstat(self._descriptor))
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_here:  # else another file has taken its place since it was opened
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
    def mark_of(path: Path) -> Mark | None:
        """Return the mark of a ledger, without its lock; None if there is none."""
        try:
            descriptor = open_regular(_beside(path), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return _mark(descriptor)
        finally:
            os.close(descriptor)

    @property
    def mark(self) -> Mark | None:
        """The mark; None if there is none."""
        return _mark(self._descriptor)

    @mark.setter
    def mark(self, mark: Mark) -> None:
        # Not forced onto the disk: after a crash of the machine it may be an earlier one, which is no less true.
        os.pwrite(self._descriptor, mark.line, 0)

    @property
    def _is_here(self) -> bool:
        try:
            here = self._path.stat()
        except FileNotFoundError:
            return False
        held = os.fstat(self._descriptor)
        return (here.st_dev, here.st_ino) == (held.st_dev, held.st_ino)

    def forget(self) -> None:
        """Remove the mark, of a ledger that is made anew."""
        os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        """Let other processes write."""
        os.close(self._descriptor)


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".mark")


def _mark(descriptor: int) -> Mark | None:
    return Mark.of(os.pread(descriptor, 200, 0))

"""The log of a run: without colours, and of its last attempt the warnings, and why it failed."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from flower_dp.running.run_folder import RESUMED_LINE, write_whole
from flower_dp.running.superlink import plain

# Of Flower's own, in each run of its engine.
_FLOWERS = ("Since flwr ",)
# What Ray adds to a line that several workers have written.
_REPEATED = re.compile(r" \[repeated \d+x across cluster\].*$")


def without_colours(log: Path) -> None:
    """Remove a terminal's colours from a log, if there is one."""
    if log.exists():
        write_whole(log, plain(log.read_text(encoding="utf-8", errors="replace")).encode())


def log_without_colours() -> None:
    """Let Flower's logger write no colours in this process, whose output is a file, also of a run that is killed."""
    import flwr.serverapp  # noqa: F401, PLC0415 - it makes the handlers

    for handler in logging.getLogger("flwr").handlers:
        if hasattr(handler, "colored"):
            handler.colored = False


def warnings_of(log: Path) -> list[str]:
    """Return the warnings of a run's last attempt, once each: those that differ in numbers alone are one. None without a log."""
    text = _last_attempt(plain(log.read_text(encoding="utf-8", errors="replace"))) if log.is_file() else ""
    kinds: dict[str, str] = {}
    for written in re.findall(r"^(?:\([^()]*\) )?WARNING\s*:\s*(.+)$", text, re.MULTILINE):
        line = _REPEATED.sub("", written)
        if not line.startswith(_FLOWERS):
            kinds.setdefault(re.sub(r"\d+", "0", line), line)
    return list(kinds.values())


def num_warnings(warnings: Sequence[str]) -> str:
    """Return `1 warning` or `3 warnings`."""
    return f"{len(warnings)} warning{'s' * (len(warnings) != 1)}"


def why_of(details: str, log_text: str) -> str:
    """Return why a run's last attempt failed: Flower's details, and the exception or the last lines of the log."""
    lines = [line.rstrip() for line in _last_attempt(log_text).splitlines() if line.strip()]
    details = "" if details == "N/A" else details.strip()
    if (error := _last_error(lines)) is not None:
        last = [error] if error else []
        # Flower's details repeat the exception's message without its type.
        message = last[0].partition(": ")[2] if last else ""
        return "\n".join(last if message and details.endswith(message) else filter(None, [details, *last]))
    if details:
        return details
    if boxes := [at for at, line in enumerate(lines) if line.startswith("\u256d")]:  # how `flwr` shows its errors
        return " ".join(" ".join(lines[boxes[-1] + 1 : -1]).replace("\u2502", " ").split())
    return "\n".join(line.strip() for line in lines[-3:]) or "no reason given"


def is_refusal(log_text: str) -> bool:
    """Return whether a run has failed since its settings, or its checkpoint, were refused: it would be refused again."""
    lines = [line.rstrip() for line in _last_attempt(log_text).splitlines() if line.strip()]
    kind = (_last_error(lines) or "").partition(":")[0].rpartition(".")[2]
    return kind in ("SettingsError", "CheckpointError")


def _last_attempt(log_text: str) -> str:
    return log_text.rpartition(f"\n{RESUMED_LINE}\n")[2]


def _last_error(lines: Sequence[str]) -> str | None:
    """Return the first line of the last exception in a log; None without one, empty if the log ends in its traceback."""
    traces = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    return next((line for line in lines[traces[-1] + 1 :] if not line[0].isspace()), "") if traces else None

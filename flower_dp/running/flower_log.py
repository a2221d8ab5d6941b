"""The log of a run: without colours, and why the run failed."""

from pathlib import Path

from flower_dp.running.run_folder import write_whole
from flower_dp.running.superlink import plain


def without_colours(log: Path) -> None:
    """Remove a terminal's colours from a log, if there is one."""
    if log.exists():
        write_whole(log, plain(log.read_text(encoding="utf-8", errors="replace")).encode())


def why_of(details: str, log_text: str) -> str:
    """Return why a run failed: Flower's details, and the exception or the last lines of the log."""
    lines = [line.rstrip() for line in log_text.splitlines() if line.strip()]
    details = "" if details == "N/A" else details.strip()
    if traces := [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]:
        last = [line for line in lines[traces[-1] + 1 :] if not line[0].isspace()][:1]
        # Flower's details repeat the exception's message without its type.
        message = last[0].partition(": ")[2] if last else ""
        return "\n".join(last if message and details.endswith(message) else filter(None, [details, *last]))
    if details:
        return details
    if boxes := [at for at, line in enumerate(lines) if line.startswith("\u256d")]:  # how `flwr` shows its errors
        return " ".join(" ".join(lines[boxes[-1] + 1 : -1]).replace("\u2502", " ").split())
    return "\n".join(line.strip() for line in lines[-3:]) or "no reason given"

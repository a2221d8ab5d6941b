"""The run folder: configuration, metrics, statement, model and plot of one run."""

import importlib.util
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np
import tomli_w
from numpy.typing import NDArray

from flower_dp.core import checks
from flower_dp.core.environment import RUN_FOLDER
from flower_dp.running.trained_model import described, put_into, stored_model

if TYPE_CHECKING:
    from torch import nn

CONFIG = "run-config.toml"
METRICS = "metrics.jsonl"
STATEMENT_JSON = "statement.json"
STATEMENT_TEXT = "statement.txt"
MODEL = "model.safetensors"
MODEL_JSON = "model.json"
PLOT = "progress.png"
LOG = "flower.log"
# The line in a run's log before each attempt but the first.
RESUMED_LINE = "--- the run is resumed ---"
# The folder of checkpoints, of the server's ledger, and of the launch record of `flower-dp run`.
CHECKPOINT = "checkpoint"
# Results of a run. An app's own files of these names are not linked into the folder.
RESULTS = (CONFIG, METRICS, STATEMENT_JSON, STATEMENT_TEXT, MODEL, MODEL_JSON, PLOT, LOG, CHECKPOINT)
# Only the owner may open a new folder and its log: the log, and the times of files, may tell how many clients took part.
_OWNERS_ALONE, _OWNERS_FILE, _ANY_FILE = 0o700, 0o600, 0o666
_MOST_ROUNDS = 2**31 - 1
# The function that gets every line of `metrics.jsonl` written in this context.
ON_LINE: ContextVar[Callable[[Mapping[str, Any]], None]] = ContextVar("on_line", default=lambda line: None)
# Settings that change where a run is stored, and nothing that it computes.
_FREE = {"output-dir", "resume"}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run.

    Every file except `metrics.jsonl` and `flower.log` is written completely or not at all; `metrics.jsonl` grows by whole lines.
    Only the owner can open a folder that is created here, and the log in any folder.

    Attributes:
        path: path of the folder.

    Example:
        >>> import tempfile
        >>> from flower_dp.running.run_folder import RunFolder, read_metrics
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     folder = RunFolder.create(parent + "/run", {"num-rounds": 2}, "my run")
        ...     folder.append({"round": 0, "accuracy": 0.1})
        ...     [line["accuracy"] for line in read_metrics(folder.path)]
        [0.1]
    """

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).expanduser())

    @classmethod
    def create(cls, path: str | os.PathLike[str] | None, config: Mapping[str, Any], name: str) -> Self:
        """Create the folder, and write the run's settings to `run-config.toml`.

        Args:
            path: path of the folder; None for the folder of `flower-dp run`. If another command runs the app, None means a new
                folder under `~/.flower-dp/runs` (see `new_folder`).
            config: settings of the run, with values that TOML can hold.
            name: name of the run, for the default folder's name.

        Raises:
            ValueError: if the folder already holds a run, or `path` is a file.
        """
        passed = os.environ.get(RUN_FOLDER) if path is None else None
        folder = Path(passed) if passed else new_folder(path, name)
        # The folder that `flower-dp run` has created may contain links to the app's files.
        if held := [name for name in RESULTS if name not in (LOG, CHECKPOINT) and (folder / name).exists()]:
            raise ValueError(f"{folder}: already holds {held[0]}; a run needs a folder of its own: give this run another path")
        write_whole(folder / CONFIG, tomli_w.dumps(dict(config)).encode())
        return cls(path=folder)

    @classmethod
    def reopen(cls, path: str | os.PathLike[str] | None, config: Mapping[str, Any]) -> Self:
        """Return the folder of a run that is resumed.

        Args:
            path: path of the folder; None for the folder of `flower-dp run`.
            config: settings of the run, the same as at its start.

        Raises:
            SettingsError: if there is no such run, or it had other settings.
        """
        given = os.environ.get(RUN_FOLDER) if path is None else path
        if not given:
            raise checks.SettingsError("resume: needs the path of the run folder")
        folder = cls(path=Path(given).absolute())
        file = folder.path / CONFIG
        if file.is_file():
            before = tomllib.loads(file.read_text(encoding="utf-8"))
            now = tomllib.loads(tomli_w.dumps(dict(config)))
            for key, value in before.items():  # a newer release may have more settings
                if key not in _FREE and now.get(key, value) != value:
                    raise checks.SettingsError(f"{key}={now[key]!r}: was {value!r} in {folder.path}: it can't change in a run")
        return folder

    def truncate(self, last: int) -> list[dict[str, Any]]:
        """Drop the lines of `metrics.jsonl` after round `last`, and the statement; return the other lines.

        The statement goes because the resumed run will charge more than it covers.
        """
        lines = [line for line in read_metrics(self.path) if line.get("round", 0) <= last]
        content = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        write_whole(self.path / METRICS, content.encode())
        forget_statement(self.path)
        return lines

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Append one line to `metrics.jsonl`; NaN and infinity become null."""
        line = json.dumps(_plain(metrics), allow_nan=False)
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        ON_LINE.get()(metrics)

    def state(self, statement: Mapping[str, Any], text: str) -> None:
        """Write the privacy statement. A failed run has one too, since its releases before the failure count.

        Args:
            statement: statement in the form of `to_dict()`.
            text: statement as text for people.
        """
        content = json.dumps(_plain(statement), allow_nan=False, indent=2) + "\n"
        write_whole(self.path / STATEMENT_JSON, content.encode())
        write_whole(self.path / STATEMENT_TEXT, (text.rstrip("\n") + "\n").encode())

    def write_results(
        self, arrays: Mapping[str, NDArray[np.generic]], others: Mapping[str, Any] | None = None, *, unfinished: str = ""
    ) -> None:
        """Write the final model, its description, and the plot of the metrics, which needs matplotlib.

        Args:
            arrays: arrays of the model by name, of any shape (0-d too) and memory layout.
            others: arrays of the whole model that the run did not have, such as a frozen base (`trained_model.rest_of`).
            unfinished: the round of this model as text, if the run did not end; "" for the final model.

        Raises:
            ValueError: if safetensors can't hold an array's dtype.
        """
        content = _safetensors(arrays)
        write_whole(self.path / MODEL, content)
        description = described(arrays, content, others or {}) | ({"unfinished": unfinished} if unfinished else {})
        write_whole(self.path / MODEL_JSON, (json.dumps(description, indent=2) + "\n").encode())
        if importlib.util.find_spec("matplotlib") is not None:
            from flower_dp.running import plot  # noqa: PLC0415  (slow to load)

            write_whole(self.path / PLOT, plot.png(read_metrics(self.path)))

    def load_model_into(self, model: "nn.Module") -> tuple[str, ...]:
        """Copy the trained model into a torch module; return the names of the unchanged parameters and buffers.

        The method replaces only arrays that the run trained or sent. Buffers stay, and so does a frozen base, as of LoRA, which
        the module must already have. Tied weights are one tensor, under any of their names. `model.json` lists the folder's
        arrays, with hashes.

        Args:
            model: module of the run's architecture, on any device.

        Raises:
            ValueError: naming the arrays that do not fit the module; or if the folder has no model, or not that of the run.

        Example:
            >>> from flower_dp import RunFolder
            >>> def trained(path):
            ...     model = make_model()
            ...     RunFolder(path).load_model_into(model)
            ...     return model.eval()
        """
        arrays, others = stored_model(self.path / MODEL, self.path / MODEL_JSON)
        return put_into(model, arrays, others, str(self.path / MODEL))


def new_folder(path: str | os.PathLike[str] | None, name: str) -> Path:
    """Create the folder of one run if necessary, and return its absolute path. The folder is empty, or holds a `flower.log`.

    `flower-dp run` creates the folder and opens the log before the ServerApp uses the folder, so a folder with only that log is
    still free.

    Args:
        path: path of the folder; None for `~/.flower-dp/runs/<UTC time>-<name>`. It gets a number at the end if two runs of one
            name start in the same second.
        name: name of the run.

    Raises:
        ValueError: if `path` is a file, holds anything else, or can't be created.
    """
    if path is not None:
        folder = Path(path).expanduser().absolute()
        try:
            folder.mkdir(_OWNERS_ALONE, parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"run folder {str(path)!r}: can't be created: {error.strerror}; choose another folder") from None
        if held := sorted(entry.name for entry in folder.iterdir() if entry.name != LOG):
            raise ValueError(f"run folder {str(path)!r}: already holds {held[0]}; must be a new or an empty folder")
        return folder
    parent = Path.home() / ".flower-dp" / "runs"
    parent.mkdir(parents=True, exist_ok=True)
    safe_name = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "run"
    stem = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{safe_name}"
    folder, count = parent / stem, 1
    while True:
        try:
            folder.mkdir(_OWNERS_ALONE)  # fails if another run has just created it
            return folder
        except FileExistsError:
            folder, count = parent / f"{stem}-{count + 1}", count + 1


def forget_statement(folder: Path) -> None:
    """Remove the statement from the folder of a run or a sweep that will soon charge more than the statement covers."""
    for name in (STATEMENT_JSON, STATEMENT_TEXT):
        (folder / name).unlink(missing_ok=True)


def lacks_statement(folder: Path) -> bool:
    """Return whether a run in a folder has begun and left no statement, because its process was killed."""
    return not (folder / STATEMENT_JSON).exists() and any((folder / CHECKPOINT).glob("checkpoint*"))


def is_finished(folder: Path) -> bool:
    """Return whether the run in a folder has ended by itself and left its final model."""
    description = folder / MODEL_JSON
    # The model is written first: a model without its description may be that of an unfinished run.
    if not (description.is_file() and (folder / MODEL).is_file()):
        return False
    return "unfinished" not in checks.json_object(str(description), description.read_bytes())


def new_log(folder: Path, *, append: bool = False, resumed: bool = False) -> IO[bytes]:
    """Open the log of a run in its folder for its owner alone, also if others could open an earlier log there.

    Args:
        folder: folder of the run.
        append: whether to append to the log; otherwise the log is emptied.
        resumed: whether to mark the beginning of a new attempt with a line.
    """
    file = _opened(folder / LOG, _OWNERS_FILE, append=append)
    (folder / LOG).chmod(_OWNERS_FILE)
    if resumed:
        file.write(f"\n{RESUMED_LINE}\n".encode())
        file.flush()
    return file


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: readers, also after a crash, find the old content or the new one, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with _opened(part, _OWNERS_FILE if path.name == LOG else _ANY_FILE) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _opened(path: Path, mode: int, *, append: bool = False) -> IO[bytes]:
    """Open a file to overwrite or append to it. A new file gets this mode."""
    flag = os.O_APPEND if append else os.O_TRUNC
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | flag | os.O_CLOEXEC, mode), "ab" if append else "wb")


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl` (the file itself or its folder), oldest first.

    A last line without its line end is left out: it is still being written, or a crash cut it off. A missing file is a run
    without rounds.

    Raises:
        ValueError: if a whole line is not a JSON object, or its `round` is not a whole number.
    """
    file = Path(path, METRICS) if Path(path).is_dir() else Path(path)
    if not file.exists():
        return []
    rows = []
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], start=1):
        row = checks.json_object(f"{file}, line {number}", line)
        if "round" in row:
            checks.integer(f"{file}, line {number}: round", row["round"], at_least=0, at_most=_MOST_ROUNDS)
        rows.append(row)
    return rows


def _plain(value: Any) -> Any:
    """Return a value in a form that JSON can hold: NumPy scalars as Python numbers, NaN and infinity as None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _safetensors(arrays: Mapping[str, NDArray[np.generic]]) -> bytes:
    from safetensors.numpy import save  # noqa: PLC0415

    tensors = {}
    for name, array in arrays.items():
        # safetensors writes the buffer as it is in memory, so it must be in C order and little-endian here. np.ascontiguousarray
        # would turn a 0-d array into one of shape (1,).
        tensor = np.array(array, order="C")
        if tensor.dtype.kind not in "biuf" or tensor.dtype.itemsize > 8:
            raise ValueError(f"arrays[{name!r}]: dtype {tensor.dtype}; must be bool, integer or float of 64 bits or less")
        tensors[name] = tensor.astype(tensor.dtype.newbyteorder("<"), copy=False)
    return bytes(save(tensors))

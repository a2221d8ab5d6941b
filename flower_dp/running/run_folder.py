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
# In the log of a run, before each attempt but the first.
RESUMED_LINE = "--- the run is resumed ---"
# The folder of checkpoints and of the server's ledger, and in it what `flower-dp run` was asked for.
CHECKPOINT = "checkpoint"
# What a run writes. An app's own files of these names are not linked into the folder.
RESULTS = (CONFIG, METRICS, STATEMENT_JSON, STATEMENT_TEXT, MODEL, MODEL_JSON, PLOT, LOG, CHECKPOINT)
# Modes of a new folder, and of its log: the log, and the times of files, may tell how many clients took part.
_OWNERS_ALONE, _OWNERS_FILE, _ANY_FILE = 0o700, 0o600, 0o666
_MOST_ROUNDS = 2**31 - 1
# Called with every line of `metrics.jsonl` that is written in this context.
ON_LINE: ContextVar[Callable[[Mapping[str, Any]], None]] = ContextVar("on_line", default=lambda line: None)
# Settings that say where a run is kept, and nothing of what it does.
_FREE = {"output-dir", "resume"}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run.

    Attributes:
        path: of the folder.

    Every file but `metrics.jsonl` and `flower.log` is written completely or not at all; `metrics.jsonl` grows by complete lines.
    A folder that is created is its owner's alone, and so is the log in any folder.

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
        """Make the folder and write the resolved configuration to `run-config.toml`.

        Args:
            path: The folder; None for the folder that `flower-dp run` has passed, or, if the app is not run by that command, for
                a new one under `~/.flower-dp/runs` (see `new_folder`).
            config: The run's settings, with values that TOML can hold.
            name: The name of the run, used in the default folder's name.

        Raises:
            ValueError: The folder already holds a run, or `path` is a file.
        """
        passed = os.environ.get(RUN_FOLDER) if path is None else None
        folder = Path(passed) if passed else new_folder(path, name)
        # The folder that `flower-dp run` has created may contain links to the app's files.
        if held := [name for name in RESULTS if name not in (LOG, CHECKPOINT) and (folder / name).exists()]:
            raise ValueError(f"{folder}: already holds {held[0]}; a run of an app has one run folder; give another one a path")
        write_whole(folder / CONFIG, tomli_w.dumps(dict(config)).encode())
        return cls(path=folder)

    @classmethod
    def reopen(cls, path: str | os.PathLike[str] | None, config: Mapping[str, Any]) -> Self:
        """Return the folder of a run that goes on.

        Args:
            path: The folder; None for the one that `flower-dp run` has passed.
            config: The run's settings, those with which it began.

        Raises:
            SettingsError: There is no such run, or it had other settings.
        """
        place = os.environ.get(RUN_FOLDER) if path is None else path
        if not place:
            raise checks.SettingsError("resume: needs the path of the run folder")
        folder = cls(path=Path(place).absolute())
        file = folder.path / CONFIG
        if file.is_file():
            before = tomllib.loads(file.read_text(encoding="utf-8"))
            now = tomllib.loads(tomli_w.dumps(dict(config)))
            for key, value in before.items():  # a newer release may have more settings
                if key not in _FREE and now.get(key, value) != value:
                    raise checks.SettingsError(f"{key}={now[key]!r}: was {value!r} in {folder.path}: it can't change")
        return folder

    def truncate(self, last: int) -> list[dict[str, Any]]:
        """Drop the lines of `metrics.jsonl` of rounds after `last`, and the statement, which the run is about to outgrow.

        Returns:
            The lines that stay.
        """
        lines = [line for line in read_metrics(self.path) if line.get("round", 0) <= last]
        content = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        write_whole(self.path / METRICS, content.encode())
        forget_statement(self.path)
        return lines

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Add one line to `metrics.jsonl`, on disk when this returns; NaN and infinity become null."""
        line = json.dumps(_plain(metrics), allow_nan=False)
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        ON_LINE.get()(metrics)

    def state(self, statement: Mapping[str, Any], text: str) -> None:
        """Write the privacy statement, also of a run that failed, since its releases before the failure count.

        Args:
            statement: The statement as `to_dict()` gives it.
            text: The statement as text for people.
        """
        content = json.dumps(_plain(statement), allow_nan=False, indent=2) + "\n"
        write_whole(self.path / STATEMENT_JSON, content.encode())
        write_whole(self.path / STATEMENT_TEXT, (text.rstrip("\n") + "\n").encode())

    def write_results(
        self, arrays: Mapping[str, NDArray[np.generic]], others: Mapping[str, Any] | None = None, *, unfinished: str = ""
    ) -> None:
        """Write the final model, what it consists of, and the plot of the metrics.

        Without matplotlib there is no plot.

        Args:
            arrays: The model's named arrays, of any shape (0-d too) and memory layout.
            others: The arrays of the whole model that the run did not have, such as a frozen base (`trained_model.rest_of`).
            unfinished: Of a run that did not end: after which round this was its model, in words.

        Raises:
            ValueError: An array's dtype is one that safetensors cannot hold.
        """
        content = _safetensors(arrays)
        write_whole(self.path / MODEL, content)
        said = described(arrays, content, others or {}) | ({"unfinished": unfinished} if unfinished else {})
        write_whole(self.path / MODEL_JSON, (json.dumps(said, indent=2) + "\n").encode())
        if importlib.util.find_spec("matplotlib") is not None:
            from flower_dp.running import plot  # noqa: PLC0415  (slow to load)

            write_whole(self.path / PLOT, plot.png(read_metrics(self.path)))

    def load_model_into(self, model: "nn.Module") -> tuple[str, ...]:
        """Put the trained model into a torch module; return the names of the parameters and buffers that stay as they are.

        Only what the run has trained, or sent, is replaced: buffers stay, and so does a frozen base, as of LoRA, which must be in
        the module. Tied weights are one tensor, under any of their names. `model.json` says what the folder has, with hashes.

        Args:
            model: a module of the run's architecture, on any device.

        Raises:
            ValueError: naming the arrays that do not fit the module; or the folder has no model, or not that of the run.

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
    """Return the absolute path of a folder for one run, created if necessary, that holds nothing but a `flower.log`.

    `flower-dp run` creates the folder and opens the log before the ServerApp uses the folder, so a folder with only that log is
    still free.

    Args:
        path: The folder; None for `~/.flower-dp/runs/<UTC time>-<name>`, with a number at the end if two runs with the same name
            start in the same second.
        name: The name of the run.

    Raises:
        ValueError: `path` is a file, a folder that holds anything else, or one that can't be made.
    """
    if path is not None:
        folder = Path(path).expanduser().absolute()
        try:
            folder.mkdir(_OWNERS_ALONE, parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"run folder {str(path)!r}: can't be made: {error.strerror}; take another folder") from None
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
    """Remove the statement from the folder of a run or a sweep, which is about to outgrow it."""
    for name in (STATEMENT_JSON, STATEMENT_TEXT):
        (folder / name).unlink(missing_ok=True)


def lacks_statement(folder: Path) -> bool:
    """Return whether a run in a folder has begun, and has left no statement, as its process was killed."""
    return not (folder / STATEMENT_JSON).exists() and any((folder / CHECKPOINT).glob("checkpoint*"))


def is_finished(folder: Path) -> bool:
    """Return whether the run in a folder has ended by itself, and left its model."""
    said = folder / MODEL_JSON
    # The model is written first: without the other file nothing says that it is the final one.
    if not (said.is_file() and (folder / MODEL).is_file()):
        return False
    return "unfinished" not in checks.json_object(str(said), said.read_bytes())


def new_log(folder: Path, *, go_on: bool = False, resumed: bool = False) -> IO[bytes]:
    """Open the log of a run in its folder, empty unless it goes on: its owner's alone, also if it was there and was not.

    If the run is `resumed`, a line in the log tells where its last attempt begins.
    """
    file = _opened(folder / LOG, _OWNERS_FILE, go_on=go_on)
    (folder / LOG).chmod(_OWNERS_FILE)
    if resumed:
        file.write(f"\n{RESUMED_LINE}\n".encode())
        file.flush()
    return file


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that readers, also after a crash, find the old content or the new, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with _opened(part, _OWNERS_FILE if path.name == LOG else _ANY_FILE) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _opened(path: Path, mode: int, *, go_on: bool = False) -> IO[bytes]:
    """Open a file to write it, anew or after what it has, with this mode if it is not there yet."""
    how = os.O_APPEND if go_on else os.O_TRUNC
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | how | os.O_CLOEXEC, mode), "ab" if go_on else "wb")


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl` (the file itself or its folder), oldest first.

    A last line without its line end is still being written, or was cut off by a crash, and is left out; a missing
    file is a run without rounds.

    Raises:
        ValueError: A whole line is not a JSON object, or its `round` is no whole number.
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
    """Return `value` as JSON can hold it: NumPy scalars unpacked, NaN and infinity as None."""
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

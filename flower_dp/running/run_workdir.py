"""The surroundings of an app: environment variables, and the run folder as working directory, with links to the app's files.

Under `flwr run .` an app's relative paths start at its own folder. Here the app writes new files to the run folder, and finds its
own files through links. Python modules are not linked: Ray's workers would import them instead of the bundle's.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flower_dp.running.run_folder import RESULTS

_NOT_DATA = ("pyproject.toml", "__pycache__")


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within this context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    path: Path
    target: Path
    changed: int  # time of the target's last change, in nanoseconds

    @classmethod
    def make(cls, path: Path, target: Path) -> "_Link":
        if not path.is_symlink():  # a killed process leaves its links
            path.symlink_to(target, target_is_directory=target.is_dir())
        return cls(path=path, target=target, changed=target.stat().st_mtime_ns)

    def remove(self) -> None:
        """Remove the link. If the run has overwritten the linked file, replace the link by a copy of the file."""
        if not self.path.is_symlink():
            return  # the run has replaced the link by its own file
        self.path.unlink()
        if self.target.is_file() and self.target.stat().st_mtime_ns != self.changed:
            shutil.copy2(self.target, self.path)


@contextmanager
def app_files_linked(folder: Path, app_folder: Path) -> Iterator[None]:
    """Link an app's files and folders into a run folder, within this context.

    Every file and folder is linked under its name, except hidden ones, Python's, and those with the name of a run's result. A
    folder with Python modules becomes a new folder, with links to its other contents. The links are removed afterwards.

    Args:
        folder: run folder, empty.
        app_folder: folder of the app.

    Raises:
        OSError: if the system does not support links.
    """
    links: list[_Link] = []
    folders: list[Path] = []
    try:
        _link_all(app_folder.resolve(), folder.resolve(), folder.resolve(), links, folders)
        yield
    finally:
        for link in links:
            link.remove()
        for made in reversed(folders):
            if made.is_dir() and not any(made.iterdir()):
                made.rmdir()


def _link_all(source: Path, place: Path, run: Path, links: list[_Link], folders: list[Path]) -> None:
    for entry in sorted(source.iterdir()):
        result = place == run and entry.name in RESULTS
        if entry.name.startswith(".") or entry.name in _NOT_DATA or entry.suffix == ".py" or result or entry.resolve() == run:
            continue
        if not entry.exists():
            continue  # a broken link
        if (place / entry.name).exists() and not (place / entry.name).is_symlink() and not entry.is_dir():
            continue  # a file that an earlier attempt of the run has replaced
        if entry.is_dir() and not entry.is_symlink() and any(entry.glob("*.py")):
            (place / entry.name).mkdir(exist_ok=True)
            folders.append(place / entry.name)
            _link_all(entry, place / entry.name, run, links, folders)
        else:
            links.append(_Link.make(place / entry.name, entry))

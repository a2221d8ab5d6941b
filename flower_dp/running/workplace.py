"""A run's folder as the working directory of somebody's app: what the app reads there, and what it leaves.

Under `flwr run .` an app's relative paths count from its own folder. Here new files land in the run's folder, where they stay;
what lies in the app's folder is found by links. Python modules are not linked: Ray's workers would import them before the bundle.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flower_dp.running.run_folder import RESULTS

_NOT_DATA = ("pyproject.toml", "__pycache__")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    path: Path
    target: Path
    changed: int  # when the target was, in nanoseconds

    @classmethod
    def make(cls, path: Path, target: Path) -> "_Link":
        path.symlink_to(target, target_is_directory=target.is_dir())
        return cls(path=path, target=target, changed=target.stat().st_mtime_ns)

    def remove(self) -> None:
        """Remove the link; a file that the run has written over is copied to where the link was."""
        if not self.path.is_symlink():
            return  # the run has put a file of its own there
        self.path.unlink()
        if self.target.is_file() and self.target.stat().st_mtime_ns != self.changed:
            shutil.copy2(self.target, self.path)


@contextmanager
def furnished(folder: Path, app_folder: Path) -> Iterator[None]:
    """Let an app find in a run's folder what lies in its own folder, within this context.

    Every file and folder gets a link of its name, but for hidden ones, Python's and those that would stand in the place of a
    run's results. A folder with Python modules is made anew, with links to what else it holds. Links are gone afterwards.

    Args:
        folder: the run's, empty.
        app_folder: the app's.

    Raises:
        OSError: the system makes no links.
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
            continue  # a link that leads nowhere
        if entry.is_dir() and not entry.is_symlink() and any(entry.glob("*.py")):
            (place / entry.name).mkdir()
            folders.append(place / entry.name)
            _link_all(entry, place / entry.name, run, links, folders)
        else:
            links.append(_Link.make(place / entry.name, entry))

"""The launch record: the options of `flower-dp run`, stored in the run folder so that the folder alone can resume the run."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from flower_dp.privacy.private_file import ownership_error
from flower_dp.running.apps import App, Target, own_app, read_app
from flower_dp.running.run_folder import CHECKPOINT, CONFIG, write_whole
from flower_dp.running.values import Value

_FILE = "launch.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """The app, settings and resources with which `flower-dp run` began a run.

    Attributes:
        app: folder of the app; empty for flower-dp's own.
        name: name of the run.
        overrides: settings that differ from the app's.
        workers: number of worker processes.
        supernodes: number of simulated SuperNodes; None: as many as the app's strategy expects clients.
        gpus_per_worker: fraction of a GPU for each worker.
        ray_address: Ray cluster of the workers, as the user gave it; "" for none.
    """

    app: str
    name: str
    overrides: dict[str, Value]
    workers: int
    supernodes: int | None
    gpus_per_worker: float
    ray_address: str = ""

    @classmethod
    def read(cls, folder: Path) -> "LaunchRecord":
        """Return the launch record of the run in a folder.

        Raises:
            ValueError: if `flower-dp run` has not begun the run, or other users could have written the record.
        """
        checkpoints = folder / CHECKPOINT
        if checkpoints.is_dir() and (reason := ownership_error(checkpoints.stat())):
            raise ValueError(f"{checkpoints}: {reason}; it says which app runs")
        try:
            return cls(**json.loads((folder / CHECKPOINT / _FILE).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ValueError(f"{folder}: holds no run that `flower-dp run` has begun: it has no {CHECKPOINT}/{_FILE}") from None
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"{folder}: holds no run that `flower-dp run` has begun ({error})") from None

    def write(self, folder: Path) -> None:
        """Write the record to the run's folder."""
        (folder / CHECKPOINT).mkdir(mode=0o700, exist_ok=True)
        write_whole(folder / CHECKPOINT / _FILE, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @staticmethod
    def forget(folder: Path) -> None:
        """Remove the record from the folder of a run that did not begin."""
        checkpoints = folder / CHECKPOINT
        if not (folder / CONFIG).exists() and checkpoints.is_dir() and os.listdir(checkpoints) == [_FILE]:
            (checkpoints / _FILE).unlink()
            checkpoints.rmdir()

    @property
    def target(self) -> Target:
        """The app, with the run's settings.

        Raises:
            ValueError: if the app's folder is gone.
        """
        app: App | None = read_app(Path(self.app)) if self.app else own_app()
        if app is None:
            raise ValueError(f"{self.app}: is no longer the folder of a Flower app")
        return Target(app=app, name=self.name, overrides=self.overrides)

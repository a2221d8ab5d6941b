"""What is shown of a run that was chosen by private results."""

import json
import os
import shutil
import time
from pathlib import Path

from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.reporting.past_run import PastRun
from flower_dp.running.run_folder import CONFIG, METRICS, MODEL, MODEL_JSON, RunFolder, write_whole

# A run's own epsilons, which don't count the choice, and its times.
_HIDDEN = ("epsilon", "seconds", "elapsed")


def publish(run: PastRun, statement: PrivacyStatement, folder: Path) -> None:
    """Copy what a run may show: neither its log nor its ledger, which have times; nor its own epsilons, which are too small."""
    folder.mkdir(mode=0o700, parents=True)
    for name in (MODEL, MODEL_JSON):
        if (run.folder / name).is_file():
            shutil.copyfile(run.folder / name, folder / name)
    rows = [{key: value for key, value in row.items() if key not in _HIDDEN} for row in run.rows]
    write_whole(folder / METRICS, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode())
    lines = (run.folder / CONFIG).read_text(encoding="utf-8").splitlines(keepends=True)
    write_whole(folder / CONFIG, "".join(line for line in lines if str(run.folder) not in line).encode())
    RunFolder(folder).state(statement.to_dict(), str(statement))


def same_times(folder: Path, but: str) -> None:
    """Give all in a folder one time, except what is in `but`: when a run was made tells how many came before and after it."""
    now = time.time()
    for place in [*folder.rglob("*"), folder]:
        if but not in place.relative_to(folder).parts[:1]:
            os.utime(place, (now, now))

"""Record the golden runs anew: `python -m tests.golden.record [TEXT]`, those with TEXT in their name, or all.

It says what has changed, and how long each run took. A record that changes is a change of what users get: look at each.
"""

import os
import sys
import tempfile
import time

for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

import json  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from tests.golden.runs import PLAYS, RECORDED, file_of, play  # noqa: E402


def main() -> None:
    """Record the chosen runs; with all of them chosen, delete the records of runs that there are no more."""
    text = "".join(sys.argv[1:2])
    torch.set_num_threads(1)
    for name in (name for name in PLAYS if text in name):
        started = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            content = json.dumps(play(name, Path(folder)), indent=1, ensure_ascii=False) + "\n"
        file = file_of(name)
        same = file.is_file() and file.read_text(encoding="utf-8") == content
        file.write_text(content, encoding="utf-8")
        sys.stdout.write(f"{time.process_time() - started:5.2f} s  {'the same' if same else 'CHANGED '}  {name}\n")
    if not text:
        for file in set(RECORDED.glob("*.json")) - {file_of(name) for name in PLAYS}:
            file.unlink()
            sys.stdout.write(f"gone: {file.name}\n")


if __name__ == "__main__":
    main()

"""The log of a run."""

import subprocess
import sys

import pytest

from flower_dp.running import flower_log, run_folder

CODE = """
import logging, os, sys
from pathlib import Path
from flower_dp.running.flower_log import logged
print("before")
with logged(Path(sys.argv[1]), append=sys.argv[2:] == ["go on"]):
    import flwr.serverapp
    logging.getLogger("flwr").warning("of Flower")
    print("of the app")
    os.system("echo of a program")
    sys.stderr.write("\\x1b[31mred\\x1b[0m")
    written = (Path(sys.argv[1]) / "flower.log").read_text()
    assert "WARNING" in written and "of the app" in written, written  # a process that is killed leaves it
print("after")
"""


def test_all_that_a_process_writes_meanwhile_is_in_the_log_without_colors(tmp_path):
    log = tmp_path / "flower.log"
    log.write_text("of another run\n")
    for more, count in (([], 1), (["go on"], 2)):
        done = subprocess.run([sys.executable, "-c", CODE, tmp_path, *more], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "before\nafter\n", "")
        written = log.read_text()
        assert [written.count(text) for text in ("of Flower", "of the app", "of a program", "red")] == [count] * 4
        assert "\x1b" not in written
        assert "of another run" not in written
    assert log.stat().st_mode & 0o777 == 0o600


TRACE = (
    "INFO : Starting\nTraceback (most recent call last):\n    raise KeyError('x')\nKeyError: 'x'\n\n"
    "During handling of the above exception, another exception occurred:\n\n"
    "Traceback (most recent call last):\n    app()\n    ^^^^^\n{error}\nERROR : Exit Code: 700\n"
)


@pytest.mark.parametrize(
    ("log", "why"), [(TRACE.format(error="\x1b[31mKeyError: x\x1b[0m"), "\nKeyError: x"), ("a\n\nb: c\n d\n", ""), ("", "")]
)
def test_how_the_log_of_a_process_ends_that_has_died(tmp_path, log, why):
    (tmp_path / "flower.log").write_text(log)
    told = "the process that ran the app ended before the run did"
    assert flower_log.of_a_dead_process(tmp_path / "flower.log") == told + why
    assert flower_log.of_a_dead_process(tmp_path / "nowhere") == told


def test_warnings_of_a_log_once_each(tmp_path):
    log = tmp_path / "flower.log"
    assert flower_log.warnings_of(log) == []
    log.write_text(
        "INFO :      WARNING is no warning\n"
        "\x1b[93mWARNING \x1b[0m:   node 3: reply refused: too long\n"
        "(Worker pid=7) WARNING :   client 'c01': what it has kept is damaged\n"
        "(Worker pid=8) WARNING :   client 'c01': what it has kept is damaged [repeated 12x across cluster] (Ray deduplicates)\n"
        "WARNING :   node 14: reply refused: too long\n"
        "WARNING :   The evaluation of round 1 was left out: no client has answered\n"
    )
    assert flower_log.warnings_of(log) == [
        "node 3: reply refused: too long",
        "client 'c01': what it has kept is damaged",
        "The evaluation of round 1 was left out: no client has answered",
    ]


def test_a_resumed_run_has_the_warnings_and_the_error_of_its_last_attempt_alone(tmp_path):
    log = tmp_path / "flower.log"
    with run_folder.new_log(tmp_path) as file:
        file.write(b"WARNING :   of the first attempt\n" + TRACE.format(error="KeyError: 1").encode())
    for resumed, kept in ((False, True), (True, False)):  # not resumed: its statement is made once more
        run_folder.new_log(tmp_path, append=True, resumed=resumed).close()
        assert flower_log.warnings_of(log) == (["of the first attempt"] if kept else [])
        assert flower_log.of_a_dead_process(log).endswith("KeyError: 1") is kept

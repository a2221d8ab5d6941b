"""What a run has started is ended: with time to finish while its program runs, at once when that has ended."""

import subprocess
import sys
import time

import psutil
import pytest

from tests.flower.processes import Programs

# Tells that it hears SIGTERM, and does not end by it.
DEAF = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('heard', flush=True)); print('ready', flush=True); time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {DEAF!r}])"


@pytest.fixture
def programs(tmp_path):
    return Programs(("FLWR_HOME", str(tmp_path)), environment={}, working_dir=tmp_path, check=lambda: None)


def descendants(tmp_path):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FLWR_HOME") == str(tmp_path) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for(text, file):
    while text not in file.read_text():
        time.sleep(0.01)


def test_what_outlives_its_program_is_ended_at_once(programs, tmp_path, monkeypatch):
    output = tmp_path / "output"
    with output.open("wb") as file:
        program = programs.start([sys.executable, "-c", PARENT], file)
        programs.wait(program, lambda: None)
        wait_for("ready", output)
    assert len(descendants(tmp_path)) == 1
    graces = []
    signal_until_gone = type(programs._tree)._signal_until_gone

    def spy(tree, *, force, seconds):
        graces.append((force, seconds))
        signal_until_gone(tree, force=force, seconds=seconds)

    monkeypatch.setattr(type(programs._tree), "_signal_until_gone", spy)
    programs.stop()
    assert not descendants(tmp_path)
    assert graces == [(False, 0.0), (True, 10.0)]


def test_a_program_that_runs_has_time_to_end_itself(programs, tmp_path):
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (print('done', flush=True), sys.exit())); print('ready', flush=True); time.sleep(600)"
    output = tmp_path / "output"
    with output.open("wb") as file:
        program = programs.start([sys.executable, "-c", code], file)
        wait_for("ready", output)
        programs.stop()
    assert isinstance(program, subprocess.Popen)
    assert (program.returncode, output.read_text().splitlines()) == (0, ["ready", "done"])
    assert not descendants(tmp_path)

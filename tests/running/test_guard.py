"""The process behind a command: signals, processes that die or hang, and what they leave."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
# Runs one of the functions, says what came of it, and closes.
CODE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from flower_dp.running import guard

place, what = Path(sys.argv[1]), sys.argv[2]

def begun():
    (place / "part").write_text(f"{os.getpid()}")
    (place / "part").replace(place / "begun")

def tells():
    guard.tell("the run")
    os.write(1, f"{guard.ray_folder().is_dir()}\\n".encode())
    return 0

def exits():
    guard.tell("the run")
    os._exit(0)

def crashes():
    os.kill(os.getpid(), signal.SIGSEGV)

def raises():
    raise ValueError("of nobody")

def leaves():  # a process in a session of its own, whose parent is gone
    child = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(300)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
    subprocess.run([sys.executable, "-c", code], stdout=(place / "left").open("w"))
    while not (place / "left").read_text().endswith("\\n"):
        time.sleep(0.01)
    return 0

def waits():
    try:
        begun()
        time.sleep(300)
    except KeyboardInterrupt:
        (place / "stated").touch()
        return 3

def hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    begun()
    time.sleep(300)

guard.LEAVE_SECONDS = int(sys.argv[3])
made = guard.Guard()
try:
    status = made.run(globals()[what])
finally:
    made.close()
print(status, made.came, made.said, made.folder.exists(), flush=True)
"""


def begin(tmp_path, what, leave=100):
    words = [sys.executable, "-c", CODE, str(tmp_path), what, str(leave)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def child(tmp_path):
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return psutil.Process(int((tmp_path / "begun").read_text()))


@pytest.mark.parametrize(
    ("what", "out"),
    [
        ("tells", "True\n0 0 the run False\n"),
        ("exits", "None 0 the run False\n"),
        ("crashes", "None 0  False\n"),
        ("raises", "1 0  False\n"),
    ],
)
def test_how_a_function_has_ended(tmp_path, what, out):
    said, err = begin(tmp_path, what).communicate(timeout=60)
    assert said == out, err
    assert ("ValueError: of nobody" in err) == (what == "raises")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is not known whose child it was")
def test_what_a_function_leaves_is_ended(tmp_path):
    said, err = begin(tmp_path, "leaves").communicate(timeout=60)
    assert said == "0 0  False\n", err
    assert not psutil.pid_exists(int((tmp_path / "left").read_text()))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once(tmp_path, signum):
    process = begin(tmp_path, "waits")
    child(tmp_path)
    process.send_signal(signum)
    assert process.communicate(timeout=60)[0] == f"3 {signum}  False\n"
    assert (tmp_path / "stated").exists()


@pytest.mark.parametrize("again", [True, False])
def test_who_hears_no_signal_is_killed_at_the_second_one_or_in_time(tmp_path, again):
    process = begin(tmp_path, "hangs", leave=100 if again else 1)
    deaf = child(tmp_path)
    process.send_signal(signal.SIGINT)
    if again:
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == f"None {int(signal.SIGINT)}  False\n"
    assert not deaf.is_running()


def test_the_function_ends_with_its_guard(tmp_path):
    process = begin(tmp_path, "waits")
    left = child(tmp_path)
    process.kill()
    process.communicate(timeout=60)
    assert not psutil.wait_procs([left], timeout=60)[1]
    assert (tmp_path / "stated").exists()

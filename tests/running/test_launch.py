import os
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest

from flower_dp.running import flower_log, launch, run_folder, superlink
from flower_dp.running.processes import ProcessTree
from flower_dp.running.signals import Interrupted, Signals

# ending processes


def _wait_for(path):
    deadline = time.monotonic() + 200
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return psutil.Process(int(path.read_text()))


def test_a_child_in_its_own_session_whose_parent_is_gone_is_ended(tmp_path):
    # The root starts a child in a session of its own and leaves; nobody looked while it lived.
    child = f"import os, time; open({str(tmp_path / 'child')!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(300)"
    root = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
    mark = ("FLOWER_DP_MARK", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", root], env=os.environ | dict([mark])) as process:
        tree = ProcessTree(mark)
        tree.add(process.pid)
        stray = _wait_for(tmp_path / "child")
        process.wait()
    tree.end()
    assert not stray.is_running() or stray.status() == psutil.STATUS_ZOMBIE


def test_a_child_that_hides_its_environment_is_ended_if_it_was_seen(tmp_path):
    child = f"import os, time; open({str(tmp_path / 'child')!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(300)"
    root = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True, env={{}});"
        "sys.stdin.read()"
    )
    tree = ProcessTree(("FLOWER_DP_MARK", str(tmp_path)))
    with subprocess.Popen([sys.executable, "-c", root], stdin=subprocess.PIPE) as process:
        tree.add(process.pid)
        stray = _wait_for(tmp_path / "child")
        tree.remember_descendants()
    assert process.returncode == 0
    assert stray in set(tree.alive())
    tree.end()
    assert not stray.is_running() or stray.status() == psutil.STATUS_ZOMBIE


def test_who_ignores_sigterm_is_killed_and_a_stranger_lives(tmp_path):
    deaf = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"open({str(tmp_path / 'deaf')!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(300)"
    )
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    process = subprocess.Popen([sys.executable, "-c", deaf])
    try:
        _wait_for(tmp_path / "deaf")
        tree = ProcessTree(("FLOWER_DP_MARK", str(tmp_path)))
        tree.add(process.pid)
        tree.end(grace=0.2)
        assert process.wait() == -signal.SIGKILL
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


# signals


def _with_signal(signum, steps, ask):
    with Signals() as signals:
        os.kill(os.getpid(), signum)
        time.sleep(0.01)
        steps.append("not cut in half")
        if ask:
            signals.check()
            steps.append("went on")


@pytest.mark.parametrize("ask", [True, False], ids=["asked", "in the last step"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_noted_until_asked_for(signum, ask, request):
    # Whoever runs the tests may have started them with nohup.
    request.addfinalizer(partial(signal.signal, signum, signal.signal(signum, signal.default_int_handler)))
    before, steps = signal.getsignal(signum), []
    with pytest.raises(Interrupted, match=signal.Signals(signum).name) as caught:
        _with_signal(signum, steps, ask)
    assert steps == ["not cut in half"]
    assert caught.value.signum == signum
    assert isinstance(caught.value, KeyboardInterrupt)
    assert signal.getsignal(signum) is before


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


# reading along


def test_tail_hands_on_whole_lines_once(tmp_path):
    lines = []
    tail = launch._Tail(tmp_path / "m", lines.append)
    tail.read()
    with (tmp_path / "m").open("wb", buffering=0) as file:
        for content, total in ((b"one\ntw", ["one"]), (b"", ["one"]), ("o\nthree é\n".encode(), ["one", "two", "three é"])):
            file.write(content)
            tail.read()
            assert lines == total


def test_what_a_resumed_run_has_logged_before_is_not_shown_again(tmp_path):
    lines = []
    (tmp_path / "log").write_text("of the first attempt\n")
    tail = launch._Tail(tmp_path / "log", lines.append, begin=(tmp_path / "log").stat().st_size)
    with (tmp_path / "log").open("a") as file:
        file.write("of this one\n")
    tail.read()
    assert lines == ["of this one"]


def test_a_broken_line_does_not_end_a_run():
    rows = []
    take = launch._rows_to(rows.append)
    for line in ('{"round": 1}', "nonsense", "[1]", '{"round": 2}'):
        take(line)
    assert rows == [{"round": 1}, {"round": 2}]


# why it failed


TRACE = """INFO : Starting
ERROR : Simulation raised an exception
Traceback (most recent call last):
  File "a.py", line 1, in run
    raise KeyError("x")
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in run
    app()
    ^^^^^
{error}
ERROR : Exit Code: 700
An unhandled exception occurred when running the simulation.
"""


@pytest.mark.parametrize(
    ("details", "log", "why"),
    [
        ("Simulation failed with exception: no data", TRACE.format(error="ValueError: no data"), "ValueError: no data"),
        ("No heartbeat received.", TRACE.format(error="ValueError: x"), "No heartbeat received.\nValueError: x"),
        ("N/A", "a\n\nb\nc\n d\n", "b\nc\nd"),
        ("Stopped by user", "a\n", "Stopped by user"),
        ("", "Using\n╭─ Error ─╮\n│ No module  │\n│ here.      │\n╰──╯\n", "No module here."),
        ("", "", "no reason given"),
    ],
)
def test_why(details, log, why):
    assert flower_log.why_of(details, log) == why


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        ("flower_dp.core.checks.SettingsError: seed=1: was 2", True),
        ("flower_dp.strategies.checkpoint.CheckpointError: model was a, and is b", True),
        ("TimeoutError: SettingsError", False),
        ("ValueError: flower_dp.core.checks.SettingsError: no", False),
    ],
)
def test_a_run_that_was_refused_is_known_by_the_last_error_of_its_log(error, refused):
    assert flower_log.is_refusal(TRACE.format(error="OSError: full") + TRACE.format(error=error)) is refused
    assert not flower_log.is_refusal(TRACE.format(error=error) + TRACE.format(error="OSError: full"))
    assert not flower_log.is_refusal("no error")


def test_a_log_has_no_colours_while_it_is_written():
    code = (
        "import logging, sys; from flower_dp.running.flower_log import log_without_colours; log_without_colours(); "
        "logging.getLogger('flwr').info('plain')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    written = done.stdout + done.stderr
    assert "plain" in written
    assert "\x1b" not in written


def test_warnings_of_a_log_once_each(tmp_path):
    log = tmp_path / "flower.log"
    assert flower_log.warnings_of(log) == []
    log.write_text(
        "INFO :      WARNING is no warning\n"
        "\x1b[93mWARNING \x1b[0m:   node 3: reply refused: too long\n"
        "WARNING :   Since flwr 1.32, default simulated SuperNodes changed from 10 to 2.\n"
        "(Worker pid=7) WARNING :   client 'c01': what it has kept is damaged\n"
        "(Worker pid=8) WARNING :   client 'c01': what it has kept is damaged [repeated 12x across cluster] (Ray deduplicates)\n"
        "WARNING :   node 14: reply refused: too long\n"
        "WARNING :   the evaluation of round 1 was left out: no client has answered\n"
    )
    assert flower_log.warnings_of(log) == (
        found := [
            "node 3: reply refused: too long",
            "client 'c01': what it has kept is damaged",
            "the evaluation of round 1 was left out: no client has answered",
        ]
    )
    assert [flower_log.num_warnings(found), flower_log.num_warnings(found[:1])] == ["3 warnings", "1 warning"]


def test_a_resumed_run_has_the_warnings_and_the_error_of_its_last_attempt_alone(tmp_path):
    log = tmp_path / "flower.log"
    with run_folder.new_log(tmp_path) as file:
        file.write(b"WARNING :   of the first attempt\n" + TRACE.format(error="SettingsError: 1").encode())
    for resumed, kept in ((False, True), (True, False)):  # not resumed: its statement is made once more
        run_folder.new_log(tmp_path, go_on=True, resumed=resumed).close()
        assert flower_log.warnings_of(log) == (["of the first attempt"] if kept else [])
        assert flower_log.is_refusal(log.read_text()) is kept
    with run_folder.new_log(tmp_path, go_on=True) as file:
        file.write(b"WARNING :   of the second attempt\nits last line\n")
    assert flower_log.warnings_of(log) == ["of the second attempt"]
    assert flower_log.why_of("", log.read_text()) == "WARNING :   of the second attempt\nits last line"


# what Flower's programs get


def test_the_environment_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("NO_PROXY", "example.org")
    got = superlink._environment(tmp_path, tmp_path / "home")
    assert "RAY_ADDRESS" not in got
    assert got["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"  # without it Ray listens to other machines
    assert got["FLWR_HOME"] == str(tmp_path / "home")
    assert got["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert got["FLWR_TELEMETRY_ENABLED"] == "0"
    assert got["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    assert got["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)


def test_the_environment_of_a_run_on_a_cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", raising=False)
    got = superlink._environment(tmp_path, tmp_path / "home", "10.0.0.2:6379")
    assert got["RAY_ADDRESS"] == "10.0.0.2:6379"
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in got  # it is one of several machines


def test_a_program_that_is_not_there_says_how_to_get_it():
    with pytest.raises(superlink.LaunchError, match="flower-nothing is not installed"):
        superlink._program("flower-nothing")


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ('Listing\n{"success": true, "runs": [{"status": "running"}]}', [{"status": "running"}]),
        ('{"success": false}', []),
        ("", []),
        ("{", []),
    ],
)
def test_runs_in_flowers_answer(text, runs):
    assert superlink._runs(text) == runs


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_supernodes": 0}, "num_supernodes=0"),
        ({"gpus_per_worker": -0.5}, "gpus_per_worker"),
        ({}, "app_dir="),
    ],
)
def test_launch_refuses_nonsense(tmp_path, changes, named):
    arguments = {"overrides": {}, "output_dir": tmp_path, "num_workers": 1, "gpus_per_worker": 0.0} | changes
    with pytest.raises(ValueError, match=named):
        launch.launch(tmp_path, on_progress=print, **arguments)


def test_a_check_that_refuses_without_a_word_refuses(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname='a'\nversion='1'\n")

    def check():
        raise ValueError

    arguments = {"overrides": {}, "num_workers": 1, "gpus_per_worker": 0.0, "engine": "flower"}
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match=r"^$"):
        launch.launch(tmp_path, output_dir=tmp_path / "run", on_progress=print, check=check, **arguments)
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.flwr_run
def test_a_check_that_refuses_ends_the_process_before_its_server_app_begins(tmp_path):
    app, began, folder, ready = (tmp_path / name for name in ("app", "began", "run", "ready"))
    app.mkdir()
    folder.mkdir()
    (app / "pyproject.toml").write_text(
        "[project]\nname='a'\nversion='1'\n[tool.flwr.app]\npublisher='p'\n[tool.flwr.app.config]\nrounds=1\n"
        "[tool.flwr.app.components]\nserverapp='theirs:server'\nclientapp='theirs:client'\n[tool.flower-dp]\ncheck='theirs:check'\n"
    )
    (app / "theirs.py").write_text(
        "from pathlib import Path\nfrom flwr.serverapp import ServerApp\nfrom flwr.clientapp import ClientApp\n"
        f"server, client = ServerApp(), ClientApp()\n@server.main()\ndef main(grid, context):\n    Path({str(began)!r}).touch()\n"
        f"def check(config):\n    Path({str(ready)!r}).touch()\n"
    )
    started: list[psutil.Process] = []
    before = set(psutil.Process().children(recursive=True))  # workers that other tests have left warm

    def check():
        deadline = time.monotonic() + 90
        # Then the process has its workers, and has called the app's own check: the ServerApp would begin now.
        while not ready.exists():
            if time.monotonic() > deadline:
                pytest.fail("\n".join(f"{one.pid} of {one.ppid()}: {' '.join(one.cmdline())}" for one in psutil.process_iter()))
            time.sleep(0.1)
        started[:] = set(psutil.Process().children(recursive=True)) - before
        time.sleep(1)
        raise OSError("no records there")

    arguments = {"overrides": {"rounds": 2}, "num_workers": 1, "gpus_per_worker": 0.0, "engine": "ray"}
    with pytest.raises(ValueError, match="no records there"):
        launch.launch(app, output_dir=folder, on_progress=print, check=check, **arguments)
    assert len(started) > 3
    assert psutil.wait_procs(started, timeout=100)[1] == []
    assert (began.exists(), list(folder.iterdir())) == (False, [])


def test_default_workers_is_what_this_process_may_use():
    assert 1 <= launch.default_workers() <= (os.cpu_count() or 1)


def test_only_flowers_migration_of_a_file_is_undone(tmp_path):
    path = tmp_path / "pyproject.toml"
    before = b"[project]\n\n[tool.flwr.federations.remote]\naddress = 'a'\n"
    for content, after in (
        (b"[project]\n\n# [tool.flwr.federations.remote]\n# address = 'a'\n", before),
        (before + b"# a remark of its owner\n", before + b"# a remark of its owner\n"),
    ):
        path.write_bytes(before)
        original = launch._RestoredFile(path)
        path.write_bytes(content)
        original.keep()
        assert path.read_bytes() == after
    path.unlink()
    original.keep()
    migrated = b"[project]\n\n# [tool.flwr.federations.remote]\n"
    path.write_bytes(migrated)
    original = launch._RestoredFile(path)
    path.write_bytes(b"new\n" + migrated)
    original.keep()
    assert path.read_bytes() == b"new\n" + migrated


def test_a_file_that_flower_reads_or_writes_meanwhile_is_restored_whole(tmp_path):
    """Written anew in its place it was empty for a moment, and `flwr run` said: Missing [project] section."""
    own = tmp_path / "own.toml"
    before, migrated = (b"[project]\n\n%s[tool.flwr.federations.a]\n" % mark for mark in (b"", b"# "))
    own.write_bytes(before)
    own.chmod(0o640)
    path = tmp_path / "pyproject.toml"
    path.symlink_to(own)
    original = launch._RestoredFile(path)
    own.write_bytes(migrated)
    with path.open("rb") as reading, path.open("ab") as writing:
        original.keep()
        writing.write(b"the rest")
        writing.flush()
        assert reading.read() == migrated + b"the rest"
    assert path.is_symlink()
    assert (own.read_bytes(), own.stat().st_mode & 0o777) == (before, 0o640)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.toml", "pyproject.toml"]

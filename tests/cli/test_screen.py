"""What the terminal shows of a run's log besides its rounds."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from flower_dp.core.root_logger import SHOWN
from flower_dp.running import flower_log, screen
from flower_dp.running.screen import Screen
from flower_dp.running.signals import Interrupted

log = logging.getLogger("flwr")


def screen_of(display, folder=Path("nowhere"), **more):
    return Screen(display, None, folder / "flower.log", **{"goes_on": False, "quiet": True, "interrupt": print} | more)


def test_what_a_worker_logs_to_be_shown_is_kept_for_the_server_and_nothing_else_is(caplog):
    with flower_log.kept_to_be_shown() as kept:
        log.warning("%s", "shown", extra=SHOWN)
        log.warning("not shown")
    log.warning("after it", extra=SHOWN)
    assert kept == [(logging.WARNING, "shown")]
    assert caplog.messages == ["not shown", "after it"]


def test_a_reader_that_closes_ends_what_is_made_as_a_signal_does(monkeypatch):
    """What is written afterwards, such as where the statement is, fails no more."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        shows = SimpleNamespace(show=lambda metrics: (closed.write("round 1\n"), closed.flush()))
        with pytest.raises(Interrupted) as ended:
            screen_of(shows).show({"round": 1})
        assert ended.value.signum == signal.SIGPIPE
        screen.echo("goes nowhere")
        closed.flush()


def test_whole_lines_of_a_log_are_shown_once_while_it_grows(tmp_path, capsys):
    log, seen = tmp_path / "flower.log", ""
    log.write_text("of the first attempt of a run that goes on\n")
    with screen_of(SimpleNamespace(), tmp_path, quiet=False, goes_on=True), log.open("ab", buffering=0) as file:
        for content, total in (
            (b"one\ntw", "one\n"),
            (b"", "one\n"),
            ("o\n\x1b[31mthree\x1b[0m é\n".encode(), "one\ntwo\nthree é\n"),
        ):
            file.write(content)
            time.sleep(0.3)
            seen += capsys.readouterr().out
            assert seen == total
        file.write(b"in the end\n")
    assert capsys.readouterr().out == "in the end\n"


def test_a_reader_of_the_log_that_closes_interrupts_the_run(tmp_path, monkeypatch):
    log, came = tmp_path / "flower.log", []
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with screen_of(SimpleNamespace(), tmp_path, quiet=False, interrupt=came.append):
            log.write_text("a line\n")
    assert came == [signal.SIGPIPE]


def test_the_terminal_stays_that_while_a_process_writes_to_a_log(tmp_path):
    code = (
        "import os, sys\nfrom flower_dp.running.screen import own_stream\nwith own_stream() as stream:\n"
        "    os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 1)\n    print('of the app', flush=True)\n    print('shown', file=stream)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "log"], capture_output=True, text=True, check=True)
    assert (done.stdout, (tmp_path / "log").read_text()) == ("shown\n", "of the app\n")

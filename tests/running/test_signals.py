"""Signals that end what a command does."""

import os
import signal
import time
from functools import partial

import pytest

from flower_dp.running.signals import Interrupted, Signals


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


def test_the_first_signal_is_raised_where_it_is_asked_for_and_what_is_written_then_is_not_interrupted(request):
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler)))
    written = []

    def act():
        with Signals(raises=True):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
                written.append("statement")

    with pytest.raises(Interrupted, match="SIGTERM"):
        act()
    assert written == ["statement"]


def test_an_app_that_swallows_the_interruption_is_interrupted_in_the_end():
    def act():
        with Signals(raises=True):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
            except KeyboardInterrupt:
                pass

    with pytest.raises(Interrupted, match="SIGTERM"):
        act()


def test_handlers_that_ray_has_replaced_are_set_again():
    def act():
        with Signals() as signals:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signals.set_again()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    with pytest.raises(Interrupted):
        act()

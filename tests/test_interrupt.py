"""Ctrl-C in the middle of llama.cpp's work."""

import ctypes
import os
import signal
import time

import pytest

from qwen_chat import interrupt


@pytest.fixture
def installed():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt.install()
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(seconds: float = 60):
    os.kill(os.getpid(), signal.SIGINT)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.001)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_it_ends_a_program_as_ever(installed):
    with pytest.raises(KeyboardInterrupt):
        interrupted()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_within_a_callback_it_comes_once_that_has_returned(installed, capfd):
    returned = []

    @ctypes.CFUNCTYPE(None)
    @interrupt.called_back
    def called():
        interrupted(0.05)
        returned.append(True)

    with pytest.raises(KeyboardInterrupt):
        called()
        time.sleep(60)
    assert returned and "Traceback" not in capfd.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_where_it_is_ignored_it_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupt.install()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)

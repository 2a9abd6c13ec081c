"""Ctrl-C while llama.cpp works: an exception raised in a function that C has called is printed and lost."""

import os
import signal
import threading
from types import CodeType, FrameType

AGAIN = 0.01  # seconds until the signal is tried anew

_called_back: set[CodeType] = set()


def called_back(function):
    """Marks a function that llama.cpp calls; for use below the decorator that makes it a C function."""
    _called_back.add(function.__code__)
    return function


def handler(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, as Python does by itself; a moment later where that would be lost."""
    while frame:
        if frame.f_code in _called_back:
            threading.Timer(AGAIN, os.kill, (os.getpid(), number)).start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def install() -> None:
    """Has Ctrl-C end this program wherever it comes."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # not where it is ignored on purpose
        signal.signal(signal.SIGINT, handler)

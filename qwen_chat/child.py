"""Child processes: for work that needs a memory of its own or can only be stopped from outside, and for programs in Python.

Ctrl-C at a terminal goes to all of its processes. These do not hear it: the process that started them ends them, then
and in any case; and they end themselves when it is no more.
"""

import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import interrupt

# python -m, for a process that ends when its standard input closes, as it does when the one that started it ends.
_PROGRAM = """
import os, runpy, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


class Died(Exception):
    """The process ended before its work was done."""

    def __init__(self, status: int | None):
        super().__init__(f"it ended with status {status}")
        self.status = status


def run(work: Callable, *arguments, on_message: Callable[[object], object] = lambda message: None):
    """What `work(send, *arguments)` returns in a fresh process; `on_message` gets what it sends meanwhile.

    Raises Died where the process ends before, which includes an exception in it.
    """
    context = multiprocessing.get_context("spawn")
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(writing, work, arguments), daemon=True)
    multiprocessing.resource_tracker.ensure_running()  # before signals are blocked: in Python 3.10 its start unblocks them
    interrupt.check()
    with _unheard():
        process.start()
    writing.close()
    try:
        with interrupt.waking(process.kill):
            while True:
                done, value = _next_message(reading, process)
                if done:
                    return value
                on_message(value)
    finally:
        process.kill()
        process.join()
        reading.close()


def _next_message(reading, process) -> tuple[bool, object]:
    try:
        return reading.recv()
    except (EOFError, OSError):  # OSError: in the middle of a message
        process.join(5)
        interrupt.check()
        raise Died(process.exitcode) from None


def _work(writing, work: Callable, arguments: tuple) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    writing.send((True, work(lambda message: writing.send((False, message)), *arguments)))


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


@contextmanager
def program(module: str, *arguments: str, **options) -> Iterator[subprocess.Popen]:
    """`python -m module` with the options of Popen; it is killed in the end."""
    interrupt.check()
    with _unheard():
        process = subprocess.Popen([sys.executable, "-c", _PROGRAM, module, *arguments], stdin=subprocess.PIPE, **options)
    try:
        with interrupt.waking(process.kill):
            yield process
        interrupt.check()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()


@contextmanager
def _unheard() -> Iterator[None]:
    """What is started within does not hear the signals that end this process: a new process has the mask of the thread
    that starts it. They are not lost here, where the main thread hears them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, interrupt.SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

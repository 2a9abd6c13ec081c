"""Ctrl-C as a flag that the work looks at between its steps, and never as an exception in the middle of one.

Python runs a signal's handler between any two lines of the main thread. What is raised there may come out of a function
that llama.cpp called, which prints and loses it, or pydantic's serialiser, which makes another error of it; and a lock that
is taken there may be held by the very line that was interrupted. So the handlers do nothing: Python writes each signal's
number into a socket (signal.set_wakeup_fd), at which the main thread waits while another thread does the work.
"""

import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

STATUS = 130  # as shells have it: 128 + SIGINT
SAID = "\nInterrupted.\n"
GRACE = 5.0  # seconds that the work has to come to its next step
CLEANING = 1.0  # seconds that removing unfinished files may take where the process ends at once
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

_asked = threading.Event()
_lock = threading.Lock()  # guards the lists
_to_wake: list[Callable[[], object]] = []
_unfinished: list[Path] = []


class Interrupted(BaseException):
    """The work was asked to end. Not an Exception: what tolerates faults must not swallow it."""


# For the work


def noted() -> bool:
    """Whether the work was asked to end."""
    return _asked.is_set()


def check() -> None:
    """Raises Interrupted once the work was asked to end. Called between steps, where it can end."""
    if _asked.is_set():
        raise Interrupted


def sleep(seconds: float) -> None:
    """Waits that long. Raises Interrupted as soon as the work is asked to end."""
    _asked.wait(seconds)
    check()


def loading(_fraction: float) -> bool:
    """The `progress` of model.Model: whether to go on with loading."""
    return not _asked.is_set()


@contextmanager
def waking(call: Callable[[], object]) -> Iterator[None]:
    """Has `call` called, from another thread, when the work is asked to end: what is waited for within is over then.

    It must return soon, and may be called more than once.
    """
    with _lock:
        _to_wake.append(call)
    try:
        if _asked.is_set():
            call()
        yield
    finally:
        with _lock:
            _to_wake.remove(call)


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """The file or folder `path` is gone in the end, unless it was moved away; also where the process ends at once."""
    with _lock:
        _unfinished.append(path)
    try:
        yield path
    finally:
        _remove(path)
        with _lock:
            _unfinished.remove(path)


def _remove(path: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


# For the main thread


class Signals:
    """The signals that come from now on, but for those that are ignored on purpose, as nohup does it. Closing restores."""

    def __init__(self, numbers: Iterable[int]):
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._wakeup_fd = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in numbers if _heard(number)}

    def wait(self, seconds: float | None = None) -> int | None:
        """The number of the next signal, 0 after `wake`; None when none has come for `seconds`."""
        self._reading.settimeout(seconds)
        try:
            while (number := self._reading.recv(1)[0]) not in (0, *self._handlers):
                pass
            return number
        except (TimeoutError, BlockingIOError):  # the latter where there is no time to wait
            return None

    def wake(self) -> None:
        """Ends a `wait`. From any thread."""
        self._writing.send(b"\0")

    def close(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_fd)
        self._reading.close()
        self._writing.close()

    def __enter__(self) -> "Signals":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _heard(number: int) -> bool:
    return signal.getsignal(number) not in (signal.SIG_IGN, None)


def end_at_once(numbers: Iterable[int], status: int, saying: str = SAID) -> None:
    """Has these signals end the process there and then, for a time in which there is nothing to bring to an end.

    `saying` is written to standard error, with the signal's name in place of {name}.
    """
    def end(number: int, _frame) -> None:
        with suppress(OSError):  # not sys.stderr, which may be in the middle of writing
            os.write(2, saying.format(name=signal.Signals(number).name).encode())
        os._exit(status)

    for number in filter(_heard, numbers):
        signal.signal(number, end)


def run(work: Callable[[], int]) -> int:
    """Does `work` on a thread of its own and returns what it returns, or raises what it raises; STATUS where it was interrupted.

    The first signal asks it to end. The process ends at once where the work does not within GRACE, as it waits for a
    network, say; and at the second signal.
    """
    _asked.clear()
    outcome: Future[int] = Future()
    with Signals(SIGNALS) as signals:
        threading.Thread(target=_settle, args=(outcome, work, signals), name="work", daemon=True).start()
        if signals.wait():
            _asked.set()
            threading.Thread(target=_wake, daemon=True).start()
            if signals.wait(GRACE) != 0:
                _leave()
        try:
            return outcome.result()
        except Interrupted:
            _say()
            return STATUS


def _settle(outcome: Future, work: Callable[[], int], signals: Signals) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:
        outcome.set_exception(error)
    with suppress(OSError):  # nobody waits any more
        signals.wake()


def _wake() -> None:
    with _lock:
        for call in _to_wake:
            call()


def _leave() -> None:
    """Ends the process without waiting for anything in it."""
    cleaning = threading.Thread(target=_clean, daemon=True)
    cleaning.start()
    cleaning.join(CLEANING)
    os._exit(STATUS)


def _clean() -> None:
    for path in list(_unfinished):
        _remove(path)
    _say()


def _say() -> None:
    with suppress(OSError):  # the terminal may be gone
        sys.stdout.flush()
        print(SAID, end="", file=sys.stderr, flush=True)

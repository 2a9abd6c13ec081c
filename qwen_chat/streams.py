"""Standard output and error that cannot break the program: closed, full, without a reader, or in an encoding that
lacks a character."""

import errno
import io
import os
import sys


class OutputLost(Exception):
    """Standard output cannot be written any more. The message says why; it is empty where its reader went away,
    as `head` does, which is no fault."""


def make_safe(needed: bool = False) -> None:
    """Has nothing that is printed or logged end this program; to be called before anything else.

    What cannot be written is dropped. With `needed`, where the output is what the program is run for, OutputLost is
    raised instead, once. Characters that the encoding lacks are written as escapes.
    """
    _fill_closed()
    sys.stdout = _safe(sys.stdout, needed)
    sys.stderr = _safe(sys.stderr, False)


def _fill_closed() -> None:
    """Opens what is closed of the three standard descriptors: else the next file or socket gets the number, and with
    it whatever a library prints."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(number, True)


def _safe(stream: io.TextIOWrapper | None, needed: bool) -> io.TextIOWrapper:
    if stream is None:  # it was closed
        return open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")
    raw = getattr(stream.buffer, "raw", stream.buffer)
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(raw, needed)),
        stream.encoding,
        "backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Output(io.RawIOBase):
    """The bytes' way out of a standard stream."""

    def __init__(self, raw: io.RawIOBase, needed: bool):
        self._raw, self._needed, self.name = raw, needed, raw.name

    def write(self, data) -> int:
        try:
            return self._raw.write(data)
        except OSError as error:
            if self._needed:
                self._needed = False  # what is still on its way when the program ends goes nowhere
                gone = error.errno == errno.EPIPE
                raise OutputLost("" if gone else f"The output cannot be written: {error.strerror}.") from None
        return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def isatty(self) -> bool:
        return self._raw.isatty()

"""What llama.cpp says while it works, as this program's log, and why something failed."""

import ctypes
import logging
from collections import deque

import llama_cpp

log = logging.getLogger(__name__)
llama_log = logging.getLogger("llama.cpp")

GGML_LOG_LEVEL_ERROR = 4  # see ggml.h
LOCKABLE = (
    "Allow the program to lock memory: --ulimit memlock=-1 for docker run, LimitMEMLOCK=infinity for systemd, "
    "`ulimit -l unlimited` in a shell (what a user may set there is in /etc/security/limits.conf)"
)

_errors: deque[str] = deque(maxlen=4)


def install() -> None:
    """Has llama.cpp log here."""
    llama_cpp.llama_log_set(_to_logging, ctypes.c_void_p(0))


def forget_errors() -> None:
    _errors.clear()


def because() -> str:
    """The latest errors in brackets, for the end of a sentence; "" where there were none."""
    return f" ({'; '.join(_errors)})" if _errors else ""


@llama_cpp.llama_log_callback
def _to_logging(level: int, text: bytes, _data) -> None:
    line = text.decode("utf-8", "replace").strip()
    if level == GGML_LOG_LEVEL_ERROR and line:
        _errors.append(line)
    if "failed to mlock" in line:  # once, however many buffers there are: llama.cpp gives up at the first
        reason = line.splitlines()[0].removeprefix("warning: ")
        log.warning("runtime.use_mlock: the weights may be swapped out all the same: %s. %s", reason, LOCKABLE)
    if line:
        llama_log.debug("%s", line)

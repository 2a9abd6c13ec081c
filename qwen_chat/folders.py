"""The folders that the program needs beside its own."""

import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED_MEMORY = Path("/dev/shm")  # which a container can write to even where all else is read-only


def cache() -> Path:
    """Where what was fetched, or found out about this machine, is kept: $XDG_CACHE_HOME/qwen-chat, ~/.cache/qwen-chat,
    or, for a user without a home, .cache/qwen-chat beside app.py. It need not exist, nor be writable."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return (ROOT / ".cache" if base.startswith("~") else Path(base)) / "qwen-chat"


def make_sure() -> str | None:
    """Gives libraries that ask for them a current folder and one for temporary files, where the system has none; where
    none can be written, what is said about it."""
    try:
        os.getcwd()
    except OSError:  # it was removed
        os.chdir(ROOT)
    try:
        tempfile.gettempdir()
    except OSError:  # none of the usual ones can be written
        tempfile.tempdir = next((str(folder) for folder in (cache(), SHARED_MEMORY) if _writable(folder)), None)
        if tempfile.tempdir is None:
            return "No folder for temporary files can be written: TMPDIR names one; a container takes --tmpfs /tmp."
    return None


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False

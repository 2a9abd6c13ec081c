"""Reading what the kernel writes below /proc and /sys.

Nothing here raises: a file that is missing, locked, empty or full of something else is read as one that says nothing.
"""

import os
import re
from pathlib import Path

NUMBER = re.compile(r"-?[0-9]{1,20}")  # the kernel's are of 64 bits


def raw(file: Path) -> bytes:
    """The file's content, b"" where it cannot be read."""
    try:
        return file.read_bytes()
    except (OSError, ValueError):  # ValueError: no system has a path with a NUL
        return b""


def text(file: Path) -> str:
    """The file's content as text for people, whatever the locale; "" where it cannot be read."""
    return raw(file).decode(errors="replace")


def names(folder: Path) -> list[str]:
    """What is in a folder, [] where it cannot be listed."""
    try:
        return os.listdir(folder)
    except (OSError, ValueError):
        return []


def numbers(file: Path) -> list[int | None]:
    """The file's words as numbers, None for a word that is not one: [150000, 100000], or [None, 100000] for
    "max 100000", which is how the kernel says "no limit"."""
    return [int(word) if NUMBER.fullmatch(word) else None for word in text(file).split()]


def number(file: Path) -> int | None:
    """The number a file consists of; None where it is another thing ("max")."""
    found = numbers(file)
    return found[0] if len(found) == 1 else None


def table(file: Path) -> dict[str, int]:
    """The lines "name number", "name: number kB" by their names."""
    lines = (line.split() for line in text(file).splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and NUMBER.fullmatch(words[1])}


def listed(file: Path) -> set[int]:
    """The numbers of a list such as "0-3,8", none above 9999 (Linux has at most 8192 processors)."""
    found: set[int] = set()
    for first, last in re.findall(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", text(file)):
        found.update(range(int(first), int(last or first) + 1))
    return found

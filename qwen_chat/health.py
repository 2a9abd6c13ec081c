"""Asks the running program whether it can answer: `python -m qwen_chat.health`, status 0 for yes.

For a container's HEALTHCHECK. It runs every few seconds beside the model, so it imports next to nothing:
an HTTP library would double what it costs.
"""

import os
import socket
import sys
from pathlib import Path

from . import address, streams


def place() -> tuple[tuple[str, ...], int]:
    """Where the program listens, as config.py reads it: the hosts to try in turn, and the port.

    Raises OSError or ValueError for a file or a PORT that it would not have started with.
    """
    import yaml

    file = Path(os.environ.get("CONFIG") or Path(__file__).resolve().parent.parent / "config.yaml")
    try:
        server = (yaml.safe_load(file.read_text(encoding="utf-8-sig")) or {}).get("server") or {}
        return address.within(server.get("host", "0.0.0.0")), int(os.environ.get("PORT") or server.get("port", 7860))
    except (yaml.YAMLError, AttributeError, TypeError, ValueError):
        raise ValueError(f"{file} or PORT does not say where the program listens") from None


def ask(hosts: tuple[str, ...], port: int) -> str:
    """The answer of the first of `hosts` that answers, header and all."""
    *others, last = hosts
    for host in others:
        try:
            return ask((host,), port)
        except OSError:
            pass
    with socket.create_connection((last, port), timeout=4) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
        return connection.makefile("rb").read().decode(errors="replace")


def main() -> int:
    """Prints the answer, or why there is none."""
    try:
        head, _, body = ask(*place()).partition("\r\n\r\n")
    except (OSError, ValueError) as error:  # a ValueError also for a host that cannot be one
        print(error)
        return 1
    print(body)
    return 0 if head.split(" ")[1:2] == ["200"] else 1


if __name__ == "__main__":
    streams.make_safe()
    sys.exit(main())

"""Asks the running program whether it can answer: `python -m qwen_chat.health`, status 0 for yes.

For a container's HEALTHCHECK. It runs every few seconds beside the model, so it imports next to nothing:
an HTTP library would double what it costs.
"""

import os
import socket
import sys
from pathlib import Path

ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def address() -> tuple[str, int]:
    """Where the program listens, as config.py reads it."""
    import yaml

    file = os.environ.get("CONFIG") or Path(__file__).resolve().parent.parent / "config.yaml"
    server = (yaml.safe_load(Path(file).read_text(encoding="utf-8-sig")) or {}).get("server") or {}
    host = server.get("host", "0.0.0.0").strip("[]")
    return ANYWHERE.get(host, host), int(os.environ.get("PORT") or server.get("port", 7860))


def main() -> int:
    try:
        with socket.create_connection(address(), timeout=4) as connection:
            connection.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
            answer = connection.makefile("rb").read()
    except OSError as error:
        print(error)
        return 1
    head, _, body = answer.decode(errors="replace").partition("\r\n\r\n")
    print(body)
    return 0 if head.split(" ")[1:2] == ["200"] else 1


if __name__ == "__main__":
    sys.exit(main())

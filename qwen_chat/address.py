"""Whether the page can be served at an address."""

import errno
import socket


def why_not(host: str, port: int) -> str | None:
    """Why nothing can listen at this address, in a sentence for a person; None where it can."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        remedy = (
            "Another program is using it; server.port in config.yaml, or PORT, names another."
            if taken
            else "server.host in config.yaml names where to listen: 127.0.0.1, 0.0.0.0, or an address of this machine."
        )
        return f"{host}:{port} cannot be used: {error.strerror or error}. {remedy}"
    return None

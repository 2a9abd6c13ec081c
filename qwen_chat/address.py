"""Where the page is served: what server.host and server.port stand for on this machine."""

import errno
import ipaddress
import os
import socket

FORMS = (
    "server.host in config.yaml names where to listen: 127.0.0.1, 0.0.0.0, ::, or a name or an address of this "
    "machine, without a port (server.port is for that); fe80:... with its interface, as in fe80::1%eth0."
)
# Where this machine itself reaches what listens anywhere
WITHIN = {"0.0.0.0": ("127.0.0.1",), "::": ("::1", "127.0.0.1")}
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class AddressError(Exception):
    """Nothing can listen there. The message is a sentence for a person."""


def why_not(host: str, port: int) -> str | None:
    """Why nothing can listen at this address, in a sentence for a person; None where it can."""
    try:
        for each in sockets(host, port):
            each.close()
    except AddressError as error:
        return str(error)
    return None


def sockets(host: str, port: int) -> list[socket.socket]:
    """A socket for each address that `host` stands for on this machine, bound, not listening yet; :: stands for all
    addresses of IPv4 as well. Raises AddressError."""
    bound, absent = [], None
    try:
        for family, address in _addresses(host, port):
            try:
                bound.append(_bound(family, address))
            except OSError as error:
                if error.errno not in ABSENT:
                    raise
                absent = error  # this machine may have another of them
        if not bound:
            raise absent
    except (OSError, ValueError) as error:
        for each in bound:
            each.close()
        numbers = isinstance(error, OSError) and not isinstance(error, socket.gaierror)
        place = _with_port(host, port) if numbers else f"{host!r}"
        raise AddressError(f"{place} cannot be used: {_reason(error)}. {_remedy(port, error)}") from None
    return bound


def _addresses(host: str, port: int) -> list[tuple[int, tuple]]:
    """Families and addresses, as a socket takes them."""
    if not set("*/ \t").isdisjoint(host):
        raise ValueError
    name = numeric(host)
    found = [(family, address) for family, _, _, _, address in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys(found)) + ([(socket.AF_INET, ("0.0.0.0", port))] if name == "::" else [])


def _bound(family: int, address: tuple) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name != "nt":  # where it would let two programs share the port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def numeric(host: str) -> str:
    """`host` without brackets; a numeric address in its usual form: 0 is 0.0.0.0, ::ffff:127.0.0.1 is 127.0.0.1."""
    name = host.strip("[]")
    try:
        address = ipaddress.ip_address(name if ":" in name else socket.inet_ntoa(socket.inet_aton(name)))
    except (OSError, ValueError):
        return name
    return str(getattr(address, "ipv4_mapped", None) or address)


def within(host: str) -> tuple[str, ...]:
    """Where this machine itself reaches what listens at `host`; to be tried in turn."""
    name = numeric(host)
    return WITHIN.get(name, (name,))


def url(host: str, port: int) -> str:
    """The page's address for a browser on this machine."""
    name = numeric(host)
    return f"http://{_with_port('localhost' if name in WITHIN else name, port).replace('%', '%25')}/"


def own_url(bound: socket.socket) -> str:
    """The page's address for this program itself, which needs no name to be known."""
    host, port = socket.getnameinfo(bound.getsockname(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
    return f"http://{_with_port(within(host)[0], port)}/"


def _with_port(host: str, port: int | str) -> str:
    try:
        brackets = ipaddress.ip_address(host).version == 6
    except ValueError:
        brackets = False
    return f"[{host}]:{port}" if brackets else f"{host}:{port}"


def _reason(error: Exception) -> str:
    """`error` in a few words; a ValueError comes from what cannot be a name."""
    return error.strerror or str(error) if isinstance(error, OSError) else "not an address, nor a name"


def _remedy(port: int, error: Exception) -> str:
    key = "PORT in the environment" if os.environ.get("PORT") else "server.port in config.yaml, or PORT,"
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        return f"Another program is using it; {key} names another."
    if code == errno.EACCES:
        allowed = "Ports below 1024 need root" if port < 1024 else "This system does not let it be used"
        return f"{allowed}; {key} names another."
    return FORMS

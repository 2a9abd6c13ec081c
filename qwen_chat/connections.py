"""The HTTP connections of the page and the API: how many there may be, and how long one may do nothing.

Gradio starts uvicorn by itself, which has no time limit for a header nor for a client that does not read its answer,
and no limit to the connections of one address. It asks its configuration for a protocol at every connection.
"""

from functools import partial

from uvicorn.protocols.http.h11_impl import H11Protocol

from .gate import network

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None

IDLE_SECONDS = 15  # after twice as long at most a connection has got on: has sent its header, or read of its answer
MOST_CONNECTIONS = 2000  # a page that is open holds two
SHARE = 0.75  # of them that one address may hold: many people behind a proxy or in one office have the same
OWN_FILES = 200  # that the program may have open besides
MOST_HEADER = 32 * 2**10  # bytes
FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 2\r\nContent-Length: 0\r\n\r\n"


def bound(config) -> None:
    """Bounds the connections that a uvicorn server with this configuration, which is loaded, gets from now on."""
    config.http_protocol_class = partial(Connection, most=most_connections())
    config.ws_protocol_class = None  # nothing here speaks it
    config.h11_max_incomplete_event_size = MOST_HEADER


def most_connections() -> int:
    """How many connections there may be: fewer than MOST_CONNECTIONS where the system grants fewer open files."""
    if resource is None:
        return MOST_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + OWN_FILES
    if 0 <= soft < wanted:  # RLIM_INFINITY is -1
        soft = min(wanted, hard) if hard >= 0 else wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MOST_CONNECTIONS if soft < 0 else max(1, min(MOST_CONNECTIONS, soft - OWN_FILES))


class Connection(H11Protocol):
    """A connection that is closed when its client does nothing for long, or when there are too many.

    `most` is how many there may be; a new one takes the place of the one that has sent no request for the longest time.
    """

    def __init__(self, *args, most: int, **options):
        super().__init__(*args, **options)
        self._most = most
        self._address = ""
        self._since = 0.0  # when it last had nothing to do
        self._stuck_before: tuple | None = None
        self._look_again = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._address = network({"client": self.client})
        self._since = self.loop.time()
        self._look_again = self.loop.call_later(IDLE_SECONDS, self._look)
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._look_again.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    @property
    def idle(self) -> bool:
        """Whether no request of it is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        """Closes another connection, or this one, where there are too many."""
        crowd = [other for other in self.connections if other._address == self._address]
        if len(crowd) <= SHARE * self._most:
            crowd = self.connections
            if len(crowd) <= self._most:
                return
        idle = [other for other in crowd if other.idle and other is not self]
        if idle:
            return min(idle, key=lambda other: other._since).drop()
        self.transport.write(FULL)
        self.transport.close()
        self.connections.discard(self)

    def drop(self) -> None:
        """Closes it at once, whatever is on its way."""
        self.connections.discard(self)
        self.transport.abort()

    def _look(self) -> None:
        stuck = self._stuck()
        if stuck and stuck == self._stuck_before:
            return self.drop()
        self._stuck_before = stuck
        self._look_again = self.loop.call_later(IDLE_SECONDS, self._look)

    def _stuck(self) -> tuple | None:
        """What its client has to get on with, and how far it is; None where it waits for nothing of its client."""
        unread = self.transport.get_write_buffer_size()
        return (self.cycle, unread) if self.idle or unread else None

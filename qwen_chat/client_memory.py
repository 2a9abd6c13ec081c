"""What is kept between requests for those who ask: nobody finds, shortens or changes what was made for another."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock

LEAST = 16  # what any value counts at the least, for its key takes room as well


class ClientMemory:
    """Values by a client, which is any hashable value that names who asks, and a key of the client's own.

    They take at most `most` in all, as `size` measures them. When it is more, the client that holds the most loses
    what it used longest ago, so what one client keeps is never lost to another that keeps more. Nothing is kept for
    the client None, of whom nothing is known. Usable from any thread.
    """

    def __init__(self, size: Callable[[object], int], most: int):
        self._size = size
        self._most = most
        self._held: dict[Hashable, OrderedDict] = {}  # of each client, the one used longest ago first
        self._sizes: dict[Hashable, int] = {}
        self._total = 0
        self._lock = Lock()

    def holds(self, client: Hashable) -> bool:
        """Whether anything is kept for `client`."""
        return client in self._held

    def get(self, client: Hashable, key: Hashable):
        """What was kept for `client` under `key`, or None."""
        with self._lock:
            own = self._held.get(client, {})
            if key in own:
                own.move_to_end(key)
            return own.get(key)

    def put(self, client: Hashable, key: Hashable, value) -> None:
        """Keeps `value`, in the place of what was kept there before."""
        if client is None:
            return
        with self._lock:
            if key in self._held.get(client, {}):
                self._drop(client, key)
            self._held.setdefault(client, OrderedDict())[key] = value
            self._count(client, self._measured(value))
            while self._total > self._most:
                largest = max(self._sizes, key=self._sizes.get)
                self._drop(largest, next(iter(self._held[largest])))

    def _drop(self, client: Hashable, key: Hashable) -> None:
        self._count(client, -self._measured(self._held[client].pop(key)))
        if not self._held[client]:
            del self._held[client], self._sizes[client]

    def _count(self, client: Hashable, change: int) -> None:
        self._sizes[client] = self._sizes.get(client, 0) + change
        self._total += change

    def _measured(self, value) -> int:
        return max(LEAST, self._size(value))

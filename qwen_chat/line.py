"""Who is served next: a line that people share.

Nobody can crowd others out by asking a lot. Whoever has the fewest requests running goes first; among equals,
whoever has waited longest since one of their own requests ended or, if none did, since they came. So a person
who sends many requests at once is served as if they sent each after the one before had ended.

A person may have no more requests waiting than places are left for others: one alone can fill half of the line
(rounded up), the next who wants all of it half of the rest, and so on; as requests end, shares become equal. It is
how switches share a buffer (dynamic thresholds: Choudhury and Hahne, 1998).
"""

from dataclasses import dataclass, field


@dataclass(eq=False)
class _Person:
    waiting: list = field(default_factory=list)  # requests in the order they came
    running: int = 0
    turn: int = 0  # when it was last settled at which place among others they stand

    @property
    def order(self) -> tuple[int, int]:
        return self.running, self.turn


class Line:
    """Requests by the person who asks: any object with a hashable `client`. Not thread-safe.

    `parallel` may run at once, `size` more may wait.
    """

    def __init__(self, parallel: int, size: int):
        self._parallel = parallel
        self._size = size
        self._people: dict[object, _Person] = {}
        self._clock = 0
        self.waiting = 0
        self.running = 0

    def limit_met(self, client) -> str | None:
        """What keeps one more request of `client` from joining: "line", all of it is taken; "share", theirs is; None."""
        idle = self._parallel - self.running  # so many of those who wait are about to run
        waiting = self.waiting + 1 - idle
        if waiting <= 0:
            return None
        if waiting > self._size:
            return "line"
        person = self._people.get(client)
        own = len(person.waiting) + 1 - idle if person else 1
        return "share" if own > self._size - waiting + 1 else None

    def join(self, request) -> None:
        """Puts a request into the line."""
        person = self._people.setdefault(request.client, _Person())
        if not person.waiting:
            person.turn = self._tick()
        person.waiting.append(request)
        self.waiting += 1

    def begin(self):
        """Takes the request out that is next, which runs from now on; None where nobody waits."""
        if not self.waiting:
            return None
        person = min((person for person in self._people.values() if person.waiting), key=lambda person: person.order)
        person.running += 1
        self.running += 1
        self.waiting -= 1
        return person.waiting.pop(0)

    def leave(self, request) -> None:
        """A request has ended, or waits no longer."""
        person = self._people[request.client]
        if request in person.waiting:
            person.waiting.remove(request)
            self.waiting -= 1
        else:
            person.running -= 1
            person.turn = self._tick()
            self.running -= 1
        if not (person.waiting or person.running):
            del self._people[request.client]

    def place(self, request) -> int:
        """1 for the request that is next, and so on in the order in which they will be begun as things stand; 0 where
        it does not wait.

        What will have ended first is not known, so it is taken that everybody's first request goes before anybody's
        second: with one request running at once, that is exactly what happens.
        """
        person = self._people.get(request.client)
        if person is None or request not in person.waiting:
            return 0
        own = person.waiting.index(request)
        others = (other for other in self._people.values() if other is not person)
        return 1 + own + sum(min(len(other.waiting), own + (other.order < person.order)) for other in others)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

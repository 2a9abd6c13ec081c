"""Two thousand random requests leave nothing behind: no sequence at work, no line, no growing memory."""

import random
import threading

import psutil
from test_engine import ask, quiet, user

from qwen_chat.engine import Busy
from qwen_chat.sampling import Sampling

REQUESTS = 2000
WORDS = "sun moon star river mountain 春天 花 small big why how tell me about the quick answer please 🙂".split()


class Person:
    """Somebody who asks, goes on, edits, begins anew, types ahead and gives up, all by chance."""

    def __init__(self, bot, number: int):
        self.bot, self.number, self.chance = bot, number, random.Random(number)
        self.messages: list[dict] = []
        self.outcomes = dict.fromkeys(("stop", "length", "cancelled", "busy"), 0)

    def run(self, requests: int) -> None:
        for _ in range(requests):
            self.prepare()
            self.request()

    def text(self, most: int) -> str:
        return " ".join(self.chance.choices(WORDS, k=self.chance.randint(1, most)))

    def prepare(self) -> None:
        luck = self.chance.random()
        if luck < 0.1:
            self.messages = []
        elif luck < 0.3:
            del self.messages[2 * self.chance.randint(0, len(self.messages) // 2) :]
        self.messages.append(user(self.text(60 if luck > 0.98 else 3)))
        if luck > 0.8:
            self.bot.engine.warm(self.number, self.bot.conversation.prompt(self.messages, client=self.number).tokens)

    def request(self) -> None:
        luck = self.chance.random()
        try:
            reply = ask(self.bot, self.messages, Sampling(), self.chance.randint(1, 4), owner=self.number)
        except Busy:
            self.outcomes["busy"] += 1
            self.messages.pop()
            return
        if luck < 0.1:
            reply.cancel()
        pieces = []
        for piece in reply:
            pieces.append(piece)
            if luck < 0.25 and len(pieces) == self.chance.randint(1, 3):
                reply.cancel()
        self.outcomes[reply.stats.finish_reason] += 1
        self.messages.append({"role": "assistant", "content": "".join(pieces) or "."})


def talk(bot, people: list[Person], requests: int) -> None:
    threads = [threading.Thread(target=person.run, args=[requests // len(people)]) for person in people]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    quiet(bot)


def test_two_thousand_random_requests_leave_nothing_behind(make_bot):
    bot = make_bot(queue_size=2, runtime={"n_ctx": 256, "parallel": 3, "cache_mb": 8}, generation={"max_tokens": 64})
    people = [Person(bot, number) for number in range(6)]
    talk(bot, people, REQUESTS // 4)
    before = psutil.Process().memory_info().rss
    talk(bot, people, REQUESTS * 3 // 4)
    grown = psutil.Process().memory_info().rss - before
    outcomes = {name: sum(person.outcomes[name] for person in people) for name in people[0].outcomes}
    assert sum(outcomes.values()) >= REQUESTS - 2 * len(people)
    assert all(outcomes.values()), outcomes
    assert bot.engine.cache.parked_bytes <= 8 * 2**20
    assert grown < 30 * 2**20
    assert not bot.engine._warm and not bot.engine._computing

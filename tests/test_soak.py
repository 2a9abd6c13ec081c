"""Two thousand random requests leave nothing behind: no sequence at work, no line, no cell unaccounted for, no growing
memory."""

import random
import threading
from collections import Counter

import llama_cpp
import psutil
from test_engine import ask, plain, quiet, user

from qwen_chat.engine import Busy
from qwen_chat.model import ABORTED
from qwen_chat.sampling import Sampling

REQUESTS = 2000
WORDS = "sun moon star river mountain 春天 花 small big why how tell me about the quick answer please 🙂".split()


class Person:
    """Somebody who asks, goes on, edits, begins anew, types ahead, leaves and gives up, all by chance."""

    def __init__(self, bot, number: int):
        self.bot, self.number, self.chance = bot, number, random.Random(number)
        self.client = number // 2  # two conversations of one client
        self.messages: list[dict] = []
        self.outcomes: Counter[str] = Counter()

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
            ahead = self.bot.conversation.prompt(self.messages, client=self.client).tokens
            self.bot.engine.warm(self.number, ahead, client=self.client)

    def ask(self):
        """A question of one kind or another; what its answer may have in it to end it is by chance too."""
        kind, stop = self.chance.random(), self.chance.choice(["", "e", ". "])
        sampling = Sampling(seed=7 if self.chance.random() < 0.1 else -1)
        if kind < 0.15:
            return plain(self.bot, self.text(3), client=self.client, keep=kind > 0.05)
        stop = {"stop": [stop]} if stop else {}
        who = {"owner": self.number, "client": self.client}
        return ask(self.bot, self.messages, sampling, self.chance.randint(1, 4), **who, **stop)

    def request(self) -> None:
        luck = self.chance.random()
        try:
            reply = self.ask()
        except Busy as busy:
            self.outcomes["share" if busy.own_share else "busy"] += 1
            self.messages.pop()
            return
        if luck < 0.1:
            reply.cancel()
        if luck > 0.98:
            self.bot.engine.forget(self.number)
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


class Cells:
    """Counts the cells that hold a token by the size of llama.cpp's own state: each adds the same, and four bytes more
    for every sequence that it belongs to. Begins with a cache of which only the opening is in use."""

    def __init__(self, bot):
        self.cache, self.model = bot.engine.cache, bot.engine.model
        self.begin = self.size()
        assert self.model.decode([(0, 0, [0], False)]) == 0
        self.cell = self.size() - self.begin - 4
        self.model.seq_rm(0, 0, -1)

    def size(self) -> int:
        return llama_cpp.llama_state_get_size(self.model._context)

    def in_use(self) -> float:
        grown = self.size() - self.begin - 4 * sum(map(len, self.cache.slots))
        return len(self.cache.opening) + grown / self.cell


def test_two_thousand_random_requests_leave_nothing_behind(make_bot):
    runtime = {"n_ctx": 256, "parallel": 3, "cache_mb": 8, "n_threads": 1, "n_threads_batch": 1}
    bot = make_bot(queue_size=2, runtime=runtime, generation={"max_tokens": 64})
    engine, model, statuses = bot.engine, bot.engine.model, Counter()
    cells, decode = Cells(bot), model.decode

    def counted(parts):
        status = decode(parts)
        statuses[status] += 1
        return status

    model.decode = counted
    people = [Person(bot, number) for number in range(6)]
    talk(bot, people, REQUESTS // 4)
    before = psutil.Process().memory_info().rss
    talk(bot, people, REQUESTS * 3 // 4)
    grown = psutil.Process().memory_info().rss - before
    outcomes = sum((person.outcomes for person in people), Counter())
    assert outcomes.total() >= REQUESTS - 2 * len(people)
    assert set(outcomes) >= {"stop", "length", "cancelled", "busy"}, outcomes
    assert set(statuses) <= {0, ABORTED}, statuses
    assert engine.cache.parked_bytes <= 8 * 2**20
    assert grown < 30 * 2**20
    assert not (engine._warm or engine._computing or engine._open or engine._active or engine._line._people)
    assert engine.cache.used_cells == cells.in_use()

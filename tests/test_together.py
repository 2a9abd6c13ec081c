"""Nobody's answer depends on what others ask: whatever goes on beside it, it is what the model says to it alone.

To the last bit it is not. llama.cpp adds up what a token attends to in the order in which it lies in the cache, and
from 64 tokens in a step on in other code: the same tokens computed in other steps, or in cells that others had before,
give logits that differ by up to 0.6 here (measured: 0 where neither changes). So every token must be as good as the
likeliest but for ROUNDING, with all before it computed anew by itself, and so must be the logits of all that is cached.
"""

import threading
from dataclasses import dataclass

import llama_cpp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_engine import quiet, user

from qwen_chat.sampling import Sampling
from qwen_chat.textstream import TextStream

ROUNDING = 1.5  # logits: of two each may be off by 0.6
WORDS = "sun moon river winter small big why how tell me about the 春天 花 please 🙂".split()


@dataclass(frozen=True)
class Turn:
    """One request of a conversation, and what goes on while it is answered."""

    text: str
    max_tokens: int
    seed: int | None  # None: greedy
    stop: str
    cancel_after: int | None  # pieces
    typed: bool  # it is computed ahead before it is sent
    aside: bool  # the program asks something of its own before

    @property
    def sampling(self) -> Sampling:
        if self.seed is None:
            return Sampling(temperature=0, repeat_penalty=1)
        return Sampling(temperature=1.5, seed=self.seed)


TURNS = st.builds(
    Turn,
    text=st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join),
    max_tokens=st.integers(1, 8),
    seed=st.sampled_from([None, None, None, 1, 2]),
    stop=st.sampled_from(["", "", "e", ".", " "]),
    cancel_after=st.sampled_from([None, None, None, 0, 1, 3]),
    typed=st.booleans(),
    aside=st.sampled_from([False, False, True]),
)
TALKS = st.lists(st.lists(TURNS, min_size=1, max_size=3).map(tuple), min_size=2, max_size=5)


def ask(bot, messages: list[dict], turn: Turn, **options):
    """The prompt, in which earlier answers stand as they were chosen, and the reply to it."""
    prompt = bot.conversation.prompt(messages, client=options["client"])
    assert not prompt.dropped  # turns out of view may still show in the cache, to their own conversation alone
    assert spelt(bot, prompt.tokens) == spelt(bot, bot.conversation.prompt(messages).tokens)
    stop = [turn.stop] if turn.stop else []
    return prompt.tokens, bot.engine.stream(
        prompt.tokens, turn.sampling, turn.max_tokens, stop, follow=prompt.follow,
        on_end=lambda reply: bot.conversation.remember(reply, prompt), **options,
    )


def spelt(bot, tokens) -> bytes:
    return b"".join(bot.engine.model.piece(token, special=True) for token in tokens)


class Talk(threading.Thread):
    """A conversation among others. `answers` are its turns, each with its prompt and its reply."""

    def __init__(self, bot, number: int, turns: tuple[Turn, ...]):
        super().__init__(daemon=True)
        self.bot, self.turns, self.answers, self.error = bot, turns, [], None
        self.who = {"owner": number, "client": number % 3} if number % 2 else {"client": number % 3}

    def run(self) -> None:
        try:
            self.talk()
        except BaseException as error:
            self.error = error

    def talk(self) -> None:
        messages, engine = [], self.bot.engine
        for turn in self.turns:
            messages = [*messages, user(turn.text)]
            if turn.typed and "owner" in self.who:
                engine.warm(self.who["owner"], self.bot.conversation.prompt(messages).tokens)
            if turn.aside:
                "".join(ask(self.bot, [user("Shorten: " + turn.text)], turn, keep=False, client=self.who["client"])[1])
            prompt, reply = ask(self.bot, messages, turn, **self.who)
            if turn.cancel_after == 0:
                reply.cancel()
            text = ""
            for number, piece in enumerate(reply, 1):
                text += piece
                if number == turn.cancel_after:
                    reply.cancel()
            self.answers.append((turn, prompt, reply))
            messages = [*messages, {"role": "assistant", "content": text or "Well."}]


def logits(model, seq: int, tokens, start: int) -> np.ndarray:
    """The logits after the last of `tokens`, of which those from `start` on are computed."""
    chunk = tokens[start:]
    assert model.decode([(seq, start, chunk, True)]) == 0
    pointer = llama_cpp.llama_get_logits_ith(model._context, len(chunk) - 1)
    return np.ctypeslib.as_array(pointer, (model.n_vocab,)).copy()


def assert_cached_as_computed_anew(bot) -> None:
    """Whatever the cache holds gives what its tokens give when they are computed alone."""
    model, cache = bot.engine.model, bot.engine.cache

    def check(tokens) -> None:
        model.seq_rm(0, len(tokens) - 1, -1)
        held = logits(model, 0, tokens, len(tokens) - 1)
        model.seq_rm(0, 0, -1)
        assert np.abs(held - logits(model, 0, tokens, 0)).max() < ROUNDING
        model.seq_rm(0, 0, -1)

    for slot in reversed(cache.slots):  # the first is where all are checked
        tokens = slot.tokens[:]
        if not tokens:
            continue
        if slot.id:
            cache._clear(cache.slots[0])
            model.seq_cp(slot.id, 0, 0, -1)
        check(tokens)
    cache._clear(cache.slots[0])
    for parked in cache.parked:
        assert model.restore(0, parked.state)
        check(parked.tokens)


def assert_said_alone(bot, turn: Turn, prompt: list[int], reply) -> None:
    """The reply's text is that of its tokens, and its tokens those of a model that was never asked anything else."""
    model, stream, told = bot.engine.model, TextStream([turn.stop] if turn.stop else []), list(prompt)
    assert "".join([*(stream.feed(model.piece(token)) for token in reply.tokens), stream.close()]) == reply.text
    bot.engine.cache._clear(bot.engine.cache.slots[0])
    for number, token in enumerate(reply.tokens if turn.seed is None else []):
        found = logits(model, 0, told, len(told) - 1 if number else 0)
        assert found.max() - found[token] < ROUNDING
        told.append(token)
    model.seq_rm(0, 0, -1)


@pytest.fixture(scope="module")
def bots(make_bot):
    """An engine for all and one for each alone."""
    sections = {"generation": {"max_tokens": 16}, "chat": {"system_prompt": "Be brief."}}
    together = make_bot(queue_size=64, runtime={"n_ctx": 256, "parallel": 3}, **sections)
    return together, make_bot(runtime={"n_ctx": 256, "parallel": 1}, **sections)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(talks=TALKS, cache_bytes=st.sampled_from([0, 4 * 2**20, 64 * 2**20]))
def test_conversations_together_are_answered_as_each_is_alone(bots, talks, cache_bytes):
    together, alone = bots
    quiet(together)
    together.engine.cache.cache_bytes = cache_bytes
    threads = [Talk(together, number, turns) for number, turns in enumerate(talks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    quiet(together)
    quiet(alone)
    for thread in threads:
        assert thread.error is None
        for answer in thread.answers:
            assert_said_alone(alone, *answer)
    assert_cached_as_computed_anew(together)
    for slot in together.engine.cache.slots:
        together.engine.cache._clear(slot)
    together.engine.cache.parked.clear()

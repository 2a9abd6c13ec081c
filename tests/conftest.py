"""What the tests share: a small real model, and engines on it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from qwen_chat import weights
from qwen_chat.config import SMOLLM2, Config, Model
from qwen_chat.conversation import Conversation
from qwen_chat.engine import Engine


@pytest.fixture(scope="session")
def small_model() -> Path:
    """A 135M chat model, fetched once into the user's cache by the program's own fallback code."""
    return weights.find(Model(endpoints=[], fallbacks=[SMOLLM2])).path


@pytest.fixture(scope="session")
def make_bot(small_model):
    """Starts an engine with a conversation on it: `make_bot(runtime={...}, generation={...}, ...)`. All are closed at the end."""
    bots = []

    def make(queue_size: int = 16, ready: bool = True, path: Path = small_model, **sections) -> SimpleNamespace:
        config = Config.model_validate(sections)
        found = weights.Weights(path, path.stem, None)
        engine = Engine(config.runtime, lambda report: found, queue_size, lambda: bot.conversation.opening())
        bot = SimpleNamespace(config=config, engine=engine, conversation=Conversation(engine, config))
        bots.append(bot)
        engine.start()
        if ready:
            while not engine.ready.wait(0.1):
                assert not engine.ended.is_set(), engine.error
        return bot

    yield make
    for bot in bots:
        bot.engine.close()


@pytest.fixture(scope="session")
def bot(make_bot):
    """One engine that many tests use; two answers at once, a window of 512 tokens."""
    return make_bot(runtime={"n_ctx": 512, "parallel": 2, "cache_mb": 64}, generation={"max_tokens": 64})

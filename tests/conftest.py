"""What the tests share: a small real model, engines on it, the program and a browser on its page."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from browser import CHROMIUM, Page, Program

from qwen_chat import weights
from qwen_chat.config import SMOLLM2, Config, Model
from qwen_chat.conversation import Conversation
from qwen_chat.engine import Engine


@pytest.fixture(scope="session", autouse=True)
def signals_as_at_a_terminal():
    """Programs that tests start hear Ctrl-C, also where the tests run in the background and a shell has them ignore it:
    what is ignored is inherited, a handler is not."""
    for name in {"SIGINT", "SIGHUP", "SIGQUIT"} & set(dir(signal)):
        if signal.getsignal(getattr(signal, name)) == signal.SIG_IGN:
            signal.signal(getattr(signal, name), lambda *_: None)


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


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as library:
        browser = library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def program(small_model, tmp_path_factory):
    """One answer at a time, one more may wait; greedy, so that the same question has the same answer."""
    program = Program(
        tmp_path_factory.mktemp("program"),
        model={"path": str(small_model)},
        runtime={"n_ctx": 1024, "parallel": 1},
        generation={"temperature": 0.0, "repeat_penalty": 1.0, "max_tokens": 250},
        chat={"long_input": "refuse"},
        server={"queue_size": 1},
    )
    yield program.until_up()
    program.end()


@pytest.fixture
def open_page(browser):
    """Opens the page in a browser of its own: `open_page(program, locale="zh-CN")`. Every tab is closed at the end."""
    contexts = []

    def open_page(program: Program, locale: str = "en-US", **options) -> Page:
        contexts.append(browser.new_context(locale=locale, **options))
        return Page(contexts[-1], program.url)

    yield open_page
    for context in contexts:
        context.close()

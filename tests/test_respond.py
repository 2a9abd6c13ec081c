"""What the page's `respond` and `typed` ask of the engine, and for whom."""

import asyncio
import importlib.util
import time
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from qwen_chat import condense

APP = Path(__file__).resolve().parent.parent / "app.py"
NUMBER = "0123456789abcdef" * 2
LONG = "The sea was calm and the crew sang old songs of harbours far away. " * 30


@pytest.fixture(scope="module")
def app(small_model, tmp_path_factory):
    """app.py with its engine running, and no page served."""
    config = tmp_path_factory.mktemp("respond") / "config.yaml"
    sections = {
        "profile": "none",
        "model": {"path": str(small_model)},
        "runtime": {"n_ctx": 384, "parallel": 1},
        "generation": {"temperature": 0.0, "max_tokens": 16},
        "chat": {"history": {"overflow": "condense"}},
    }
    config.write_text(yaml.safe_dump(sections), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONFIG", str(config))
        spec = importlib.util.spec_from_file_location("app_under_test", APP)
        app = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(app)
    app.engine.start()
    assert app.engine.ready.wait(120)
    yield app
    app.engine.close()


@pytest.fixture
def asked(app, monkeypatch):
    """Who asked the engine for something, and whether it was an answer, an aside or only to be computed ahead."""
    asked, stream, warm = [], app.engine.stream, app.engine.warm

    def streamed(*given, **options):
        asked.append((options["client"], "answer" if options.get("keep", True) else "aside"))
        return stream(*given, **options)

    def warmed(owner, tokens, trimmed=False, client=None):
        asked.append((client, "ahead"))
        return warm(owner, tokens, trimmed, client)

    monkeypatch.setattr(app.engine, "stream", streamed)
    monkeypatch.setattr(app.engine, "warm", warmed)
    monkeypatch.setattr(condense, "SUMMARY", (6, 12))
    return asked


def asking(session_hash, username, cookies=None):
    return SimpleNamespace(headers={}, session_hash=session_hash, username=username, cookies=cookies or {})


def respond(app, message, history=(), **who):
    """What `respond` said at last."""
    request = asking(**who)

    async def said():
        async with aclosing(app.respond(message, list(history), app.config, request)) as answers:
            return [each async for each in answers][-1]

    answer = asyncio.run(said())
    assert answer["metadata"].get("id") != "notice", answer
    return answer["content"][0]["text"]


@pytest.mark.parametrize(
    ("who", "client"),
    [
        ({"session_hash": "s1", "username": None}, ("tab", "s1")),
        ({"session_hash": "s2", "username": "ann", "cookies": {"qwen-chat-browser": NUMBER}}, ("login", "ann")),
        ({"session_hash": "s4", "username": None, "cookies": {"qwen-chat-browser": NUMBER}}, ("browser", NUMBER)),
        ({"session_hash": "s5", "username": None, "cookies": {"qwen-chat-browser": "x" * 10_000}}, ("tab", "s5")),
    ],
)
def test_all_that_a_person_causes_is_asked_for_that_person(app, asked, who, client):
    said = respond(app, LONG, **who)
    assert {each for each, _ in asked} == {client} and {"answer", "aside"} <= {kind for _, kind in asked}
    asked.clear()
    history = [{"role": "user", "content": LONG}, {"role": "assistant", "content": said}]
    respond(app, "word " * 200, history, **who)  # after this the first round leaves, and a note is written of it
    while not app.engine.idle:
        time.sleep(0.01)
    assert {each for each, _ in asked} == {client} and ("aside" in {kind for _, kind in asked})
    asked.clear()
    app.typed("Thank", history, app.config, asking(**who))
    assert asked == [(client, "ahead")]


def test_a_chat_of_thousands_of_rounds_is_answered(app):
    history = [{"role": role, "content": "word"} for _ in range(3000) for role in ("user", "assistant")]
    assert respond(app, "Hello", history, session_hash="s3", username=None)

"""The figures of the performance view, and how they are put into words."""

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from test_engine import ask

from qwen_chat import performance, texts, view
from qwen_chat.config import Runtime
from qwen_chat.engine import Engine, Info, Stats
from qwen_chat.hardware import Memory
from qwen_chat.performance import KEPT, RECENT, Performance, count_words

INFO = Info("a <model>", "/m.gguf", None, 490, 494_032_768, 2048, 32768, 2, 2, 491_400_032, "Q4_K_M", "haswell", ("AVX2", "FMA", "OPENMP"))


def reply(prompt=100, cached=90, tokens=20, first_ms=120.0, speed=40.0, text="one two three four five") -> SimpleNamespace:
    return SimpleNamespace(stats=Stats(prompt, cached, tokens, 1.0, first_ms, speed, "stop"), text=text)


@pytest.fixture
def idle():
    """The figures of an engine that was never started, with a clock that `idle.now` sets."""
    engine = Engine(Runtime(), None)
    engine.info = INFO
    idle = SimpleNamespace(engine=engine, now=0.0)
    idle.performance = Performance(engine, lambda: idle.now)
    return idle


def look(idle) -> performance.Snapshot:
    idle.now += 1
    return idle.performance.snapshot()


def test_before_the_first_answer_there_are_no_figures_of_answers(idle):
    snapshot = look(idle)
    assert snapshot.answers == () and snapshot.answers_total == 0
    assert snapshot.first_token == snapshot.tokens_per_second == snapshot.words_per_second == snapshot.reused == 0
    assert 0 < snapshot.memory_used < snapshot.memory_granted and snapshot.cores_granted > 0


def test_figures_sum_up_the_recent_answers(idle):
    for first_ms, speed in ((100, 30), (200, 50), (900, 40)):
        idle.performance.note(reply(first_ms=first_ms, speed=speed))
    idle.performance.note(reply(prompt=300, cached=30, tokens=1, first_ms=150, speed=0, text="word"))
    snapshot = look(idle)
    assert snapshot.first_token == pytest.approx(0.175)
    assert snapshot.tokens_per_second == 40  # one token has no speed
    assert snapshot.words_per_second == pytest.approx(40 * (3 * 5 + 1) / (3 * 20 + 1))
    assert snapshot.reused == pytest.approx((3 * 90 + 30) / (3 * 100 + 300))


def test_only_the_last_answers_are_kept_and_only_those_that_began(idle):
    for number in range(1, KEPT + 11):
        idle.performance.note(reply(first_ms=1000 * number))
        idle.performance.note(reply(first_ms=0.0))  # cancelled in line, or failed
    snapshot = look(idle)
    assert [answer.first_token for answer in snapshot.answers] == list(range(11, KEPT + 11))
    assert snapshot.answers_total == KEPT + 10 and snapshot.recent == snapshot.answers[-RECENT:]


def test_one_look_serves_all_who_look_at_about_the_same_time(idle):
    first = look(idle)
    idle.performance.note(reply())
    idle.now += performance.FRESH_SECONDS / 2
    assert idle.performance.snapshot() is first
    idle.now += performance.FRESH_SECONDS / 2
    assert len(idle.performance.snapshot().answers) == 1


def test_processor_use_is_that_of_now_or_not_told(idle, monkeypatch):
    seconds = iter([10.0, 10.5, 100.0, 103.0])
    monkeypatch.setattr(idle.performance._usage, "cpu_seconds", lambda: next(seconds))
    assert look(idle).cores_used is None
    assert look(idle).cores_used == 0.5
    idle.now += performance.NOW_SECONDS
    assert look(idle).cores_used is None  # of the time nobody looked
    assert look(idle).cores_used == 3.0


def test_what_a_container_grants_is_the_measure(idle, monkeypatch):
    monkeypatch.setattr(performance, "usable_memory", lambda: Memory(1_000_000_000, 1, 0, True))
    monkeypatch.setattr(performance, "cpu_quota", lambda: 0.5)
    snapshot = look(idle)
    assert (snapshot.memory_granted, snapshot.cores_granted) == (1_000_000_000, 0.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", 0),
        ("The sea, the sea!", 4),
        ("It's well-known: 3.5 km", 4),
        ("春天来了。", 4),
        ("用 Python 写一行代码", 7),
        ("ひらがな", 4),
        ("사과 하나", 2),
    ],
)
def test_words_are_counted_as_a_word_processor_does(text, words):
    assert count_words(text) == words


def test_an_answer_of_a_real_model_is_noted_without_its_text(bot):
    figures = Performance(bot.engine, itertools.count().__next__)  # a second between any two looks
    answer = ask(bot, "Tell me a long story about the sea.", max_tokens=200)
    pieces = iter(answer)
    next(pieces)
    assert figures.snapshot().running == 1
    "".join(pieces)
    snapshot = figures.snapshot()
    bot.engine.on_answer.remove(figures.note)
    (noted,) = snapshot.answers
    stats = answer.stats
    assert noted.first_token == stats.first_token_ms / 1000 and noted.tokens_per_second == stats.tokens_per_second
    assert (noted.prompt_tokens, noted.cached_tokens, noted.answer_tokens) == (stats.prompt_tokens, stats.cached_tokens, stats.answer_tokens)
    assert noted.words == count_words(answer.text) > 0
    assert answer.text not in repr(snapshot) and "sea" not in repr(snapshot)


def test_the_engine_tells_what_computes_the_model(bot, small_model):
    info = bot.engine.info
    assert info.quantization == "Q4_1" and info.file_bytes == small_model.stat().st_size
    assert info.cpu_code and {"SSE3", "NEON"} & set(info.cpu_features)
    assert all(re.fullmatch(r"\w+", feature) for feature in info.cpu_features)


@pytest.mark.parametrize(
    ("language", "parts"),
    [
        ("en", ["No answer yet", "of 4.0\u00a0GB", "measuring", "491\u00a0MB, quantised to Q4_K_M", "494 million", "2,048 tokens", "AVX2 FMA (haswell)", "0 min"]),
        ("zh", ["还没有回答过", "/ 4.0\u00a0GB", "测量中", "491\u00a0MB，量化为 Q4_K_M", "494M", "2,048 词元", "AVX2 FMA (haswell)", "0 分钟"]),
    ],
)
def test_the_empty_view(idle, monkeypatch, language, parts):
    monkeypatch.setattr(performance, "usable_memory", lambda: Memory(4_000_000_000, 1, 0, True))
    shown = view.render(look(idle), texts.preferred(language, None))
    assert [part for part in parts if part not in shown] == []
    assert "<svg" not in shown and "a &lt;model&gt;" in shown


@pytest.mark.parametrize(
    ("language", "parts"),
    [
        ("en", ["0.12 s", "40 tokens/s", "about 10 words a second", "90%", "median of the last 2", "1.5 of 2 cores", "1 answering, 0 waiting", ": 3 (12\u00a0MB)", "1 d 2 h"]),
        ("zh", ["0.12 秒", "40 词元/秒", "约每秒 10 个字", "90%", "最近 2 次", "1.5 / 2 核", "正在回答 1 个，排队 0 个", "3 个（12\u00a0MB）", "1 天 2 小时"]),
    ],
)
def test_the_view_after_answers(idle, language, parts):
    idle.performance.note(reply())
    idle.performance.note(reply())
    snapshot = replace(look(idle), cores_used=1.5, cores_granted=2, running=1, parked=3, parked_bytes=12_345_678, uptime=26 * 3600)
    shown = view.render(snapshot, texts.preferred(language, None))
    assert [part for part in parts if part not in shown] == []


def test_plots_have_a_bar_for_each_answer_with_the_newest_at_the_right(idle):
    for first_ms in (100, 400, 200):
        idle.performance.note(reply(first_ms=first_ms))
    shown = view.render(look(idle), texts.preferred("en", None))
    plots = ElementTree.fromstring(f"<div>{shown}</div>").iter("svg")
    bars = [sorted(plot.iter("rect"), key=lambda bar: float(bar.get("x"))) for plot in plots]
    assert [len(plot) for plot in bars] == [3, 3, 3]
    assert [float(bar.get("height")) / view.HEIGHT for bar in bars[0]] == [0.25, 1, 0.5]
    assert [bar.find("title").text for bar in bars[0]] == ["0.10 s", "0.40 s", "0.20 s"]
    assert [float(bar.get("height")) / view.HEIGHT for bar in bars[2]] == [0.9] * 3  # of 100%
    assert all(0 <= float(bar.get("x")) and float(bar.get("y")) >= 0 for plot in bars for bar in plot)

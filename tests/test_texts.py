"""The page's words: both languages complete, the right one chosen, figures readable."""

import string
from types import SimpleNamespace

import pytest

from qwen_chat import texts
from qwen_chat.condense import Condensed, Size
from qwen_chat.conversation import Prompt
from qwen_chat.engine import State, Stats


def holes(value) -> list:
    return sorted(field for text in ([value] if isinstance(value, str) else value) for _, field, _, _ in string.Formatter().parse(text) if field)


def test_both_languages_have_the_same_words_with_the_same_values_in_them():
    assert texts.ZH.keys() == texts.EN.keys()
    for key in texts.EN:
        assert set(holes(texts.ZH[key])) == set(holes(texts.EN[key])), key
        assert all(texts.ZH[key]) and all(texts.EN[key]), key


@pytest.mark.parametrize(
    ("setting", "header", "language"),
    [
        ("auto", "zh-CN,zh;q=0.9,en;q=0.8", "zh"),
        ("auto", "zh-HK", "zh"),
        ("auto", "en-US,en;q=0.9,zh;q=0.8", "en"),
        ("auto", "en;q=0.5, zh-TW;q=0.9", "zh"),
        ("auto", "de", "en"),
        ("auto", "", "en"),
        ("auto", None, "en"),
        ("auto", ";q=, ,zh;q=nonsense", "en"),
        ("zh", "en-US", "zh"),
        ("en", "zh-CN", "en"),
    ],
)
def test_the_language_is_the_one_set_or_the_one_the_browser_asks_for_first(setting, header, language):
    assert texts.preferred(setting, header)("busy") == {"zh": texts.ZH, "en": texts.EN}[language]["busy"]


@pytest.mark.parametrize(
    ("state", "english", "chinese"),
    [
        (State("looking", "m.gguf"), "Looking for the model…", "正在寻找模型…"),
        (State("downloading", "m.gguf", 43, 100), "Downloading m.gguf 43%", "正在下载 m.gguf 43%"),
        (State("downloading", "m.gguf", 12_000_000, None), "Downloading m.gguf 12 MB", "正在下载 m.gguf 12 MB"),
        (State("checking", "m.gguf", 1, 2), "Checking m.gguf 50%", "正在校验 m.gguf 50%"),
        (State("loading", "m", 43, 100), "Loading model 43%", "正在加载模型 43%"),
    ],
)
def test_the_state_of_the_engine_is_told(state, english, chinese):
    assert texts.preferred("en", None).state(state) == english
    assert texts.preferred("zh", None).state(state) == chinese


def test_an_answer_that_has_not_begun_says_what_it_waits_for():
    words = texts.preferred("en", None)
    assert words.waiting(SimpleNamespace(place=2, read=0, to_read=50)) == "Waiting: 2 in line"
    assert words.waiting(SimpleNamespace(place=0, read=420, to_read=1300)) == "Reading your message: 420 of 1,300 tokens"
    assert words.waiting(SimpleNamespace(place=0, read=0, to_read=50)) == ""
    assert words.waiting(SimpleNamespace(place=0, read=50, to_read=50)) == ""


def test_a_place_in_line_that_is_given_up_while_it_is_told_is_told_as_it_was():
    class Moving:
        read, to_read, places = 0, 50, iter([1, 0])
        place = property(lambda self: next(self.places))

    assert texts.preferred("en", None).waiting(Moving()) == "Waiting: 1 in line"


def test_figures_are_one_line():
    stats = Stats(1300, 1250, 80, first_token_ms=81.6, tokens_per_second=51.4, finish_reason="stop")
    english, chinese = texts.preferred("en", None), texts.preferred("zh", None)
    assert english.figures(stats, 2048) == "first token 82 ms · 51 tokens/s · window 1,380 / 2,048 tokens · 1,250 reused"
    assert chinese.figures(stats, 2048) == "首字 82 ms · 51 词元/秒 · 窗口 1,380 / 2,048 词元 · 复用 1,250"


def test_figures_say_what_was_cut_and_what_was_condensed():
    words = texts.preferred("en", None)
    slow = Stats(10, 0, 512, first_token_ms=2340, tokens_per_second=3.21, finish_reason="length")
    assert words.figures(slow, 1024, Condensed("", 12400, 900, 8, None)) == (
        "first token 2.3 s · 3.2 tokens/s · window 522 / 1,024 tokens · 0 reused"
        " · stopped at the limit of 512 tokens · the message was condensed from 12,400 to 900 tokens in 8 parts"
    )
    assert words.figures(slow, 1024, Condensed("", 1400, 900, 1, None)).endswith("from 1,400 to 900 tokens")


def test_the_line_says_what_the_model_no_longer_sees():
    english, chinese = texts.preferred("en", None), texts.preferred("zh", None)
    assert english.out_of_view(Prompt([], 1)) == ""
    assert english.out_of_view(Prompt([], 1, dropped=1)) == "The model no longer sees the first round"
    assert english.out_of_view(Prompt([], 1, dropped=3)) == "The model no longer sees the first 3 rounds"
    assert english.out_of_view(Prompt([], 1, dropped=3, note="x")) == "The model has a short note of the first 3 rounds"
    assert chinese.out_of_view(Prompt([], 1, dropped=3)) == "最早的 3 轮对话，模型已看不到"


def test_the_size_of_what_is_typed_is_told_once_it_is_noticeable():
    words = texts.preferred("en", None)
    assert words.size(Size(512, 2048, 1900, "fits")) == ""
    assert words.size(Size(1240, 2048, 1900, "fits")) == "1,240 / 2,048 tokens"
    assert words.size(Size(2000, 2048, 1900, "condensed")) == "2,000 / 2,048 tokens · will be condensed"
    assert words.size(Size(2000, 2048, 1900, "refused")) == "2,000 tokens · at most 1,900, 100 too many"


def test_figures_leave_out_what_was_not_measured():
    assert texts.preferred("en", None).figures(Stats(10, 4, 0), 1024) == "window 10 / 1,024 tokens · 4 reused"


def test_the_last_line_of_the_page_names_the_profile_in_force():
    english, chinese = texts.preferred("en", None), texts.preferred("zh", None)
    assert english.about("1.0", "qwen", "n100") == "qwen-chat 1.0 · qwen · llama.cpp · profile n100"
    assert chinese.about("1.0", "qwen", "n100") == "qwen-chat 1.0 · qwen · llama.cpp · 设备配置 n100"
    assert english.about("1.0", "qwen", None) == "qwen-chat 1.0 · qwen · llama.cpp"


def test_why_a_stand_in_is_in_use_is_said_in_the_pages_language():
    reason = "huggingface.co and hf-mirror.com cannot be reached; b.example has no such file"
    assert texts.Words(texts.ZH).fallback("M", reason) == "当前使用的是备用模型：M。无法连接 huggingface.co、hf-mirror.com; b.example has no such file"
    assert texts.Words(texts.EN).fallback("M", reason) == f"This is a stand-in: M. {reason}"
    assert texts.Words(texts.ZH).fallback("M", "model.endpoints is empty").endswith("。model.endpoints is empty")

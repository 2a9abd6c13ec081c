"""How quantisations are compared: against an independent computation, and on what cannot be compared."""

import argparse
import json
import math
from types import SimpleNamespace

import llama_cpp
import numpy as np
import pytest

from qwen_chat import __main__ as tools
from qwen_chat import quality, samples
from qwen_chat.config import Runtime
from qwen_chat.quality import Quality, as_table, log_softmax, measure

TEXT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid. " * 6  # more than one chunk


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CONFIG", str(tmp_path / "config.yaml"))
    (tmp_path / "config.yaml").write_text("{}")

    def run(*arguments) -> SimpleNamespace:
        status = tools.main(["quality", *map(str, arguments)])
        captured = capsys.readouterr()
        return SimpleNamespace(status=status, out=captured.out, error=captured.err)

    return run


def test_log_softmax():
    logits = np.array([[0.0, math.log(3)], [1000.0, 1000.0]], np.float32)
    np.testing.assert_allclose(log_softmax(logits), np.log([[0.25, 0.75], [0.5, 0.5]]), rtol=1e-6)


def test_perplexity_is_that_of_a_simple_computation(small_model, text):
    """With llama-cpp-python's own class, one probability after the other."""
    llama = llama_cpp.Llama(str(small_model), n_ctx=512, logits_all=True, verbose=False)
    tokens = llama.tokenize(TEXT.encode(), add_bos=False)
    llama.eval(tokens)
    loss = 0.0
    for position, token in enumerate(tokens[1:]):
        scores = [float(score) for score in llama.scores[position]]
        most = max(scores)
        loss += most + math.log(sum(math.exp(score - most) for score in scores)) - scores[token]
    llama.close()
    result = measure([small_model], text, Runtime(), rounds=0)[0]
    assert result.perplexity == pytest.approx(math.exp(loss / (len(tokens) - 1)), rel=0.01)


def test_a_file_does_not_differ_from_itself(small_model, text):
    first, second = measure([small_model, small_model], text, Runtime(), rounds=1)
    assert first.divergence == second.divergence == pytest.approx(0, abs=1e-6)
    assert first.same_top == second.same_top == 1
    assert second.perplexity == first.perplexity
    assert len(second.answer) == len(second.prompt) == 1 and second.answer[0] > 0


def test_divergence_and_top_are_those_of_the_distributions(monkeypatch, text):
    """Three tokens to choose from: what the models say is known, so the figures are."""
    said = np.log(np.array([[[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [1, 1, 1]], [[0.3, 0.5, 0.2], [0.1, 0.8, 0.1], [1, 1, 1]]], np.float32))
    models = [SimpleNamespace(score=lambda tokens, logits=logits: iter([logits[:2], logits[2:]]), n_vocab=3, piece=lambda token: b"x") for logits in said]
    results = [Quality("a", 1), Quality("b", 1)]
    quality._score(models, [[0, 0, 1]], results)
    assert results[0].perplexity == pytest.approx((0.5 * 0.8) ** -0.5)
    assert results[1].perplexity == pytest.approx((0.3 * 0.8) ** -0.5)
    assert results[1].divergence == pytest.approx((0.5 * math.log(0.5 / 0.3) + 0.3 * math.log(0.3 / 0.5)) / 2)
    assert results[1].same_top == 0.5


def test_models_of_different_vocabularies_are_refused():
    models = [SimpleNamespace(n_vocab=n, piece=lambda token: b"x", path=SimpleNamespace(name=f"{n}.gguf")) for n in (3, 4)]
    with pytest.raises(quality.ModelError, match="4.gguf has another vocabulary than 3.gguf"):
        quality._compare_vocabularies(models)


def test_vocabularies_differ_where_some_tokens_do():
    models = [SimpleNamespace(n_vocab=200, piece=lambda token, other=other: b"x" if token < 100 else other, path=SimpleNamespace(name="x")) for other in (b"y", b"z")]
    with pytest.raises(quality.ModelError, match="another vocabulary"):
        quality._compare_vocabularies(models)


def test_models_take_turns_and_the_first_round_does_not_count(monkeypatch):
    order, figures = [], iter([(1, 1), (1, 1), (200, 20), (100, 10), (100, 10), (200, 40)])
    monkeypatch.setattr(quality, "speeds", lambda model: order.append(model) or next(figures))
    results = [Quality("a", 1), Quality("b", 1)]
    quality._time(["a", "b"], 2, results)
    assert order == ["a", "b", "b", "a", "a", "b"]  # who was first is second in the next round
    assert results[1].prompt == [200, 200] and results[0].prompt == [100, 100]
    assert (results[1].prompt_ratio, results[1].answer_ratio, results[0].answer_ratio) == (2, 3, 1)


def test_speeds_are_tokens_by_seconds(monkeypatch):
    read = []
    model = SimpleNamespace(forget=lambda: None, read=lambda tokens, position, every=True: read.append(len(tokens)))
    monkeypatch.setattr(quality.time, "perf_counter", lambda times=iter([0.0, 2.0, 5.0]): next(times))
    prompt, answer = quality.speeds(model)
    assert read == [quality.CHUNK] * 2 + [1] * quality.ANSWER
    assert (prompt, answer) == (quality.CHUNK, quality.ANSWER / 3)


def test_rounds_are_a_number_up_to_a_thousand():
    assert [quality._rounds(text) for text in ("0", "1000")] == [0, 1000]
    for text in ("1001", "-1", "²", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="from 0 to 1000"):
            quality._rounds(text)


def test_ratios_are_made_round_by_round():
    assert quality._ratio([2, 8, 3], [1, 2, 3]) == 2
    assert quality._ratio([], []) == 1


def test_the_table_and_the_json_say_the_same(run, small_model, text):
    files = [small_model, small_model]
    table = run(*files, "--text", text, "--rounds", "0")
    assert table.status == 0
    rows = table.out.splitlines()
    assert rows[0].split()[:2] == ["MB", "perplexity"] and "tok/s" not in rows[0]
    found = json.loads(run(*files, "--text", text, "--rounds", "0", "--json").out)
    assert rows[2].split()[1:] == ["98", f"{found[1]['perplexity']:.3f}", "1.000", "0.0000", "100.0%"]


def test_the_table_has_speeds_where_they_were_measured():
    first = Quality("a/first.gguf", 491_400_064, 10.0, 0.0, 1.0, [50.0, 52.0, 51.0], [200.0] * 3)
    second = Quality("b/second.gguf", 361_000_000, 10.5, 0.0213, 0.913, [100.0] * 3, [300.0] * 3, 1.96, 1.5)
    rows = as_table([first, second]).splitlines()
    assert rows[1].split() == ["first.gguf", "491", "10.000", "1.000", "0.0000", "100.0%", "51.0", "1.00", "200", "1.00"]
    assert rows[2].split() == ["second.gguf", "361", "10.500", "1.050", "0.0213", "91.3%", "100.0", "1.96", "300", "1.50"]


def test_what_cannot_be_read_is_explained(run, small_model, tmp_path):
    assert "none.gguf: no such file" in run(small_model, tmp_path / "none.gguf").error
    (tmp_path / "page.gguf").write_text("<html>")
    result = run(tmp_path / "page.gguf")
    assert result.status == 1 and "page.gguf: not a GGUF file" in result.error
    assert "No such file" in run(small_model, "--text", tmp_path / "none.txt").error


def test_the_two_built_in_texts_have_no_line_in_common():
    lines = [
        {line.strip() for entry in samples.load(file) for text in ([entry] if isinstance(entry, str) else entry) for line in text.splitlines() if len(line.strip()) > 12}
        for file in (samples.CALIBRATION, samples.EVALUATION)
    ]
    assert min(map(len, lines)) > 50 and not lines[0] & lines[1]


def test_long_texts_are_cut_and_dialogues_rendered(bot, tmp_path):
    (tmp_path / "a.yaml").write_text('["one two three four five six", ["Hello?", "Yes."], "x"]')
    model = bot.engine.model
    pieces = samples.windows(tmp_path / "a.yaml", model, 4)
    whole = model.tokenize("one two three four five six")
    assert pieces[0] == whole[:4] and all(2 <= len(piece) <= 4 for piece in pieces)
    text = b"".join(model.piece(token, special=True) for piece in pieces[2:] for token in piece).decode()
    assert "<|im_start|>user\nHello?" in text and "Yes." in text and "x" not in text

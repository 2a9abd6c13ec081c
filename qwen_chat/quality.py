"""python -m qwen_chat quality: what a quantisation costs and brings, several files beside each other.

All are compared with the first file, on the same texts, token by token; speed is measured in turns, so that
what else the machine does hits all alike.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from . import interrupt, samples
from .bench_report import table
from .config import load_or_exit
from .model import ModelError
from .offline import CHUNK, WINDOW, Scorer

ANSWER = 24  # tokens whose speed is measured in a round


@dataclass
class Quality:
    """What was found out about one file. Speeds are tokens/s, one for each round; the ratios are to the first file.

    `perplexity` is e to the mean of -log p(token); `divergence` the mean Kullback-Leibler divergence from the
    first file's distribution, in nats a token; `same_top` how often both find the same token likeliest.
    """

    file: str
    size_bytes: int
    perplexity: float = 0.0
    divergence: float = 0.0
    same_top: float = 0.0
    answer: list[float] = field(default_factory=list)
    prompt: list[float] = field(default_factory=list)
    answer_ratio: float = 1.0
    prompt_ratio: float = 1.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE.gguf", help="the files; the first is what the others are compared with. All are in memory at once")
    parser.add_argument("--text", metavar="FILE", help="measure on this text (or .yaml list of texts) instead of the built-in one: Chinese, English and code")
    parser.add_argument("--rounds", type=_rounds, default=7, metavar="N", help="how often the speed is measured (7; 0: not at all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options) -> int:
    """0, or 1 where a file or a text cannot be used."""
    runtime = load_or_exit().runtime
    try:
        results = measure([Path(name) for name in options.files], Path(options.text) if options.text else samples.EVALUATION, runtime, options.rounds)
    except (ModelError, samples.SampleError) as error:
        interrupt.check()  # which ends loading
        print(f"quality: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=1, ensure_ascii=False))
    else:
        print(as_table(results))
    return 0


def measure(files: list[Path], text: Path, runtime, rounds: int) -> list[Quality]:
    """The quality of each file, beside the first. Raises ModelError and samples.SampleError."""
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file}: no such file")
    models: list[Scorer] = []
    try:
        for file in _steps(files, "loading"):
            models.append(Scorer(file, runtime))
        results = [Quality(str(file), os.path.getsize(file)) for file in files]
        _score(models, samples.windows(text, models[0], WINDOW), results)
        _time(models, rounds, results)
        return results
    finally:
        for model in models:
            model.close()


def _score(models: list[Scorer], texts: list[list[int]], results: list[Quality]) -> None:
    _compare_vocabularies(models)
    losses, divergences, tops = np.zeros((3, len(models)))
    count = 0
    for tokens in _steps(texts, "reading"):
        start = 0
        for pieces in zip(*(model.score(tokens) for model in models)):
            following = tokens[start + 1 : start + 1 + len(pieces[0])]
            start += len(pieces[0])
            count += len(following)
            reference = log_softmax(pieces[0][: len(following)])
            for number, piece in enumerate(pieces):
                own = log_softmax(piece[: len(following)]) if number else reference
                losses[number] -= own[np.arange(len(following)), following].sum(dtype=np.float64)
                divergences[number] += (np.exp(reference) * (reference - own)).sum(dtype=np.float64)
                tops[number] += (own.argmax(axis=1) == reference.argmax(axis=1)).sum()
    for number, result in enumerate(results):
        result.perplexity = float(np.exp(losses[number] / count))
        result.divergence = float(divergences[number] / count)
        result.same_top = float(tops[number] / count)


def _compare_vocabularies(models: list[Scorer]) -> None:
    first = models[0]
    for model in models[1:]:
        tokens = range(0, first.n_vocab, 97)
        if model.n_vocab != first.n_vocab or any(model.piece(token) != first.piece(token) for token in tokens):
            raise ModelError(f"{model.path.name} has another vocabulary than {first.path.name}: only quantisations of one model can be compared")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities of each row, float32."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)


def _time(models: list[Scorer], rounds: int, results: list[Quality]) -> None:
    """A round has every model read a prompt and answer; the first round, in which all grow warm, does not count."""
    for number in _steps(range(rounds + 1 if rounds else 0), "timing"):
        for index in (np.arange(len(models)) + number) % len(models):
            prompt, answer = speeds(models[index])
            if number:
                results[index].prompt.append(prompt)
                results[index].answer.append(answer)
    for result in results:
        result.prompt_ratio = _ratio(result.prompt, results[0].prompt)
        result.answer_ratio = _ratio(result.answer, results[0].answer)


def speeds(model: Scorer) -> tuple[float, float]:
    """Tokens/s of reading a prompt and of answering. Which tokens does not matter."""
    model.forget()
    begun = time.perf_counter()
    for start in (0, CHUNK):
        model.read([start + 1] * CHUNK, start, every=False)
    read = time.perf_counter()
    for position in range(2 * CHUNK, 2 * CHUNK + ANSWER):
        model.read([position], position)
    return 2 * CHUNK / (read - begun), ANSWER / (time.perf_counter() - read)


def _ratio(values: list[float], firsts: list[float]) -> float:
    return statistics.median(value / first for value, first in zip(values, firsts)) if values else 1.0


def as_table(results: list[Quality]) -> str:
    first = results[0]
    head = ["", "MB", "perplexity", "of the first", "divergence", "same top"]
    timed = bool(first.answer)
    if timed:
        head += ["answer tok/s", "of the first", "prompt tok/s", "of the first"]
    rows = []
    for result in results:
        row = [Path(result.file).name, f"{result.size_bytes / 1e6:.0f}", f"{result.perplexity:.3f}",
               f"{result.perplexity / first.perplexity:.3f}", f"{result.divergence:.4f}", f"{result.same_top:.1%}"]
        if timed:
            row += [f"{statistics.median(result.answer):.1f}", f"{result.answer_ratio:.2f}",
                    f"{statistics.median(result.prompt):.0f}", f"{result.prompt_ratio:.2f}"]
        rows.append(row)
    return table(head, rows)


def _steps(things: Iterable, what: str):
    from huggingface_hub.utils import tqdm

    return tqdm(things, desc=what, leave=False, disable=not sys.stderr.isatty())


def _rounds(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 1000):
        raise argparse.ArgumentTypeError(f"{text!r} found; allowed: a whole number from 0 to 1000")
    return int(text)

"""python -m qwen_chat bench: how fast this machine answers, each figure beside its target.

Machines are noisy, so everything is measured several times, what is compared is measured in turns, and
ratios are made pair by pair. The work is the same for everybody: fixed texts, their lengths counted in
tokens, the likeliest token taken each time. Of config.yaml the weights, `runtime` and the system prompt count.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil

from . import bench_report as report
from . import child, interrupt, weights
from .bench_report import Figure, Part, ratios
from .bench_sides import BenchError, EngineSide, HttpSide, LlamaSide, Texts, assistant, user
from .config import Chat, Config, load_or_exit
from .conversation import Conversation, TooLong
from .engine import Engine, EngineError
from .hardware import allowed_processors, cpu_model, cpu_quota
from .model import ModelError

ROOT = Path(__file__).resolve().parent.parent
HISTORIES = (100, 500, 1000)  # tokens
TYPED = (16, 128, 512)  # tokens of a message
AT_ONCE = (1, 2, 4, 8)
TALKS = 16
SPARE = 160  # tokens of the window that questions and answers take beside a history
GAP_PROMPT = 1000  # tokens another one has to read while an answer flows
SMALL_WINDOW = 1024
ANSWER = 96  # tokens of an answer whose speed is measured
SHORT = 8  # tokens of an answer that is only there to be continued


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="FILE", help="measure this .gguf instead of config.yaml's")
    parser.add_argument("--quick", action="store_true", help="few repeats and shorter runs: a glance, not a measurement")
    parser.add_argument("--repeats", type=_positive, metavar="N", help="how often each is measured (5; 2 with --quick)")
    parser.add_argument("--only", type=_names, metavar="NAME[,NAME]", help=f"of {', '.join(MEASUREMENTS)}")
    parser.add_argument("--contexts", type=_sizes, metavar="N[,N]", help="a table over window sizes, such as 512,1024,2048,4096")
    parser.add_argument("--against", metavar="URL", help="the same work on a server with OpenAI's API, side by side")
    parser.add_argument("--answers", type=_positive, metavar="N", help="answers over which memory is watched (200; 20 with --quick)")
    parser.add_argument("--json", metavar="FILE", help="write all figures, raw ones too; - is standard output")
    parser.add_argument("--figure", metavar="FILE", help="first token over the turns of `window`: .svg, or .png where matplotlib is installed")


def run(options) -> int:
    """0 when everything was measured, 1 when a part failed or an option cannot be carried out."""
    try:
        config = _for_measuring(load_or_exit(), options.model)
        measurements = _chosen(options)
        _check_files(options, measurements)
        bench = Bench(config, weights.find(config.model), options)
        return _measure_all(bench, measurements, options)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


def _for_measuring(config: Config, model: str | None) -> Config:
    """The configuration with nothing that would make the work another: no turn dropped before it must be."""
    chat = Chat(system_prompt=config.chat.system_prompt)
    found = config.model if model is None else config.model.model_copy(update={"path": os.path.abspath(model)})
    generation = config.generation.model_copy(update={"stop": []})
    return config.model_copy(update={"chat": chat, "model": found, "generation": generation})


def _chosen(options) -> dict:
    """Which measurements are asked for: --contexts and --against stand alone unless --only names more."""
    names = options.only or ([] if options.contexts or options.against else list(MEASUREMENTS))
    chosen = {name: MEASUREMENTS[name] for name in MEASUREMENTS if name in names}
    if options.contexts:
        chosen["contexts"] = contexts
    if options.against:
        chosen["against"] = against
    return chosen


def _check_files(options, measurements: dict) -> None:
    """What cannot be written is told before anything is measured, not after."""
    for name in ("json", "figure"):
        file = getattr(options, name)
        if file and file != "-" and (fault := report.why_not_writable(file)):
            raise BenchError(f"--{name} {file}: {fault}")
    if not options.figure:
        return
    if not options.figure.endswith((".svg", ".png")):
        raise BenchError(f"--figure {options.figure}: the name must end in .svg or .png")
    if options.figure.endswith(".png") and not importlib.util.find_spec("matplotlib"):
        raise BenchError("a .png needs matplotlib, which is not installed here; name a file that ends in .svg")
    if "window" not in measurements:
        raise BenchError("--figure shows the measurement `window`, which --only, --contexts and --against leave out; add --only window")


def _measure_all(bench: "Bench", measurements: dict, options) -> int:
    out = sys.stderr if options.json == "-" else sys.stdout
    about = bench.about()
    print(report.listed(about), file=out, flush=True)
    parts = {}
    for number, (name, measure) in enumerate(measurements.items(), 1):
        bench.label = f"{number}/{len(measurements)} {name}"
        begun = time.perf_counter()
        try:
            parts[name] = measure(bench)
        except (BenchError, EngineError, TooLong) as error:
            parts[name] = Part(name, error=str(error))
        parts[name].raw["seconds"] = round(time.perf_counter() - begun, 1)
        print(parts[name].text(), file=out, flush=True)
    _write(options, about, parts)
    return int(any(part.error for part in parts.values()))


def _write(options, about: dict, parts: dict[str, Part]) -> None:
    if options.json:
        text = json.dumps({"about": about, "parts": {name: part.as_dict() for name, part in parts.items()}}, indent=1, ensure_ascii=False)
        print(text) if options.json == "-" else Path(options.json).write_text(text + "\n", encoding="utf-8")
    turns = options.figure and parts["window"].raw.get("turns")
    if turns:
        title = f"First token over {len(turns)} turns, window of {parts['window'].raw['n_ctx']} tokens"
        subtitle = f"{about['file']}, {about['cpu']}, {about['threads']}"
        if options.figure.endswith(".svg"):
            Path(options.figure).write_text(report.svg(turns, title, subtitle), encoding="utf-8")
        else:
            report.png(turns, title, subtitle, options.figure)


class Bench:
    """What the measurements share: the settings, the weights, how often, and how far they are."""

    def __init__(self, config: Config, found: weights.Weights, options):
        self.config = config
        self.found = found
        self.quick = options.quick
        self.repeats = options.repeats or (2 if options.quick else 5)
        self.answers = options.answers or (20 if options.quick else 200)
        self.contexts = options.contexts
        self.against = options.against
        self.answer = 16 if options.quick else ANSWER
        self.label = ""
        self._number = 0

    @contextmanager
    def engine(self, **runtime):
        """An engine that is ready, on config.yaml's `runtime` with these changes; closed at the end."""
        with started(self.config, self.found, **runtime) as side:
            yield side

    def number(self) -> int:
        """A number not used before, for a text that nobody has computed yet."""
        self._number += 1000
        return self._number

    def steps(self, total: int, what: str = ""):
        """range(total), with a progress bar on a terminal. Raises Interrupted where the work was asked to end."""
        from huggingface_hub.utils import tqdm

        for number in tqdm(range(total), desc=f"{self.label} {what}".strip(), leave=False, disable=not sys.stderr.isatty()):
            interrupt.check()
            yield number

    def about(self) -> dict:
        """On what all this is measured."""
        import llama_cpp

        runtime = self.config.runtime
        with self.engine(parallel=1) as side:
            info = side.engine.info
        quota = cpu_quota()
        limit = f", a quota of {quota:g}" if quota else ""
        file = Path(info.path)
        return {
            "cpu": cpu_model(),
            "threads": f"{info.n_threads} of {allowed_processors()} processors{limit}",
            "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, llama-cpp-python {llama_cpp.__version__}",
            "file": f"{file.name}, {file.stat().st_size / 1e6:,.0f} MB, {info.n_params / 1e6:,.0f} million parameters",
            "runtime": ", ".join(f"{name} {getattr(runtime, name)}" for name in ("n_batch", "n_ubatch", "flash_attn", "kv_type", "parallel", "cache_mb")),
            "window": f"n_ctx {info.n_ctx}",
            "project": commit(),
            "repeats": str(self.repeats) + (", quick" if self.quick else ""),
        }


@contextmanager
def started(config: Config, found: weights.Weights, **runtime):
    """An EngineSide on an engine of its own, from its start on; closed at the end."""
    settings = Config.model_validate({**config.model_dump(), "runtime": {**config.runtime.model_dump(), **runtime}})
    engine = Engine(settings.runtime, lambda report: found, 64, lambda: conversation.opening())
    conversation = Conversation(engine, settings)
    try:
        engine.start()
        while not engine.ready.wait(0.002):
            interrupt.check()
            if isinstance(engine.error, ModelError):
                raise weights.UnusableWeights(str(engine.error))
            if engine.ended.is_set():
                raise EngineError(str(engine.error))
        yield EngineSide(engine, conversation)
    finally:
        engine.close(timeout=30)


def texts_of(side: EngineSide) -> Texts:
    return Texts(lambda text: len(side.engine.model.tokenize(text)))


def system_of(bench: Bench) -> list[dict]:
    text = bench.config.chat.system_prompt
    return [{"role": "system", "content": text}] if text else []


def fitting(side: EngineSide, lengths) -> list[int]:
    """The lengths for which the window has room beside questions and answers."""
    return [length for length in lengths if length + SPARE < side.engine.n_ctx]


def left_out(side: EngineSide, lengths) -> str:
    others = [str(length) for length in lengths if length not in fitting(side, lengths)]
    return f" Left out, for n_ctx {side.engine.n_ctx} is too small: {', '.join(others)}." if others else ""


# The measurements. Each takes the bench and gives its part of the report.


def load(bench: Bench) -> Part:
    """From the start of an engine until it answers, and the first answer of all."""
    loads, firsts = [], []
    for _ in bench.steps(bench.repeats):
        begun = time.perf_counter()
        with bench.engine() as side:
            loads.append(time.perf_counter() - begun)
            firsts.append(side.ask([user("What is the capital of France?")], SHORT).first_ms)
    return Part(
        "Load", "A new engine each time; the file has been read before. Cold: only the system prompt is computed.",
        [Figure("load, start to ready", "s", loads), Figure("first token, cold", "ms", firsts)],
    )


def follow_up(bench: Bench) -> Part:
    """A later turn's first token, with the history kept and with it computed anew."""
    with bench.engine() as side:
        texts, figures, raw = texts_of(side), [], {}
        for length in fitting(side, HISTORIES):
            pairs = [follow_up_pair(bench, side, texts, length) for _ in bench.steps(bench.repeats, f"{length} tokens")]
            kept, anew = ([pair[which].first_ms for pair in pairs] for which in (0, 1))
            raw[length] = [{"prompt": a.prompt_tokens, "reused": a.cached_tokens, "computed_anew": b.prompt_tokens - b.cached_tokens} for a, b in pairs]
            figures += [
                Figure(f"{length} tokens of history, reused", "ms", kept),
                Figure(f"{length} tokens of history, computed anew", "ms", anew),
                Figure(f"{length} tokens of history, ratio", "", ratios(kept, anew), at_most=0.15 if length == 1000 else None),
            ]
        note = "First token of a later turn; \"anew\" is the same conversation in other words, of which nothing is computed." + left_out(side, HISTORIES)
    return Part("Follow-up", note, figures, raw={"tokens": raw})


def follow_up_pair(bench: Bench, side, texts: Texts, length: int):
    """The answers of a turn that goes on with a history of `length` tokens, and of one whose history is new."""
    question, next_question = user("What came first?"), user("And what came after that?")
    room = length - 2 * 5 - SHORT - 5  # for the question before, and its answer
    known, other = (texts.history(room, bench.number()) for _ in range(2))
    owner = object()
    before = side.ask([*known, question], SHORT, owner)
    side.settle()
    kept = side.ask([*known, question, assistant(before.text), next_question], SHORT, owner)
    side.settle()
    anew = side.ask([*other, question, assistant(before.text), next_question], SHORT, object())
    side.settle()
    return kept, anew


def typed_ahead(bench: Bench) -> Part:
    """The first token after Enter, when the message was computed while it was typed."""
    with bench.engine() as side:
        texts, figures = texts_of(side), []
        for length in fitting(side, TYPED):
            times, steps = [], []
            for _ in bench.steps(bench.repeats, f"{length} tokens"):
                message, owner = texts.text(length, bench.number()), object()
                for part in (3, 2, 1):
                    side.type_ahead([user(message[: len(message) // part])], owner)
                times.append(side.ask([user(message)], SHORT, owner).first_ms)
                side.settle()
                steps.append(times[-1] * side.ask([texts.story(bench.number())], bench.answer).speed / 1000)
                side.settle()
            figures += [Figure(f"message of {length} tokens", "ms", times),
                        Figure(f"message of {length} tokens, in decode steps", "", steps, at_most=3)]
        note = "First token after Enter. A decode step is the time between two tokens of an answer right after it." + left_out(side, TYPED)
    return Part("Typed ahead", note, figures)


def speed(bench: Bench) -> Part:
    """Answer speed: against a bare loop of llama.cpp, and for several at once."""
    ours, bare = [], []
    with bench.engine(parallel=1) as side:
        for _ in bench.steps(bench.repeats, "one"):
            story = texts_of(side).story(bench.number())
            ours.append(side.ask([story], bench.answer).speed)
            side.settle()
            bare.append(side.bare_speed([story], bench.answer))
    figures = [Figure("one answer", "tokens/s", ours), Figure("bare decode loop", "tokens/s", bare),
               Figure("one answer / bare loop", "", ratios(ours, bare), at_least=0.97)]
    totals = {count: [] for count in AT_ONCE}
    each = {count: [] for count in AT_ONCE}
    for _ in bench.steps(bench.repeats, "several"):
        for count in AT_ONCE:
            with bench.engine(parallel=count) as side:
                total, single = at_once(bench, side, count)
            totals[count].append(total)
            each[count].append(single)
    for count in AT_ONCE:
        figures += [Figure(f"{count} at once, in all", "tokens/s", totals[count]), Figure(f"{count} at once, each", "tokens/s", each[count])]
    figures += [Figure(f"{count} at once / 1, in all", "", ratios(totals[count], totals[1])) for count in AT_ONCE[1:]]
    return Part("Answer speed", f"Answers of {bench.answer} tokens; with parallel as large as answers are at once.", figures)


def at_once(bench: Bench, side, count: int) -> tuple[float, float]:
    """Tokens/s of `count` answers together, from the first token of the first to the end of the last; and the middle one's own."""
    stories = [Texts.story(bench.number()) for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda story: side.ask([story], bench.answer, object()), stories))
    side.settle()
    seconds = max(answer.ended for answer in answers) - min(answer.times[0] for answer in answers if answer.times)
    return sum(answer.tokens for answer in answers) / seconds, statistics.median(answer.speed for answer in answers)


def gap(bench: Bench) -> Part:
    """How long an answer pauses while another's long prompt is read."""
    gaps, before = [], []
    with bench.engine(parallel=max(2, bench.config.runtime.parallel)) as side, ThreadPoolExecutor(1) as pool:
        length = min(200 if bench.quick else GAP_PROMPT, side.engine.n_ctx - SPARE)
        for _ in bench.steps(bench.repeats):
            most = side.engine.n_ctx - SPARE
            steady = side.stream([Texts.story(bench.number())], most, object())
            with interrupt.waking(steady.cancel):  # for which the pool waits
                times = pool.submit(lambda: [time.perf_counter() for _ in steady])
                _until(lambda: len(steady.tokens) >= 8 or steady.ended)
                asked = time.perf_counter()
                other = side.ask([user(texts_of(side).text(length, bench.number()))], 1, object())
                _until(lambda: len(steady.tokens) >= most or steady.ended or time.perf_counter() > other.ended + 0.5)
                steady.cancel()
                moments = times.result()
            before.append(_longest_gap(moments, 0, asked))
            gaps.append(_longest_gap(moments, asked, other.ended))
            side.settle()
    note = f"Between two pieces of an answer, while another prompt of {length} tokens is read."
    return Part("Longest pause", note, [Figure("answer alone", "s", before), Figure("while another is read", "s", gaps, at_most=0.3)])


def _until(condition) -> None:
    while not condition():
        interrupt.sleep(0.005)


def _longest_gap(moments: list[float], start: float, end: float) -> float:
    """The longest gap that touches start ... end."""
    pairs = [(a, b) for a, b in zip(moments, moments[1:]) if b > start and a < end]
    if not pairs:
        raise BenchError("the steady answer ended before the other prompt was read")
    return max(b - a for a, b in pairs)


def baseline(bench: Bench) -> Part:
    """The same turns by llama-cpp-python's Llama class."""
    with bench.engine() as side:
        info, texts = side.engine.info, texts_of(side)
        other = LlamaSide(info.path, info.n_ctx, info.n_threads, bench.config.runtime.flash_attn, system_of(bench))
        try:
            pairs = []
            for length in fitting(side, HISTORIES):
                pairs += follow_up_rows(bench, side, other, texts, length, ("follow-up",))
            speeds = [_each_in_turn(bench, (side, other), lambda each, story: each.ask([story], bench.answer).speed) for _ in bench.steps(bench.repeats, "speed")]
            pairs.append(pair("answer", "tokens/s", *zip(*speeds), at_least=1))
        finally:
            other.close()
    note = "First token of follow-ups, and answer speed; the other: llama-cpp-python's Llama class with its defaults, same file, window and threads."
    return Part("Beside the Llama class", note, pairs=pairs)


def _each_in_turn(bench: Bench, sides, measure) -> list[float]:
    """`measure(side, story)` of each side, one after the other, with the same story."""
    story, results = Texts.story(bench.number()), []
    for side in sides:
        results.append(measure(side, story))
        side.settle()
    return results


def follow_up_rows(bench: Bench, side, other, texts: Texts, length: int, which) -> list:
    """Rows of both sides' first tokens: "follow-up" with the history kept, "computed anew"."""
    results = {name: ([], []) for name in ("follow-up", "computed anew")}
    for _ in bench.steps(bench.repeats, f"{length} tokens"):
        for column, each in enumerate((side, other)):
            kept, anew = follow_up_pair(bench, each, texts, length)
            results["follow-up"][column].append(kept.first_ms)
            results["computed anew"][column].append(anew.first_ms)
    return [pair(f"{name}, {length} tokens of history", "ms", *results[name], at_most=1) for name in which]


def pair(name: str, unit: str, ours, theirs, **target) -> tuple[Figure, Figure, Figure]:
    ours, theirs = list(ours), list(theirs)
    return (Figure(f"{name}, this project", unit, ours), Figure(f"{name}, the other", unit, theirs),
            Figure(f"{name}, this project / the other", "", ratios(ours, theirs), **target))


def turns(bench: Bench) -> Part:
    """Sixteen conversations taking turns, beside one alone."""
    with bench.engine() as side:
        talks = Talks(bench, side, texts_of(side))
        for _ in bench.steps(bench.repeats):
            talks.round()
    note = f"First token of a follow-up; {TALKS} conversations with a history of about {talks.length} tokens, parallel {bench.config.runtime.parallel}."
    return Part("Taking turns", note, talks.figures())


class Talks:
    """Conversations that take turns, and one that goes on alone in between, at the same length."""

    def __init__(self, bench: Bench, side, texts: Texts):
        self.side = side
        self.length, self.answer = (24, 2) if bench.quick else (200, SHORT)
        self.alone: list[float] = []
        self.turns: list[float] = []
        self._talks = [texts.history(self.length, bench.number()) for _ in range(TALKS + 1)]
        self._owners = [object() for _ in self._talks]
        self._asked = 0
        for number in bench.steps(len(self._talks), "histories"):
            self._turn(number)

    def round(self) -> None:
        """Each conversation takes one turn; then one takes several, of which the first only brings it back."""
        turns = [self._turn(number) for number in range(TALKS)]
        size = len(self._talks[0])
        self._turn(TALKS)
        alone = [self._turn(TALKS) for _ in range(4)]
        del self._talks[TALKS][size:]
        self.turns.append(statistics.median(turns))
        self.alone.append(statistics.median(alone))

    def figures(self) -> list[Figure]:
        return [Figure("one alone", "ms", self.alone), Figure(f"{TALKS} taking turns", "ms", self.turns),
                Figure("ratio", "", ratios(self.turns, self.alone), at_most=1.1)]

    def _turn(self, number: int) -> float:
        self._asked += 1
        talk = self._talks[number]
        talk.append(user(f"Say it in other words, please ({self._asked % 90 + 10})."))
        answer = self.side.ask(talk, self.answer, self._owners[number])
        talk.append(assistant(answer.text))
        self.side.settle()
        return answer.first_ms


def window(bench: Bench) -> Part:
    """A long conversation in a small window, which drops its oldest turns all the time."""
    n_ctx, count, length = (256, 24, 8) if bench.quick else (SMALL_WINDOW, 100, 24)
    messages, owner, rows = [], object(), []
    with bench.engine(n_ctx=n_ctx) as side:
        for number in bench.steps(count):
            messages.append(user(f"Question {number + 10}: what about the {_colour(number)} door, and who went through it?"))
            dropped = side.conversation.prompt(messages, length).dropped
            answer = side.ask(messages, length, owner)
            side.settle()
            messages.append(assistant(answer.text))
            rows.append({"first_ms": answer.first_ms, "prompt": answer.prompt_tokens, "reused": answer.cached_tokens, "dropped": dropped})
    early, late = rows[1:11], rows[-10:]
    figures = [
        Figure("turns 2 to 11", "ms", [row["first_ms"] for row in early]),
        Figure(f"turns {count - 9} to {count}", "ms", [row["first_ms"] for row in late]),
        Figure("ratio of the medians", "", [statistics.median(row["first_ms"] for row in late) / statistics.median(row["first_ms"] for row in early)], at_most=1.3),
        Figure("tokens reused, last ten", "", [row["reused"] for row in late]),
        Figure("tokens computed, last ten", "", [row["prompt"] - row["reused"] for row in late]),
    ]
    return Part(f"{count} turns in n_ctx {n_ctx}", f"First token. At the end {rows[-1]['dropped']} turns are dropped.", figures, raw={"n_ctx": n_ctx, "turns": rows})


def _colour(number: int) -> str:
    return ("red", "green", "blue", "white", "black")[number % 5]


def memory(bench: Bench) -> Part:
    """What stays in memory, after loading and after many answers, in a process of its own."""
    result = apart(bench, memory_work, bench.answers, bench.config, bench.found, bench.answers)
    samples, later = result["samples"], result["samples"][len(result["samples"]) // 2 :]
    small = bench.config.runtime.n_ctx <= 2048 and bench.found.path.stat().st_size < 520e6
    figures = [
        Figure("after loading", "MB", [result["loaded"]]),
        Figure(f"after {bench.answers} answers", "MB", [samples[-1]], at_most=800 if small else None),
        Figure("growth in 100 answers, second half", "MB", [report.slope(later) * 100], at_most=None if bench.quick else 0.5),
        Figure("this process, after all other measurements", "MB", [resident()]),
    ]
    note = ("Resident, with the mapped weights, of an engine in a process of its own, without the page. Eight conversations go on and "
            "start again; cache_mb is 8, so that it is full soon: what config.yaml allows comes on top.")
    return Part("Memory", note, figures, raw={"samples": samples})


def memory_work(tick, config: Config, found: weights.Weights, answers: int) -> dict:
    with started(config, found, cache_mb=min(8, config.runtime.cache_mb)) as side:
        loaded, samples, texts = resident(), [], texts_of(side)
        talks: dict[int, list[dict]] = {}
        for number in range(answers):
            messages = talks.setdefault(number % 8, [])
            messages.append(user(texts.text(24, number)))
            answer = side.ask(messages, 16, number % 8)
            side.settle()
            messages.append(assistant(answer.text))
            if len(messages) > 8:
                messages.clear()
            samples.append(resident())
            tick()
    return {"loaded": loaded, "samples": samples}


def contexts(bench: Bench) -> Part:
    """What a larger window costs: half of it is filled."""
    rows = []
    for size in bench.contexts:
        result = apart(bench, context_work, bench.repeats, bench.config, bench.found, size, bench.repeats, bench.answer)
        rows.append([result["n_ctx"], *(statistics.median(result[name]) for name in ("cold", "anew", "follow", "speed")), result["resident"]])
    head = ["n_ctx", "cold ms", "half full ms", "follow-up ms", "tokens/s", "resident MB"]
    note = ("First token of a short question; of a prompt that fills half the window; of a follow-up to it; then its answer's speed. "
            "parallel 1, each size in a process of its own, without the page.")
    return Part("Window sizes", note, head=head, rows=rows)


def context_work(tick, config: Config, found: weights.Weights, size: int, repeats: int, count: int) -> dict:
    result: dict = {"cold": [], "anew": [], "follow": [], "speed": []}
    with started(config, found, n_ctx=size, parallel=1) as side:
        texts, base = texts_of(side), len(side.conversation.opening()) + 40
        result["n_ctx"] = side.engine.n_ctx
        for number in range(repeats):
            owner = object()
            result["cold"].append(side.ask([user(f"{number + 10}: what is the capital of France?")], SHORT, owner).first_ms)
            side.settle()
            messages = [*texts.history(max(40, side.engine.n_ctx // 2 - base), 1000 * (number + 1)), user("What came first?")]
            answer = side.ask(messages, SHORT, owner)
            side.settle()
            result["anew"].append(answer.first_ms)
            messages += [assistant(answer.text), Texts.story(number)]
            answer = side.ask(messages, min(count, side.engine.n_ctx // 4), owner)
            side.settle()
            result["follow"].append(answer.first_ms)
            result["speed"].append(answer.speed)
            tick()
        result["resident"] = resident()
    return result


def against(bench: Bench) -> Part:
    """The same work on a server. One side rests while the other works: they may be on one machine."""
    other = HttpSide(bench.against, system_of(bench))
    try:
        pairs, note = _side_by_side(bench, other)
    finally:
        other.close()
    return Part(f"Beside {other.url}", f"The other: {other.model}. {note}", pairs=pairs)


def _side_by_side(bench: Bench, other: HttpSide) -> tuple[list, str]:
    with bench.engine() as side:
        texts = texts_of(side)
        firsts = [_each_in_turn(bench, (side, other), lambda each, story: each.ask([story], SHORT, object()).first_ms) for _ in bench.steps(bench.repeats, "cold")]
        pairs = [pair("short new question", "ms", *zip(*firsts), at_most=1)]
        for length in fitting(side, HISTORIES):
            pairs += follow_up_rows(bench, side, other, texts, length, ("follow-up", "computed anew"))
        talks = [Talks(bench, each, texts) for each in (side, other)]
        for _ in bench.steps(bench.repeats, "taking turns"):
            for each in talks:
                each.round()
        pairs.append(pair("follow-up, one alone", "ms", *(each.alone for each in talks), at_most=1))
        pairs.append(pair(f"follow-up, {TALKS} taking turns", "ms", *(each.turns for each in talks), at_most=1))
        note = "First token in ms, then answer speed; of this project with parallel as large as answers are at once." + left_out(side, HISTORIES)
    for count in AT_ONCE:
        totals = ([], [])
        for _ in bench.steps(bench.repeats, f"{count} at once"):
            with bench.engine(parallel=count) as side:
                totals[0].append(at_once(bench, side, count)[0])
            totals[1].append(at_once(bench, other, count)[0])
        pairs.append(pair(f"{count} at once, in all", "tokens/s", *totals, at_least=1))
    return pairs, note


MEASUREMENTS = {
    "load": load, "follow-up": follow_up, "typed-ahead": typed_ahead, "speed": speed, "gap": gap,
    "baseline": baseline, "turns": turns, "window": window, "memory": memory,
}


# A process of its own


def apart(bench: Bench, work, steps: int, *arguments) -> dict:
    """What `work(tick, *arguments)` returns in a fresh process, whose memory is its own; `steps` ticks are expected."""
    bar = iter(bench.steps(steps))
    try:
        result = child.run(_measured, work, arguments, on_message=lambda _: next(bar, None))
    except child.Died as died:
        raise BenchError(f"the process that measures ended with status {died.status}; is there enough memory?") from None
    next(bar, None)
    if isinstance(result, str):
        raise BenchError(result)
    return result


def _measured(send, work, arguments) -> dict | str:
    """The result, or why there is none."""
    try:
        return work(lambda: send("tick"), *arguments)
    except (BenchError, EngineError, TooLong, weights.WeightsError) as error:
        return str(error)


def resident() -> float:
    """Resident memory of this process in MB."""
    return psutil.Process().memory_info().rss / 1e6


# About the machine and the options


def commit() -> str:
    """The checkout's commit, with "+changes" where files differ from it."""
    from . import __version__

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            return __version__
        changes = "+changes" if git("status", "--porcelain") else ""
        return f"{__version__}, commit {git('rev-parse', '--short=10', 'HEAD')}{changes}"
    except (OSError, subprocess.SubprocessError):
        return __version__


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1_000_000):
        raise argparse.ArgumentTypeError(f"{text!r} found; allowed: a whole number from 1 to 1000000")
    return int(text)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in MEASUREMENTS:
            raise argparse.ArgumentTypeError(f"{name!r} found; allowed: {', '.join(MEASUREMENTS)}")
    return names


def _sizes(text: str) -> list[int]:
    sizes = [_positive(size.strip()) for size in text.split(",")]
    if min(sizes) < 256:
        raise argparse.ArgumentTypeError(f"{min(sizes)} found; allowed: 256 or more")
    return sizes

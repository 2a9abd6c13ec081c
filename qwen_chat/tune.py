"""python -m qwen_chat tune: measures which settings answer fastest on this machine; --write puts them into config.yaml.

Settings are compared in turns, A B A B, and what cannot be told apart from noise stays as it is (tune_choice.py).
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from . import bench_report as report
from . import config_edit, interrupt, weights
from .bench import cpu_model
from .bench_sides import GREEDY, Texts
from .config import DEFAULT_FILE, Config, Runtime, load_or_exit
from .hardware import allowed_processors, usable_cores, usable_memory
from .model import Model, ModelError
from .tune_choice import Speeds, choose, compare, faster, not_slower, thread_counts

HISTORY = 256  # tokens that stand in the cache while an answer is measured
READ = 256  # tokens of a prompt that is read
ANSWER = 16  # tokens of an answer
CHUNKS = (32, 64, 128, 256)  # n_ubatch worth measuring
ATTENTION = (True, "f16"), (False, "f16"), (True, "q8_0")  # flash_attn, kv_type
TURN = 64, 128  # tokens read and answered in a usual turn; by turns is compared what changes both speeds
TURNS = f"turns of {TURN[0]} tokens read and {TURN[1]} answered"
ROUNDS, SECONDS = 9, 75  # of one comparison at most; seconds only once tune_choice.FEWEST_ROUNDS are made
QUICK_ROUNDS, QUICK_SECONDS = 5, 0
KINDS = {"answer": "answer, tokens/s", "read": "reading, tokens/s", "turn": "turns a minute"}


class TuneError(Exception):
    """Something cannot be measured or written; the message is a sentence for a person."""


@dataclass(frozen=True)
class Finding:
    """What came out for one setting; `after` equals `before` where it is kept."""

    key: tuple[str, str]
    before: object
    after: object
    why: str

    @property
    def name(self) -> str:
        return ".".join(self.key)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="FILE", help="measure with this .gguf instead of config.yaml's")
    parser.add_argument("--weights", metavar="FILE", nargs="+", help="compare these .gguf files first, then tune for the fastest; their quality is not looked at")
    parser.add_argument("--quick", action="store_true", help="few rounds and shorter texts: a glance, which settles only what is very clear")
    parser.add_argument("--write", action="store_true", help="put what is clearly faster into config.yaml; comments and all else stay as they are")
    parser.add_argument("--json", metavar="FILE", help="write all figures, raw ones too; - is standard output")


def run(options) -> int:
    """0 when everything was measured, 1 when something cannot be carried out, 130 when it was interrupted."""
    config = load_or_exit()
    file = Path(os.environ.get("CONFIG") or DEFAULT_FILE)
    try:
        _check(options, file)
        tuner = Tuner(config, options)
        try:
            interrupted = tuner.measure_all()
        finally:
            tuner.close()
        return _finish(tuner, options, file, interrupted)
    except (TuneError, config_edit.EditError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return 1
    except ModelError as error:
        interrupt.check()  # which ends loading
        raise weights.UnusableWeights(str(error)) from None


def _check(options, file: Path) -> None:
    """What cannot be done is told before anything is measured, not after."""
    if options.model and options.weights:
        raise TuneError("--model and --weights together; name all files with --weights")
    if options.json and options.json != "-" and (fault := report.why_not_writable(options.json)):
        raise TuneError(f"--json {options.json}: {fault}")
    folder = os.path.dirname(os.path.realpath(file))
    if options.write and not os.access(folder, os.W_OK):
        raise TuneError(f"--write: {file} cannot be replaced, for its folder {folder} is not writable")


class Rig:
    """A loaded model with HISTORY tokens in its cache. Speeds are in tokens/s."""

    def __init__(self, path: Path, runtime: Runtime):
        self.path = path
        self.model = Model(path, runtime, interrupt.loading)
        text = Texts(lambda text: len(self.model.tokenize(text))).text(HISTORY + READ + 8, 1000)
        self._tokens = (self.model.tokenize(text) * 2)[: HISTORY + READ]

    def open(self, runtime: Runtime, threads: tuple[int, int]) -> float:
        """Makes a new context and reads the history, in chunks of n_ubatch; returns with which speed."""
        whole = runtime.model_copy(update={"n_batch": READ, "n_ubatch": READ})  # smaller chunks are smaller calls
        self.model.open_context(whole, HISTORY + READ, 1, *threads)
        self._decode(0, self._tokens[:1])  # the first use of a context is slow
        return self._read_history(runtime.n_ubatch)

    def read(self, count: int, chunk: int) -> float:
        """How fast `count` tokens after the history are read, `chunk` at a time."""
        self._decode(HISTORY, self._tokens[HISTORY : HISTORY + 2])  # wakes the threads
        self._back()
        begun = time.perf_counter()
        for start in range(HISTORY, HISTORY + count, chunk):
            self._decode(start, self._tokens[start : min(start + chunk, HISTORY + count)])
        speed = count / (time.perf_counter() - begun)
        self._back()
        return speed

    def answer(self, count: int = ANSWER) -> float:
        """How fast `count` tokens after the history are answered, sampling included."""
        sampler = self.model.sampler(GREEDY)
        try:
            token = self._decode(HISTORY, self._tokens[-1:], sampler)
            begun = time.perf_counter()
            for number in range(1, count + 1):
                token = self._decode(HISTORY + number, [token], sampler)
            speed = count / (time.perf_counter() - begun)
        finally:
            sampler.close()
        self._back()
        return speed

    def bytes_a_token(self) -> float:
        return self.model.saved_size(0) / HISTORY

    def close(self) -> None:
        self.model.close()

    def _read_history(self, chunk: int) -> float:
        self.model.seq_rm(0, 0, -1)
        begun = time.perf_counter()
        for start in range(0, HISTORY, chunk):
            self._decode(start, self._tokens[start : min(start + chunk, HISTORY)])
        return HISTORY / (time.perf_counter() - begun)

    def _back(self) -> None:
        """To the history alone."""
        if self.model.can_cut:
            self.model.seq_rm(0, HISTORY, -1)
        else:
            self._read_history(READ)

    def _decode(self, position: int, tokens: list[int], sampler=None) -> int | None:
        interrupt.check()
        with interrupt.waking(self.model.abort):
            status = self.model.decode([(0, position, tokens, True)])
        if status:
            interrupt.check()
            raise TuneError(f"{self.path.name}: llama.cpp cannot compute (status {status})")
        return self.model.sample(sampler, len(tokens) - 1)[0] if sampler else None


class Tuner:
    """Measures stage by stage; each goes on with what the stages before it have found."""

    def __init__(self, config: Config, options):
        self.config = config
        self.runtime = config.runtime
        self.quick = options.quick
        self.rounds, self.seconds = (QUICK_ROUNDS, QUICK_SECONDS) if options.quick else (ROUNDS, SECONDS)
        self.to_read = READ // 2 if options.quick else READ
        self.out = sys.stderr if options.json == "-" else sys.stdout
        self.findings: list[Finding] = []
        self.parts: dict[str, report.Part] = {}
        self.note = ""
        self.rigs: dict[Path, Rig] = {}
        self.names = {Path(os.path.abspath(file)): file for file in options.weights or ()}
        if self.names:
            self.files = list(self.names)
        else:
            given = {} if options.model is None else {"path": os.path.abspath(options.model)}
            found = weights.find(config.model.model_copy(update=given))
            self.files, self.note = [found.path], f"{found.name}, for {found.fallback}" if found.fallback else ""
        self._load()
        self.rig = self.rigs[self.files[0]]

    def measure_all(self) -> bool:
        """Whether it was interrupted: what was found until then is kept."""
        print(report.listed(self.about()), file=self.out, flush=True)
        stages = [self.tune_weights] if len(self.files) > 1 else []
        try:
            for stage in [*stages, self.tune_threads, self.tune_chunk, self.tune_attention]:
                stage()
        except interrupt.Interrupted:
            return True
        return interrupt.noted()

    def about(self) -> dict:
        stand_in = {"instead": self.note} if self.note else {}
        return {
            "cpu": cpu_model(), "threads": f"{usable_cores()} usable cores of {allowed_processors()} processors",
            "file": ", ".join(f"{file.name} ({file.stat().st_size / 1e6:,.0f} MB)" for file in self.files), **stand_in,
        }

    def close(self) -> None:
        for rig in self.rigs.values():
            rig.close()

    # The stages

    def tune_weights(self) -> None:
        """Which of several files is the fastest, with the settings as they are."""
        model = self.config.model
        configured = weights.ROOT / os.path.expanduser(model.path or f"models/{model.filename}")
        present = configured if configured in self.files else self.files[0]

        def measure(file: Path) -> dict[str, float]:
            return _with_turn(self.rigs[file].open(self.runtime, self.threads()), self.rigs[file].answer())

        note = f"With the settings as they are, compared by {TURNS}. Speed alone: how well a file answers is not measured."
        speeds = self._compare("weights", "Files", note, self.files, dict.fromkeys(("turn", "read", "answer"), present), measure, self._shown)
        choice = choose(speeds["turn"], present)
        path = choice.value.relative_to(weights.ROOT).as_posix() if choice.value.is_relative_to(weights.ROOT) else str(choice.value)
        keep = choice.value == configured or not choice.clear
        self.findings.append(Finding(("model", "path"), model.path, model.path if keep else path, choice.why))
        self.rig = self.rigs[choice.value]
        for file in self.files:
            if self.rigs[file] is not self.rig:
                self.rigs.pop(file).close()

    def tune_threads(self) -> None:
        """n_threads by the speed of answers, n_threads_batch by that of reading."""
        present = dict(zip(("answer", "read"), self.threads()))
        candidates = thread_counts(usable_cores(), allowed_processors(), *present.values())
        self.rig.open(self.runtime, self.threads())

        def measure(count: int) -> dict[str, float]:
            self.rig.model.set_threads(count, count)
            return {"answer": self.rig.answer(), "read": self.rig.read(self.to_read, self.runtime.n_ubatch)}

        note = f"An answer after {HISTORY} tokens of history, and {self.to_read} tokens read after them."
        speeds = self._compare("threads", "Threads", note, candidates, present, measure)
        for key, kind in (("n_threads", "answer"), ("n_threads_batch", "read")):
            choice = choose(speeds[kind], present[kind])
            value = "auto" if choice.value == usable_cores() else choice.value
            self._settle(key, value if choice.value != present[kind] else getattr(self.runtime, key), choice.why)

    def tune_chunk(self) -> None:
        """n_ubatch, and n_batch with it."""
        present = min(self.runtime.n_ubatch, READ)
        candidates = sorted({size for size in CHUNKS if size <= self.to_read} | {present})
        self.rig.open(self.runtime, self.threads())
        note = f"{self.to_read} tokens read after {HISTORY} tokens of history, so many at a time."
        speeds = self._compare("n_ubatch", "Tokens at a time (n_ubatch)", note, candidates, {"read": present},
                               lambda size: {"read": self.rig.read(self.to_read, size)})
        choice = choose(speeds["read"], present)
        changed = choice.value != present
        self._settle("n_batch", choice.value if changed else self.runtime.n_batch, "as n_ubatch" if changed else "kept with n_ubatch")
        self._settle("n_ubatch", choice.value if changed else self.runtime.n_ubatch, choice.why)

    def tune_attention(self) -> None:
        """flash_attn by the time of a whole turn; kv_type q8_0 where it is not slower."""
        runtime, sizes = self.runtime, {}
        present = runtime.flash_attn or runtime.kv_type != "f16", runtime.kv_type  # q8_0 needs it

        def measure(candidate: tuple[bool, str]) -> dict[str, float]:
            changed = runtime.model_copy(update={"flash_attn": candidate[0], "kv_type": candidate[1]})
            read = self.rig.open(changed, self.threads())
            sizes[candidate[1]] = self.rig.bytes_a_token() * runtime.n_ctx * runtime.parallel / 2**20
            return _with_turn(read, self.rig.answer())

        note = f"{HISTORY} tokens read, then an answer; compared by {TURNS}."
        speeds = self._compare("attention", "Attention and cache", note, list(ATTENTION), dict.fromkeys(("turn", "read", "answer"), present), measure,
                               lambda candidate: f"flash_attn {_yaml(candidate[0])}, kv_type {candidate[1]}")
        (flash, kv_type), why, why_small = choose_attention(speeds, present)
        if runtime.flash_attn and not flash and runtime.cache_mb:
            why += "; but conversations that pause are kept and brought back more slowly"
        self._settle("flash_attn", flash if kv_type == "f16" else runtime.flash_attn, why)
        self._settle("kv_type", kv_type, f"{why_small}; q8_0 takes {sizes['q8_0']:,.0f} MiB, f16 {sizes['f16']:,.0f}")

    # What they share

    def threads(self) -> tuple[int, int]:
        """Threads for answers and for reading, as the settings now are."""
        return tuple(usable_cores() if count == "auto" else count for count in (self.runtime.n_threads, self.runtime.n_threads_batch))

    def _settle(self, key: str, value, why: str) -> None:
        self.findings.append(Finding(("runtime", key), getattr(self.config.runtime, key), value, why))
        self.runtime = self.runtime.model_copy(update={key: value})

    def _shown(self, candidate) -> str:
        """A file as it was named, anything else as it is."""
        return self.names.get(candidate) or str(candidate)

    def _compare(self, name: str, title: str, note: str, candidates: list, present: dict, measure, shown=str) -> dict[str, Speeds]:
        """Measures, with a progress bar on a terminal, and prints the table, also of what an interrupt leaves."""
        from huggingface_hub.utils import tqdm

        speeds = {kind: {each: [] for each in candidates} for kind in present}
        terminal, begun = sys.stderr.isatty(), time.perf_counter()
        try:
            if not terminal:
                print(f"measuring {title} ...", file=sys.stderr, flush=True)
            with tqdm(total=self.rounds * len(candidates), desc=title, leave=False, disable=not terminal) as bar:
                compare(speeds, present, measure, self.rounds, self.seconds, bar.update)
        finally:
            self.parts[name] = part = _part(title, note, speeds, set(present.values()), shown)
            part.raw["seconds"] = round(time.perf_counter() - begun, 1)
            print(part.text(), file=self.out, flush=True)
        return speeds

    def _load(self) -> None:
        """All files at once, so that they can be measured in turns."""
        for file in self.files:
            if not file.is_file():
                raise weights.UnusableWeights(f"{file}: {'a folder' if file.is_dir() else 'no such file'}; the name of a .gguf file is needed")
        needed = sum(file.stat().st_size for file in self.files)
        free = usable_memory().available
        if len(self.files) > 1 and needed > free:
            raise TuneError(f"{len(self.files)} files of together {needed / 1e6:,.0f} MB, but {free / 1e6:,.0f} MB of memory are free; compare fewer at once")
        for file in self.files:
            self.rigs[file] = Rig(file, self.runtime)


def choose_attention(speeds: dict[str, Speeds], present: tuple[bool, str]) -> tuple[tuple[bool, str], str, str]:
    """Which (flash_attn, kv_type) is best, and why, for each of the two: the fastest by the turn where that is clear; and
    q8_0, which takes less memory, where neither reading nor answering is slower with it."""
    best, small = choose(speeds["turn"], present), (True, "q8_0")
    if small in (best.value, present):
        return best.value, best.why, best.why
    both = [(speeds[kind][small], speeds[kind][best.value]) for kind in ("read", "answer")]
    if all(not_slower(*pair) for pair in both):
        return small, f"{best.why}; q8_0 needs it", "q8_0 is not slower"
    slower = any(faster(usual, of_small) for of_small, usual in both)
    return best.value, best.why, "q8_0 is slower, kept" if slower else "not clear that q8_0 is as fast, kept"


def _with_turn(read: float, answer: float) -> dict[str, float]:
    """Speeds of reading and answering, and how many turns they make in a minute."""
    return {"turn": 60 / (TURN[0] / read + TURN[1] / answer), "read": read, "answer": answer}


def _part(title: str, note: str, speeds: dict[str, Speeds], used: set, shown) -> report.Part:
    """A table with the median of each speed, and its range."""
    rows, raw = [], {}
    for candidate in next(iter(speeds.values())):
        row = [shown(candidate) + (" *" if candidate in used else "")]
        for found in (speeds[kind][candidate] for kind in speeds):
            row += [statistics.median(found), f"{report.number(min(found))} - {report.number(max(found))}"] if found else ["", "not measured"]
        rows.append(row)
        raw[shown(candidate)] = {kind: speeds[kind][candidate] for kind in speeds}
    head = ["* in use", *(cell for kind in speeds for cell in (KINDS[kind], "lowest - highest"))]
    return report.Part(title, note, head=head, rows=rows, raw={"speeds": raw})


def _finish(tuner: Tuner, options, file: Path, interrupted: bool) -> int:
    rows = [[each.name, _yaml(each.before), _yaml(each.after), each.why] for each in tuner.findings]
    if rows:
        print("Settings\n--------\n" + _settings_table(rows) + "\n", file=tuner.out, flush=True)
    if options.json:
        settings = {each.name: {"before": each.before, "after": each.after, "why": each.why} for each in tuner.findings}
        parts = {name: part.as_dict() for name, part in tuner.parts.items()}
        text = json.dumps({"about": tuner.about(), "interrupted": interrupted, "parts": parts, "settings": settings}, indent=1, ensure_ascii=False)
        print(text) if options.json == "-" else Path(options.json).write_text(text + "\n", encoding="utf-8")
    if interrupted:
        print("Interrupted; nothing was written into the settings.", file=sys.stderr)
        return interrupt.STATUS
    changes = {each.key: each.after for each in tuner.findings if each.after != each.before}
    if not changes:
        print(f"Nothing is clearly faster than what {file.name} has.", file=tuner.out)
    elif options.write:
        for key in config_edit.write(file, changes):
            print(f"{file}: {'.'.join(key)}: {_yaml(changes[key[-2:]])}" + (" (in the profile that is in force, which sets it too)" if len(key) > 2 else ""), file=tuner.out)
        print("Restart the program to use it.", file=tuner.out)
    else:
        print("To put what is faster into the file: the same with --write.", file=tuner.out)
    return 0


def _settings_table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in [["setting", "now", "best"], *rows]) for column in range(3)]
    lines = [["setting", "now", "best", ""], *rows]
    return "\n".join("  " + "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths)), line[3]]).rstrip() for line in lines)


def _yaml(value) -> str:
    """A value as it stands in the file."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)

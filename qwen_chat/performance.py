"""What the performance view shows: figures of the last answers, of this process and of the engine. Never a text."""

import re
import statistics
import time
from dataclasses import dataclass

import psutil

from .engine import Info
from .hardware import allowed_processors, cpu_quota, usable_memory

KEPT = 50  # answers
RECENT = 20  # of them, for the figures that sum up
FRESH_SECONDS = 0.5  # so long one look serves everybody who looks
NOW_SECONDS = 5  # processor use over a longer time does not tell what it is now
IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"  # and kana
WORD = re.compile(rf"[{IDEOGRAPHS}]|[^\W{IDEOGRAPHS}]+(?:['’.-][^\W{IDEOGRAPHS}]+)*")


@dataclass(frozen=True)
class Answer:
    """One answer that was begun. `first_token` in seconds; `tokens_per_second` is 0 where there was but one token."""

    first_token: float
    tokens_per_second: float
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    words: int

    @property
    def reused(self) -> float:
        """The part of the prompt that had been computed before, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens


@dataclass(frozen=True)
class Snapshot:
    """The figures of one moment. Memory in bytes, times in seconds; `cores_used` is None until it was watched for a while.

    `answers` are the last ones, the oldest first, of `answers_total` since the start. `info` is None until the model is there.
    """

    answers: tuple[Answer, ...]
    answers_total: int
    memory_used: int
    memory_granted: int
    cores_used: float | None
    cores_granted: float
    running: int
    waiting: int
    parked: int
    parked_bytes: int
    uptime: float
    info: Info | None

    @property
    def recent(self) -> tuple[Answer, ...]:
        """The answers that the summary is of."""
        return self.answers[-RECENT:]

    @property
    def first_token(self) -> float:
        """The median of the recent answers, in seconds; as of all that follows, 0 where there are none."""
        return _median([answer.first_token for answer in self.recent])

    @property
    def tokens_per_second(self) -> float:
        return _median([answer.tokens_per_second for answer in self.recent if answer.tokens_per_second])

    @property
    def words_per_second(self) -> float:
        """Counted in these very answers, for it depends on the language how many tokens make a word."""
        tokens = sum(answer.answer_tokens for answer in self.recent)
        return self.tokens_per_second * sum(answer.words for answer in self.recent) / tokens if tokens else 0.0

    @property
    def reused(self) -> float:
        """The part of all that the recent answers had to read that had been computed before, 0 to 1."""
        to_read = sum(answer.prompt_tokens for answer in self.recent)
        return sum(answer.cached_tokens for answer in self.recent) / to_read if to_read else 0.0


class Usage:
    """What this process uses of the machine."""

    def __init__(self, clock=time.monotonic):
        self._clock = clock
        self._process = psutil.Process()
        self._looked = (clock(), self.cpu_seconds())

    def memory(self) -> int:
        """Resident memory in bytes, the mapped weights included."""
        return self._process.memory_info().rss

    def cpu_seconds(self) -> float:
        """Processor time used since the start."""
        times = self._process.cpu_times()
        return times.user + times.system

    def cores(self) -> float:
        """Processors kept busy since the last call of this, on average: 1.0 is one all the time."""
        then, used = self._looked
        self._looked = now, seconds = self._clock(), self.cpu_seconds()
        return (seconds - used) / max(now - then, 1e-9)


class Performance:
    """Keeps the figures of the last answers of an engine, whoever asked for them, and looks up the rest when asked."""

    def __init__(self, engine, clock=time.monotonic):
        self._engine = engine
        self._clock = clock
        self._usage = Usage(clock)
        self._started = clock()
        self._answers: tuple[Answer, ...] = ()
        self._total = 0
        self._looked = float("-inf")
        self._snapshot: Snapshot | None = None
        engine.on_answer.append(self.note)

    def note(self, reply) -> None:
        """Called by the engine after every answer; those on the way to another one are left out."""
        stats = reply.stats
        if stats.first_token_ms and not stats.aside:
            answer = Answer(
                stats.first_token_ms / 1000, stats.tokens_per_second, stats.prompt_tokens, stats.cached_tokens,
                stats.answer_tokens, count_words(reply.text),
            )
            self._answers = (*self._answers, answer)[-KEPT:]
            self._total += 1

    def snapshot(self) -> Snapshot:
        """The figures of now, or of less than FRESH_SECONDS ago. Not for several threads at once."""
        now = self._clock()
        if now - self._looked >= FRESH_SECONDS:
            self._snapshot = self._look(now - self._looked)
            self._looked = now
        return self._snapshot

    def _look(self, since: float) -> Snapshot:
        engine, cache = self._engine, self._engine.cache
        cores = self._usage.cores()
        return Snapshot(
            self._answers, self._total,
            memory_used=self._usage.memory(), memory_granted=usable_memory().total,
            cores_used=cores if since <= NOW_SECONDS else None, cores_granted=round(min(allowed_processors(), cpu_quota() or float("inf")), 2),
            running=engine.running, waiting=engine.waiting,
            parked=len(cache.parked) if cache else 0, parked_bytes=cache.parked_bytes if cache else 0,
            uptime=self._clock() - self._started, info=engine.info,
        )


def count_words(text: str) -> int:
    """The words of a text, as a word processor counts: each Chinese character is one, and so is what stands between spaces elsewhere."""
    return len(WORD.findall(text))


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0

"""The decode thread: prompts go in as token ids, answers come out as text.

One thread owns llama.cpp. It loads the model, then takes step after step: one token for every answer
that flows, then a chunk of the prompts that wait to be read, and, when nobody wants anything, a chunk
of what people will probably ask next. Nobody else computes, so nothing needs a lock around the model.

Whatever is kept between requests, an answer depends on its own conversation alone, and nobody can see what
others asked. So a cached sequence serves nobody but the client who left it (`kvcache`), and of others a request
may only feel that the machine is shared: by its place in line (`line`), by speed, and in the last bits of the
logits, which depend on how tokens were batched (`Sampling.seed` says when those are the same again too).
"""

import asyncio
import logging
import re
import threading
import time
from array import array
from dataclasses import dataclass, field, replace
from typing import Callable, Iterable

from . import cpu_code, memory
from .gguf import read_shape
from .hardware import held_by_process, usable_cores, usable_memory
from .interrupt import Interrupted
from .kvcache import KVCache, Sequence, token_array
from .line import Line
from .model import ABORTED, Model, system_info
from .sampling import Logprob, Sampler, Sampling
from .textstream import TextStream

log = logging.getLogger(__name__)

STEP_SECONDS = 0.2  # a prompt's chunk takes about this long while other answers flow
WARM_SECONDS = 0.1  # and this long when it is only computed ahead: a real request waits no longer
SMALLEST_CHUNK = 4  # tokens
FIRST_CHUNK = 32  # tokens, before anything was measured
MOST_WARM = 64  # texts computed ahead that may wait at once


class EngineError(Exception):
    """The engine cannot answer; the message is a sentence for a person."""


class Busy(EngineError):
    """As many answers run and wait as may: of all, or, with `own_share`, of the person who asks."""

    def __init__(self, message: str, own_share: bool = False):
        super().__init__(message)
        self.own_share = own_share


@dataclass(frozen=True)
class State:
    """What the engine is doing: looking, downloading, checking, loading, ready, failed or closed."""

    phase: str = "looking"
    name: str = ""
    done: int = 0
    total: int | None = None

    @property
    def fraction(self) -> float | None:
        """How much of the phase is done, 0 to 1; None where that is not known."""
        return min(1.0, self.done / self.total) if self.total else None


@dataclass(frozen=True)
class Info:
    """The model in use, and what computes it. `fallback` says why it is not the configured one; None where it is.

    `cpu_code` names the build of llama.cpp's code, `cpu_features` the instruction sets and libraries that it uses.
    """

    name: str
    path: str
    fallback: str | None
    size_bytes: int
    n_params: int
    n_ctx: int
    n_ctx_train: int
    n_threads: int
    parallel: int
    file_bytes: int
    quantization: str
    cpu_code: str
    cpu_features: tuple[str, ...]


@dataclass
class Stats:
    """The figures of one answer. Times in milliseconds from the call of `stream`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    waited_ms: float = 0.0
    first_token_ms: float = 0.0
    tokens_per_second: float = 0.0
    finish_reason: str = ""  # stop, length, cancelled or error
    aside: bool = False  # it was asked for by the program itself, on the way to an answer


class Reply:
    """One answer on its way. Iterate, plainly or with `async for`, to get its text as it comes.

    Each piece holds all that was gathered since the last was taken. Leaving the loop early cancels.
    """

    def __init__(self, engine: "Engine", n_prompt: int):
        self.stats = Stats(prompt_tokens=n_prompt)
        self.error: EngineError | None = None
        self.read, self.to_read = 0, n_prompt
        self.tokens: list[int] = []
        self.logprobs: list[Logprob] = []
        self.cancelled = False
        self._engine = engine
        self._pieces: list[str] = []
        self._text: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._on_change: Callable[[], None] | None = None

    @property
    def place(self) -> int:
        """0 while it is computed, else its place in line: 1 is next."""
        return self._engine.place_of(self)

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def text(self) -> str:
        """All the text so far."""
        return "".join(self._text)

    def cancel(self) -> None:
        """Ends the answer within one step. From any thread, at any time, more than once."""
        self.cancelled = True
        self._engine.notice_cancel(self)

    def __iter__(self):
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._pieces or self._ended)
                text, ended = self._take()
                if text:
                    yield text
                if ended:
                    return self._raise_error()
        finally:
            self._leave()

    async def __aiter__(self):
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        with self._changed:
            self._on_change = lambda: loop.call_soon_threadsafe(changed.set)
        try:
            while True:
                changed.clear()
                text, ended = self._take()
                if text:
                    yield text
                if ended:
                    self._raise_error()
                    return
                await changed.wait()
        finally:
            with self._changed:
                self._on_change = None
            self._leave()

    def put(self, text: str) -> None:
        """Called by the decode thread with new text."""
        with self._changed:
            self._pieces.append(text)
            self._text.append(text)
            self._tell()

    def end(self, error: EngineError | None = None) -> None:
        """Called by the decode thread once nothing more will come."""
        with self._changed:
            self.error = error
            self._ended = True
            self._tell()

    def _take(self) -> tuple[str, bool]:
        """The text gathered so far, and whether that was the last of it."""
        with self._changed:
            text, ended = "".join(self._pieces), self._ended
            self._pieces.clear()
        return text, ended

    def _raise_error(self) -> None:
        if self.error:
            raise self.error

    def _tell(self) -> None:
        self._changed.notify_all()
        if self._on_change:
            try:
                self._on_change()
            except RuntimeError:  # the listener's event loop is closed
                self._on_change = None

    def _leave(self) -> None:
        if not self._ended:
            self.cancel()


@dataclass(eq=False)
class _Task:
    """A request as the decode thread sees it."""

    reply: Reply
    prompt: list
    sampling: Sampling
    max_tokens: int
    stop: list[str]
    owner: object
    client: object
    trimmed: bool
    follow: list[int]
    on_end: Callable[[Reply], None] | None
    keep: bool = True
    owner_left: bool = False
    asked: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    sequence: Sequence | None = None
    sampler: Sampler | None = None
    text: TextStream | None = None
    next_token: int | None = None  # sampled, not yet computed
    read_in: int = 0  # the step that last read of its prompt

    @property
    def unread(self) -> int:
        return len(self.prompt) - len(self.sequence)


@dataclass(frozen=True, eq=False)
class _Ahead:
    """A prompt that is computed ahead, unless more than `most` tokens of it are not in the cache any more."""

    tokens: array
    owner: object
    client: object
    trimmed: bool = False
    most: int | None = None


class Engine:
    """A model that answers token ids with text. Nothing happens before `start`.

    `find_weights(report)` returns weights.Weights; `opening()` returns the tokens every conversation
    begins with, which are computed at once and kept.
    """

    def __init__(self, runtime, find_weights, queue_size: int = 16, opening: Callable[[], list[int]] = list):
        self.runtime = runtime
        self.queue_size = queue_size
        self.state = State()
        self.error: Exception | None = None
        self.info: Info | None = None
        self.model: Model | None = None
        self.cache: KVCache | None = None
        self.n_ctx = runtime.n_ctx
        self.on_answer: list[Callable[[Reply], None]] = []  # called by the decode thread after every answer
        self.rejected = 0  # people who were told that their request met a full line
        self.ready = threading.Event()
        self.ended = threading.Event()
        self._find_weights = find_weights
        self._opening = opening
        self._thread: threading.Thread | None = None
        self._news = threading.Condition()  # guards what follows, up to _closing
        self._line = Line(runtime.parallel, queue_size)
        self._open: dict[Reply, _Task] = {}  # all that wait or run
        self._cancelled: list[_Task] = []  # of late
        self._warm: dict[object, _Ahead] = {}  # the latest last
        self._computing: set[Reply] = set()  # whose prompts the running decode reads
        self._closing = False
        self._active: list[_Task] = []
        self._steps = 0
        self._step_cost = 0.0  # seconds of a step that reads no prompt, of late
        self._token_cost = 0.0  # seconds that each prompt token adds to it

    # From any thread

    def start(self) -> None:
        """Starts the decode thread, which finds and loads the weights. Returns at once."""
        with self._news:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
                self._thread.start()

    def stream(
        self,
        tokens: Iterable[int],
        sampling: Sampling = Sampling(),
        max_tokens: int = 512,
        stop: list[str] = (),
        *,
        owner: object = None,
        client: object = None,
        trimmed: bool = False,
        follow: list[int] = (),
        on_end: Callable[[Reply], None] | None = None,
        keep: bool = True,
        told: bool = True,
    ) -> Reply:
        """Asks for the continuation of `tokens`; returns at once.

        `owner` names the conversation, `client` (any hashable value; all of whom nothing is known are one) the person
        who asks. `trimmed` says that the conversation dropped old turns before this prompt, `follow` is what its next
        prompt surely has after this answer and is computed when it ends. `on_end` is called by the decode thread.
        Without `keep` nothing of it stays in the cache: it is on the way to an answer, and no conversation goes on
        from there. Raises Busy, which is not counted as a rejection unless somebody is `told`, or EngineError when
        the engine has ended.
        """
        prompt = token_array(tokens)
        if not prompt:
            raise EngineError("an empty prompt has no continuation")
        self.start()
        reply = Reply(self, len(prompt))
        reply.stats.aside = not keep
        task = _Task(
            reply, prompt, sampling, max_tokens, list(stop), owner, client, trimmed, list(follow), on_end, keep
        )
        with self._news:
            if self.error or self._closing:
                raise EngineError(f"the engine has ended: {self.error or 'it was closed'}")
            if limit := self._line.limit_met(client):
                self.rejected += told
                raise _busy(limit, len(self._open))
            self._open[reply] = task
            self._warm.pop(owner, None)
            self._line.join(task)
            self._news.notify()
        return reply

    def warm(self, owner: object, tokens: Iterable[int], trimmed: bool = False, client: object = None) -> None:
        """Computes a prompt that `client`, whose page is open, will probably send in the conversation `owner`, when
        nothing else is to do; the latest one counts."""
        ahead = _Ahead(token_array(tokens), owner, client, trimmed)
        with self._news:
            self._warm.pop(owner, None)
            self._put_ahead(owner, ahead)

    def forget(self, owner: object) -> None:
        """Drops what was to be computed ahead for `owner`, who will not come back."""
        with self._news:
            self._warm.pop(owner, None)
            for task in self._open.values():
                task.owner_left |= owner is not None and task.owner == owner

    def _put_ahead(self, key: object, ahead: _Ahead) -> None:
        """Adds to what is computed ahead, of which the oldest is dropped beyond a number. Needs the lock."""
        self._warm[key] = ahead
        while len(self._warm) > MOST_WARM:
            self._warm.pop(next(iter(self._warm)))
        self._news.notify()

    async def wait_ready(self) -> None:
        """Returns once the model answers. Raises EngineError when it never will."""
        self.start()
        while not self.ready.is_set():
            if self.error or self.ended.is_set():
                raise EngineError(str(self.error or "the engine was closed"))
            await asyncio.sleep(0.05)

    def place_of(self, reply: Reply) -> int:
        with self._news:
            task = self._open.get(reply)
            return self._line.place(task) if task else 0

    def notice_cancel(self, reply: Reply) -> None:
        with self._news:
            if reply in self._open:
                self._cancelled.append(self._open[reply])
                self._news.notify()
            if reply in self._computing and self.model.can_cut:  # what a recurrent state has read it cannot unread
                self.model.abort()

    @property
    def can_shift(self) -> bool:
        """Whether turns can be dropped from the middle of the cache without computing the rest anew."""
        return bool(self.model and self.model.can_shift)

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to do, not even ahead of time."""
        return not (self._open or self._warm)

    @property
    def running(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> int:
        return self._line.waiting

    def close(self, timeout: float = 1.5) -> None:
        """Ends all answers and the decode thread, and frees the model."""
        with self._news:
            self._closing = True
            self._news.notify()
            if self.model:
                self.model.abort()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    # The decode thread

    def _run(self) -> None:
        try:
            self._load()
            while self._wait_for_work():
                self._admit()
                self._step()
        except BaseException as error:
            if not self._closing:
                self._fail(error)
        finally:
            self._end_all(EngineError(f"the engine has ended: {self.error or 'it was closed'}"))
            if self.model and not self.error:
                self.model.close()
            if not self.error:
                self.state = State("closed")
            self.ended.set()

    def _load(self) -> None:
        runtime = self.runtime
        code = cpu_code.use(runtime.cpu_code, runtime.cpu_code_exclude)  # first: without it the weights are of no use
        weights = self._find_weights(self._report)
        self.state = State("loading", weights.name, 0, 100)
        started = time.perf_counter()
        layout, cache_bytes = self._check_memory(weights, code)
        model = Model(weights.path, runtime, lambda part: self._loaded(weights.name, part), layout)
        self.model = model
        n_ctx = runtime.n_ctx
        if n_ctx > model.n_ctx_train:
            log.warning("runtime.n_ctx is %d, but %s was trained for %d tokens: %d is used", n_ctx, weights.name, model.n_ctx_train, model.n_ctx_train)
            n_ctx = model.n_ctx_train
        self.n_ctx = n_ctx
        opening = token_array(self._opening())
        threads = usable_cores()
        n_threads = threads if runtime.n_threads == "auto" else runtime.n_threads
        n_batch = n_threads if runtime.n_threads_batch == "auto" else runtime.n_threads_batch
        model.open_context(runtime, n_ctx * runtime.parallel + len(opening), runtime.parallel + 1, n_threads, n_batch)
        self.cache = KVCache(model, runtime.parallel, cache_bytes)
        self._compute_opening(opening or token_array(model.tokenize("\n")))
        self.info = Info(
            weights.name, str(weights.path), weights.fallback, model.size_bytes, model.n_params,
            n_ctx, model.n_ctx_train, n_threads, runtime.parallel, weights.path.stat().st_size,
            model.quantization, model.cpu_code, tuple(re.findall(r"(\w+) = 1\b", system_info())),
        )
        log.info("%s is ready after %.1f s: %d threads, n_ctx %d", weights.name, time.perf_counter() - started, n_threads, n_ctx)
        self.state = State("ready", weights.name)
        self.ready.set()

    def _check_memory(self, weights, code) -> tuple[memory.Layout | None, int]:
        """How the weights are to lie in memory, and how many bytes paused conversations may take. Raises
        memory.NotEnoughMemory where the model does not fit."""
        shape, runtime, mb = read_shape(weights.path), self.runtime, memory.mb
        if shape is None:
            return None, runtime.cache_mb * 2**20
        there, own = usable_memory(), held_by_process()
        need = memory.check(shape, runtime, there, own, code.extra_buffers)
        if shape.copies and code.extra_buffers and not need.layout.extra_buffers:
            log.warning("%s of the weights are not repacked for the processor (%s): the memory does not suffice for a second copy",
                        mb(shape.copied), ", ".join(shape.copy_kinds))
        log.info("about %s of memory are needed (%s), %s are there", mb(need.least), need.parts(), mb(there.available + own))
        if missing := memory.short(need, there, own):
            log.warning("memory is short by about %s, which may make answers slow", mb(missing))
        parking = memory.parking(need, runtime, there, own)
        if parking < runtime.cache_mb * 2**20:
            log.warning("runtime.cache_mb is %d; %d is used, which is what the memory leaves", runtime.cache_mb, parking // 2**20)
        return need.layout, parking

    def _report(self, progress) -> None:
        if self._closing:
            raise Interrupted  # which nothing that tries one source of weights after the other swallows
        self.state = State(progress.phase, progress.name, progress.done, progress.total)

    def _loaded(self, name: str, part: float) -> bool:
        self.state = State("loading", name, int(part * 100), 100)
        return not self._closing

    def _compute_opening(self, opening) -> None:
        """Computes the system prompt, in chunks and then by one token, so that both graphs are warm too."""
        sequence = self.cache.opening
        while len(sequence) < len(opening):
            left = len(opening) - len(sequence)
            chunk = opening[len(sequence) : len(sequence) + max(1, min(left - 1, self.model.n_batch))]
            if self._closing or self.model.decode([(sequence.id, len(sequence), chunk, False)]):
                raise EngineError("the system prompt cannot be computed; is it longer than runtime.n_ctx?")
            sequence.tokens.extend(chunk)

    def _wait_for_work(self) -> bool:
        with self._news:
            self._news.wait_for(lambda: self._closing or self._open or self._warm)
            return not self._closing

    def _admit(self) -> None:
        """Drops waiting requests that were cancelled, and gives others a sequence, as the line has it."""
        with self._news:
            cancelled, self._cancelled = self._cancelled, []
        for task in cancelled:
            if task.reply.place:
                self._finish(task, "cancelled")
        while self.cache.has_room():
            with self._news:
                task = self._line.begin()
            if task is None:
                return
            try:
                self._begin(task)
            except Exception as error:
                self._finish(task, "error", _as_engine_error(error))

    def _begin(self, task: _Task) -> None:
        if len(task.prompt) >= self.n_ctx:
            raise EngineError(f"the prompt has {len(task.prompt)} tokens, the window holds {self.n_ctx}")
        task.sampler = self.model.sampler(task.sampling)
        task.text = TextStream(task.stop)
        task.sequence = self.cache.acquire(task.prompt, task.owner, task.client, task.trimmed, task.sampling.seed >= 0)
        reply, cached = task.reply, len(task.sequence)
        reply.stats.cached_tokens = cached
        reply.stats.waited_ms = (time.perf_counter() - task.asked) * 1000
        reply.to_read = len(task.prompt) - cached
        self._active.append(task)

    def _step(self) -> None:
        for task in [task for task in self._active if task.reply.cancelled]:
            self._finish(task, "cancelled")
        if not self._active:
            return self._warm_step()
        plan = self._plan()
        parts = [
            (task.sequence.id, len(task.sequence), tokens, task.next_token is not None or len(tokens) == task.unread)
            for task, tokens in plan
        ]
        reading = {task.reply for task, _ in plan if task.next_token is None}
        status = self._decode(parts, reading)
        if status == 0:
            for index, (task, tokens) in enumerate(plan):
                self._advance(task, tokens, parts, index)
        elif status != ABORTED:
            self._recover(status, [task for task, _ in plan])

    def _plan(self) -> list[tuple[_Task, list]]:
        """Which tokens the next step computes: answers first, then prompts, sharing what room is left."""
        flowing = [task for task in self._active if task.next_token is not None]
        reading = [task for task in self._active if task.next_token is None]
        plan = [(task, [task.next_token]) for task in flowing]
        room = self.model.n_batch - len(flowing)
        if flowing:
            room = min(room, self._chunk(STEP_SECONDS))
        self._steps += 1
        served = sorted(reading, key=lambda task: task.read_in)[:room]  # where not all can be, whoever waited longest
        for left, task in zip(range(len(served), 0, -1), sorted(served, key=lambda task: task.unread)):
            start, count = len(task.sequence), min(task.unread, -(-room // left))
            plan.append((task, task.prompt[start : start + count]))
            task.read_in = self._steps
            room -= count
        return plan

    def _chunk(self, seconds: float) -> int:
        """How many prompt tokens a step of about that long can read on this machine."""
        if not self._token_cost:
            return min(FIRST_CHUNK, self.model.n_batch)
        expected = int((seconds - self._step_cost) / self._token_cost)
        return min(max(SMALLEST_CHUNK, expected), self.model.n_batch)

    def _decode(self, parts, reading: set[Reply]) -> int:
        """Computes a step, of which nothing stays unless its status is 0. Cancelling one of `reading` ends it."""
        with self._news:
            if self._closing or any(reply.cancelled for reply in reading):
                return ABORTED
            self._computing = reading
        started = time.perf_counter()
        status = self.model.decode(parts)
        seconds = time.perf_counter() - started
        with self._news:
            self._computing = set()
            if not self._closing:
                self.model.forget_abort()
        if status:
            for seq, position, _, _ in parts:
                self.model.seq_rm(seq, position, -1)
        else:
            n_tokens = sum(len(tokens) for _, _, tokens, _ in parts)
            self._learn_cost(seconds, n_tokens, bool(reading) or not self._active)
        return status

    def _learn_cost(self, seconds: float, tokens: int, reads: bool) -> None:
        if not reads:
            self._step_cost = _smoothed(self._step_cost, seconds)
        elif tokens >= 2 * SMALLEST_CHUNK and seconds > self._step_cost:
            self._token_cost = _smoothed(self._token_cost, (seconds - self._step_cost) / tokens)

    def _advance(self, task: _Task, tokens, parts, index: int) -> None:
        """Books what was computed for a request, and takes its next token when it has read its prompt."""
        task.sequence.tokens.extend(tokens)
        if task.next_token is None:
            task.reply.read += len(tokens)
            if task.unread > 0:
                return
        try:
            token, logprob = self.model.sample(task.sampler, self.model.output_index(parts, index))
            if logprob:
                task.reply.logprobs.append(logprob)
            self._take_token(task, token)
        except Exception as error:
            self._finish(task, "error", _as_engine_error(error))

    def _take_token(self, task: _Task, token: int) -> None:
        reply, now = task.reply, time.perf_counter()
        stats = reply.stats
        if not task.first:
            task.first = now
            stats.first_token_ms = (now - task.asked) * 1000
        task.next_token = token
        if self.model.is_end(token):
            return self._finish(task, "stop")
        reply.tokens.append(token)
        stats.answer_tokens += 1
        if stats.answer_tokens > 1:
            stats.tokens_per_second = (stats.answer_tokens - 1) / max(now - task.first, 1e-9)
        text = task.text.feed(self.model.piece(token))
        if text:
            reply.put(text)
        if task.text.stopped:
            self._finish(task, "stop")
        elif stats.answer_tokens >= task.max_tokens or len(task.sequence) + 1 >= self.n_ctx:
            self._finish(task, "length")

    def _finish(self, task: _Task, reason: str, error: EngineError | None = None) -> None:
        """Ends a request and leaves its sequence to whoever goes on with it."""
        if task in self._active:
            self._active.remove(task)
        reply = task.reply
        stats = replace(reply.stats, finish_reason=reason)
        reply.stats = stats
        if task.text and not task.text.stopped:
            rest = task.text.close()
            if rest:
                reply.put(rest)
        if task.sampler:
            task.sampler.close()
        if task.sequence is not None:
            if not task.keep:
                self.cache.cut(task.sequence, 0)
            self.cache.release(task.sequence)
            if task.follow and reason in ("stop", "length") and not task.text.stopped:
                self._warm_follow(task)
        with self._news:
            if self._open.pop(reply, None):
                self._line.leave(task)
        log.info(
            "answer: %d prompt tokens (%d cached), %d answer tokens, first token %.0f ms, %.1f tokens/s, %s",
            stats.prompt_tokens, stats.cached_tokens, stats.answer_tokens,
            stats.first_token_ms, stats.tokens_per_second, reason,
        )
        if error:
            log.error("an answer failed: %s", error)
        for tell in filter(None, [task.on_end, *self.on_answer]):
            try:
                tell(reply)
            except Exception:
                log.exception("what was to be done after an answer failed")
        if task.owner_left:
            self.forget(task.owner)
        reply.end(error)

    def _warm_follow(self, task: _Task) -> None:
        """Has the end of the turn and the start of the next computed ahead, while what stands before is cached: of a
        conversation without an owner, to which perhaps nobody comes back, only while its sequence lives."""
        told = [task.next_token] if not self.model.is_end(task.next_token) else []
        ahead = told + task.follow
        tokens = task.sequence.tokens[:] + token_array(ahead)
        key = task.owner if task.owner is not None else task.sequence
        with self._news:
            if task.owner is None or key not in self._warm:
                self._put_ahead(key, _Ahead(tokens, task.owner, task.client, most=len(ahead)))

    def _warm_step(self) -> None:
        with self._news:
            if not self._warm or self._line.waiting:
                return
            key, ahead = next(reversed(self._warm.items()))
        if self._is_done(ahead) or self._compute_ahead(ahead):
            with self._news:
                if self._warm.get(key) is ahead:
                    del self._warm[key]

    def _is_done(self, ahead: _Ahead) -> bool:
        """Whether a prompt is computed already, or not worth it."""
        missing = self.cache.missing(ahead.tokens, ahead.owner, ahead.client, ahead.trimmed, live=ahead.owner is None)
        return not missing or len(ahead.tokens) >= self.n_ctx or (ahead.most is not None and missing > ahead.most)

    def _compute_ahead(self, ahead: _Ahead) -> bool:
        """Computes a chunk; whether that was the last, or could not be. The sequence is let go after each, so a real
        request finds all of it idle."""
        sequence = self.cache.acquire(ahead.tokens, ahead.owner, ahead.client, ahead.trimmed)
        chunk = ahead.tokens[len(sequence) : len(sequence) + self._chunk(WARM_SECONDS)]
        status = self._decode([(sequence.id, len(sequence), chunk, False)], set())
        if status == 0:
            sequence.tokens.extend(chunk)
        self.cache.release(sequence)
        return status != 0 or len(sequence) == len(ahead.tokens)

    def _recover(self, status: int, tasks: list[_Task]) -> None:
        """After a step that could not be computed: ends the requests it was for."""
        for task in tasks:
            self.cache.cut(task.sequence, 0)
            self._finish(task, "error", EngineError(f"llama.cpp could not compute this answer (status {status})"))
        probe = self.cache.opening
        if self.model.decode([(probe.id, len(probe), token_array(probe.tokens[-1:]), False)]) < 0:
            raise EngineError(f"llama.cpp computes no more (status {status})")
        self.model.seq_rm(probe.id, len(probe), -1)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self.state = State("failed", self.state.name)
        if self.ready.is_set():  # before that, whoever started it says why
            log.error("the engine has ended: %s", error, exc_info=True)

    def _end_all(self, error: EngineError) -> None:
        with self._news:
            self._closing = True
            self._warm.clear()
            left = list(self._open.values())
        for task in left:
            if self.error:
                self._finish_plainly(task, error)
            else:
                self._finish(task, "cancelled")

    def _finish_plainly(self, task: _Task, error: EngineError) -> None:
        """Ends a request without touching a model that may be broken."""
        task.sequence = task.sampler = task.text = None
        self._finish(task, "error", error)


def _busy(limit: str, n_open: int) -> Busy:
    if limit == "share":
        return Busy("as many of your requests as may are running or waiting; try again when one has ended", True)
    return Busy(f"as many answers as may are running or waiting ({n_open}); try again in a moment")


def _smoothed(before: float, now: float) -> float:
    return 0.7 * before + 0.3 * now if before else now


def _as_engine_error(error: Exception) -> EngineError:
    return error if isinstance(error, EngineError) else EngineError(f"this answer failed: {error}")

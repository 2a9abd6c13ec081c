"""Who the benchmark asks - this project's engine, llama-cpp-python's Llama class, a server - and with which texts.

Each side has `ask(messages, max_tokens, owner) -> Answer` and `settle()`; times are taken where the text
arrives, from before the prompt is made, so that all sides are measured alike.
"""

import json
import random
import time
from dataclasses import dataclass, field
from typing import Iterable, Iterator

from . import interrupt
from .engine import Engine, EngineError
from .kvcache import token_array
from .sampling import Sampling

GREEDY = Sampling(temperature=0, repeat_penalty=1)
SETTLE_SECONDS = 0.2  # a pause in which a server may finish what it does after an answer
ANSWER_SECONDS = 600  # a server that is silent for longer has failed

WORDS = {
    "en": ("river mountain engine window garden letter market silver morning bridge paper music winter harbour "
           "kitchen travel forest history number colour machine island teacher summer village evening answer "
           "carry build learn write follow remember between under slowly bright quiet early the a of and in with").split(),
    "zh": ("河流 高山 机器 窗户 花园 信件 市场 银色 早晨 大桥 纸张 音乐 冬天 港口 厨房 旅行 森林 历史 数字 颜色 "
           "电脑 岛屿 老师 夏天 村庄 夜晚 回答 携带 建造 学习 书写 跟随 记得 之间 下面 慢慢 明亮 安静 很早 的 和 在 有").split(),
}


class BenchError(Exception):
    """A measurement cannot be made; the message is a sentence for a person."""


@dataclass
class Answer:
    """What came back. Times in seconds on one clock; `times` has one for each piece of text."""

    text: str
    tokens: int
    started: float
    ended: float
    times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def first_ms(self) -> float:
        return ((self.times[0] if self.times else self.ended) - self.started) * 1000

    @property
    def speed(self) -> float:
        """Tokens/s after the first."""
        if self.tokens < 2 or len(self.times) < 2:
            raise BenchError(f"an answer ended after {self.tokens} tokens, too few for its speed to be measured")
        return (self.tokens - 1) / (self.times[-1] - self.times[0])

    @property
    def longest_gap(self) -> float:
        """The longest time between two pieces."""
        return max((later - earlier for earlier, later in zip(self.times, self.times[1:])), default=0.0)


def take(pieces: Iterable[str], started: float) -> Answer:
    """Reads an answer to its end; tokens are still to be counted. Raises Interrupted where the work was asked to end."""
    texts, times = [], []
    for text in pieces:
        if text:
            texts.append(text)
            times.append(time.perf_counter())
        interrupt.check()
    interrupt.check()  # which may have ended it
    return Answer("".join(texts), 0, started, time.perf_counter(), times)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text or "-"}


class Texts:
    """Texts of given lengths, the same for everybody who has the same tokenizer. `count` gives a text's tokens."""

    def __init__(self, count):
        self._count = count

    def text(self, tokens: int, number: int) -> str:
        """At most `tokens` tokens, and hardly fewer. It begins with `number`; odd ones are Chinese, even ones English."""
        source, language = random.Random(number), "zh" if number % 2 else "en"
        words, joint = WORDS[language], "" if language == "zh" else " "
        chosen = [str(number), *(words[int(source.random() * len(words))] for _ in range(2 * tokens))]
        low, high = 1, len(chosen)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._count(joint.join(chosen[:middle])) <= tokens else (low, middle - 1)
        return joint.join(chosen[:low])

    def history(self, tokens: int, number: int) -> list[dict]:
        """Questions and answers, together about `tokens` tokens, the template's own (5 a message) counted in."""
        messages, left = [], tokens
        while left > 12:
            size = left if left < 180 else 120
            question = size // 3
            messages.append(user(self.text(question - 5, number + len(messages))))
            messages.append(assistant(self.text(size - question - 5, number + len(messages))))
            left -= size
        return messages

    @staticmethod
    def story(number: int) -> dict:
        """A request whose answer is long."""
        source = random.Random(number)
        first, second = (WORDS["en"][int(source.random() * 24)] for _ in range(2))
        return user(f"Story {number}: write a very long and detailed story about a {first} and a {second}. Do not stop early.")


class EngineSide:
    """This project's engine, asked as the page asks it."""

    name = "this project"

    def __init__(self, engine: Engine, conversation):
        self.engine = engine
        self.conversation = conversation

    def ask(self, messages: list[dict], max_tokens: int, owner: object = None) -> Answer:
        started = time.perf_counter()
        reply = self.stream(messages, max_tokens, owner)
        with interrupt.waking(reply.cancel):
            answer = take(reply, started)
        stats = reply.stats
        answer.tokens, answer.prompt_tokens, answer.cached_tokens = stats.answer_tokens, stats.prompt_tokens, stats.cached_tokens
        return answer

    def stream(self, messages: list[dict], max_tokens: int, owner: object = None):
        prompt, messages = self.conversation.prompt(messages, max_tokens, client=owner), list(messages)
        return self.engine.stream(
            prompt.tokens, GREEDY, prompt.max_tokens, owner=owner, client=owner, trimmed=prompt.trimmed,
            follow=prompt.follow, on_end=lambda reply: self.conversation.after(reply, prompt, messages, owner, max_tokens),
        )

    def type_ahead(self, messages: list[dict], owner: object) -> None:
        self.engine.warm(owner, self.conversation.prompt(messages, client=owner).tokens, client=owner)
        self.settle()

    def settle(self) -> None:
        """Waits until nothing is computed any more, not even ahead."""
        engine, end = self.engine, time.monotonic() + ANSWER_SECONDS
        while not engine.idle:
            if engine.error:
                raise EngineError(f"the engine has ended: {engine.error}")
            if time.monotonic() > end:
                raise BenchError("the engine did not come to rest")
            interrupt.sleep(0.002)

    def bare_speed(self, messages: list[dict], max_tokens: int) -> float:
        """Tokens/s of nothing but decode and sample, over and over, on the thread that computes for the engine."""
        prompt = self.conversation.prompt(messages, max_tokens)
        speeds = []
        loop = lambda reply: speeds.append(_decode_loop(self.engine, prompt.tokens, max_tokens))
        "".join(self.engine.stream(prompt.tokens, GREEDY, 1, on_end=loop))
        interrupt.check()
        if not speeds[0]:
            raise BenchError("llama.cpp could not compute the bare loop")
        return speeds[0]


def _decode_loop(engine: Engine, prompt: list[int], count: int) -> float:
    """Tokens/s, 0 where llama.cpp fails or the work was asked to end. Called by the decode thread."""
    model, cache = engine.model, engine.cache
    sampler, slot = model.sampler(GREEDY), cache.acquire(token_array(prompt))
    times, tokens = [], token_array(prompt[len(slot):])
    try:
        for _ in range(count):
            if interrupt.noted() or model.decode([(slot.id, len(slot), tokens, True)]):
                return 0.0
            slot.tokens.extend(tokens)
            tokens = token_array([model.sample(sampler, len(tokens) - 1)[0]])
            times.append(time.perf_counter())
    finally:
        sampler.close()
        cache.release(slot)
    return (count - 1) / (times[-1] - times[0])


class LlamaSide:
    """llama-cpp-python's Llama class with its own defaults, on the same file, window and threads."""

    name = "the Llama class"

    def __init__(self, path: str, n_ctx: int, threads: int, flash_attn: bool, system: list[dict]):
        from llama_cpp import Llama

        self._system = system
        self._llama = Llama(path, n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads, flash_attn=flash_attn, verbose=False)

    def ask(self, messages: list[dict], max_tokens: int, owner: object = None) -> Answer:
        ends = []

        def pieces(chunks):
            for chunk in chunks:
                choice = chunk["choices"][0]
                ends.append(choice["finish_reason"])
                yield choice["delta"].get("content") or ""

        started = time.perf_counter()
        chunks = self._llama.create_chat_completion(
            [*self._system, *messages], stream=True, max_tokens=max_tokens, temperature=0, repeat_penalty=1.0)
        answer = take(pieces(chunks), started)
        whole = ends and ends[-1] == "length"
        answer.tokens = max_tokens if whole else len(self._llama.tokenize(answer.text.encode(), add_bos=False))
        return answer

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self._llama.close()


class HttpSide:
    """A server with OpenAI's chat API, at `url`, with or without /v1."""

    name = "the server"

    def __init__(self, url: str, system: list[dict], most: int = 32):
        import httpx

        from . import proxies

        base = url.rstrip("/")
        self.url = base if base.endswith("/v1") else f"{base}/v1"
        self._system = system
        self._errors = httpx.HTTPError, httpx.InvalidURL
        limits = httpx.Limits(max_connections=most, max_keepalive_connections=most)
        timeout, proxy = httpx.Timeout(ANSWER_SECONDS, connect=5), proxies.for_address(base)
        self._client = httpx.Client(timeout=timeout, limits=limits, proxy=proxy, trust_env=False)
        self.model = self._first_model()

    def ask(self, messages: list[dict], max_tokens: int, owner: object = None) -> Answer:
        body = {
            "model": self.model, "messages": [*self._system, *messages], "max_tokens": max_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }
        usage = {}

        def pieces(lines):
            for event in events(lines):
                usage.update(event.get("usage") or {})
                yield delta(event)

        started = time.perf_counter()
        try:
            with self._client.stream("POST", f"{self.url}/chat/completions", json=body) as response:
                if response.status_code != 200:
                    text = " ".join(response.read().decode("utf-8", "replace").split())
                    raise BenchError(f"{self.url} answered HTTP {response.status_code}: {text[:300]}")
                answer = take(pieces(response.iter_lines()), started)
        except self._errors as error:
            raise BenchError(f"{self.url} broke off an answer: {error or type(error).__name__}") from None
        answer.tokens = usage.get("completion_tokens") or len(answer.times)
        answer.prompt_tokens = usage.get("prompt_tokens") or 0
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return answer

    def settle(self) -> None:
        interrupt.sleep(SETTLE_SECONDS)

    def close(self) -> None:
        self._client.close()

    def _first_model(self) -> str:
        try:
            response = self._client.get(f"{self.url}/models", timeout=10)
        except self._errors as error:
            raise BenchError(f"{self.url} does not answer: {error or type(error).__name__}. Is the server running, and is this its address?") from None
        if response.status_code != 200:
            raise BenchError(f"{self.url}/models answered HTTP {response.status_code}; a server with OpenAI's API is needed")
        try:
            return response.json()["data"][0]["id"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise BenchError(f"{self.url}/models does not list a model; a server with OpenAI's API is needed") from None


def events(lines: Iterable[str]) -> Iterator[dict]:
    """The objects of a stream of server-sent events, up to [DONE]. Raises BenchError for one that tells of an error."""
    for line in lines:
        field_name, _, value = line.partition(":")
        if field_name != "data":
            continue
        value = value.strip()
        if value == "[DONE]":
            return
        try:
            event = json.loads(value)
        except ValueError:
            raise BenchError(f"the server sent what is not JSON: {value[:100]!r}") from None
        if not isinstance(event, dict) or event.get("error"):
            raise BenchError(f"the server tells of an error: {value[:300]}")
        yield event


def delta(event: dict) -> str:
    """The text of one event; empty where it brings none."""
    choices = event.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""

"""Long text made short enough for the window.

A message that does not fit is split at its paragraphs and sentences, the model summarises each part, and
the answer is computed over the summaries. Each summary is a request of its own to the engine, so others
are served in between. What was condensed is remembered, so that later turns find the same prompt again.

The request usually stands around the text that was pasted. The first and the last paragraph (if that is long, line;
if that is long, sentence) are kept word for word; where such a line is no request after all, it is a title or a
closing sentence, and does no harm. A small model that summarises passes over the one fact that is asked for, so the
sentences that have the most rare words in common with it stand word for word beside the summaries. The summaries
themselves depend on the text alone: another question about it finds them ready.

With `history.overflow: condense`, rounds that leave the window are summarised too, into one short note, after an
answer, while the person reads. Until the note is there, and where it cannot be had, they are simply gone.
"""

import asyncio
import copy
import hashlib
import logging
import math
import re
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from threading import Lock

from .conversation import NOTE, TooLong, flatten
from .engine import Busy, EngineError, Reply
from .sampling import Sampling

log = logging.getLogger(__name__)

LONGEST_PART = 420  # tokens; of more, a small model tells only the end
MOST_TOKENS = 80_000  # of one message: more would take longer than anybody waits
SUMMARY = 48, 160  # tokens of one summary, at least and at most
QUOTES = 5, 160  # sentences, and tokens of all of them, that stand word for word
LONGEST_REQUEST = 80  # tokens of the first and of the last lines that are kept as they are
REMEMBERED = 1_000_000  # characters of summaries that are kept in memory
BUSY_PAUSES = 1, 2, 4, 8  # seconds until it is tried again when the line is full
STEADY = Sampling(temperature=0, repeat_penalty=1.1)

BOUNDARIES = [  # where a text may be split, the best first
    re.compile(r"\n[ \t]*\n+"),
    re.compile(r"\n"),
    re.compile(r"[。！？!?；;…]+[”’」』）)\"']*|\.[”’)\"']*\s"),
    re.compile(r"[，、,：:]|\s"),
]
PARAGRAPH, LINE, SENTENCE = BOUNDARIES[:3]
FENCE = re.compile(r"\s*(`{3,}|~{3,})\s*")  # a line that only ends a block of code
CHINESE = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]")

ENGLISH_WORDS = {
    "ask": "Shorten the following text to at most {words} words. Keep names, numbers and conclusions.\n\n{text}\n\nSummary:",
    "condensed": "[The text, condensed]",
    "quoted": "[From the text, word for word]",
    "note": "Earlier in this conversation: {text}",
    "recall": "Shorten the following conversation to at most {words} words. Keep what was asked and answered, names and facts.\n\n{text}\n\nSummary:",
    "user": "Person: {text}",
    "assistant": "Assistant: {text}",
}
CHINESE_WORDS = {
    "ask": "{text}\n\n请用一段话概括以上内容，不超过{words}字，保留人名和数字。",
    "condensed": "【原文压缩稿】",
    "quoted": "【原文摘录】",
    "note": "此前的对话：{text}",
    "recall": "{text}\n\n请用一段话概括以上对话，不超过{words}字，保留问过什么、答过什么、人名和事实。",
    "user": "用户：{text}",
    "assistant": "助手：{text}",
}
WORDS_PER_TOKEN = 0.6, 1.0  # of an English and of a Chinese summary: told less than it may write, a model ends by itself


@dataclass(frozen=True)
class Progress:
    """Part `number` of `count` is about to be summarised."""

    number: int
    count: int


@dataclass(frozen=True)
class Size:
    """Of an unsent text: about how many `tokens`, of what `window`, and its `fate`: it fits, is condensed or refused
    (then `limit` is how many there may be)."""

    tokens: int
    window: int
    limit: int
    fate: str


@dataclass(frozen=True)
class Condensed:
    """What stands for a message: its text, its size `before` and `after` in tokens, and of how many `parts` it was made."""

    text: str
    before: int
    after: int
    parts: int


class Condenser:
    """Makes messages fit the window of `conversation`, with the model of `engine`."""

    def __init__(self, engine, conversation, config):
        self._engine = engine
        self._conversation = conversation
        self._config = config
        self._messages = Memory(lambda condensed: len(condensed.text))
        self._summaries = Memory(len)
        self._notes = Memory(len)
        self._noting: dict[object, Reply] = {}  # by owner; the decode thread's and the event loop's
        conversation.note_of = self.note_of

    def under(self, config) -> "Condenser":
        """The same, with what it remembers, under other settings: for one tab that has its own."""
        other = copy.copy(self)
        other._conversation, other._config = self._conversation.under(config), config
        return other

    def measure(self, samples: list[str], length: int) -> "Size":
        """How large a text of `length` characters is, of which there are samples, and what will become of it.
        Characters are counted as JavaScript does."""
        counted = sum(map(self._conversation.count, samples))
        tokens = counted * length // max(1, sum(map(_length_in_browser, samples)))
        limit = self._conversation.longest()
        if tokens <= limit:
            return Size(tokens, self._engine.n_ctx, limit, "fits")
        if self._config.chat.long_input == "condense" and tokens <= MOST_TOKENS:
            return Size(tokens, self._engine.n_ctx, limit, "condensed")
        return Size(tokens, self._engine.n_ctx, limit if self._config.chat.long_input == "refuse" else MOST_TOKENS, "refused")

    def on(self, messages: list[dict], owner: object = None) -> "Condensing":
        """The condensing of what in `messages`, the last of which is the person's, is too long.

        A note that is being written for `owner` is given up: nobody waits for it.
        """
        if noting := self._noting.pop(owner, None):
            noting.cancel()
        return Condensing(self, flatten(messages))

    def shown(self, messages: list[dict]) -> list[dict]:
        """`messages` as the model reads them: what was condensed before stands there condensed."""
        return [self._shown(message) for message in flatten(messages)]

    def remembered(self, message: dict) -> Condensed | None:
        """What stands for a person's message that was condensed before."""
        return self._messages.get(message["content"]) if message["role"] == "user" else None

    def _shown(self, message: dict) -> dict:
        condensed = self.remembered(message)
        return {**message, "content": condensed.text} if condensed else message

    def may_be_too_long(self, messages: list[dict]) -> bool:
        """Whether it is worth counting: as many tokens as bytes is the most a text can be."""
        size = sum(len(messages[at]["content"].encode("utf-8", "replace")) for at in _unanswered(messages))
        return size > self._conversation.longest() // 2

    def too_long(self, messages: list[dict]) -> int | None:
        """Which message is to be condensed so that `messages` fit: the longest of those not answered yet; None: they fit.

        Raises TooLong where nothing is to be condensed.
        """
        sizes = {at: self._conversation.size(messages[at]["content"]) for at in _unanswered(messages)}
        size, longest = sum(sizes.values()), self._conversation.longest()
        if not sizes or (size < self._engine.n_ctx and self._fits(messages)):
            return None
        if self._config.chat.long_input == "refuse":
            raise TooLong(max(size, longest + 1), longest)
        return max(sizes, key=sizes.get)

    def _fits(self, messages: list[dict]) -> bool:
        try:
            return bool(self._conversation.prompt(messages))
        except TooLong:
            return False

    async def condense(self, text: str) -> AsyncIterator[Progress | Condensed]:
        """Condenses a message: what is about to be done, and at last what stands for it.

        Raises TooLong for more than `MOST_TOKENS`, Busy when the line stays full, EngineError.
        """
        plan = await asyncio.to_thread(Plan, self._conversation, self._config.generation.max_tokens, text)
        body, done, owner = plan.body, 0, object()
        while True:
            parts = await asyncio.to_thread(split, body, plan.part, self._conversation.count)
            limit = plan.share(len(parts))
            summaries = []
            for number, part in enumerate(parts, 1):
                yield Progress(number, len(parts))
                summaries.append(await self._summary(plan, part, limit, owner))
            body, done = "\n\n".join(filter(None, summaries)), done + len(parts)
            if len(parts) == 1 or await asyncio.to_thread(self._conversation.count, body) <= plan.most:
                break
        whole = plan.whole(body)
        condensed = Condensed(whole, plan.before, await asyncio.to_thread(self._conversation.count, whole), done)
        self._messages.put(text, condensed)
        yield condensed

    async def _summary(self, plan: "Plan", part: str, limit: int, owner: object) -> str:
        """The model's summary of one part in at most `limit` tokens; a part as short as that stays as it is."""
        if await asyncio.to_thread(self._conversation.count, part) <= limit:
            return part.strip()
        asked = plan.ask(part, limit)
        known = self._summaries.get(asked)
        if known is None:
            prompt = await asyncio.to_thread(self._conversation.whole, [{"role": "user", "content": asked}], False)
            known = await self._answer(prompt.tokens, min(limit, prompt.max_tokens), owner)
            self._summaries.put(asked, known)
        return known

    async def _answer(self, tokens: list[int], limit: int, owner: object) -> str:
        reply = await self._stream(tokens, limit, owner)
        try:
            text = "".join([text async for text in reply]).strip()
            return _without_a_torn_end(text) if reply.stats.finish_reason == "length" else text
        finally:
            reply.cancel()  # Stop, or nothing left to cancel

    async def _stream(self, tokens: list[int], limit: int, owner: object):
        """Asks the engine; where the line is full, again a little later. Raises Busy when it stays full."""
        for pause in (*BUSY_PAUSES, None):
            try:
                return self._engine.stream(tokens, STEADY, limit, owner=owner, keep=False, told=pause is None)
            except Busy:
                if pause is None:
                    raise
                await asyncio.sleep(pause)

    # Notes of earlier turns

    def note_of(self, gone: list[dict]) -> str:
        """The note of these messages; "" where there is none, or not yet."""
        return self._notes.get(_key(gone)) or ""

    def after(self, reply, messages: list[dict], owner: object, max_tokens: int | None = None, begun: str = "") -> None:
        """Prepares the next turn, as Conversation.after, and has a note written of the turns it will have dropped."""
        ahead = self._conversation.after(reply, messages, owner, max_tokens, begun)
        if not (ahead and ahead.gone and self._conversation.takes_notes) or ahead.note or self._engine.waiting:
            return
        words = CHINESE_WORDS if _is_chinese("".join(message["content"] for message in ahead.gone)) else ENGLISH_WORDS

        def written(note: Reply) -> None:
            if self._noting.get(owner) is note:
                del self._noting[owner]
            text = note.text.strip()
            if text and note.stats.finish_reason in ("stop", "length"):
                self._notes.put(_key(ahead.gone), words["note"].format(text=_without_a_torn_end(text)))
                self._conversation.after(reply, messages, owner, max_tokens, begun)

        try:
            tokens = self._recall(ahead.gone, words)
            self._noting[owner] = self._engine.stream(
                tokens, STEADY, NOTE - 16, owner=object(), on_end=written, keep=False, told=False
            )
        except (EngineError, TooLong):
            log.debug("no note was written")

    def _recall(self, gone: list[dict], words: dict) -> list[int]:
        """The prompt for a note of `gone`: of the note before it, and of what has left the window since."""
        known = max((at for at in range(len(gone)) if self._notes.get(_key(gone[:at]))), default=0)
        told = [self.note_of(gone[:known])] if known else []
        told += [words[message["role"]].format(text=message["content"]) for message in gone[known:]]
        asked = words["recall"].format(text="{text}", words=60)
        room = self._conversation.whole([{"role": "user", "content": asked}], False).max_tokens - NOTE
        newest = split("\n".join(told), max(16, room), self._conversation.count)[-1]
        return self._conversation.whole([{"role": "user", "content": asked.replace("{text}", newest)}], False).tokens


class Condensing:
    """One conversation on its way into the window. `messages` are what the model is to read, once `parts` has ended;
    `result` is what stands for the newest condensed message that waits for an answer, `None` where none was condensed."""

    def __init__(self, condenser: Condenser, messages: list[dict]):
        self._condenser = condenser
        self._given = messages
        self.messages = condenser.shown(messages)
        known = [condenser.remembered(messages[at]) for at in _unanswered(messages)]
        self.result: Condensed | None = next(filter(None, reversed(known)), None)

    async def parts(self) -> AsyncIterator[Progress]:
        """Condenses what must be, and tells before each part which one it is. Nothing where all fits.

        Raises what Condenser.condense raises, and TooLong where the settings say that nothing is condensed.
        """
        if not self._condenser.may_be_too_long(self.messages):
            return
        tried = set()
        while (at := await asyncio.to_thread(self._condenser.too_long, self.messages)) is not None and at not in tried:
            tried.add(at)
            steps = self._condenser.condense(self._given[at]["content"])
            try:
                async for step in steps:
                    if isinstance(step, Progress):
                        yield step
                    else:
                        self.result = step
            finally:
                await steps.aclose()
            self.messages[at] = {"role": "user", "content": self.result.text}


class Plan:
    """How one message is condensed.

    `before`: its size; `body`: what is to be summarised; `part`: tokens of a part; `most`: tokens that
    all summaries may have in the end.
    """

    def __init__(self, conversation, max_tokens: int, text: str):
        longest = conversation.longest()
        self.before = conversation.size(text)
        if self.before > MOST_TOKENS:
            raise TooLong(self.before, MOST_TOKENS)
        chinese = _is_chinese(text)
        self._words, self._per_token = (CHINESE_WORDS if chinese else ENGLISH_WORDS), WORDS_PER_TOKEN[chinese]
        kept = min(LONGEST_REQUEST, longest // 8)
        self._head, self.body, self._tail = frame(text, kept, conversation.count)
        if 2 * len(self.body) < len(text):  # several short lines, not a text with a request
            self._head, self.body, self._tail = "", text, ""
        budget = min(QUOTES[1], (longest - max_tokens) // 4)
        self._quotes = quotes(self.body, _request(self._head, self._tail), budget, conversation.count)
        self.most = max(SUMMARY[0], longest - max_tokens - conversation.count(self.whole("")))
        empty = conversation.whole([{"role": "user", "content": self.ask("", 1000)}], False)
        self._smallest = min(SUMMARY[0], self.most // 2, empty.max_tokens // 4)
        self.part = min(LONGEST_PART, empty.max_tokens - max(self._smallest, min(SUMMARY[1], empty.max_tokens // 4)))

    def share(self, parts: int) -> int:
        """Tokens of each summary, so that all of them take half of what there is room for."""
        return min(max(self._smallest, self.most // 2 // parts), SUMMARY[1], self.part // 4)

    def ask(self, part: str, limit: int) -> str:
        """What the model is asked for one part."""
        count = max(10, int(limit * self._per_token) // 10 * 10)
        return self._words["ask"].format(text=part.strip(), words=count)

    def whole(self, body: str) -> str:
        """The message with `body` in the place of its text."""
        quotes = f"{self._words['quoted']}\n{self._quotes}" if self._quotes else ""
        parts = (self._head.strip(), f"{self._words['condensed']}\n{body}", quotes, self._tail.strip())
        return "\n\n".join(filter(None, parts))


class Memory:
    """Results by the text they were made from, of which only a digest is held; those used longest ago go first."""

    def __init__(self, size: Callable[[object], int], most: int = REMEMBERED):
        self._size = size
        self._most = most
        self._held: OrderedDict[bytes, object] = OrderedDict()
        self._total = 0
        self._lock = Lock()

    def get(self, text: str):
        """What was kept for `text`, or None."""
        key = _digest(text)
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, text: str, value) -> None:
        key = _digest(text)
        with self._lock:
            before = self._held.pop(key, None)
            self._total += self._size(value) - (self._size(before) if before is not None else 0)
            self._held[key] = value
            while self._total > self._most:
                self._total -= self._size(self._held.popitem(last=False)[1])


def split(text: str, most: int, count: Callable[[str], int]) -> list[str]:
    """Parts of `text`, in order, that joined are the text again; none is more than `most` by `count`, unless it is one character.

    A part ends at the best boundary in its second half: paragraph, line, sentence, clause or word, in any script,
    or wherever it must.
    """
    parts, start, guess = [], 0, 4 * most  # characters
    while start < len(text):
        end = _first_that_fits(text, start, guess, most, count)
        if end < len(text):
            end = _boundary(text, start, end)
            while end - start > 1 and count(text[start:end]) > most:  # less text is now and then more tokens
                end -= max(1, (end - start) // 20)
        parts.append(text[start:end])
        guess = max(16, int(1.25 * (end - start)))
        start = end
    return parts


def _first_that_fits(text: str, start: int, guess: int, most: int, count: Callable[[str], int]) -> int:
    """An end near the last one with which the text from `start` is no more than `most`."""
    end = min(len(text), start + guess)
    size = count(text[start:end])
    while size <= most // 2 and end < len(text):
        end = min(len(text), start + 2 * (end - start))
        size = count(text[start:end])
    while size > most and end - start > 1:
        end = start + max(1, min((end - start) * most // size, end - start - 1))
        size = count(text[start:end])
    return end


def _boundary(text: str, start: int, end: int) -> int:
    """The best place to end a part between the middle of text[start:end] and its end."""
    middle = (start + end + 1) // 2
    for pattern in BOUNDARIES:
        found = [match.end() for match in pattern.finditer(text, middle, end)]
        if found:
            return found[-1]
    return end


def frame(text: str, most: int, count: Callable[[str], int]) -> tuple[str, str, str]:
    """Head, body and tail of a message: the head and the tail, which have at most `most` tokens each, are probably what
    is asked for, the body what it is asked about. Joined they are the message again."""
    head = _edge([_start(text, pattern) for pattern in (PARAGRAPH, LINE, SENTENCE)], most, count)
    rest = text[len(head) :]
    tail = _edge([_end(rest, pattern) for pattern in (PARAGRAPH, LINE, SENTENCE)], most, count)
    return head, rest[: len(rest) - len(tail)], tail


def _request(head: str, tail: str) -> str:
    """What is asked for: of head and tail those that end in a question mark or a colon, else the shorter."""
    edges = [edge.strip() for edge in (tail, head) if edge.strip()]
    return "\n".join(edge for edge in edges if edge[-1] in "?？:：") or min(edges, key=len, default="")


def quotes(text: str, request: str, most: int, count: Callable[[str], int]) -> str:
    """The sentences of `text` that have the most in common with `request`, in their order; at most `most` tokens.

    What is common is weighed by how rare it is in the text (inverse document frequency); one rare word is no match.
    """
    sentences = [sentence.strip() for sentence in _sentences(text)]
    terms = [_terms(sentence) for sentence in sentences]
    wanted = _terms(request)
    frequency = Counter(term for each in terms for term in each & wanted)
    weight = {term: math.log(len(sentences) / found) for term, found in frequency.items()}
    scores = [(sum(weight[term] for term in each & wanted) if len(each & wanted) > 1 else 0, at) for at, each in enumerate(terms)]
    chosen, left = [], most
    for score, at in sorted(scores, key=lambda pair: (-pair[0], pair[1]))[: QUOTES[0]]:
        size = count(sentences[at]) + 1
        if score > 0 and size <= left:
            chosen.append(at)
            left -= size
    return "\n".join(dict.fromkeys(sentences[at] for at in sorted(chosen)))


def _sentences(text: str) -> Iterator[str]:
    start = 0
    for end in sorted({match.end() for pattern in (LINE, SENTENCE) for match in pattern.finditer(text)} | {len(text)}):
        if text[start:end].strip():
            yield text[start:end]
        start = end


def _terms(text: str) -> set[str]:
    """Words, cut to their first letters so that "fail" finds "failed", numbers, and pairs of Chinese characters."""
    words = {word if word.isdigit() else word[:4] for word in re.findall(r"[^\W\d_]{2,}|\d+", CHINESE.sub(" ", text.lower()))}
    runs = re.findall(f"(?:{CHINESE.pattern})+", text)
    return words | {run[at : at + 2] for run in runs for at in range(len(run) - 1)}


def _without_a_torn_end(text: str) -> str:
    ends = [match.end() for match in SENTENCE.finditer(text, len(text) // 2)]
    return text[: ends[-1]].strip() if ends else text


def _edge(choices: list[str], most: int, count: Callable[[str], int]) -> str:
    """The longest of the choices that is short enough and says anything."""
    for edge in choices:
        lines = [line for line in edge.splitlines() if line.strip() and not FENCE.fullmatch(line)]
        if lines and len(edge) <= 32 * most and count(edge) <= most:
            return edge
    return ""


def _start(text: str, pattern: re.Pattern) -> str:
    skipped = len(text) - len(text.lstrip())
    found = pattern.search(text, skipped)
    return text[: found.end()] if found else text


def _end(text: str, pattern: re.Pattern) -> str:
    length = len(text.rstrip())
    found = [match.end() for match in pattern.finditer(text, max(0, length - 4000), length) if match.end() < length]
    return text[found[-1] :] if found else text


def _unanswered(messages: list[dict]) -> list[int]:
    """Where the person's messages stand that nobody has answered yet."""
    at = len(messages)
    while at and (messages[at - 1]["role"] == "user" or not messages[at - 1]["content"]):
        at -= 1
    return [place for place in range(at, len(messages)) if messages[place]["role"] == "user"]


def _key(messages: list[dict]) -> str:
    return "".join(f"{message['role']}\0{message['content']}\0" for message in messages)


def _is_chinese(text: str) -> bool:
    sample = text[:20_000]
    return len(CHINESE.findall(sample)) > len(sample.split()) / 2


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _length_in_browser(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2

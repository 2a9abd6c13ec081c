"""From a conversation to the token ids of a prompt: what fits into the window, and what an answer is read as later.

An answer's text can be split into tokens in several ways. The model's own are kept, so that the next turn finds them
in the cache, for that turn alone: an answer is known by who asked and by all that was said up to and with it. To
everybody else, and in any other place, a text is what the tokenizer makes of it.
"""

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, chain, groupby, islice
from operator import itemgetter

from .client_memory import ClientMemory
from .template import ChatTemplate, joined

QUESTION = 48  # tokens kept free for the next question when turns are dropped
NOTE = 96  # tokens that the note of earlier turns may have
SMALLEST_ANSWER = 64  # tokens that a long message must leave for its answer
REMEMBERED = 100_000  # tokens of answers that are kept for those who got them
PLACE_BYTES = 16
SAMPLE = 8_000  # characters of a very long text that are counted to estimate it, at three places


class SystemPromptTooLong(Exception):
    """The system prompt of config.yaml leaves no room in the window for a question and its answer; sizes in tokens."""

    def __init__(self, size: int, limit: int, n_ctx: int):
        super().__init__(
            f"chat.system_prompt: {size} tokens found; allowed: at most {limit}, so that a question and its answer fit "
            f"the window of {n_ctx} tokens beside it (runtime.n_ctx)"
        )


class TooLong(Exception):
    """A message that cannot fit: `size` and `limit` in tokens."""

    def __init__(self, size: int, limit: int):
        super().__init__(f"The message is too long: {size} tokens, at most {limit} fit. Shorten it, or raise n_ctx in config.yaml.")
        self.size, self.limit = size, limit


@dataclass(frozen=True)
class Prompt:
    """What the engine is asked: the prompt, and how long the answer may be (tokens).

    `dropped` turns, the oldest, are no longer in view; of those `note` tells, if there is one. `follow` is what surely
    comes after the answer. `client` asks, `place` is where in the conversation the answer stands, of which there is
    what has `begun`.
    """

    tokens: list[int]
    max_tokens: int
    dropped: int = 0
    follow: list[int] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    note: str = ""
    gone: list[dict] = field(default_factory=list, repr=False)  # the messages of the dropped turns, with their places
    client: Hashable = None
    place: bytes = b""
    begun: str = ""

    @property
    def trimmed(self) -> bool:
        return self.dropped > 0


class Conversation:
    """Makes prompts for an engine by the settings of config.yaml. Usable once the engine has its model.

    `client` always is who asks, any hashable value: nobody else's prompts depend on what was answered there. For None
    nothing is kept. `note_of(client, place)` is asked for a note of the turns up to a place, which are dropped, with
    `history.overflow: condense`.
    """

    def __init__(self, engine, config):
        self._engine = engine
        self._config = config
        self.note_of: Callable[[Hashable, bytes], str] = lambda client, place: ""
        self._made: ChatTemplate | None = None
        self._answers = ClientMemory(len, REMEMBERED)  # the model's own tokens, by the places of answers

    def under(self, config) -> "Conversation":
        """The same with other settings: for one tab that has its own. Needs the model."""
        if config is self._config:
            return self
        self._made = self.template
        other = copy.copy(self)
        other._config = config
        return other

    @property
    def template(self) -> ChatTemplate:
        if self._made is None:
            self._made = ChatTemplate(self._engine.model)
        return self._made

    def opening(self) -> list[int]:
        """The tokens that a conversation begins with: the system prompt, up to the first message. Raises
        SystemPromptTooLong."""
        if (room := self.longest()) < 1:
            size = self.count(self._config.chat.system_prompt)
            raise SystemPromptTooLong(size, max(0, size + room - 1), self._engine.n_ctx)
        system = self._system()
        pieces = self.template.render([*system, {"role": "user", "content": ""}], answering=False)
        at = next(number for number, piece in enumerate(pieces) if piece.message in (len(system), None))
        return joined(pieces[:at]) + pieces[at].before

    def prompt(
        self, messages: list[dict], max_tokens: int | None = None, begun: str = "", client: Hashable = None
    ) -> Prompt:
        """The prompt for the answer to `messages`, the last of which is the user's; for the rest of it, where
        there is a `begun` answer.

        Oldest turns are dropped, one by one, until the answer has room; the system prompt and the newest
        message never are. Raises TooLong when they alone are too much.
        """
        wanted = max_tokens or self._config.generation.max_tokens
        given = flatten(messages)
        system = [message for message in given if message["role"] == "system"] or self._system()
        turns = _turns([message for message in given if message["role"] != "system"]) or [[]]
        place = self._place(system, turns, client)
        already = self._begun(begun, client, place)
        window = self._engine.n_ctx - len(already)
        start = self._start(system, turns, wanted, window)
        while True:
            gone, kept = _flat(turns[:start]), _flat(turns[start:])
            note = self.note_of(client, gone[-1]["place"]) if gone and self.takes_notes else ""
            tokens, view = self._with_note(system, note, kept)
            if note and window - len(tokens) < min(wanted, SMALLEST_ANSWER):
                note = ""
                tokens, view = self._with_note(system, note, kept)
            if window - len(tokens) >= wanted or start >= len(turns) - 1:
                break
            start += 1  # the template has more around what is left than it had in the whole
        return Prompt(
            tokens + already, min(wanted, window - len(tokens)), start, self._follow(view, tokens),
            list(self._config.generation.stop), note, gone, client, place, begun,
        )

    @property
    def takes_notes(self) -> bool:
        """Whether turns that do not fit leave a note. Those beyond `max_turns` do not: they go one by one, so it would
        be another note at every turn."""
        history = self._config.chat.history
        return history.overflow == "condense" and not history.max_turns

    def _with_note(self, system: list[dict], note: str, kept: list[dict]) -> tuple[list[int], list[dict]]:
        """The prompt's tokens and messages; the note stands at the head of the first message that is kept."""
        if note:
            kept = [{**kept[0], "content": f"{note}\n\n{kept[0]['content']}"}, *kept[1:]]
        view = [*system, *kept]
        return joined(self.template.render(view)), view

    def whole(self, messages: list[dict], keep: bool = True, client: Hashable = None) -> Prompt:
        """The prompt for the answer to all of `messages` as they are, with all the room that is left.

        Without `keep` their tokens are not kept at hand. Raises TooLong where they leave none.
        """
        view = flatten(messages)
        if not any(message["role"] == "system" for message in view):
            view = [*self._system(), *view]
        place = self._place([], [view], client)
        tokens = joined(self.template.render(view, keep=keep))
        return self._with_room(tokens, self._follow(view, tokens) if keep else [], client, place)

    def plain(self, text: str) -> Prompt:
        """The prompt for the continuation of `text`, with no template around it."""
        return self._with_room(self.template.plain(text), [])

    def count(self, text: str) -> int:
        """How many tokens `text` is."""
        return len(self._engine.model.tokenize(text))

    def size(self, text: str) -> int:
        """How many tokens `text` is; of more than three samples an estimate, since counting 1 MB takes seconds."""
        if len(text) <= 3 * SAMPLE:
            return len(self.template.tokens(text))
        starts = (0, (len(text) - SAMPLE) // 2, len(text) - SAMPLE)
        return sum(self.count(text[start : start + SAMPLE]) for start in starts) * len(text) // (3 * SAMPLE)

    def fits(self, text: str) -> bool:
        """Whether a message of this text fits the window with its answer. Only what is far too long is estimated."""
        longest = self.longest()
        return self.size(text) <= 2 * longest and self.count(text) <= longest

    def longest(self) -> int:
        """How many tokens a message may have, so that it fits the window with its answer."""
        around = len(joined(self.template.render([*self._system(), {"role": "user", "content": ""}])))
        return self._engine.n_ctx - around - min(self._config.generation.max_tokens, SMALLEST_ANSWER)

    def _with_room(self, tokens: list[int], follow: list[int], client: Hashable = None, place: bytes = b"") -> Prompt:
        room = self._engine.n_ctx - len(tokens)
        if room < 1:
            raise TooLong(len(tokens), self._engine.n_ctx - 1)
        return Prompt(tokens, room, 0, follow, list(self._config.generation.stop), client=client, place=place)

    def remember(self, reply, prompt: Prompt) -> None:
        """Keeps the model's own tokens of the answer to `prompt`, so that the next turn's prompt has them unchanged.

        Only those count whose pieces joined are what the person got: neither half a character nor the token of a
        stop string.
        """
        if not (prompt.place and reply.text):
            return
        text = prompt.begun + reply.text
        tokens = self.template.exactly(self._begun(prompt.begun, prompt.client, prompt.place) + reply.tokens, text)
        if tokens:
            self._answers.put(prompt.client, _after(prompt.place, {"role": "assistant", "content": text}), tokens)

    def after(
        self, reply, prompt: Prompt, messages: list[dict], owner: object, max_tokens: int | None = None
    ) -> Prompt | None:
        """Prepares the next turn of a conversation whose `prompt` has just been answered: if that will have to drop
        turns, they are dropped now, while the answer is read. Returns the prompt of that turn, its question empty."""
        self.remember(reply, prompt)
        if not reply.text:
            return None
        question = {"role": "user", "content": ""}
        answered = [*messages, {"role": "assistant", "content": prompt.begun + reply.text}, question]
        ahead = self.prompt(answered, max_tokens, client=prompt.client)
        if ahead.note or ahead.dropped > prompt.dropped:
            end = len(self.template.render([question])[-1].before)
            self._engine.warm(owner, ahead.tokens[: len(ahead.tokens) - end], trimmed=True, client=prompt.client)
        return ahead

    def _system(self) -> list[dict]:
        text = self._config.chat.system_prompt
        return [{"role": "system", "content": text}] if text else []

    def _place(self, system: list[dict], turns: list[list[dict]], client: Hashable) -> bytes:
        """The place after all that was said. Each message gets its own, and each answer the model's own tokens, where
        they are known."""
        place = b""
        for place, message in zip(places(chain(system, *turns)), chain(system, *turns)):
            message["place"] = place
            if message["role"] == "assistant":
                message["tokens"] = self._own(client, place)
        return place

    def _own(self, client: Hashable, place: bytes) -> list[int] | None:
        """The model's own tokens of the answer at `place`. Not with a seed: the same messages then make the same
        prompt, and the history is computed anew all the same."""
        return self._answers.get(client, place) if self._config.runtime.seed < 0 else None

    def _begun(self, begun: str, client: Hashable, place: bytes) -> list[int]:
        """Token ids of what there is of the answer at `place`."""
        if not begun:
            return []
        own = self._own(client, _after(place, {"role": "assistant", "content": begun}))
        return own or self.template.tokens(begun)

    def _start(self, system: list[dict], turns: list[list[dict]], wanted: int, window: int) -> int:
        """The first turn to keep for an answer of `wanted` tokens in what is free of the window. Raises TooLong."""
        most = self._config.chat.history.max_turns
        passed = max(len(turns) - most if most else 0, self._out_of_reach(turns))
        costs, base = self._costs(system, turns[passed:])
        least = min(wanted, SMALLEST_ANSWER)
        if base + costs[-1] + least > window:
            raise TooLong(costs[-1], window - base - least)
        return passed + self._first_that_fits(costs, window - wanted - base - (NOTE if self.takes_notes else 0))

    def _out_of_reach(self, turns: list[list[dict]]) -> int:
        """How many of the oldest turns cannot be in view, so that a long chat costs no more than a short one.

        Two windows full are left, for a template may strip texts. Where turns are dropped by halves, they are left in
        whole blocks, each of which fills a window whatever it says: from turn to turn the same halves are found.
        """
        if not self._one_by_one:
            block = self._engine.n_ctx // self.template.least_round + 1
            return max(0, len(turns) // block - 1) * block
        left = 2 * self._engine.n_ctx
        for number in range(len(turns) - 1, -1, -1):
            texts = (message.get("tokens") or self.template.tokens(message["content"]) for message in turns[number])
            left -= self.template.least_round + sum(map(len, texts))
            if left < 0:
                return number
        return 0

    def _costs(self, system: list[dict], turns: list[list[dict]]) -> tuple[list[int], int]:
        """Tokens of each turn, and of all that stays whatever is dropped."""
        sizes, end = self.template.sizes([*system, *_flat(turns)])
        starts = accumulate(map(len, turns), initial=len(system))
        costs = [sum(sizes[start : start + len(turn)]) for start, turn in zip(starts, turns)]
        alone = joined(self.template.render([*system, *turns[-1]]))
        base = len(alone) - costs[-1]
        if len(turns) > 1:  # what the template has before any first message stays as well
            costs[0] = max(0, costs[0] + sum(sizes[: len(system)]) + end - base)
        return costs, base

    @property
    def _one_by_one(self) -> bool:
        """Whether turns are dropped one by one. Not where every drop means computing all anew, for the model cannot
        shift its cache or there is another note: then half the room is freed at once."""
        return self._engine.can_shift and not self.takes_notes

    def _first_that_fits(self, costs: list[int], room: int) -> int:
        """The first turn to keep. Where half the room is freed at once, the same is done again only when that is used
        up."""
        ends = list(accumulate(costs, initial=0))
        start = 0

        def size(end: int) -> int:
            return ends[end - 1] - ends[start] + max(costs[end - 1], QUESTION)

        if self._one_by_one:
            while start < len(costs) - 1 and size(len(costs)) > room:
                start += 1
            return start
        for end in range(1, len(costs) + 1):
            if size(end) > room:
                while start < end - 1 and size(end) > room // 2:
                    start += 1
        return start

    def _follow(self, view: list[dict], tokens: list[int]) -> list[int]:
        """The template's text between the answer to the prompt `tokens` and the next message; nothing where that prompt
        is not what the next one begins with."""
        longer = [*view, {"role": "assistant", "content": ""}, {"role": "user", "content": ""}]
        try:
            pieces = self.template.render(longer, answering=False)
        except ValueError:
            return []
        at = next((number for number, piece in enumerate(pieces) if piece.message == len(view)), None)
        if at is None or pieces[at + 1].message != len(view) + 1 or joined(pieces[:at]) + pieces[at].before != tokens:
            return []
        return pieces[at + 1].before


def flatten(messages: list[dict]) -> list[dict]:
    """Messages as {role, content} with plain text: Gradio's lists of parts are joined, other parts left out."""
    return [{"role": message["role"], "content": _text(message.get("content"))} for message in messages]


def places(messages: Iterable[dict]) -> Iterator[bytes]:
    """The place of each message: a digest of all that was said up to and with it."""
    return islice(accumulate(messages, _after, initial=b""), 1, None)


def merged(texts: Iterable[str]) -> str:
    """What stands for several messages of one person in a row."""
    return "\n\n".join(texts)


def _after(place: bytes, message: dict) -> bytes:
    said = f"{message['role']}\0{message['content']}".encode("utf-8", "surrogatepass")
    return blake2b(place + said, digest_size=PLACE_BYTES).digest()


def _text(content) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        return content["text"] if isinstance(content.get("text"), str) and content.get("type", "text") == "text" else ""
    return "\n".join(text for text in map(_text, content) if text) if isinstance(content, (list, tuple)) else ""


def _turns(messages: list[dict]) -> list[list[dict]]:
    """Turns that each begin with a user's message. Messages of one role in a row are merged; what stands
    before the first user's message, and answers with no text, are left out."""
    said = (message for message in messages if message["content"] or message["role"] != "assistant")
    turns: list[list[dict]] = []
    for role, group in groupby(said, key=itemgetter("role")):
        message = {"role": role, "content": merged(each["content"] for each in group)}
        if role == "user":
            turns.append([message])
        elif turns:
            turns[-1].append(message)
    return turns


def _flat(turns: list[list[dict]]) -> list[dict]:
    return list(chain.from_iterable(turns))

"""From a conversation to the token ids of a prompt: the chat template, and what fits into the window.

What people type is tokenized apart from the template, so control tokens in it are plain text: nobody
can end a turn or plant a system message by typing one.
"""

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from llama_cpp.llama_chat_format import Jinja2ChatFormatter

QUESTION = 48  # tokens kept free for the next question when turns are dropped
NOTE = 96  # tokens that the note of earlier turns may have
SMALLEST_ANSWER = 64  # tokens that a long message must leave for its answer
REMEMBERED = 100_000  # tokens of texts that are kept at hand
LARGEST_KEPT = REMEMBERED // 4  # tokens; a longer text would push out those of all conversations
SAMPLE = 8_000  # characters of a very long text that are counted to estimate it, at three places
MARK = re.compile("\ue000(\\d+)\ue001")  # where a message's text goes; private-use characters


class TooLong(Exception):
    """A message that cannot fit: `size` and `limit` in tokens."""

    def __init__(self, size: int, limit: int):
        super().__init__(f"The message is too long: {size} tokens, at most {limit} fit. Shorten it, or raise n_ctx in config.yaml.")
        self.size, self.limit = size, limit


@dataclass(frozen=True)
class Prompt:
    """What the engine is asked: the prompt, and how long the answer may be (tokens).

    `dropped` turns, the oldest, are no longer in view; of those `note` tells, if there is one. `follow` is what surely comes after the answer.
    """

    tokens: list[int]
    max_tokens: int
    dropped: int = 0
    follow: list[int] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    note: str = ""
    gone: list[dict] = field(default_factory=list, repr=False)  # the messages of the dropped turns

    @property
    def trimmed(self) -> bool:
        return self.dropped > 0


class ChatTemplate:
    """A GGUF's own chat template, rendered to token ids. `model` gives the template and the tokenizer."""

    def __init__(self, model):
        self._model = model
        text = model.chat_template
        bos, eos = model.special_text("bos"), model.special_text("eos")
        self._formatters = {
            answering: Jinja2ChatFormatter(text, eos_token=eos, bos_token=bos, add_generation_prompt=answering)
            for answering in (True, False)
        }
        self._bos = model.tokenize(bos, special=True) if model.adds_bos and bos else []
        self._known: OrderedDict[tuple[str, bool], list[int]] = OrderedDict()  # the one used longest ago first
        self._held = 0  # tokens in it
        self._lock = Lock()

    def render(self, messages: list[dict], answering: bool = True, keep: bool = True) -> list[list[int]]:
        """Token ids in pieces: one for each message, with the template's text before it, and one for the end.

        `answering` adds the start of the assistant's turn; without `keep` the texts are not kept at hand,
        for they will not come again. Raises ValueError where the template
        refuses the conversation.
        """
        marked = [{"role": message["role"], "content": f"\ue000{number}\ue001"} for number, message in enumerate(messages)]
        try:
            text = self._formatters[answering](messages=marked).prompt
        except Exception as error:
            raise ValueError(f"the model's chat template refuses this conversation: {error}") from None
        parts = MARK.split(text)
        pieces = [self.tokens(parts[0], special=True)]
        if self._bos and pieces[0][: len(self._bos)] != self._bos:
            pieces[0] = self._bos + pieces[0]
        for number, after in zip(parts[1::2], parts[2::2]):
            text = messages[int(number)]["content"]
            pieces[-1] = pieces[-1] + (self.tokens(text) if keep else self._model.tokenize(text))
            pieces.append(self.tokens(after, special=True))
        return pieces

    def text(self, text: str) -> list[int]:
        """Token ids of `text` within a message: those the model chose, where it is an answer of its own."""
        return self.tokens(text) if text else []

    def plain(self, text: str) -> list[int]:
        """Token ids of `text` alone, which begin as the model wants every text to begin."""
        return self._bos + self._model.tokenize(text)

    def remember(self, text: str, tokens: list[int]) -> None:
        """Has `text`, when it is in a later prompt, stand for exactly the tokens the model chose for it."""
        self._keep((text, False), list(tokens))

    def tokens(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text` as it is in a message; `special` reads control tokens as such."""
        key = (text, special)
        try:
            self._known.move_to_end(key)
            return self._known[key]
        except KeyError:  # not known, or just dropped by another thread
            return self._keep(key, self._model.tokenize(text, special))

    def _keep(self, key: tuple[str, bool], tokens: list[int]) -> list[int]:
        if len(tokens) > LARGEST_KEPT:
            return tokens
        with self._lock:
            self._held += len(tokens) - len(self._known.pop(key, ()))
            self._known[key] = tokens
            while self._held > REMEMBERED:
                self._held -= len(self._known.popitem(last=False)[1])
        return tokens


class Conversation:
    """Makes prompts for an engine by the settings of config.yaml. Usable once the engine has its model.

    `note_of(messages)` is asked for a note of turns that are dropped, with `history.overflow: condense`.
    """

    def __init__(self, engine, config):
        self._engine = engine
        self._config = config
        self.note_of: Callable[[list[dict]], str] = lambda messages: ""
        self._made: ChatTemplate | None = None

    def under(self, config) -> "Conversation":
        """The same with other settings: for one tab that has its own. Needs the model."""
        if config is self._config:
            return self
        other = Conversation(self._engine, config)
        other._made, other.note_of = self.template, self.note_of
        return other

    @property
    def template(self) -> ChatTemplate:
        if self._made is None:
            self._made = ChatTemplate(self._engine.model)
        return self._made

    def opening(self) -> list[int]:
        """The tokens that every conversation begins with: the system prompt, up to the first message."""
        messages = [*self._system(), {"role": "user", "content": ""}]
        return sum(self.template.render(messages, answering=False)[: len(messages)], [])

    def prompt(self, messages: list[dict], max_tokens: int | None = None, begun: str = "") -> Prompt:
        """The prompt for the answer to `messages`, the last of which is the user's; for the rest of it, where
        there is a `begun` answer.

        Oldest turns are dropped, one by one, until the answer has room; the system prompt and the newest
        message never are. Raises TooLong when they alone are too much.
        """
        wanted = max_tokens or self._config.generation.max_tokens
        n_ctx = self._engine.n_ctx
        given = flatten(messages)
        system = [message for message in given if message["role"] == "system"] or self._system()
        turns = _turns([message for message in given if message["role"] != "system"])
        costs, base = self._costs(system, turns)
        already = self.template.text(begun)
        base += len(already)
        most = self._config.chat.history.max_turns
        start = max(0, len(turns) - most) if most else 0
        start = self._first_that_fits(costs, start, n_ctx - wanted - base - (NOTE if self.takes_notes else 0))
        room = min(wanted, n_ctx - base - sum(costs[start:]))
        if room < min(wanted, SMALLEST_ANSWER):
            raise TooLong(costs[-1], n_ctx - base - min(wanted, SMALLEST_ANSWER))
        gone, kept = sum(turns[:start], []), sum(turns[start:], [])
        note = self.note_of(gone) if gone and self.takes_notes else ""
        tokens, view = self._with_note(system, note, kept)
        if note and n_ctx - len(tokens) - len(already) < min(wanted, SMALLEST_ANSWER):
            note = ""
            tokens, view = self._with_note(system, note, kept)
        tokens += already
        return Prompt(tokens, min(wanted, n_ctx - len(tokens)), start, self._follow(view), list(self._config.generation.stop), note, gone)

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
        return sum(self.template.render(view), []), view

    def whole(self, messages: list[dict], keep: bool = True) -> Prompt:
        """The prompt for the answer to all of `messages` as they are, with all the room that is left.

        Without `keep` their tokens are not kept at hand. Raises TooLong where they leave none.
        """
        view = flatten(messages)
        if not any(message["role"] == "system" for message in view):
            view = [*self._system(), *view]
        return self._with_room(sum(self.template.render(view, keep=keep), []), self._follow(view) if keep else [])

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

    def longest(self) -> int:
        """How many tokens a message may have, so that it fits the window with its answer."""
        costs, base = self._costs(self._system(), [[{"role": "user", "content": ""}]])
        return self._engine.n_ctx - base - costs[0] - min(self._config.generation.max_tokens, SMALLEST_ANSWER)

    def _with_room(self, tokens: list[int], follow: list[int]) -> Prompt:
        room = self._engine.n_ctx - len(tokens)
        if room < 1:
            raise TooLong(len(tokens), self._engine.n_ctx - 1)
        return Prompt(tokens, room, 0, follow, list(self._config.generation.stop))

    def remember(self, reply, begun: str = "") -> None:
        """Keeps an answer's own tokens, so that the next turn's prompt has them unchanged."""
        if reply.tokens and reply.text:
            self.template.remember(begun + reply.text, self.template.text(begun) + reply.tokens)

    def after(self, reply, messages: list[dict], owner: object, max_tokens: int | None = None, begun: str = "") -> Prompt | None:
        """Prepares the next turn of a conversation that has just been answered: if that will have to drop turns,
        they are dropped now, while the answer is read. Returns the prompt of that turn, its question empty."""
        self.remember(reply, begun)
        if not reply.text:
            return None
        answered = [*messages, {"role": "assistant", "content": begun + reply.text}, {"role": "user", "content": ""}]
        ahead = self.prompt(answered, max_tokens)
        if ahead.note or ahead.dropped > self.prompt(messages, max_tokens).dropped:
            end = len(self.template.render([{"role": "user", "content": ""}])[-1])
            self._engine.warm(owner, ahead.tokens[: len(ahead.tokens) - end], trimmed=True)
        return ahead

    def _system(self) -> list[dict]:
        text = self._config.chat.system_prompt
        return [{"role": "system", "content": text}] if text else []

    def _costs(self, system: list[dict], turns: list[list[dict]]) -> tuple[list[int], int]:
        """Tokens of each turn, and of all that stays whatever is dropped."""
        flat = [*system, *(message for turn in turns for message in turn)]
        sizes = [len(piece) for piece in self.template.render(flat)]
        base, at, costs = sum(sizes[: len(system)]) + sum(sizes[len(flat) :]), len(system), []
        for turn in turns:
            costs.append(sum(sizes[at : at + len(turn)]))
            at += len(turn)
        return costs, base

    def _first_that_fits(self, costs: list[int], start: int, room: int) -> int:
        """The first turn to keep. Where every drop means computing all anew, for the model cannot shift its
        cache or there is another note, half the room is freed at once, and the same again only when that is used up."""

        def size(end: int) -> int:
            return sum(costs[start : end - 1]) + max(costs[end - 1], QUESTION)

        if self._engine.can_shift and not self.takes_notes:
            while start < len(costs) - 1 and size(len(costs)) > room:
                start += 1
            return start
        for end in range(1, len(costs) + 1):
            if size(end) > room:
                while start < end - 1 and size(end) > room // 2:
                    start += 1
        return start

    def _follow(self, view: list[dict]) -> list[int]:
        """The template's text between an answer and the next message."""
        longer = [*view, {"role": "assistant", "content": ""}, {"role": "user", "content": ""}]
        try:
            return self.template.render(longer, answering=False)[len(view) + 1]
        except (ValueError, IndexError):
            return []


def flatten(messages: list[dict]) -> list[dict]:
    """Messages as {role, content} with plain text: Gradio's lists of parts are joined, other parts left out."""
    return [{"role": message["role"], "content": _text(message.get("content"))} for message in messages]


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
    merged: list[dict] = []
    for message in messages:
        if message["role"] == "assistant" and not message["content"]:
            continue
        if merged and merged[-1]["role"] == message["role"]:
            merged[-1] = {**message, "content": f"{merged[-1]['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    turns: list[list[dict]] = []
    for message in merged:
        if message["role"] == "user":
            turns.append([message])
        elif turns:
            turns[-1].append(message)
    return turns

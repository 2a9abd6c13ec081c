"""A GGUF's own chat template, rendered to token ids.

A mark stands for each message's text while the template is rendered, and what people type is tokenized apart from
it. So control tokens in it are plain text: nobody can end a turn or plant a system message by typing one. The marks
also tell, wherever a template puts a text, whose it is.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from itertools import chain, dropwhile
from threading import Lock
from typing import NamedTuple

from llama_cpp.llama_chat_format import Jinja2ChatFormatter

REMEMBERED = 100_000  # tokens of texts that are kept at hand
LARGEST_KEPT = REMEMBERED // 4  # tokens; a longer text would push out all others
EDGE = "\u2003"  # an em space, which is gone from a mark's side where the template strips the text
MARK = re.compile(f"({EDGE}?)\ue000(\\d+)\ue001({EDGE}?)")  # private-use characters around a message's number


class Piece(NamedTuple):
    """One text of a rendered conversation: the number of its `message`, the tokens of what the template has `before`
    it, and those of the text. The last piece is what the template ends with; its `message` is None."""

    message: int | None
    before: list[int]
    text: list[int]

    @property
    def size(self) -> int:
        return len(self.before) + len(self.text)


def joined(pieces: Iterable[Piece]) -> list[int]:
    """All tokens of a rendered conversation."""
    return list(chain.from_iterable(chain.from_iterable((piece.before, piece.text) for piece in pieces)))


class ChatTemplate:
    """A GGUF's chat template. `model` gives the template and the tokenizer. Usable from any thread."""

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

    def render(self, messages: list[dict], answering: bool = True, keep: bool = True) -> list[Piece]:
        """A conversation in pieces, in the order in which the template has them: it may move a text, repeat or omit it.

        A message with `tokens` has these in place of those of its text. `answering` adds the start of the
        assistant's turn; without `keep` the texts are not kept at hand, for they will not come again.
        Raises ValueError where the template refuses the conversation.
        """
        text = self._marked(messages, answering)
        pieces, end = [], 0
        for mark in MARK.finditer(text):
            before, number = self.tokens(text[end : mark.start()], special=True), int(mark[2])
            pieces.append(Piece(number, before, self._text_of(messages[number], not mark[1], not mark[3], keep)))
            end = mark.end()
        pieces.append(Piece(None, self.tokens(text[end:], special=True), []))
        first = pieces[0]
        if self._bos and first.before[: len(self._bos)] != self._bos:
            pieces[0] = first._replace(before=self._bos + first.before)
        return pieces

    def sizes(self, messages: list[dict]) -> tuple[list[int], int]:
        """How many tokens each message takes with what the template has before it, and how many the end takes."""
        pieces = self.render(messages)
        sizes = [0] * len(messages)
        for piece in pieces[:-1]:
            sizes[piece.message] += piece.size
        return sizes, pieces[-1].size

    @cached_property
    def least_round(self) -> int:
        """The fewest tokens that a question and its answer take, whatever they say; at least 1."""
        talk = [{"role": role, "content": ""} for role in ("user", "assistant", "user", "assistant", "user")]
        try:
            sizes, _ = self.sizes(talk)
        except ValueError:
            return 1
        return max(1, min(sum(sizes[:2]), sum(sizes[2:4])))

    def plain(self, text: str) -> list[int]:
        """Token ids of `text` alone, which begin as the model wants every text to begin."""
        return self._bos + self._model.tokenize(text)

    def exactly(self, tokens: list[int], text: str) -> list[int]:
        """The first of `tokens` whose pieces joined are exactly `text`; [] where no such tokens are, or a control
        token, which is no text, is among them."""
        wanted, at = text.encode("utf-8", "surrogatepass"), 0
        for count, token in enumerate(tokens, 1):
            piece = self._model.piece(token)
            if not piece or not wanted.startswith(piece, at):
                return []
            at += len(piece)
            if at == len(wanted):
                return tokens[:count]
        return []

    def tokens(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text` as it is in a message; `special` reads control tokens as such.

        Texts are kept with their tokens, whoever wrote them, for these depend on nothing but the text.
        """
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

    def _text_of(self, message: dict, strip_left: bool, strip_right: bool, keep: bool) -> list[int]:
        """Token ids of a message's text, of which the template may strip the ends."""
        text, own = message["content"], message.get("tokens")
        if strip_left:
            text = text.lstrip()
        if strip_right:
            text = text.rstrip()
        if own and text != message["content"]:
            blank = dropwhile(lambda token: self._model.piece(token).isspace(), own) if strip_left else own
            own = self.exactly(list(blank), text)
        return own or (self.tokens(text) if keep else self._model.tokenize(text))

    def _marked(self, messages: list[dict], answering: bool) -> str:
        """The rendered conversation, with marks for the texts."""
        marked = [{"role": message["role"], "content": _mark(number)} for number, message in enumerate(messages)]
        try:
            return self._formatters[answering](messages=marked if self._has_system else _without_system(marked)).prompt
        except Exception as error:
            raise ValueError(f"the model's chat template refuses this conversation: {error}") from None

    @cached_property
    def _has_system(self) -> bool:
        """Whether the template knows system messages. Some refuse them, others leave them out without a word."""
        talk = [{"role": "system", "content": _mark(0)}, {"role": "user", "content": _mark(1)}]
        try:
            return any(mark[2] == "0" for mark in MARK.finditer(self._formatters[True](messages=talk).prompt))
        except Exception:
            return False


def _mark(number: int) -> str:
    return f"{EDGE}\ue000{number}\ue001{EDGE}"


def _without_system(messages: list[dict]) -> list[dict]:
    """The same with each system message at the head of the user's message that comes next, if one does."""
    told, waiting = [], []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message)
        elif message["role"] == "user" and waiting:
            told.append({**message, "content": "\n\n".join(each["content"] for each in (*waiting, message))})
            waiting = []
        else:
            told += [*waiting, message]
            waiting = []
    return told + waiting

"""Answers in the shapes that OpenAI's API gives them, with llama.cpp's timings beside."""

import time
import uuid

from .engine import Reply
from .sampling import Logprob


class Shape:
    """One answer, as a whole or in chunks. The kinds of answers say what a choice looks like."""

    prefix = kind = chunk_kind = ""

    def __init__(self, reply: Reply, engine):
        self._reply = reply
        self._engine = engine
        self._taken = 0  # tokens whose log-probabilities were told
        self._id = self.prefix + uuid.uuid4().hex
        self._created = int(time.time())

    def whole(self) -> dict:
        choice = self._choice(self._reply.text, self._logprobs(), self._reply.stats.finish_reason)
        return {**self._frame(self.kind, [choice]), "usage": self._usage(), "timings": self._timings()}

    def chunk(self, text: str) -> dict:
        return self._frame(self.chunk_kind, [self._part(text, self._logprobs(), None)])

    def last_chunk(self) -> dict:
        part = self._part("", self._logprobs(), self._reply.stats.finish_reason)
        return {**self._frame(self.chunk_kind, [part]), "timings": self._timings()}

    def usage_chunk(self) -> dict:
        return {**self._frame(self.chunk_kind, []), "usage": self._usage()}

    def _choice(self, text: str, logprobs: dict | None, reason: str | None) -> dict:
        raise NotImplementedError

    _part = _choice

    def _logprob_list(self, entries: list[Logprob]) -> dict:
        raise NotImplementedError

    def _frame(self, kind: str, choices: list[dict]) -> dict:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._engine.info.name, "choices": choices}

    def _logprobs(self) -> dict | None:
        """Of the tokens that came since the last look; the one that ends the answer is not among them."""
        start, self._taken = self._taken, len(self._reply.tokens)
        entries = self._reply.logprobs[start : self._taken]
        return self._logprob_list(entries) if entries else None

    def _piece(self, token: int) -> bytes:
        return self._engine.model.piece(token, special=True)

    def _usage(self) -> dict:
        stats = self._reply.stats
        return {
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": stats.answer_tokens,
            "total_tokens": stats.prompt_tokens + stats.answer_tokens,
            "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
        }

    def _timings(self) -> dict:
        """The figures that llama.cpp's server gives, by its names."""
        stats = self._reply.stats
        computed, speed = stats.prompt_tokens - stats.cached_tokens, stats.tokens_per_second
        prompt_ms = max(stats.first_token_ms - stats.waited_ms, 0.0)
        return {
            "cache_n": stats.cached_tokens,
            "prompt_n": computed,
            "prompt_ms": prompt_ms,
            "prompt_per_second": computed / prompt_ms * 1000 if prompt_ms else 0.0,
            "predicted_n": stats.answer_tokens,
            "predicted_ms": (stats.answer_tokens - 1) / speed * 1000 if speed else 0.0,
            "predicted_per_second": speed,
        }


class ChatShape(Shape):
    """For /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    _begun = False

    def _choice(self, text: str, logprobs: dict | None, reason: str | None) -> dict:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _part(self, text: str, logprobs: dict | None, reason: str | None) -> dict:
        delta = {} if self._begun else {"role": "assistant", "content": ""}
        self._begun = True
        if text:
            delta["content"] = text
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprob_list(self, entries: list[Logprob]) -> dict:
        def told(token: int, logprob: float) -> dict:
            piece = self._piece(token)
            return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}

        content = [{**told(entry.token, entry.logprob), "top_logprobs": [told(*each) for each in entry.top]} for entry in entries]
        return {"content": content, "refusal": None}


class TextShape(Shape):
    """For /v1/completions."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    _offset = 0

    def _choice(self, text: str, logprobs: dict | None, reason: str | None) -> dict:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    _part = _choice

    def _logprob_list(self, entries: list[Logprob]) -> dict:
        texts = [self._text(entry.token) for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{self._text(token): logprob for token, logprob in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return self._piece(token).decode("utf-8", "replace")

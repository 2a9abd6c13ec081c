"""From the bytes of tokens to text: no half characters, and nothing of a stop string."""

import codecs


class TextStream:
    """Turns the pieces of one answer into text.

    A token may end inside a character, and a stop string may span tokens: what could still become
    either is held back until it is decided.
    """

    def __init__(self, stop: list[str] = ()):
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        self._stop = [text for text in stop if text]
        self._held = ""
        self.stopped = False

    def feed(self, piece: bytes) -> str:
        """The text that is certain after `piece`; sets `stopped` when a stop string is complete."""
        text = self._held + self._decoder.decode(piece)
        ends = [text.find(stop) for stop in self._stop if stop in text]
        if ends:
            self._held, self.stopped = "", True
            return text[: min(ends)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def close(self) -> str:
        """What was held back for a stop string that never came. Half a character is dropped."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)

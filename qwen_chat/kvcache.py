"""Which sequence of llama.cpp's KV cache holds which tokens, and how a new prompt reuses them.

The prompt decides: whatever holds the most of its beginning serves it, be it a live sequence, a
parked one, or the system prompt's own. A sequence goes on in place, lends its prefix to another
(free, since the cache is unified), or is parked as bytes and brought back. When a conversation has
dropped old turns, its own sequence loses them as a gap and closes up. This module keeps the books;
`memory` does the work on the cells.

But for the opening, a sequence serves only the client who left it: how much of a prompt was found cached, and
how soon its answer comes, would tell anybody else what was asked. And what was computed in the light of turns
that were dropped serves only the conversation that dropped them.
"""

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

SMALL_LOSS = 32  # tokens: no more than this is cut off a sequence without keeping a copy
SHORTEST_RUN = 16  # tokens: computing fewer anew costs less than rotating the cached keys


class Memory(Protocol):
    """What is asked of llama.cpp's memory. Positions count tokens from 0; -1 as an end is "to the end"."""

    can_shift: bool  # positions of cached keys can be changed
    can_cut: bool  # a sequence can lose its end (a recurrent state cannot)

    def seq_rm(self, seq: int, start: int, end: int) -> None: ...
    def seq_cp(self, source: int, target: int, start: int, end: int) -> None: ...
    def seq_add(self, seq: int, start: int, end: int, delta: int) -> None: ...
    def saved_size(self, seq: int) -> int: ...
    def save(self, seq: int) -> memoryview: ...
    def restore(self, seq: int, state: memoryview) -> bool: ...


def token_array(tokens=()) -> array:
    """Token ids in the form this module compares quickly."""
    return array("i", tokens)


def common_prefix(a: array, b: array) -> int:
    """How many tokens a and b begin with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(eq=False)
class Sequence:
    """One of llama.cpp's sequences: `tokens[i]` is computed at position i."""

    id: int
    tokens: array = field(default_factory=token_array)
    owner: object = None
    client: object = None
    busy: bool = False
    pinned: bool = False
    plain: int = sys.maxsize  # the first so many tokens were computed in the light of those before them alone
    cells: array = field(default_factory=lambda: array("q"))  # names of the first cells, as far as they were shared
    last_used: int = 0

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(eq=False)
class Parked:
    """A sequence as bytes."""

    tokens: array
    owner: object
    client: object
    plain: int
    state: memoryview
    size: int  # bytes, the tokens counted in


@dataclass(frozen=True)
class _Match:
    """What of a prompt stands in a holder: `prefix` tokens and, after a gap, a run that goes on with it."""

    holder: Sequence | Parked
    own: bool  # it was left by the conversation that asks
    prefix: int
    gap: int = 0
    run: int = 0

    @property
    def reused(self) -> int:
        return self.prefix + self.run

    @property
    def lost(self) -> int:
        """Tokens at the holder's end that the prompt has no use for."""
        return len(self.holder.tokens) - self.reused - self.gap

    @property
    def movable(self) -> bool:
        """Whether the prompt may have the holder itself, not a copy: nothing worth keeping is lost."""
        return bool(self.run) or self.lost <= (SMALL_LOSS if self.own else 0)

    @property
    def worth(self) -> tuple:
        live = isinstance(self.holder, Sequence)
        return self.reused, live and not self.holder.busy and not self.holder.pinned and self.movable, live


class KVCache:
    """The books of `n_slots` working sequences (ids 0 ...) and of a pinned one, the opening (id n_slots).

    `cache_bytes` bounds what parked sequences take in all. Not thread-safe: the decode thread's own.
    """

    def __init__(self, memory: Memory, n_slots: int, cache_bytes: int):
        self.memory = memory
        self.slots = [Sequence(number) for number in range(n_slots)]
        self.opening = Sequence(n_slots, pinned=True)
        self.cache_bytes = cache_bytes
        self.parked: list[Parked] = []  # the one used longest ago first
        self._clock = 0
        self._named = 0

    @property
    def used_cells(self) -> int:
        """How many cells hold a token, those that sequences share counted once. From any thread."""
        held = [(len(sequence.tokens), sequence.cells[:]) for sequence in [*self.slots, self.opening]]
        named = {cell for _, cells in held for cell in cells}
        return len(named) + sum(max(0, size - len(cells)) for size, cells in held)

    @property
    def parked_bytes(self) -> int:
        return sum(parked.size for parked in self.parked)

    def has_room(self) -> bool:
        """Whether `acquire` may be called: some sequence is not at work."""
        return any(not slot.busy for slot in self.slots)

    def acquire(
        self, prompt: array, owner: object = None, client: object = None, trimmed: bool = False, afresh: bool = False
    ) -> Sequence:
        """A sequence for `prompt`, busy from now on, that holds as much of its beginning as could be had.

        Only what `client` or the conversation `owner` left is used, beside the opening.

        At least the last token is left to compute: logits come from computing alone. `trimmed` says
        that `owner`'s conversation dropped old turns before this prompt, so that a sequence it left may
        have them cut out. What follows a gap was computed in its light, which is why nobody else's
        sequence is ever used that way. `afresh` reuses the opening alone: how tokens were batched shows in
        the last bits of what was computed, and so, after a while, in a text that should be the same again.
        """
        if afresh:
            match = self._opening_match(prompt)
        else:
            match = self._best_match(self._holders(owner, client), prompt[:-1], owner, trimmed)
        if match is None:
            slot = self._vacate(self._home())
        elif isinstance(match.holder, Parked):
            slot = self._bring_back(match)
        else:
            slot = self._take_over(match)
        slot.busy, slot.owner, slot.client = True, owner, client
        self._touch(slot)
        return slot

    def release(self, slot: Sequence) -> None:
        """The sequence is idle from now on; its tokens stay for whoever has a use for them."""
        slot.busy = False
        self._touch(slot)

    def cut(self, slot: Sequence, length: int) -> None:
        """Forgets what stands from position `length` on: all, where the model cannot forget a part."""
        if length >= len(slot):
            return
        length = length if self.memory.can_cut else 0
        self.memory.seq_rm(slot.id, length, -1)
        del slot.tokens[length:], slot.cells[length:]
        slot.plain = _plain(slot, length)

    def missing(self, prompt: array, owner: object, client: object, trimmed: bool, live: bool) -> int:
        """How many tokens of `prompt` would have to be computed; with `live`, if no parked sequence were used."""
        holders = [holder for holder in self._holders(owner, client) if not live or isinstance(holder, Sequence)]
        match = self._best_match(holders, prompt, owner, trimmed)
        return len(prompt) - (match.reused if match else 0)

    # Finding

    def _holders(self, owner: object, client: object) -> list[Sequence | Parked]:
        """Whatever may serve a request of `client` in the conversation `owner`."""
        left = [holder for holder in [*self.slots, *self.parked] if holder.client == client or _owns(owner, holder)]
        return [*left, self.opening]

    def _best_match(self, holders: Iterable, prompt: array, owner: object, trimmed: bool) -> _Match | None:
        matches = [self._match(holder, prompt, owner, trimmed) for holder in holders]
        return max((match for match in matches if match.reused), key=lambda match: match.worth, default=None)

    def _opening_match(self, prompt: array) -> _Match | None:
        whole = len(self.opening) and common_prefix(self.opening.tokens, prompt[:-1]) == len(self.opening)
        return _Match(self.opening, False, len(self.opening)) if whole else None

    def _match(self, holder: Sequence | Parked, prompt: array, owner: object, trimmed: bool) -> _Match:
        own = _owns(owner, holder)
        prefix = common_prefix(holder.tokens, prompt)
        if not (own and trimmed):
            prefix = min(prefix, holder.plain)
        if not self.memory.can_cut and prefix < len(holder.tokens):
            prefix = 0
        plain = _Match(holder, own, prefix)
        at_work = isinstance(holder, Sequence) and holder.busy
        if at_work or not (trimmed and own and self.memory.can_shift):
            return plain
        return max([plain, *_runs_after_gap(plain, prompt)], key=lambda match: match.reused)

    # Making it so

    def _take_over(self, match: _Match) -> Sequence:
        holder = match.holder
        usable = not (holder.busy or holder.pinned)
        if usable and match.movable:
            return self._reduce(holder, match)
        home = self._home(last=holder)
        if home is holder:
            return self._reduce(holder, match)
        self._vacate(home)
        self.memory.seq_cp(holder.id, home.id, 0, match.prefix if self.memory.can_cut else -1)
        self._name_cells(holder, match.prefix)
        home.tokens, home.cells = holder.tokens[: match.prefix], holder.cells[: match.prefix]
        home.plain = _plain(holder, match.prefix)
        return home

    def _name_cells(self, holder: Sequence, count: int) -> None:
        first, new = self._named, max(0, count - len(holder.cells))
        holder.cells.extend(range(first, first + new))
        self._named += new

    def _bring_back(self, match: _Match) -> Sequence:
        parked = match.holder
        self.parked.remove(parked)
        if not match.movable:
            self.parked.append(parked)
        home = self._vacate(self._home())
        if self.memory.restore(home.id, parked.state):
            home.tokens, home.plain = parked.tokens[:], parked.plain
            self._reduce(home, match)
        else:
            self._clear(home)
        return home

    def _home(self, last: Sequence | None = None) -> Sequence:
        """The sequence to overwrite: an empty one, else the one used longest ago; `last` only if it must be."""
        idle = [slot for slot in self.slots if not slot.busy]
        return min(idle, key=lambda slot: (slot is last, len(slot) > 0, slot.last_used))

    def _reduce(self, slot: Sequence, match: _Match) -> Sequence:
        """Leaves of `slot` what the prompt has a use for: cuts the end, drops the gap, moves the run down."""
        if match.lost > SMALL_LOSS:
            self._park(slot)
        start, end = match.prefix + match.gap, match.reused + match.gap
        self.cut(slot, end)
        if match.run and self._shares(slot, start):
            self._unshare(slot)
        if match.run and len(slot) == end:
            self.memory.seq_rm(slot.id, match.prefix, start)
            self.memory.seq_add(slot.id, start, end, -match.gap)
            del slot.tokens[match.prefix : start], slot.cells[match.prefix : start]
            slot.plain = min(slot.plain, match.prefix)
        return slot

    def _shares(self, slot: Sequence, start: int) -> bool:
        """Whether any of the sequence's cells from `start` on belongs to another one too."""
        own = set(slot.cells[start:])
        return any(not own.isdisjoint(other.cells) for other in [*self.slots, self.opening] if other is not slot)

    def _unshare(self, slot: Sequence) -> None:
        """Gives the sequence cells of its own: a shift would move the others' as well."""
        state = self.memory.save(slot.id)
        tokens, plain = slot.tokens, slot.plain
        self._clear(slot)
        if self.memory.restore(slot.id, state):
            slot.tokens, slot.plain = tokens, plain
        else:
            self._clear(slot)

    def _vacate(self, slot: Sequence) -> Sequence:
        self._park(slot)
        self._clear(slot)
        return slot

    def _clear(self, slot: Sequence) -> None:
        self.memory.seq_rm(slot.id, 0, -1)
        slot.tokens, slot.owner, slot.client = token_array(), None, None
        slot.plain, slot.cells = sys.maxsize, array("q")

    def _park(self, slot: Sequence) -> None:
        """Keeps a copy of the sequence as bytes, unless it is short, too large, or held elsewhere anyhow."""
        others = [other for other in [*self.slots, self.opening, *self.parked] if other is not slot]
        if len(slot) <= SMALL_LOSS or any(_replaces(other, slot) for other in others):
            return
        size = self.memory.saved_size(slot.id) + len(slot) * slot.tokens.itemsize
        if size > self.cache_bytes:
            return
        self.parked = [parked for parked in self.parked if not _replaces(slot, parked)]
        while self.parked_bytes + size > self.cache_bytes:
            self.parked.pop(0)
        state = self.memory.save(slot.id)
        self.parked.append(Parked(slot.tokens[:], slot.owner, slot.client, slot.plain, state, size))

    def _touch(self, slot: Sequence) -> None:
        self._clock += 1
        slot.last_used = self._clock


def _plain(holder: Sequence, length: int) -> int:
    """What `plain` is of the first `length` tokens of a sequence."""
    return holder.plain if holder.plain < length else sys.maxsize


def _owns(owner: object, holder: Sequence | Parked) -> bool:
    """Whether it was left by the conversation `owner`."""
    return owner is not None and holder.owner == owner


def _replaces(holder: Sequence | Parked, other: Sequence | Parked) -> bool:
    """Whether all that `other` is good for can be had from `holder`."""
    length = len(other.tokens)
    if common_prefix(holder.tokens, other.tokens) < length:
        return False
    plain = holder.plain >= length or (holder.owner == other.owner and holder.plain >= other.plain)
    return getattr(holder, "pinned", False) or (holder.client == other.client and plain)


def _runs_after_gap(plain: _Match, prompt: array):
    """Matches in which the prompt goes on, after the prefix, with tokens that stand further on in the holder."""
    held, prefix = plain.holder.tokens, plain.prefix
    needle = prompt[prefix : prefix + SHORTEST_RUN].tobytes()
    if len(needle) < SHORTEST_RUN * prompt.itemsize:
        return
    text, at = held.tobytes(), prefix * prompt.itemsize
    while (at := text.find(needle, at + 1)) >= 0:
        if at % prompt.itemsize == 0:
            start = at // prompt.itemsize
            run = common_prefix(held[start:], prompt[prefix:])
            yield _Match(plain.holder, True, prefix, start - prefix, run)

"""Which of several settings is the fastest, and when that can be said at all.

Everything here is speeds in tokens/s by candidate, one for each round; what was measured in the same round is
compared with each other, since what slows a machine for a while slows all of a round. `present` is the candidate in use.
"""

import statistics
import time
from dataclasses import dataclass
from math import comb
from typing import Any, Callable

LEAST_GAIN = 0.03  # what is less than this apart counts as equal
DOUBT = 1 / 32  # how likely chance alone may be to give what is taken for a difference: five of five rounds
FEWEST_ROUNDS = 5  # with fewer, nothing is beyond that doubt
DROP_AFTER, DROP_BELOW = 3, 0.85  # rounds; part of the fastest: what never comes near it is not measured further

Speeds = dict[Any, list[float]]


@dataclass(frozen=True)
class Choice:
    """`value` is the candidate to use; `clear` says whether it is beyond noise that it is the fastest."""

    value: Any
    clear: bool
    why: str


def ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below)]


def _beyond_doubt(values: list[float], threshold: float) -> bool:
    """The sign test: whether more of `values` are above `threshold` than chance would give."""
    count, below = len(values), sum(value <= threshold for value in values)
    return count > 0 and sum(comb(count, k) for k in range(below + 1)) / 2**count <= DOUBT


def spread(values: list[float]) -> float:
    """The range of the middle half."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def faster(one: list[float], other: list[float]) -> bool:
    """Whether `one` is clearly faster: by more than LEAST_GAIN, more than the ratios spread, and beyond doubt."""
    found = ratios(one, other)
    gain = statistics.median(found) - 1 if found else 0.0
    return gain >= LEAST_GAIN and gain > spread(found) and _beyond_doubt(found, 1)


def not_slower(one: list[float], other: list[float]) -> bool:
    """Whether it is beyond doubt that `one` has at least 1 - LEAST_GAIN of the other's speed. Noise: False."""
    return _beyond_doubt(ratios(one, other), 1 - LEAST_GAIN)


def choose(speeds: Speeds, present) -> Choice:
    """The fastest candidate where it is clearly faster than the present one, else the present one.

    Of candidates that cannot be told from the fastest, the first in the order of `speeds` is taken.
    """
    gains = {each: statistics.median(ratios(values, speeds[present]) or [0.0]) for each, values in speeds.items()}
    best = max(gains, key=gains.get)
    if faster(speeds[best], speeds[present]):
        as_good = [each for each in speeds if faster(speeds[each], speeds[present]) and not faster(speeds[best], speeds[each])]
        return Choice(as_good[0], True, f"{gains[as_good[0]]:.2f} times as fast")
    others = [values for each, values in speeds.items() if each != present]
    if not others:
        return Choice(present, False, "nothing to compare with, kept")
    clear = all(_beats(speeds[present], values) for values in others)
    return Choice(present, clear, "the fastest, kept" if clear else "no clear difference, kept")


def decided(speeds: Speeds, present) -> bool:
    """Whether more rounds would hardly change the choice: all others are clearly slower than it, or equal to it."""
    chosen = speeds[choose(speeds, present).value]
    others = [values for values in speeds.values() if values is not chosen]
    return all(_beats(chosen, values) or (not_slower(values, chosen) and not_slower(chosen, values)) for values in others)


def compare(
    speeds: dict[str, Speeds],
    present: dict[str, Any],
    measure: Callable[[Any], dict[str, float]],
    most_rounds: int,
    seconds: float,
    tick: Callable[[], object] = lambda: None,
) -> None:
    """Measures candidates in turns until the choice by each kind of speed is decided.

    `speeds` has an empty list for every kind of speed and candidate, which are filled; `present` the candidate in use
    for every kind; `measure(candidate)` gives a speed of every kind, such as {"answer": 50.0}. At least FEWEST_ROUNDS
    are made, then no more once `seconds` have passed, and `most_rounds` in all. Every second round goes backwards, so
    that a machine which becomes slower and slower is unfair to nobody.
    """
    end, left = time.monotonic() + seconds, list(next(iter(speeds.values())))
    for number in range(most_rounds if len(left) > 1 else 1):
        for candidate in left if number % 2 == 0 else left[::-1]:
            for kind, speed in measure(candidate).items():
                speeds[kind][candidate].append(speed)
            tick()
        if number + 1 >= FEWEST_ROUNDS and (time.monotonic() > end or all(decided(speeds[kind], present[kind]) for kind in speeds)):
            return
        if number + 1 >= DROP_AFTER:
            kept = set(present.values())
            left = [each for each in left if each in kept or not all(_is_hopeless(found[each], _best(found)) for found in speeds.values())]


def _best(speeds: Speeds) -> list[float]:
    return max(speeds.values(), key=statistics.median)


def _is_hopeless(one: list[float], best: list[float]) -> bool:
    found = ratios(one, best)
    return len(found) >= DROP_AFTER and max(found) < DROP_BELOW


def _beats(one: list[float], other: list[float]) -> bool:
    return faster(one, other) or _is_hopeless(other, one)


def thread_counts(cores: int, allowed: int, *present: int) -> list[int]:
    """Numbers of threads worth measuring on `cores` cores and `allowed` processors: parts of the cores, since
    answering may be held up by memory, the cores and their neighbours, all hyperthreads, and those in use."""
    parts = [cores // 4, cores // 2, cores * 3 // 4, cores - 1, cores, cores + 1, allowed]
    return sorted({count for count in parts if 1 <= count <= allowed} | set(present))

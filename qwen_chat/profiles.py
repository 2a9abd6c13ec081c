"""Profiles of config.yaml: settings of a kind of device, laid over those of the file.

A profile that is named has the last word. One that was only found to fit the device gives way to what the person
has set: to every key whose value is not the shipped one, and where the two would contradict each other.
Settings are plain sections of keys here, as YAML has them, or flat: {"runtime.n_ctx": 1024}.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

AUTO, NONE = "auto", "none"

# Where from: the tutorials' figures for these devices, as far as measurements do not speak against them (config.yaml)
SHIPPED = {
    "raspberry-pi-4": {"runtime": {"n_ctx": 1024, "n_batch": 64, "n_ubatch": 64, "parallel": 1, "cache_mb": 64}, "server": {"queue_size": 4}},
    "raspberry-pi-5": {"runtime": {"parallel": 1, "cache_mb": 128}, "server": {"queue_size": 4}},
    "n100": {"runtime": {"n_ctx": 1024, "cache_mb": 128}, "server": {"queue_size": 8}},
    "laptop": {"runtime": {"parallel": 1, "cache_mb": 128}, "server": {"queue_size": 4}},
    "server": {"runtime": {"parallel": 4, "cache_mb": 1024}, "server": {"queue_size": 64}},
    "spaces": {"runtime": {"cache_mb": 512}, "server": {"queue_size": 32}},
    "tiny": {
        "runtime": {"n_ctx": 512, "n_batch": 64, "n_ubatch": 64, "kv_type": "q8_0", "parallel": 1, "cache_mb": 0},
        "generation": {"max_tokens": 256},
        "server": {"queue_size": 4},
    },
}

# Keys that have to go together: the first may be this part of the second at most
PAIRS = (
    ("generation.max_tokens", "runtime.n_ctx", 2, "at most half of runtime.n_ctx ({most}), so that a question fits beside its answer"),
    ("runtime.n_ubatch", "runtime.n_batch", 1, "at most runtime.n_batch ({most})"),
)

Found = tuple[str, str] | None  # the name of a profile and why it fits


@dataclass(frozen=True)
class InForce:
    """The profile that was laid over the file's settings: its name, why that one, and {key path: (before, now)}."""

    name: str
    why: str
    changes: dict[str, tuple[Any, Any]]

    def __str__(self) -> str:
        changes = ", ".join(f"{path} {before} -> {now}" for path, (before, now) in self.changes.items())
        return f"profile {self.name} ({self.why}): {changes or 'it changes nothing'}"


def flat(sections: Any, path: str = "") -> dict[str, Any]:
    """{"runtime": {"n_ctx": 1024}} as {"runtime.n_ctx": 1024}."""
    if not isinstance(sections, dict):
        return {}
    keys: dict[str, Any] = {}
    for name, value in sections.items():
        keys |= flat(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value}
    return keys


def contradictions(*layers: tuple[str, dict[str, Any]]) -> Iterator[tuple[set[str], str]]:
    """Keys whose values are allowed each by itself but not together, with a line on each such pair.

    Of the layers, each the path below which it stands and its flat settings, the first that has a key counts.
    """

    def value(key: str) -> tuple[int, str]:
        return next(((keys[key], path + key) for path, keys in layers if type(keys.get(key)) is int), (None, key))

    for part, whole, share, words in PAIRS:
        (found, at), (most, whence) = value(part), value(whole)
        if found is not None and most is not None and found > most // share:
            note = f"; {whence} is {most}" if whence != whole else ""
            yield {at, whence}, f"{at}: {found} found; allowed: {words.format(most=most)}{note}"


def more_faults(settings: dict, defaults: dict[str, Any], known: set[str]) -> list[str]:
    """A line for each contradiction in the file's settings, and for what is wrong with `profile` and `profiles` beyond
    their schema. Keys that have a fault already, `known`, are passed over."""
    profiles = settings.get("profiles") if isinstance(settings.get("profiles"), dict) else {}
    profiles, chosen = {**SHIPPED, **profiles}, settings.get("profile", AUTO)
    layers, lines, pairs = [("", flat(settings)), ("", defaults)], _bad_name(chosen, profiles), []
    for name, profile in profiles.items():
        path, keys = f"profiles.{name}.", flat(profile)
        if name in (AUTO, NONE):
            lines.append(f"profiles.{name}: no name for a profile; allowed: any other, as profile: {name} has a meaning of its own")
        for key in sorted({"server.host", "server.port"} & set(keys)):  # a health check does not know the profile
            lines.append(f"{path}{key}: {keys[key]!r} found; allowed: only {key}, outside the profiles")
        if name == chosen:
            layers.insert(0, (path, keys))
        else:
            pairs += contradictions((path, keys))
    return lines + [line for where, line in [*contradictions(*layers), *pairs] if not where & known]


def _bad_name(chosen: Any, profiles: dict) -> list[str]:
    from difflib import get_close_matches

    allowed = [AUTO, NONE, *map(str, profiles)]
    if not isinstance(chosen, str) or chosen in allowed:
        return []
    close = get_close_matches(chosen, allowed, n=1)
    return [f"profile: {chosen!r} found;{f' did you mean {close[0]}?' if close else ''} allowed: {', '.join(allowed)}"]


def lay_over(
    settings: dict, before: dict[str, Any], defaults: dict[str, Any], profiles: dict[str, dict], fitting: Callable[[], Found]
) -> tuple[dict, InForce | None]:
    """The file's settings with a profile over them, and which it is: the one they name, or for "auto" the one `fitting` finds.

    `before` and `defaults` are flat: what the settings come to without a profile, and what those of an empty file do.
    """
    chosen = before["profile"]
    found = fitting() if chosen == AUTO else (chosen, "config.yaml names it")
    if chosen == NONE or not found or found[0] not in profiles:
        return settings, None
    name, why = found
    keys = flat(profiles[name])
    if chosen == AUTO:
        keys = {key: value for key, value in keys.items() if before[key] == defaults[key]}
        for pair, _ in list(contradictions(("", keys), ("", before))):
            keys = {key: value for key, value in keys.items() if key not in pair}
    settings = deepcopy(settings)
    for key, value in keys.items():
        *sections, last = key.split(".")
        section = settings
        for each in sections:
            section = section.setdefault(each, {})
        section[last] = value
    return settings, InForce(name, why, {key: (before[key], value) for key, value in keys.items() if before[key] != value})

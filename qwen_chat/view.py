"""The performance view as HTML: how fast the last answers were, and what computes them. It knows no Gradio."""

import html

from .performance import KEPT, RECENT, Snapshot
from .texts import Words, rate, seconds, size

SLOT, BAR, HEIGHT = 4, 3, 40  # of the plots, in units of their own: the page stretches them
LIBRARIES = ("ACCELERATE", "KLEIDIAI", "LLAMAFILE", "OPENMP", "REPACK")  # no instruction sets, though llama.cpp names them among those


def render(snapshot: Snapshot, words: Words) -> str:
    """The whole view in the language of `words`."""
    return _answers(snapshot, words) + _now(snapshot, words) + _facts(snapshot, words)


def _answers(snapshot: Snapshot, words: Words) -> str:
    if not snapshot.answers:
        return f'<p class="empty">{words("view_empty")}</p>'
    waits = [answer.first_token for answer in snapshot.answers]
    speeds = [answer.tokens_per_second for answer in snapshot.answers]
    shares = [100 * answer.reused for answer in snapshot.answers]
    recent = len(snapshot.recent)

    def time(duration: float) -> str:
        return words("view_seconds", count=seconds(duration))

    def speed(per_second: float) -> str:
        return words("view_rate", count=rate(per_second))

    cards = [
        _card(words("view_first"), time(snapshot.first_token), words("view_first_hint", count=recent), _plot(waits, time)),
        _card(words("view_speed"), speed(snapshot.tokens_per_second), words("view_speed_hint", words=rate(snapshot.words_per_second)), _plot(speeds, speed)),
        _card(words("view_reused"), _percent(100 * snapshot.reused), words("view_reused_hint"), _plot(shares, _percent, highest=100)),
    ]
    return f'<div class="cards">{"".join(cards)}</div><p class="scope">{words("view_scope", count=KEPT)}</p>'


def _card(name: str, figure: str, hint: str, plot: str) -> str:
    return f'<figure><figcaption>{name}<strong>{figure}</strong><small>{hint}</small></figcaption>{plot}</figure>'


def _plot(values: list[float], write, highest: float | None = None) -> str:
    """A bar for each value, the newest at the right edge; `write` puts a value into words."""
    top = highest or max(values) or 1
    width = SLOT * max(len(values), RECENT)
    bars = []
    for place, value in enumerate(reversed(values), 1):
        height = max(HEIGHT * value / top, 1)
        bars.append(
            f'<rect x="{width - SLOT * place}" y="{HEIGHT - height:.1f}" width="{BAR}" height="{height:.1f}"><title>{write(value)}</title></rect>'
        )
    return (
        f'<div class="plot"><span>{write(top)}</span>'
        f'<svg viewBox="0 0 {width} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">{"".join(bars)}</svg></div>'
    )


def _now(snapshot: Snapshot, words: Words) -> str:
    used, granted = snapshot.cores_used, snapshot.cores_granted
    cores = words("view_measuring") if used is None else words.counted("view_cores", granted, used=f"{used:.1f}")
    memory = words("view_of", used=size(snapshot.memory_used), all=size(snapshot.memory_granted))
    engine = words(
        "view_engine", running=snapshot.running, waiting=snapshot.waiting, parked=snapshot.parked, size=size(snapshot.parked_bytes)
    )
    return (
        '<div class="now">'
        + _meter(words("view_memory"), memory, snapshot.memory_used / snapshot.memory_granted)
        + _meter(words("view_cpu"), cores, (used or 0) / granted)
        + f'</div><p class="engine">{engine}</p>'
    )


def _meter(name: str, text: str, part: float) -> str:
    return f'<label>{name}<span>{text}</span><progress max="1" value="{min(part, 1):.3f}"></progress></label>'


def _facts(snapshot: Snapshot, words: Words) -> str:
    info = snapshot.info
    if info is None:
        return ""
    features = [feature for feature in info.cpu_features if feature not in LIBRARIES]
    facts = {
        "view_model": info.name,
        "view_file": words("view_quantised", size=size(info.file_bytes), kind=info.quantization or "?"),
        "view_params": words("view_millions", count=f"{info.n_params / 1e6:,.0f}"),
        "view_window": words("view_tokens", count=f"{info.n_ctx:,}"),
        "view_threads": words("view_threads_of", threads=info.n_threads, cores=f"{snapshot.cores_granted:g}"),
        "view_code": f"{' '.join(features)} ({info.cpu_code})",
        "view_uptime": words.uptime(snapshot.uptime),
    }
    return "<dl>" + "".join(f"<dt>{words(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts.items()) + "</dl>"


def _percent(value: float) -> str:
    return f"{value:.0f}%"

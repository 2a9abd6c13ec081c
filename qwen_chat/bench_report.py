"""What the benchmark says: figures with their targets, tables, and the picture of first token over turns."""

import os
import statistics
import textwrap
from dataclasses import dataclass, field
from html import escape


@dataclass
class Figure:
    """One thing that was measured, several times. The target, if there is one, is for the median."""

    name: str
    unit: str
    values: list[float]
    at_most: float | None = None
    at_least: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.at_most is not None:
            return self.median <= self.at_most
        return self.median >= self.at_least if self.at_least is not None else None

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return f"at least {self.at_least:g}" if self.at_least is not None else ""

    def as_dict(self) -> dict:
        return {
            "name": self.name, "unit": self.unit, "median": self.median, "low": min(self.values), "high": max(self.values),
            "at_most": self.at_most, "at_least": self.at_least, "met": self.met, "values": self.values,
        }


@dataclass
class Part:
    """One measurement: how it was done, its figures, and whatever raw figures belong to it.

    `pairs` are rows of (this project's figure, the other's, the ratio), shown side by side; `rows`, with `head`, a
    table of its own.
    """

    title: str
    note: str = ""
    figures: list[Figure] = field(default_factory=list)
    pairs: list[tuple[Figure, Figure, Figure]] = field(default_factory=list)
    head: list[str] = field(default_factory=list)
    rows: list[list] = field(default_factory=list)
    raw: dict = field(default_factory=dict)
    error: str | None = None

    def all_figures(self) -> list[Figure]:
        return [*self.figures, *(figure for pair in self.pairs for figure in pair)]

    def as_dict(self) -> dict:
        table = {"head": self.head, "rows": self.rows} if self.rows else {}
        return {"title": self.title, "note": self.note, "error": self.error, **table, **self.raw,
                "figures": [figure.as_dict() for figure in self.all_figures()]}

    def text(self) -> str:
        lines = [self.title, "-" * len(self.title), *textwrap.wrap(self.note, 110)]
        if self.error:
            lines.append(f"failed: {self.error}")
        if self.figures:
            head = ["", "median", "lowest - highest", "target", ""]
            lines.append(table(head, [_row(figure) for figure in self.figures]))
        if self.pairs:
            head = ["", "unit", "this project", "the other", "ratio", "target", ""]
            lines.append(table(head, [_pair_row(*pair) for pair in self.pairs]))
        if self.rows:
            lines.append(table(self.head, [[number(cell) for cell in row] for row in self.rows]))
        return "\n".join(lines) + "\n"


def ratios(above: list[float], below: list[float]) -> list[float]:
    """Pair by pair, in the order of measuring: what slows the machine for a while slows both of a pair."""
    return [a / b for a, b in zip(above, below) if b]


def slope(values: list[float]) -> float:
    """How much `values` rise from one to the next: the least-squares line's."""
    if len(values) < 2:
        return 0.0
    middle, mean = (len(values) - 1) / 2, statistics.fmean(values)
    return sum((x - middle) * (y - mean) for x, y in enumerate(values)) / sum((x - middle) ** 2 for x in range(len(values)))


def number(value) -> str:
    """Three figures or so, as a person reads them."""
    if not isinstance(value, float):
        return str(value)
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns lined up; the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [[cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths))]
             for row in [head, *rows]]
    return "\n".join("  " + "  ".join(line).rstrip() for line in lines)


def listed(about: dict) -> str:
    """Names and what they stand for, one a line."""
    return "".join(f"{name:9} {value}\n" for name, value in about.items())


def why_not_writable(file: str) -> str | None:
    """Why `file` cannot be written; None where it can. Told before hours of measuring, not after."""
    folder = os.path.dirname(os.path.abspath(file))
    if not os.path.isdir(folder):
        return "there is no such folder"
    if os.path.isdir(file):
        return "it is a folder; give the name of a file"
    if not os.access(file if os.path.exists(file) else folder, os.W_OK):
        return "it may not be written"
    return None


def _met(figure: Figure) -> str:
    return {True: "ok", False: "missed", None: ""}[figure.met]


def _row(figure: Figure) -> list[str]:
    unit = f" {figure.unit}" if figure.unit else ""
    spread = f"{number(min(figure.values))} - {number(max(figure.values))}" if len(figure.values) > 1 else ""
    return [figure.name, number(figure.median) + unit, spread, figure.target, _met(figure)]


def _pair_row(ours: Figure, theirs: Figure, ratio: Figure) -> list[str]:
    name = ours.name.removesuffix(", this project")
    return [name, ours.unit, number(ours.median), number(theirs.median), number(ratio.median), ratio.target, _met(ratio)]


# The picture

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 800, 360, 64, 16, 56, 48  # pixels


def svg(turns: list[dict], title: str, subtitle: str) -> str:
    """First token over turns. `turns` have first_ms and dropped, the number of turns no longer in view."""
    times = [turn["first_ms"] for turn in turns]
    top, step = _scale(max(times))
    x = lambda turn: LEFT + (turn - 1) * (WIDTH - LEFT - RIGHT) / max(1, len(turns) - 1)
    y = lambda ms: HEIGHT - BOTTOM - ms * (HEIGHT - TOP - BOTTOM) / top
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12" fill="#333">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="{LEFT}" y="40" fill="#777">{escape(subtitle)}</text>',
    ]
    for line in range(int(round(top / step)) + 1):
        height = y(line * step)
        parts.append(f'<line x1="{LEFT}" y1="{height:.1f}" x2="{WIDTH - RIGHT}" y2="{height:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{line * step:g} ms</text>')
    for turn in _ticks(len(turns)):
        parts.append(f'<text x="{x(turn):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{turn}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">turn</text>')
    full = next((number for number, turn in enumerate(turns, 1) if turn["dropped"]), None)
    if full:
        parts.append(f'<line x1="{x(full):.1f}" y1="{TOP}" x2="{x(full):.1f}" y2="{HEIGHT - BOTTOM}" stroke="#999" stroke-dasharray="4 4"/>')
        side, shift = ("start", 6) if x(full) < WIDTH * 0.7 else ("end", -6)
        parts.append(f'<text x="{x(full) + shift:.1f}" y="{TOP + 12}" text-anchor="{side}" fill="#777">from here the oldest turns are dropped</text>')
    points = [(x(number), y(ms)) for number, ms in enumerate(times, 1)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    parts.append(f'<polyline points="{path}" fill="none" stroke="#2563eb" stroke-width="1.5"/>')
    parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2" fill="#2563eb"/>' for a, b in points]
    return "\n".join([*parts, "</svg>", ""])


def png(turns: list[dict], title: str, subtitle: str, file) -> None:
    """The same picture by matplotlib, which need not be installed otherwise."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(8, 3.6), dpi=150, layout="constrained")
    axes = picture.subplots()
    axes.plot(range(1, len(turns) + 1), [turn["first_ms"] for turn in turns], marker=".", linewidth=1)
    full = next((number for number, turn in enumerate(turns, 1) if turn["dropped"]), None)
    if full:
        axes.axvline(full, color="gray", linestyle="--", label="from here the oldest turns are dropped")
        axes.legend()
    axes.set(title=f"{title}\n{subtitle}", xlabel="turn", ylabel="ms", ylim=(0, None))
    picture.savefig(file, format="png")


def _scale(highest: float) -> tuple[float, float]:
    """A round top of the axis above `highest`, and the step between its lines."""
    step = next(unit * 10**power for power in range(-3, 9) for unit in (1, 2, 5) if unit * 10**power * 5 >= highest)
    count = max(1, -int(-highest // step))
    return count * step, step


def _ticks(count: int) -> list[int]:
    step = next(unit * 10**power for power in range(9) for unit in (1, 2, 5) if count / (unit * 10**power) <= 12)
    return sorted({1, *range(step, count + 1, step)})

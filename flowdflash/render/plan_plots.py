"""The drawings of a plan, as inline SVG. Colours of text and axes come from the page, so they suit light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

WIDTH = 1040
_SCALE = ("#4a78c9", "#2f9fb5", "#4fae6e", "#c9a227", "#e07f34", "#c9413f")
"""From short to long."""

_LINES = ("#8c959f", "#4a78c9", "#4fae6e", "#c9413f", "#9a62c7", "#c9a227", "#2f9fb5", "#e07f34")
"""Of strategies; the pipeline's own is the first."""


def colour(k: int, count: int) -> str:
    """Colour of class ``k`` of ``count``, from cold for short to warm for long."""
    place = k / max(count - 1, 1) * (len(_SCALE) - 1)
    low = min(int(place), len(_SCALE) - 2)
    pair = [[int(_SCALE[low + i][1 + j : 3 + j], 16) for j in (0, 2, 4)] for i in (0, 1)]
    mixed = (round(a + (b - a) * (place - low)) for a, b in zip(*pair, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def lengths(histogram: Mapping[str, Sequence[float]], classes: Sequence[int]) -> str:
    """Bars by length, coloured by class, with the bounds of the classes."""
    height, left, base = 220, 46, 180
    bounds, counts = histogram["bounds"], histogram["counts"]
    across, tallest, top = WIDTH - left - 10, max(counts) or 1, 24
    parts = []
    for tick in nice_ticks(tallest):
        y = base - tick / tallest * (base - top)
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="end" x="{left - 7}" y="{y + 4:.1f}">{short(tick)}</text>')
    step = across / len(counts)
    for i, count in enumerate(counts):
        middle = (bounds[i] + bounds[i + 1]) / 2
        k = min(sum(middle > high for high in classes), len(classes) - 1)
        tall = count / tallest * (base - top)
        told = f"{bounds[i]:,.0f}–{bounds[i + 1]:,.0f} tokens: {count:,.0f} samples"
        parts.append(
            f'<rect x="{left + i * step + 0.5:.1f}" y="{base - tall:.1f}" width="{max(step - 1, 0.5):.1f}" '
            f'height="{tall:.1f}" fill="{colour(k, len(classes))}"><title>{told}</title></rect>'
        )
    for place, high in enumerate(classes):
        x = left + high / bounds[-1] * across
        parts.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6}" y2="{base}" stroke-dasharray="4 3"/>'
        )
        # Labels of near neighbours would run into each other: every other one is a line lower.
        parts.append(f'<text class="mid" x="{x:.1f}" y="{base + 17 + 15 * (place % 2)}">{high:,}</text>')
    parts.append(f'<line class="axis" x1="{left}" x2="{WIDTH - 10}" y1="{base}" y2="{base}"/>')
    return _svg(height, parts, "Histogram of sample lengths")


def shares(rows: Sequence[Mapping[str, Any]]) -> str:
    """Two bars per bucket: its share of the samples, pale, and of the batches."""
    left, row_height = 150, 46
    across = WIDTH - left - 120
    most = max((max(row["sample_share"], row["batch_share"]) for row in rows), default=0) or 1
    parts = []
    for i, row in enumerate(rows):
        y, fill = i * row_height + 4, colour(i, len(rows))
        name = f"bucket {row['bucket']}" if row["bucket"] >= 0 else "all"
        parts.append(f'<text class="strong" x="0" y="{y + 15}">{name}</text>')
        parts.append(f'<text x="0" y="{y + 31}">{row["min_length"]:,}–{row["max_length"]:,} tokens</text>')
        for j, (what, share) in enumerate((("samples", row["sample_share"]), ("batches", row["batch_share"]))):
            wide, top = share / most * across, y + j * 19
            pale = ' fill-opacity="0.42"' if j == 0 else ""
            parts.append(
                f'<rect x="{left}" y="{top}" width="{wide:.1f}" height="16" rx="3" fill="{fill}"{pale}/>'
                f'<text x="{left + wide + 7:.1f}" y="{top + 12.5}"><tspan class="strong">{share:.1%}</tspan> of {what}'
                "</text>"
            )
    return _svg(len(rows) * row_height, parts, "Share of samples and of batches per bucket")


def strips(series: Mapping[str, Sequence[int]], classes: Sequence[int], captions: Mapping[str, str]) -> str:
    """A strip per strategy: its first batches, coloured by class of length, in a few rows as lines of a text."""
    left, lines, tall = 200, 4, 13
    across, row_height = WIDTH - left, lines * (tall + 2) + 20
    parts = []
    for i, (name, labels) in enumerate(series.items()):
        y, per_line = i * row_height, -(-len(labels) // lines)
        words = _wrapped(name)
        parts += [
            f'<text class="strong" x="0" y="{y + 11 + 16 * j}">{escape(word)}</text>' for j, word in enumerate(words)
        ]
        parts.append(f'<text x="0" y="{y + 11 + 16 * len(words)}">{escape(captions[name])}</text>')
        unit = across / max(per_line, 1)
        for line in range(lines):
            top = y + line * (tall + 2)
            parts += [
                f'<rect x="{left + at * unit:.2f}" y="{top}" width="{count * unit + 0.05:.2f}" height="{tall}" '
                f'fill="{colour(k, len(classes))}"/>'
                for at, count, k in _runs(labels[line * per_line : (line + 1) * per_line])
            ]
    return _svg(len(series) * row_height, parts, "The first batches of each strategy, by length")


def _wrapped(name: str) -> list[str]:
    bucketer, plus, order = name.partition("+")
    return [bucketer, f"+ {order}"] if plus else [name]


def _runs(labels: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Start, length and label of each stretch of one label."""
    at = 0
    for label, members in groupby(labels):
        count = sum(1 for _ in members)
        yield at, count, label
        at += count


def discrepancy(series: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """A line per strategy over the epoch, on a logarithmic scale."""
    height, left, right, base, top = 330, 46, 235, 290, 12
    across = WIDTH - left - right
    highest = max((max(s["discrepancy"], default=0) for s in series.values()), default=0)
    low, high = 0.3, max(10 ** math.ceil(math.log10(max(highest, 1))), 10)

    def y_of(value: float) -> float:
        share = math.log(max(value, low) / low) / math.log(high / low)
        return base - share * (base - top)

    parts = []
    decade = 1
    while decade <= high:
        y = y_of(decade)
        parts.append(f'<line class="grid" x1="{left}" x2="{left + across}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="end" x="{left - 7}" y="{y + 4:.1f}">{decade:,}</text>')
        decade *= 10
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<text class="mid" x="{left + share * across:.1f}" y="{base + 18}">{share:.0%}</text>')
    parts.append(f'<text class="mid" x="{left + across / 2:.1f}" y="{base + 36}">of the epoch</text>')
    parts.append(f'<line class="axis" x1="{left}" x2="{left + across}" y1="{base}" y2="{base}"/>')
    ends = []
    for i, (name, of) in enumerate(series.items()):
        points = list(zip(of["discrepancy_at"], of["discrepancy"], strict=True))
        path = " ".join(f"{left + x * across:.1f},{y_of(v):.1f}" for x, v in points)
        stroke = _LINES[i % len(_LINES)]
        parts.append(f'<polyline class="line" points="{path}" stroke="{stroke}" stroke-opacity="0.9"/>')
        typical = sorted(of["discrepancy"])[len(points) // 2] if points else low
        ends.append((y_of(typical), name, max(of["discrepancy"], default=0), stroke))
    parts += _labels(ends, left + across + 12)
    return _svg(height, parts, "Discrepancy over the epoch per strategy")


def _labels(ends: Sequence[tuple[float, str, float, str]], x: float) -> Iterator[str]:
    """Names beside the lines, from top to bottom, none over another."""
    below = -math.inf
    for y, name, most, stroke in sorted(ends):
        below = max(y, below + 34)
        yield f'<rect x="{x}" y="{below - 9:.1f}" width="10" height="10" rx="2" fill="{stroke}"/>'
        yield f'<text class="strong" x="{x + 16}" y="{below:.1f}">{escape(name)}</text>'
        yield f'<text x="{x + 16}" y="{below + 14:.1f}">most {most:,.2g}</text>'


def nice_ticks(most: float) -> list[float]:
    """Three to five round numbers up to ``most``."""
    raw = most / 4
    unit = 10 ** math.floor(math.log10(raw)) if raw > 0 else 1
    step = next(unit * k for k in (1, 2, 2.5, 5, 10) if unit * k >= raw)
    return [step * i for i in range(1, int(most / step) + 1)]


def short(value: float) -> str:
    """A count in little room."""
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *parts, "</svg>"])

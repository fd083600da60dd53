"""Charts as inline SVG text: lines, bars, and stacked bars. No library, no clock, no randomness: equal data, equal bytes.

    python -m pytest tests/tasks/test_report.py

Colours are CSS variables (`--c0` .. `--c5`, `--ink`, `--muted`, `--grid`), so that one picture suits light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = 6
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line of a chart. `dots` marks its points, as for measurements far apart."""

    name: str
    points: Sequence[Point]
    dots: bool = False


@dataclass(frozen=True)
class LineChart:
    """What a line chart shows. `marks` are labelled vertical lines, (x, text)."""

    title: str
    series: Sequence[Series]
    x_label: str = "step"
    y_label: str = ""
    marks: Sequence[tuple[float, str]] = ()
    width: int = 520
    height: int = 250
    y_range: tuple[float, float] | None = None
    note: str = field(default="")


def number(value: float) -> str:
    """A coordinate with one decimal, without trailing zeros."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def label(value: float) -> str:
    """A tick or data label: short, with k and M for thousands and millions."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:g}M"
    if size >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:.10g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover low..high from inside."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(chart: LineChart) -> str:
    """An SVG line chart; with no finite point, a frame that says so."""
    series = [Series(s.name, [p for p in s.points if math.isfinite(p[1])], s.dots) for s in chart.series]
    points = [p for s in series for p in s.points]
    width, height = chart.width, chart.height
    left, right, top, bottom = 46, 14, 34, 34
    legend_rows = _legend_rows([s.name for s in series], width - left - right) if len(series) > 1 else []
    top += 16 * len(legend_rows)
    out = [_open(width, height, chart.title), f'<text class="t" x="0" y="14">{escape(chart.title)}</text>']
    if not points:
        out.append(f'<text class="m" x="{left}" y="{height / 2:.0f}">no points yet</text></svg>')
        return "".join(out)
    xs = [*(p[0] for p in points), *(x for x, _ in chart.marks)]
    x0, x1 = min(xs), max(xs)
    y0, y1 = chart.y_range or _padded(min(p[1] for p in points), max(p[1] for p in points))
    x1 = x1 if x1 > x0 else x0 + 1

    def sx(x: float) -> float:
        return left + (x - x0) / (x1 - x0) * (width - left - right)

    def sy(y: float) -> float:
        return height - bottom - (min(max(y, y0), y1) - y0) / (y1 - y0) * (height - top - bottom)

    for y in ticks(y0, y1, max(3, height // 50)):
        out.append(f'<line class="g" x1="{left}" x2="{width - right}" y1="{number(sy(y))}" y2="{number(sy(y))}"/>')
        out.append(f'<text class="m" text-anchor="end" x="{left - 6}" y="{number(sy(y) + 4)}">{label(y)}</text>')
    for x in ticks(x0, x1, 6):
        out.append(
            f'<text class="m" text-anchor="middle" x="{number(sx(x))}" y="{height - bottom + 16}">{label(x)}</text>'
        )
    out.append(f'<text class="m" text-anchor="end" x="{width - right}" y="{height - 3}">{escape(chart.x_label)}</text>')
    if chart.y_label:
        out.append(f'<text class="m" text-anchor="end" x="{width - right}" y="14">{escape(chart.y_label)}</text>')
    for index, (x, text) in enumerate(chart.marks):
        out.append(f'<line class="k" x1="{number(sx(x))}" x2="{number(sx(x))}" y1="{top - 4}" y2="{height - bottom}"/>')
        y = top + 6 + 11 * (index % 2)
        out.append(f'<text class="m s" x="{number(sx(x) + 3)}" y="{number(y)}">{escape(text)}</text>')
    for index, one in enumerate(series):
        colour = f"var(--c{index % COLOURS})"
        path = " ".join(f"{number(sx(x))},{number(sy(y))}" for x, y in one.points)
        if len(one.points) > 1:
            out.append(f'<polyline class="l" style="stroke:{colour}" points="{path}"/>')
        if one.dots or len(one.points) == 1:
            for x, y in one.points:
                tip = f"<title>{escape(one.name)}: {label(round(y, 4))} at {label(x)}</title>"
                out.append(
                    f'<circle style="fill:{colour}" cx="{number(sx(x))}" cy="{number(sy(y))}" r="3">{tip}</circle>'
                )
    out.append(_legend(legend_rows, left))
    return "".join(out) + "</svg>"


def _padded(low: float, high: float) -> tuple[float, float]:
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - pad, high + pad


def _legend_rows(names: list[str], width: float) -> list[list[tuple[int, str, float]]]:
    rows: list[list[tuple[int, str, float]]] = [[]]
    x = 0.0
    for index, name in enumerate(names):
        need = 20 + 6.4 * len(name)
        if x and x + need > width:
            rows.append([])
            x = 0.0
        rows[-1].append((index, name, x))
        x += need + 10
    return rows


def _legend(rows: list[list[tuple[int, str, float]]], left: float, y: float = 34) -> str:
    out = []
    for row, items in enumerate(rows):
        for index, name, x in items:
            at = y + 16 * row - 4
            out.append(
                f'<line class="l" style="stroke:var(--c{index % COLOURS})" '
                f'x1="{number(left + x)}" x2="{number(left + x + 13)}" y1="{at}" y2="{at}"/>'
                f'<text class="m" x="{number(left + x + 17)}" y="{at + 4}">{escape(name)}</text>'
            )
    return "".join(out)


def _open(width: int, height: int, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, quote=True)}" '
        f'style="max-width:{width}px" xmlns="http://www.w3.org/2000/svg">'
    )


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart: (value, colour index, tooltip) segments side by side, and text after them."""

    name: str
    parts: Sequence[tuple[float, int, str]]
    text: str = ""


def bar_chart(title: str, bars: Sequence[Bar], legend: Sequence[str] = (), width: int = 1080, left: int = 150) -> str:
    """Horizontal stacked bars on one linear scale. Values must not be negative (ValueError)."""
    if any(value < 0 for bar in bars for value, *_ in bar.parts):
        raise ValueError(f"chart {title!r}: a bar cannot be negative")
    rows = _legend_rows(list(legend), width - left) if legend else []
    top, row_height, room = 30 + 18 * len(rows), 26, 430
    height = top + row_height * len(bars) + 6
    most = max((sum(value for value, *_ in bar.parts) for bar in bars), default=0) or 1
    out = [_open(width, height, title), f'<text class="t" x="0" y="14">{escape(title)}</text>', _legend(rows, left)]
    for index, bar in enumerate(bars):
        y = top + index * row_height
        out.append(f'<text class="b" text-anchor="end" x="{left - 10}" y="{y + 14}">{escape(bar.name)}</text>')
        x = float(left)
        for value, colour, tip in bar.parts:
            size = value / most * (width - left - room)
            if size > 0:
                out.append(
                    f'<rect x="{number(x)}" y="{y + 2}" width="{max(size, 0.5):.1f}" height="17" rx="2" '
                    f'style="fill:var(--c{colour % COLOURS})"><title>{escape(tip)}</title></rect>'
                )
            x += size
        out.append(f'<text class="m" x="{number(x + 8)}" y="{y + 14}">{escape(bar.text)}</text>')
    return "".join(out) + "</svg>"


def log_dots(title: str, rows: Sequence[tuple[str, Sequence[tuple[float, str]]]], names: Sequence[str]) -> str:
    """Values of each row as dots on one logarithmic axis: `rows` of (name, [(value, tooltip), ...]), one per series name."""
    width, left, right = 1080, 150, 30
    legend = _legend_rows(list(names), width - left)
    top, row_height = 34 + 18 * len(legend), 28
    height = top + row_height * len(rows) + 26
    values = [v for _, dots in rows for v, _ in dots if v > 0] or [1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = high if high > low else low + 1

    def sx(value: float) -> float:
        return left + (math.log10(value) - low) / (high - low) * (width - left - right)

    out = [_open(width, height, title), f'<text class="t" x="0" y="14">{escape(title)}</text>', _legend(legend, left)]
    for power in range(low, high + 1):
        x = number(sx(10.0**power))
        out.append(f'<line class="g" x1="{x}" x2="{x}" y1="{top - 8}" y2="{height - 22}"/>')
        out.append(f'<text class="m" text-anchor="middle" x="{x}" y="{height - 8}">1e{power}</text>')
    for index, (name, dots) in enumerate(rows):
        y = top + index * row_height + 8
        out.append(f'<text class="b" text-anchor="end" x="{left - 12}" y="{y + 4}">{escape(name)}</text>')
        shown = [(v, i, tip) for i, (v, tip) in enumerate(dots) if v > 0]
        if len(shown) > 1:
            xs = [sx(v) for v, *_ in shown]
            out.append(f'<line class="k" x1="{number(min(xs))}" x2="{number(max(xs))}" y1="{y}" y2="{y}"/>')
        for value, colour, tip in reversed(shown):
            out.append(
                f'<circle cx="{number(sx(value))}" cy="{y}" r="5" style="fill:var(--c{colour})">'
                f"<title>{escape(tip)}</title></circle>"
            )
    return "".join(out) + "</svg>"


def histogram(title: str, bins: Sequence[tuple[float, int]], width: int = 520, height: int = 150) -> str:
    """Vertical bars of (lower end of a bin, count) in order; the bins are labelled as they are, equally wide."""
    left, bottom, top = 46, 30, 28
    most = max((n for _, n in bins), default=0) or 1
    step = (width - left - 10) / max(1, len(bins))
    out = [_open(width, height, title), f'<text class="t" x="0" y="14">{escape(title)}</text>']
    for y in ticks(0, most, 3):
        at = height - bottom - y / most * (height - top - bottom)
        out.append(f'<line class="g" x1="{left}" x2="{width - 10}" y1="{number(at)}" y2="{number(at)}"/>')
        out.append(f'<text class="m" text-anchor="end" x="{left - 6}" y="{number(at + 4)}">{label(y)}</text>')
    every = max(1, math.ceil(len(bins) / 10))
    for index, (low, count) in enumerate(bins):
        x, size = left + index * step, count / most * (height - top - bottom)
        out.append(
            f'<rect x="{number(x + 1)}" y="{number(height - bottom - size)}" width="{number(max(step - 2, 0.5))}" '
            f'height="{number(size)}" style="fill:var(--c0)"><title>{label(low)}: {count:,}</title></rect>'
        )
        if index % every == 0:
            out.append(f'<text class="m s" x="{number(x)}" y="{height - bottom + 14}">{label(low)}</text>')
    return "".join(out) + "</svg>"

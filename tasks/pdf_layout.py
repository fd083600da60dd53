"""Runs of a page to lines in reading order: columns by XY-cut, fractions and scripts by baseline and size.

Sub- and superscripts are written `_{...}` and `^{...}`; limits above and below a large operator likewise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.pdf_chars import Run

_OPERATORS = frozenset("∑∏∐∫∮⋃⋂⨁⨂⋁⋀")
MAX_RUNS = 50_000


@dataclass(slots=True)
class Line:
    """One line of text: `x0`, `x1`, `y` (baseline) and `size` in points; `block` counts the page's blocks in reading order."""

    x0: float
    x1: float
    y: float
    size: float
    text: str
    mono: bool = False
    block: int = 0
    tabular: bool = False  # cells of a table: wide blanks between its parts


def body_size(items: Sequence[Run] | Sequence[Line]) -> float:
    """The size in which most characters are set (points); 10 when there are none."""
    sizes: Counter[float] = Counter()
    for item in items:
        sizes[round(item.size * 2) / 2] += len(item.text)
    return max(sizes, key=lambda s: (sizes[s], s)) if sizes else 10.0


def _gaps(runs: Sequence[Run], least: float) -> list[tuple[float, float]]:
    """Vertical strips of at least `least` points that no run reaches into, the widest first, as (left edge, right edge)."""
    found, reach = [], None
    for low, high in sorted((r.x0, r.x1) for r in runs):
        if reach is not None and low - reach >= least:
            found.append((reach, low))
        reach = high if reach is None else max(reach, high)
    return sorted(found, key=lambda g: g[0] - g[1])[:6]


def _levels(runs: Sequence[Run], pitch: float) -> list[list[Run]]:
    """Runs by height, from the top down: a level ends where the next baseline is `pitch` below the level's first."""
    levels: list[list[Run]] = []
    for run in sorted(runs, key=lambda r: -r.y):
        if levels and levels[-1][0].y - run.y <= pitch:
            levels[-1].append(run)
        else:
            levels.append([run])
    return levels


def _is_column(runs: Sequence[Run], width: float, size: float, least_lines: int, written: bool) -> bool:
    """Several lines, wide enough, and filled: a row of page numbers or labels is no column. Where the stream holds one side
    before the other (`written`), they need not be filled."""
    span = max(r.x1 for r in runs) - min(r.x0 for r in runs)
    levels = _levels(runs, 0.5 * size)
    if len(levels) < least_lines or span < 0.2 * width:
        return False
    if written:
        return True
    fill = sorted(sum(r.x1 - r.x0 for r in level) for level in levels)[len(levels) // 2]
    return span > 16 * size and len(levels) > least_lines and fill > 0.6 * span


def blocks(runs: Sequence[Run], size: float, least_lines: int = 4, depth: int = 0) -> list[list[Run]]:
    """Groups of runs in reading order. A part is cut into columns where a vertical gap runs through it and both sides look
    like columns; else bands that span the middle (titles, wide figures) are set apart where that lets columns appear."""
    runs = list(runs)
    if len(runs) < 2 * least_lines or depth > 12:
        return [runs] if runs else []
    low, high = min(r.x0 for r in runs), max(r.x1 for r in runs)
    width = high - low
    for gap in _gaps(runs, 0.9 * size):
        left, right = [r for r in runs if r.x1 <= gap[0]], [r for r in runs if r.x0 >= gap[1]]
        one_after_other = max(r.order for r in left) < min(r.order for r in right)
        if all(_is_column(side, width, size, least_lines, one_after_other) for side in (left, right)):
            return blocks(left, size, least_lines, depth + 1) + blocks(right, size, least_lines, depth + 1)
    middle = (low + high) / 2
    levels = _levels(runs, 0.5 * size)
    spans = [any(r.x0 < middle - 0.02 * width and r.x1 > middle + 0.02 * width for r in level) for level in levels]
    if not any(spans) or sum(spans) > 0.6 * len(spans):
        return [runs]
    parts: list[tuple[bool, list[Run]]] = []
    for level, spanning in zip(levels, spans):
        if parts and parts[-1][0] == spanning:
            parts[-1][1].extend(level)
        else:
            parts.append((spanning, list(level)))
    out: list[list[Run]] = []
    joined = False  # whether the last group may take more: it is not a column
    for spanning, part in parts:
        cut = [part] if spanning else blocks(part, size, least_lines, depth + 1)
        if len(cut) == 1 and joined:
            out[-1] = out[-1] + cut[0]
        else:
            out += cut
        joined = len(cut) == 1
    return out


def _attach(runs: list[Run], size: float) -> list[list[Run]]:
    """Runs of a block by line: rows of body size are anchors, widest first; what stands within reach of one belongs to it."""
    rows = _levels(runs, 0.12 * size)
    order = sorted(range(len(rows)), key=lambda i: (-_weight(rows[i], size), i))
    owner: dict[int, int] = {}
    for i in order:
        if i in owner:
            continue
        owner[i] = i
        anchor = rows[i]
        y, reach = anchor[0].y, 0.8 * size
        big = any(r.big or r.text[0] in _OPERATORS for r in anchor)
        for step in (-1, 1):
            j = i + step
            while 0 <= j < len(rows) and abs(rows[j][0].y - y) < (1.5 * size if big else reach):
                far = abs(rows[j][0].y - y) >= reach
                small = max(r.size for r in rows[j]) < 0.85 * size
                touching = any(_overlaps(r, anchor) for r in rows[j])
                beside = touching or not small or _beside(rows[j], anchor, size)
                if j not in owner and (touching and small if far else beside):
                    owner[j] = i
                j += step
    lines: dict[int, list[Run]] = {}
    for i, row in enumerate(rows):
        lines.setdefault(owner[i], []).extend(row)
    return [lines[i] for i in sorted(lines)]


def _weight(row: list[Run], size: float) -> float:
    return sum((r.x1 - r.x0) * (1.0 if r.size >= 0.85 * size else 0.2) for r in row)


def _overlaps(run: Run, anchor: list[Run]) -> bool:
    return any(
        a.x0 - 0.3 * a.size < run.x1 and run.x0 < a.x1 + 0.3 * a.size and (a.big or a.text[0] in _OPERATORS)
        for a in anchor
    )


def _beside(row: list[Run], anchor: list[Run], size: float) -> bool:
    """Whether a script of the row follows or precedes a run of the anchor's: else it belongs to another line."""
    return any(-size < r.x0 - a.x1 < 0.5 * size or -0.3 * size < a.x0 - r.x1 < 0.3 * size for r in row for a in anchor)


def _baseline(runs: list[Run], size: float) -> float:
    """The baseline with the most body-sized width."""
    widths: Counter[float] = Counter()
    for run in runs:
        widths[round(run.y, 1)] += _weight([run], size)
    return max(widths, key=lambda y: (widths[y], y))


def line_text(runs: list[Run], size: float, scripts: bool = True) -> str:
    """Text of one line's runs from left to right, with scripts marked."""
    base = _baseline(runs, size)
    local = max((r.size for r in runs if abs(r.y - base) < 0.1 * size), default=size)
    ordered = sorted(runs, key=lambda r: (r.x0, -r.y))
    ordered = _stack(ordered, local)
    out: list[str] = []
    mode, previous, held = "", None, []

    def close() -> None:
        nonlocal mode, held
        if mode:
            inner = "".join(held)
            out.append(f"{mode}{inner}" if len(inner) == 1 else f"{mode}{{{inner}}}")
        mode, held = "", []

    for run in ordered:
        offset = run.y - base
        script = ""
        if scripts and run.size < 0.86 * local and previous is not None and not run.big:
            near = run.x0 - previous.x1 < 0.35 * local
            if near and offset > 0.12 * local:
                script = "^"
            elif near and offset < -0.06 * local:
                script = "_"
        gap = run.x0 - previous.x1 if previous is not None else 0.0
        blank = previous is not None and gap > 0.2 * min(local, max(run.size, previous.size))
        if script:
            if script != mode:
                close()
                mode = script
                blank = False
            held.append((" " if blank else "") + run.text)
        else:
            if mode and gap > 0.12 * local and (run.text[:1].isalnum() or gap > 0.2 * local):
                blank = True
            close()
            out.append((" " if blank else "") + run.text)
        previous = run
    close()
    return "".join(out)


def _stack(ordered: list[Run], size: float) -> list[Run]:
    """Full-sized runs one above the other (a fraction) come top first, whichever begins further left."""
    out = list(ordered)
    for i in range(len(out) - 1):
        a, b = out[i], out[i + 1]
        apart = b.y - a.y
        if apart > 0.9 * size and b.x0 < a.x1 and a.x0 < b.x1 and b.size > 0.86 * size and a.size > 0.86 * size:
            out[i], out[i + 1] = b, a
    return out


def _has_wide_blank(runs: list[Run], size: float) -> bool:
    reach = None
    for run in sorted(runs, key=lambda r: r.x0):
        if reach is not None and run.x0 - reach > 1.6 * size:
            return True
        reach = run.x1 if reach is None else max(reach, run.x1)
    return False


def page_lines(runs: Sequence[Run], scripts: bool = True, columns: bool = True) -> list[Line]:
    """Lines of a page in reading order. ValueError when the page has more than `MAX_RUNS` runs."""
    if len(runs) > MAX_RUNS:
        raise ValueError(f"a page of {len(runs)} runs of text, more than {MAX_RUNS}")
    if not runs:
        return []
    size = body_size(runs)
    lines: list[Line] = []
    for number, block in enumerate(blocks(runs, size) if columns else [list(runs)]):
        inner = body_size(block)
        for members in _attach(block, inner):
            width = sum(len(r.text) for r in members)
            lines.append(
                Line(
                    min(r.x0 for r in members),
                    max(r.x1 for r in members),
                    _baseline(members, inner),
                    max(members, key=lambda r: (len(r.text), r.size)).size,
                    line_text(members, inner, scripts),
                    sum(len(r.text) for r in members if r.mono) > 0.6 * width,
                    number,
                    _has_wide_blank(members, inner),
                )
            )
    return lines

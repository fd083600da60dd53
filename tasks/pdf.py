"""Text of PDF pages through pdfium: reading order over columns, running heads removed, hyphenation repaired.

    python -m tasks.pdf FILE.pdf        (prints the text)

A PDF keeps no formulas as LaTeX, so its mathematics comes out as the characters on the page. Used by `python -m tasks math`.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

Box = tuple[float, float, float, float]  # left, bottom, right, top in points

_HYPHENS = "-\u00ad\u2010\ufffe\x02"


def _gap(intervals: Sequence[tuple[float, float]], least: float) -> tuple[float, float] | None:
    """The widest hole of at least `least` points between sorted intervals, as (end of the left part, start of the right)."""
    best, reach = None, None
    for low, high in sorted(intervals):
        if reach is not None and low - reach >= least and (best is None or low - reach > best[1] - best[0]):
            best = (reach, low)
        reach = high if reach is None else max(reach, high)
    return best


def reading_order(boxes: Sequence[Box], least_gap: float = 9.0, least_lines: int = 4) -> list[list[Box]]:
    """Groups of boxes in reading order (XY-cut): a page part is split into columns where a vertical gap runs through it and
    both sides hold several lines, and into bands where that lets a column gap appear; top before bottom, left before right."""
    boxes = list(boxes)
    cut = _gap([(b[0], b[2]) for b in boxes], least_gap)
    if cut:
        left = [b for b in boxes if b[2] <= cut[0]]
        right = [b for b in boxes if b[0] >= cut[1]]
        if len(_rows(left)) >= least_lines and len(_rows(right)) >= least_lines:
            return reading_order(left, least_gap, least_lines) + reading_order(right, least_gap, least_lines)
        return [boxes]
    # No gap runs through: boxes that span the middle (titles, wide figures) may hide one. Cut off bands above or below them.
    low, high = min(b[0] for b in boxes), max(b[2] for b in boxes)
    middle, width = (low + high) / 2, high - low
    spanning = sorted(
        (b for b in boxes if b[0] < middle - 0.1 * width and b[2] > middle + 0.1 * width), key=lambda b: -b[3]
    )
    if not spanning or len(spanning) > 0.4 * len(boxes):
        return [boxes]
    bands: list[list[Box]] = []
    edges = [edge for b in spanning for edge in (b[3], b[1])]
    levels = [float("inf"), *edges, float("-inf")]
    for upper, lower in zip(levels, levels[1:]):
        band = [b for b in boxes if lower <= (b[1] + b[3]) / 2 < upper]
        if band:
            bands.append(band)
    if len(bands) < 2:
        return [boxes]
    merged: list[list[Box]] = []
    for band in bands:
        parts = reading_order(band, least_gap, least_lines) if len(band) < len(boxes) else [band]
        if len(parts) == 1 and merged and merged[-1] is not None and len(merged[-1]) and not _columns(merged):
            merged[-1] = merged[-1] + parts[0]
        else:
            merged += parts
    return merged


def _columns(groups: list[list[Box]]) -> bool:
    """Whether the last two groups stand side by side: then what follows starts a group of its own."""
    if len(groups) < 2:
        return False
    a, b = groups[-2], groups[-1]
    return max(x[2] for x in a) <= min(x[0] for x in b)


def _rows(boxes: Sequence[Box]) -> list[list[Box]]:
    """Boxes by text line, from the top of the page down."""
    rows: list[list[Box]] = []
    for box in sorted(boxes, key=lambda b: -(b[1] + b[3])):
        if rows and (rows[-1][0][1] + rows[-1][0][3]) / 2 - (box[1] + box[3]) / 2 <= 3:
            rows[-1].append(box)
        else:
            rows.append([box])
    return rows


def split_edges(boxes: Sequence[Box], most: int = 2) -> tuple[list[Box], list[Box], list[Box]]:
    """(head, body, foot): up to `most` lines at the top and at the bottom that stand clear of the rest of the page.

    Clear means a distance of more than twice the usual one between lines. Producers may write such lines anywhere in the
    page's stream, so they are recognised by place.
    """
    rows = _rows(boxes)
    middles = [(row[0][1] + row[0][3]) / 2 for row in rows]
    pitches = [a - b for a, b in zip(middles, middles[1:])]
    if len(rows) < 6:
        return [], list(boxes), []
    usual = sorted(pitches)[len(pitches) // 2]
    head = max((i + 1 for i in range(most) if pitches[i] > 2 * usual), default=0)
    foot = max((i + 1 for i in range(most) if pitches[-1 - i] > 2 * usual), default=0)
    flat = [
        [b for row in part for b in row]
        for part in (rows[:head], rows[head : len(rows) - foot], rows[len(rows) - foot :])
    ]
    return flat[0], flat[1], flat[2]


def _page_text(page: object) -> str:
    text_page = page.get_textpage()
    boxes = [text_page.get_rect(i) for i in range(text_page.count_rects())]
    boxes = [b for b in boxes if b[2] > b[0] and b[3] > b[1]]
    head, body, foot = split_edges(boxes)
    groups = [*_rows(head), *reading_order(body), *_rows(foot)] if body else []
    if len(groups) <= 1:
        text = text_page.get_text_range()
    else:
        parts = []
        for group in groups:
            left, bottom = min(b[0] for b in group) - 1, min(b[1] for b in group) - 1
            right, top = max(b[2] for b in group) + 1, max(b[3] for b in group) + 1
            parts.append(text_page.get_text_bounded(left=left, bottom=bottom, right=right, top=top))
        text = "\n".join(parts)
    text_page.close()
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _key(line: str) -> str:
    return re.sub(r"\d+|\b[ivxlc]+\b", "#", " ".join(line.lower().split()))


def strip_running_heads(pages: Sequence[Sequence[str]], depth: int = 2) -> list[list[str]]:
    """Remove lines that stand among the first or last `depth` of many pages (numbers aside), and bare page numbers there."""
    counts: Counter[str] = Counter()
    for lines in pages:
        edge = set(map(_key, [*lines[:depth], *lines[-depth:]]))
        counts.update(k for k in edge if k)
    often = {k for k, c in counts.items() if c >= max(3, 0.3 * len(pages))}

    def running(line: str) -> bool:
        return _key(line) in often or re.fullmatch(r"[-–— ]*(\d+|[ivxlc]+)[-–— ]*", line.strip()) is not None

    result = []
    for lines in pages:
        kept = list(lines)
        for _ in range(depth):
            if kept and running(kept[0]):
                kept = kept[1:]
            if kept and running(kept[-1]):
                kept = kept[:-1]
        result.append(kept)
    return result


def join_lines(lines: Sequence[str]) -> str:
    """Lines to paragraphs: a word divided at a line's end becomes one again, and a line that plainly goes on is joined.

    A divided word keeps its hyphen when only the hyphenated form is found elsewhere in the text.
    """
    known = set(re.findall(r"\w+(?:-\w+)*", " ".join(lines).lower()))
    width = sorted(len(line) for line in lines)[int(len(lines) * 0.75)] if lines else 0
    out: list[str] = []
    for line in (line.strip() for line in lines):
        if not line:
            if out and out[-1]:
                out.append("")
            continue
        last = out[-1] if out else ""
        if last and last[-1] in _HYPHENS and len(last) > 1 and last[-2].isalpha() and line[0].islower():
            head = re.findall(r"\w+(?:-\w+)*$", last[:-1])[-1].lower()
            tail = re.match(r"\w+(?:-\w+)*", line)[0].lower()
            hyphen = f"{head}-{tail}" in known and head + tail not in known
            out[-1] = last[:-1] + ("-" if hyphen else "") + line
        elif last and len(last) > 0.6 * width and (last[-1] not in ".:;?!" or line[0].islower()) and line[0].isalnum():
            out[-1] = f"{last} {line}"
        else:
            out.append(line)
    return "\n".join(out).translate({ord(c): "" for c in "\u00ad\ufffe\x02"}).strip()


def pdf_to_text(path: Path, max_pages: int = 0) -> tuple[str, int]:
    """(text, pages read) of a PDF. ValueError when pdfium cannot open it."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(str(path))
    except pypdfium2.PdfiumError as error:
        raise ValueError(f"not a readable PDF: {error}") from None
    try:
        count = min(len(document), max_pages or len(document))
        pages = []
        for number in range(count):
            page = document[number]
            lines = [line.rstrip() for line in _page_text(page).split("\n")]
            pages.append([line for line in lines if line.strip()])
            page.close()
    finally:
        document.close()
    kept = strip_running_heads(pages)
    return join_lines([line for lines in kept for line in [*lines, ""]]), count


if __name__ == "__main__":
    print(pdf_to_text(Path(sys.argv[1]))[0])

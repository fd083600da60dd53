"""Lines of a document's pages to text: running heads and page numbers, contents, index, reference list and figure debris
removed by rule (`RULES`), footnotes after the paragraph they interrupt, divided words joined, paragraphs told apart.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tasks.pdf_layout import Line, body_size

RULES = ("running_head", "page_number", "contents", "index", "references", "figure_debris")
_REFERENCES = re.compile(
    r"(?:\d+\.?\d*\s+|[A-Z]\.?\s+)?(references|bibliography|literature|literature cited|works cited|references and notes"
    r"|r[ée]f[ée]rences|bibliographie|literatur|literaturverzeichnis|referencias|bibliograf[ií]a|riferimenti bibliografici"
    r"|список литературы|参考文献)[.:]?",
    re.IGNORECASE,
)
_AFTER_REFERENCES = re.compile(
    r"(?:\d+\.?\d*\s+)?(appendix|appendices|supplement(ary|al)?\b.*|annexe?|anhang|index|acknowledge?ments?)\b.{0,60}",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[-–—. |]*(?:page\s+)?(\d{1,4}|[ivxlc]{1,7})(?:\s*(?:/|of)\s*\d+)?[-–—. |]*", re.IGNORECASE)
_LEADERS = re.compile(r"(?:\.\s*){4,}\s*(?:\d+|[ivxlc]+)\s*$|(?:\. ?){8,}")
_CONTENTS = re.compile(
    r"(table of )?contents|inhaltsverzeichnis|table des mati[eè]res|[ií]ndice|indice|содержание|目录", re.IGNORECASE
)
_INDEX = re.compile(r"(subject |general |alphabetical )?index|stichwortverzeichnis", re.IGNORECASE)
_INDEX_ENTRY = re.compile(r".*?\D,? ?\d{1,4}(?:\s*[,–-]\s*\d{1,4})*\.?$")
_LOGO = re.compile(r"L\^?\{?A\}? ?T_?\{?E\}?X(?![A-Z])")  # the raised letter is no exponent
_ENDS = re.compile(r"[.!?:;。][\"'”’)\]]*$")
_HYPHEN_END = re.compile(r"([^\W\d_]+(?:-[^\W\d_]+)*)-$")


@dataclass
class Cleaned:
    """`text`, and by rule how many lines were removed and a few of them for a person to read."""

    text: str
    removed: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)


def _key(text: str) -> str:
    return re.sub(r"\d+|\b[ivxlc]+\b", "#", " ".join(text.lower().split()))


def _edges(lines: Sequence[Line]) -> tuple[list[int], list[int]]:
    """Indices of up to three lines at the top and at the bottom of a page, by place and not by reading order."""
    order = sorted(range(len(lines)), key=lambda i: -lines[i].y)
    return order[:3], order[::-1][:3]


def running_heads(pages: Sequence[Sequence[Line]]) -> list[set[int]]:
    """Per page the indices of running heads and feet: lines at the page's edge whose words (numbers aside) come back on many
    pages, or that stand clear of the text at a height where most pages have such a line; and page numbers there."""
    words: Counter[str] = Counter()
    places: Counter[tuple[str, int]] = Counter()
    clear: list[dict[int, tuple[str, int]]] = []
    for lines in pages:
        found: dict[int, tuple[str, int]] = {}
        for side, edge in zip(("top", "foot"), _edges(lines)):
            for rank, i in enumerate(edge[:2]):
                following = edge[rank + 1] if rank + 1 < len(edge) else None
                apart = abs(lines[i].y - lines[following].y) if following is not None else 0
                if apart > 1.7 * lines[i].size:
                    found.update({j: (side, round(lines[j].y / 3)) for j in edge[: rank + 1]})
        clear.append(found)
        words.update({_key(lines[i].text) for edge in _edges(lines) for i in edge[:2]})
        places.update(set(found.values()))
    least = max(3, 0.25 * len(pages))
    removed = []
    for lines, found in zip(pages, clear):
        out = set()
        for edge in _edges(lines):
            for i in edge[:2]:
                text = lines[i].text
                often = words[_key(text)] >= least and len(_key(text)) > 1
                placed = i in found and places[found[i]] >= max(5, 0.75 * len(pages)) and len(text) < 120
                number = _NUMBER.fullmatch(text.strip()) is not None and len(lines) > 3
                if often or placed or number:
                    out.add(i)
                else:
                    break
        removed.append(out)
    return removed


def _is_heading(line: Line, pattern: re.Pattern) -> bool:
    return len(line.text) < 60 and pattern.fullmatch(line.text.strip()) is not None


def _drop_tail_sections(lines: list[Line], drop: list[str]) -> None:
    """Mark reference lists (to the next appendix or the end) and a final index."""
    count = len(lines)
    for i, line in enumerate(lines):
        if drop[i]:
            continue
        if _is_heading(line, _REFERENCES) and i > 0.3 * count:
            end = next((j for j in range(i + 1, count) if _is_heading(lines[j], _AFTER_REFERENCES)), count)
            entries = lines[i + 1 : end]
            marked = sum(
                bool(re.match(r"\s*(\[\w+\W?\w*\]|\d{1,3}[.\]]|[A-Z][\w'’-]+,? [A-Z]\.)", e.text)) for e in entries
            )
            if marked >= max(1, 0.1 * len(entries)) or (entries and marked and end - i < 12):
                drop[i:end] = ["references"] * (end - i)
        elif _is_heading(line, _INDEX) and i > 0.6 * count:
            rest = lines[i + 1 :]
            if rest and sum(bool(_INDEX_ENTRY.match(e.text)) for e in rest) > 0.5 * len(rest):
                drop[i:] = ["index"] * (count - i)


def _drop_contents(lines: list[Line], drop: list[str]) -> None:
    for i, line in enumerate(lines):
        if _LEADERS.search(line.text):
            drop[i] = "contents"
    i = 0
    while i < len(lines):
        if not drop[i] and _is_heading(lines[i], _CONTENTS) and i < 0.4 * len(lines):
            j, misses = i + 1, 0
            while j < len(lines) and misses < 3:
                entry = drop[j] == "contents" or re.search(r"\S\s+\d{1,4}$", lines[j].text)
                misses = 0 if entry else misses + 1
                j += 1
            end = j - misses
            if end - i > 3:
                drop[i:end] = ["contents"] * (end - i)
            i = end
        i += 1


def _is_debris(line: Line, size: float) -> bool:
    """Labels inside of figures: much smaller than the text, without a word."""
    return (
        line.size < 0.75 * size
        and len(line.text) < 40
        and "=" not in line.text
        and not re.search(r"[^\W\d_]{3,}.*[^\W\d_]{3,}", line.text)
    )


def join_words(head: str, tail: str, known: Counter[str]) -> str:
    """A word divided at a line's end, whole again: it keeps its hyphen when only the hyphenated form is found elsewhere."""
    left = re.search(r"[^\W\d_]+(?:-[^\W\d_]+)*$", head[:-1])
    right = re.match(r"[^\W\d_]+(?:-[^\W\d_]+)*", tail)
    if not left or not right:
        return head + tail
    a, b = left.group().lower(), right.group().lower()
    hyphenated, whole = known[f"{a}-{b}"], known[a + b]
    keep = hyphenated > whole or (not whole and "-" in a) or not tail[0].islower()
    return head + tail if keep else head[:-1] + tail


def vocabulary(lines: Sequence[Line]) -> Counter[str]:
    """Words of a document as they stand inside of lines: the dictionary for divided words."""
    known: Counter[str] = Counter()
    for line in lines:
        known.update(re.findall(r"[^\W\d_]+(?:-[^\W\d_]+)*(?!-?\w*-$)", line.text.lower()))
    return known


def paragraphs(lines: Sequence[Line], hyphens: bool = True) -> list[str]:
    """Lines to paragraphs: a new one begins at a larger distance, an indentation, another size, a typewriter line, or after a
    line that ended short with a full stop."""
    known = vocabulary(lines)
    out: list[str] = []
    usual = Counter(round(a.y - b.y, 1) for a, b in zip(lines, lines[1:]) if 0 < a.y - b.y < 40)
    pitch = usual.most_common(1)[0][0] if usual else 12.0
    edges: dict[int, list[float]] = {}
    for line in lines:
        edges.setdefault(line.block, []).append(line.x1)
    previous: Line | None = None
    for line in lines:
        text = line.text.strip()
        if previous is None or not out:
            out.append(text)
        else:
            drop = previous.y - line.y
            right = sorted(edges[previous.block])[int(0.8 * len(edges[previous.block]))]
            short = previous.x1 < right - 0.12 * max(60.0, right - previous.x0)
            same_flow = 0 < drop < 1.45 * pitch or drop < -2 * pitch or line.block != previous.block
            indented = line.x0 > previous.x0 + 0.8 * line.size and 0 < drop
            ended = _ENDS.search(previous.text) is not None
            divided = previous.text.endswith("-") and text[:1].isalpha()
            fresh = (
                not same_flow
                or abs(line.size - previous.size) > 0.15 * previous.size
                or (ended and (short or indented))
                or (short and not text[:1].islower())
                or (indented and drop > 0 and text[:1].isupper() and ended)
                or line.tabular != previous.tabular
            )
            if drop > 0 and same_flow and (line.mono and previous.mono or line.tabular and previous.tabular):
                out[-1] += "\n" + text
            elif fresh and not (divided and text[:1].islower()):
                out.append(text)
            elif divided and hyphens:
                out[-1] = join_words(out[-1], text, known)
            else:
                out[-1] += " " + text
        previous = line
    return out


def clean(
    pages: Sequence[Sequence[Line]], heads: bool = True, strip: bool = True, hyphens: bool = True, notes: bool = True
) -> Cleaned:
    """Text of a document. The switches leave out one part each, for measuring what it gains."""
    result = Cleaned("")

    def remove(rule: str, line: Line) -> None:
        result.removed[rule] += 1
        shown = result.examples.setdefault(rule, [])
        if len(shown) < 5:
            shown.append(line.text[:200])

    removed = running_heads(pages) if heads else [set() for _ in pages]
    size = body_size([line for lines in pages for line in lines])
    flow: list[Line] = []
    footnotes: dict[int, list[Line]] = {}
    offset = 0
    for lines, gone in zip(pages, removed):
        kept = []
        for i, line in enumerate(lines):
            if i in gone:
                remove("page_number" if _NUMBER.fullmatch(line.text.strip()) else "running_head", line)
            elif strip and _is_debris(line, size):
                remove("figure_debris", line)
            else:
                kept.append(line)
        foot = _footnote_start(kept, size) if notes else len(kept)
        for line in kept[:foot]:
            line.block += offset
            flow.append(line)
        if foot < len(kept):
            footnotes[len(flow) - 1] = kept[foot:]
        offset += 1 + max((line.block for line in lines), default=0)
    drop = [""] * len(flow)
    if strip:
        _drop_contents(flow, drop)
        _drop_tail_sections(flow, drop)
    for line, rule in zip(flow, drop):
        if rule:
            remove(rule, line)
    last = -1
    parts: list[str] = []
    for after in [*sorted(footnotes), len(flow) - 1]:
        end = _paragraph_end(flow, after) if after in footnotes else after
        parts += paragraphs([f for f, d in zip(flow[last + 1 : end + 1], drop[last + 1 : end + 1]) if not d], hyphens)
        if after in footnotes and not drop[max(0, min(after, len(drop) - 1))] == "references":
            parts += paragraphs(footnotes[after], hyphens)
        last = max(last, end)
    text = re.sub(r"[ \t]{2,}", " ", "\n\n".join(p for p in parts if p.strip())).strip()
    result.text = unicodedata.normalize("NFC", re.sub("\u0338 ?(.)", "\\1\u0338", _LOGO.sub("LaTeX", text)))
    return result


def _footnote_start(lines: list[Line], size: float) -> int:
    """Index of the first footnote line: the page's last lines in a smaller size, the first of them with a mark."""
    start = len(lines)
    while start and lines[start - 1].size < 0.93 * size and not lines[start - 1].mono:
        start -= 1
    if start in (0, len(lines)) or len(lines) - start > 0.5 * len(lines):
        return len(lines)
    return start if re.match(r"\s*(\^?\{?[\d*†‡§]{1,3}\}?|\[\d+\])", lines[start].text) else len(lines)


def _paragraph_end(flow: list[Line], after: int) -> int:
    """The line that ends the paragraph which line `after` belongs to, at most 40 lines on."""
    for i in range(max(after, 0), min(after + 40, len(flow))):
        if _ENDS.search(flow[i].text) or i + 1 == len(flow):
            return i
    return after

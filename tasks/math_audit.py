"""What a person reads of the math stage: samples of kept and removed text per rule, and formula statistics by source.

`audit/samples.json` holds them as data, `audit/samples.html` as one page. Samples are the first of each kind in the order
of reading, and those nearest to the threshold on either side, so equal inputs give equal files.
"""

from __future__ import annotations

import html
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.latex import math_spans

_PER_RULE = 6
_HEAD = 600


class Audit:
    """Collects a bounded number of samples while the stage reads; `write` makes the two files."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.formulas = 0
        self.carriers: Counter[str] = Counter()
        self.lines: dict[str, Counter[str]] = defaultdict(Counter)
        self.lost = 0
        self._lines: dict[str, list[str]] = defaultdict(list)
        self._kept: list[tuple[float, str, dict]] = []
        self._removed: dict[str, list[dict]] = defaultdict(list)
        self._sources: dict[str, Counter[str]] = defaultdict(Counter)
        self._shown: dict[str, list[str]] = defaultdict(list)

    def carried(self, carriers: Mapping[str, int], lost: int) -> None:
        """Formulas of one page by what carried them; `lost` stood outside of its main content."""
        self.carriers.update(carriers)
        self.lost += lost

    def removed(self, kind: str, counts: Mapping[str, int], examples: Mapping[str, list[str]]) -> None:
        """Lines that a reader removed from one document, by rule."""
        self.lines[kind].update(counts)
        for rule, lines in examples.items():
            shown = self._lines[f"{kind}/{rule}"]
            shown += lines[: max(0, 20 - len(shown))]

    def document(self, row: Mapping[str, Any], formulas: int, score: float, verdict: tuple[str, float] | None) -> None:
        """One document, kept (`verdict` None) or removed by (rule, value)."""
        source = row["meta"].get("item") or row["source"]
        sample = {
            "source": row["source"], "url": row["url"], "score": score, "formulas": formulas, "text": row["text"][:_HEAD],
        }  # fmt: skip
        if verdict is not None:
            self._sources[source][verdict[0]] += 1
            if len(self._removed[verdict[0]]) < _PER_RULE:
                self._removed[verdict[0]].append(sample | {"value": verdict[1]})
            return
        self.formulas += formulas
        self._sources[source]["kept"] += 1
        self._sources[source]["formulas"] += formulas
        self._sources[source]["characters"] += len(row["text"])
        shown = self._shown[source]
        if len(shown) < 10:
            shown += [f[:200] for f in math_spans(row["text"])[:3]]
        self._kept.append((score, row["source"], sample))
        if len(self._kept) > 4 * _PER_RULE:
            self._kept.sort(key=lambda k: k[:2])
            half = _PER_RULE
            self._kept = self._kept[:half] + self._kept[-half:]

    def write(self) -> None:
        """`samples.json` and `samples.html`."""
        kept = sorted(self._kept, key=lambda k: k[:2])
        data = {
            "sources": {
                s: dict(sorted(c.items())) | {"examples": self._shown[s]} for s, c in sorted(self._sources.items())
            },
            "carriers": dict(sorted(self.carriers.items())),
            "formulas_outside_of_main_content": self.lost,
            "kept_lowest": [k[2] for k in kept[:_PER_RULE]],
            "kept_highest": [k[2] for k in kept[_PER_RULE:][-_PER_RULE:]],
            "removed": {rule: self._removed[rule] for rule in sorted(self._removed)},
            "lines_removed": {k: dict(sorted(c.items())) for k, c in sorted(self.lines.items())},
            "lines_removed_examples": {k: self._lines[k] for k in sorted(self._lines)},
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "samples.json").write_text(
            json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
        )
        (self.folder / "samples.html").write_text(_page(data), encoding="utf-8")


def _sample(sample: Mapping[str, Any]) -> str:
    facts = ", ".join(
        f"{k} {html.escape(str(sample[k]))}" for k in ("score", "formulas", "value", "source") if k in sample
    )
    return f"<p><small>{facts}</small></p><pre>{html.escape(sample['text'])}</pre>"


def _page(data: Mapping[str, Any]) -> str:
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Math stage: samples</title>",
        "<style>body{font:15px sans-serif;max-width:60em;margin:2em auto}",
        "pre{white-space:pre-wrap;background:#f4f4f4;padding:.6em}",
        "td,th{padding:.2em .7em;text-align:right}td:first-child{text-align:left}</style><h1>Math stage: samples</h1>",
        "<h2>Sources</h2><table><tr><th>source<th>kept<th>formulas<th>characters<th>removed</tr>",
    ]
    for source, counts in data["sources"].items():
        gone = sum(v for k, v in counts.items() if k not in ("kept", "formulas", "characters", "examples"))
        cells = "".join(f"<td>{counts.get(k, 0)}" for k in ("kept", "formulas", "characters"))
        parts.append(f"<tr><td>{html.escape(source)}{cells}<td>{gone}</tr>")
    parts.append("</table><h2>Formulas of pages, by carrier</h2><ul>")
    parts += [f"<li>{html.escape(k)}: {v}" for k, v in data["carriers"].items()]
    parts.append(f"</ul><p>{data['formulas_outside_of_main_content']} stood outside of a page's main content.</p>")
    for title, samples in (
        ("Kept, lowest scores", data["kept_lowest"]),
        ("Kept, highest scores", data["kept_highest"]),
    ):
        parts += [f"<h2>{title}</h2>", *map(_sample, samples)]
    for rule, samples in data["removed"].items():
        parts += [f"<h2>Removed: {html.escape(rule)}</h2>", *map(_sample, samples)]
    for rule, lines in data["lines_removed_examples"].items():
        parts += [f"<h2>Lines removed: {html.escape(rule)}</h2><pre>{html.escape(chr(10).join(lines))}</pre>"]
    return "\n".join(parts) + "\n"

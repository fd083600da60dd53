"""What a person reads to judge stage web: the funnel, score histograms, texts on both sides of every threshold, tables.

Written to `<out>/audit/`: funnel.csv, languages.csv, licences.csv, histograms.json, samples.json and index.html, which shows
all of them. Equal documents give equal files: samples are the nearest to a threshold, ties by id.
"""

from __future__ import annotations

import csv
import html
import io
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NEAREST = 4  # samples per side of a threshold
HEAD_CHARS = 400


def bin_start(value: float) -> float:
    """Lower end of a value's bin: steps of 0.05 up to 1, powers of two above."""
    if value <= 1:
        return round(math.floor(round(value * 20, 9)) / 20, 2)
    return float(2 ** math.floor(math.log2(value)))


def distance(value: float, bounds: Sequence[float | None]) -> float:
    """How far a value is from the nearest bound of its rule, relative to that bound."""
    return min(abs(value - b) / max(abs(b), 1e-3) for b in bounds if b is not None)


class Tally:
    """Histograms of measurements and the texts nearest to each threshold, of any number of documents."""

    def __init__(self) -> None:
        self.histograms: dict[str, Counter[float]] = defaultdict(Counter)
        self.samples: dict[str, dict[str, list]] = defaultdict(lambda: {"kept": [], "removed": []})

    def measured(
        self, row: Mapping[str, Any], values: Mapping[str, float | None], rules: Mapping[str, Sequence], broken: str
    ) -> None:
        """Count a document's measurements; `broken` is the rule that removes it, or ""."""
        for rule, value in values.items():
            if value is None:
                continue
            self.histograms[rule][bin_start(value)] += 1
            if any(b is not None for b in rules[rule]) and (not broken or rule == broken):
                self.sample(rule, "removed" if broken else "kept", distance(value, rules[rule]), value, row)

    def sample(self, rule: str, side: str, far: float, value: float, row: Mapping[str, Any]) -> None:
        """Keep a document as a sample if it is among the nearest of its side."""
        held = self.samples[rule][side]
        if len(held) < NEAREST or (far, row["id"]) < (held[-1][0], held[-1][2]):
            held.append([far, round(value, 5), row["id"], row["url"], row["text"][:HEAD_CHARS]])
            held.sort(key=lambda s: (s[0], s[2]))
            del held[NEAREST:]

    def as_json(self) -> dict[str, Any]:
        """JSON that `add` reads."""
        histograms = {rule: sorted(counts.items()) for rule, counts in sorted(self.histograms.items())}
        return {"histograms": histograms, "samples": dict(sorted(self.samples.items()))}

    def add(self, other: Mapping[str, Any]) -> None:
        """Merge what another tally's `as_json` returned."""
        for rule, counts in other["histograms"].items():
            self.histograms[rule].update({float(start): n for start, n in counts})
        for rule, sides in other["samples"].items():
            for side, rows in sides.items():
                held = self.samples[rule][side]
                held += rows
                held.sort(key=lambda s: (s[0], s[2]))
                del held[NEAREST:]


class Flow:
    """Documents, bytes and tokens that each step of the funnel saw and removed; a size is {"bytes": n, "tokens": n}."""

    def __init__(self, steps: Sequence[str]) -> None:
        self.steps = tuple(steps)
        self.entered: Counter[str] = Counter()
        self.rescued: Counter[str] = Counter()  # what a dropped bucket held and its knowledge kept
        self.removed: dict[str, Counter[str]] = {step: Counter() for step in steps}
        self.languages: dict[str, Counter[str]] = defaultdict(Counter)
        self.licences: dict[str, Counter[str]] = defaultdict(Counter)
        self.tokens: Counter[str] = Counter()  # kept, by domain
        self.lines: Counter[str] = Counter()  # dropped from pages, by rule

    def enter(self, size: Mapping[str, int]) -> None:
        self.entered.update(documents=1, **size)

    def remove(self, step: str, size: Mapping[str, int]) -> None:
        self.removed[step].update(documents=1, **size)

    def keep(self, row: Mapping[str, Any], size: Mapping[str, int], licence: str) -> None:
        self.tokens[row["domain"]] += size["tokens"]
        self.languages[row["lang"]].update({row["domain"]: 1, "documents": 1, **size})
        self.licences[licence or "not stated"].update({row["domain"]: 1, "documents": 1, **size})

    def left(self, unit: str = "documents") -> dict[str, int]:
        """{"pages": all, step: left after it, ...} in order; `unit` is documents, bytes or tokens."""
        number = self.entered[unit]
        found = {"pages": number}
        for step in self.steps:
            number -= self.removed[step][unit]
            found[step] = number
        return found

    def table(self) -> list[list]:
        """Rows of funnel.csv."""
        units = ("documents", "tokens", "bytes")
        left = {unit: self.left(unit) for unit in units}
        rows: list[list] = [["step", *(f"{u}_left" for u in units), *(f"{u}_removed" for u in units)]]
        for step in left["documents"]:
            lost = self.removed.get(step, Counter())
            rows.append([step, *(left[u][step] for u in units), *(lost[u] for u in units)])
        return rows


def counts_table(name: str, counts: Mapping[str, Counter[str]]) -> list[list]:
    """Rows of a table of documents, tokens and bytes by `name`, the largest first, with a column per domain."""
    units = ("documents", "tokens", "bytes")
    domains = sorted({k for c in counts.values() for k in c} - set(units))
    rows: list[list] = [[name, *units, *domains]]
    for key, c in sorted(counts.items(), key=lambda pair: (-pair[1]["bytes"], pair[0])):
        rows.append([key, *(c[u] for u in units), *(c[d] for d in domains)])
    return rows


def write_audit(folder: Path, flow: Flow, tally: Tally) -> list[Path]:
    """Write the files; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        "funnel": flow.table(),
        "languages": counts_table("language", flow.languages),
        "licences": counts_table("licence", flow.licences),
    }
    found = tally.as_json()
    for name, rows in tables.items():
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        (folder / f"{name}.csv").write_text(text.getvalue(), encoding="utf-8")
    for name in ("histograms", "samples"):
        (folder / f"{name}.json").write_text(
            json.dumps(found[name], indent=0, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    (folder / "index.html").write_text(_page(tables, found), encoding="utf-8")
    return sorted(folder.iterdir())


def _page(tables: Mapping[str, list[list]], found: Mapping[str, Any]) -> str:
    parts = ["<!doctype html><meta charset='utf-8'><title>Web curation</title><style>", _STYLE, "</style>"]
    parts.append("<h1>Web curation: what was kept and what was not</h1><p>Tokens are estimated from the bytes.</p>")
    for name, rows in tables.items():
        parts.append(f"<h2>{name.title()}</h2><table>")
        for i, row in enumerate(rows):
            tag = "td" if i else "th"
            parts.append("<tr>" + "".join(f"<{tag}>{_cell(c)}</{tag}>" for c in row) + "</tr>")
        parts.append("</table>")
    for rule, bins in found["histograms"].items():
        top = max(n for _, n in bins)
        parts.append(f"<h2>{html.escape(rule)}</h2><table class='bars'>")
        for start, n in bins:
            parts.append(f"<tr><td>{start:g}</td><td><i style='width:{300 * n / top:.0f}px'></i> {n:,}</td></tr>")
        parts.append("</table>")
        for side, rows in found["samples"].get(rule, {}).items():
            parts += [f"<h3>{side}, nearest to the threshold</h3>"] if rows else []
            for _, value, identity, url, head in rows:
                about = html.escape(f"{value:g}  {identity}  {url}")
                parts.append(f"<p><code>{about}</code></p><pre>{html.escape(head)}</pre>")
    return "\n".join(parts) + "\n"


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else html.escape(str(value))


_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "td,th{padding:.15rem .6rem;text-align:right}td:first-child,th:first-child{text-align:left}"
    ".bars td{text-align:left}.bars i{display:inline-block;height:.7rem;background:#4a7fb5}"
    "pre{white-space:pre-wrap;background:#f4f4f2;padding:.6rem;font-size:13px}code{color:#666;font-size:12px}"
)

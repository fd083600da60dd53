"""The readers of the math stage, one unit at a time: some files of the index, one WARC file, or one shard of records.

`read_unit` runs in a worker of tasks/mapshuffle.py, writes the unit's texts with their scores as JSON lines, and returns what
was rejected and what the audit counts. A unit that is done is not read again by a resumed stage.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks import latex, pdf, tex_source
from tasks.extract import NotText
from tasks.files import atomic_write
from tasks.math_html import extract_math_page, has_math_markup
from tasks.math_score import cut, formula_count, score
from tasks.records import read_record_shard

_READERS = {"rst": latex.rst_to_text, "md": latex.markdown_to_text}


class _Unit:
    """Texts of files, pages and records; what cannot be read is in `rejects` with its reason."""

    def __init__(self, reader: pdf.Reader):
        self.reader = reader
        self.seen = self.lost = 0
        self.rejects: list[tuple[str, str, str]] = []
        self.carriers: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def _pdf(self, content: bytes) -> str:
        found = self.reader.read(content)
        self.lines.update(found.removed)
        for rule, lines in found.examples.items():
            shown = self.examples.setdefault(rule, [])
            shown += lines[: max(0, 20 - len(shown))]
        return found.text

    def _html(self, content: bytes, charset: str = "") -> str:
        found = extract_math_page(content, charset)
        self.carriers.update(found.carriers)
        self.lost += found.lost
        return found.page.text

    def _file(self, path: Path, kind: str) -> str:
        suffix = path.name.rpartition(".")[2].lower()
        if kind == "pdf" or suffix == "pdf":
            return self._pdf(path.read_bytes())
        if kind == "tex" or suffix == "tex":
            return tex_source.read_source(path)
        data = path.read_bytes()
        if kind == "html" or suffix in ("html", "htm", "xhtml"):
            return self._html(data)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError("not UTF-8 text") from None
        reader = _READERS.get(suffix) or _READERS.get(kind)
        return reader(text) if reader else latex.dollars(text)

    def _reject(self, name: str, error: Exception) -> None:
        self.rejects.append((name, getattr(error, "reason", "unreadable"), getattr(error, "detail", str(error))))

    def files(self, acquired: Path, rows: list[dict]) -> Iterator[dict]:
        """Files of the index."""
        for row in rows:
            self.seen += 1
            try:
                text = self._file(acquired / row["path"], row["kind"])
            except (ValueError, OSError) as error:
                self._reject(row["path"], error)
                continue
            inner = row.get("member") or row["path"].removeprefix("files/").partition("/")[2]
            yield {
                "text": text,
                "source": f"{row['item']}/{row['version']}/{inner}",
                "url": row.get("url") or "",
                "lang": "",
                "meta": {"kind": row["kind"], "licence": row["licence"], "item": row["item"]},
            }

    def pages(self, path: Path) -> Iterator[dict]:
        """Pages of a WARC file that hold formulas."""
        from tasks.warc import BadRecord, read_warc

        for page in read_warc(path):
            if isinstance(page, BadRecord):
                self.rejects.append((page.record_id, page.reason, page.detail))
            elif has_math_markup(page.body):
                self.seen += 1
                try:
                    text = self._html(page.body)
                except NotText as error:
                    self._reject(page.url, error)
                    continue
                meta = {"kind": "html", "item": page.package}
                yield {"text": text, "source": page.package or path.name, "url": page.url, "lang": "", "meta": meta}

    def records(self, path: Path) -> Iterator[dict]:
        """PDFs, and pages with formulas, of the user's own sources."""
        for record in read_record_shard(path, kinds=("pdf", "html")):
            if record.kind == "html" and not has_math_markup(record.content):
                continue
            self.seen += 1
            try:
                text = self._pdf(record.content) if record.kind == "pdf" else self._html(record.content, record.charset)
            except ValueError as error:
                self._reject(record.id, error)
                continue
            meta = {"kind": record.kind, "licence": record.licence, "item": record.source, "path": record.path}
            yield {"text": text, "source": record.source, "url": record.url, "lang": record.lang, "meta": meta}


def read_unit(argument: Mapping[str, Any]) -> dict[str, Any]:
    """Read one unit into the file `out` (JSON lines): `rows` of the index below `acquired`, a `warc` file, or a `records` shard.

    `limits` are those of `pdf.Limits`; `max_chars` and `chunk_chars` as in the stage's parameters.
    """
    with pdf.Reader(pdf.Limits(**argument["limits"])) as reader:
        unit = _Unit(reader)
        if "rows" in argument:
            found = unit.files(Path(argument["acquired"]), argument["rows"])
        elif "warc" in argument:
            found = unit.pages(Path(argument["warc"]))
        else:
            found = unit.records(Path(argument["records"]))
        lines = []
        for row in found:
            text = cut(row["text"], argument["max_chars"]).encode("utf-8", "ignore").decode("utf-8")
            mean, best = score(text, argument["chunk_chars"])
            scores = {"text": text, "formulas": formula_count(text), "math_score": mean, "math_max": best}
            lines.append(json.dumps(row | scores, ensure_ascii=False))
    atomic_write(Path(argument["out"]), "".join(line + "\n" for line in lines))
    return {
        "seen": unit.seen,
        "rejects": unit.rejects,
        "carriers": dict(unit.carriers),
        "lost": unit.lost,
        "lines": dict(unit.lines),
        "examples": unit.examples,
    }

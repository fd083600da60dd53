"""Documents from plain files of the corpus: encyclopedia summaries, prose, and any JSON-lines file with a `text` field.

python -m tasks.texts data/acquire          prints what it would read
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tasks.extract import NotText, clean_text, decode_html

_TAGGED = re.compile(r"(\S+)/[a-z.,:()'`*$+\-]+(?=\s|$)")
_SPACE_BEFORE = re.compile(r" +([.,;:?!)])")
READABLE = ("json", "jsonl", "text")


@dataclass(frozen=True)
class BadFile:
    """A file, or a line of one, that holds no document."""

    record_id: str
    reason: str
    detail: str


def read_index(acquired: Path) -> list[dict[str, Any]]:
    """The rows of data/acquire/index.parquet."""
    return pq.read_table(Path(acquired) / "index.parquet").to_pylist()


def untag(text: str) -> str:
    """Plain text of a `word/tag` corpus (Brown): tags dropped, quotes and punctuation closed up; else unchanged."""
    tagged = len(_TAGGED.findall(text[:2000]))
    if tagged < 0.8 * len(text[:2000].split()) - 1:
        return text
    paragraphs = []
    for block in re.split(r"\n\s*\n\s*\n", text):
        words = [w.rpartition("/")[0] if "/" in w else w for w in block.split()]
        line = " ".join(words).replace("`` ", '"').replace(" ''", '"').replace("( ", "(")
        if line:
            paragraphs.append(_SPACE_BEFORE.sub(r"\1", line))
    return "\n\n".join(paragraphs)


def file_documents(acquired: Path, row: Mapping[str, Any]) -> Iterator[dict[str, Any] | BadFile]:
    """Documents of one indexed file: a JSON object title -> {extract, ...}, JSON lines with `text`, or one plain text.

    Each is {"text", "title", "url", "lang" (when stated)}; what cannot be read comes out as `BadFile`.
    """
    path = row["path"]
    body = (Path(acquired) / path).read_bytes()
    try:
        text, _ = decode_html(body)
    except NotText as error:
        yield BadFile(path, "not_text", str(error))
        return
    if row["kind"] == "text":
        plain = clean_text(untag(text))
        if plain:
            yield {"text": plain, "title": row["member"].rpartition("/")[2], "url": row["url"]}
    elif row["kind"] == "json":
        try:
            entries = json.loads(text)
        except ValueError as error:
            yield BadFile(path, "bad_json", str(error))
            return
        entries = entries.items() if isinstance(entries, dict) else enumerate(entries)
        yield from (_entry(path, row, str(key), value) for key, value in entries)
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    yield _entry(path, row, str(number), json.loads(line))
                except ValueError as error:
                    yield BadFile(f"{path}:{number}", "bad_json_line", str(error))


def _entry(path: str, row: Mapping[str, Any], key: str, value: Any) -> dict[str, Any] | BadFile:
    text = (value.get("text") or value.get("extract")) if isinstance(value, dict) else None
    if not isinstance(text, str) or not text.strip():
        return BadFile(
            f"{path}:{key}", "no_text", f"expected an object with a string 'text' or 'extract', found {value!r:.120}"
        )
    title, lang = value.get("title"), value.get("lang")
    entry = {"text": clean_text(text), "title": title if isinstance(title, str) else key}
    url = value.get("url")
    return entry | {
        "url": url if isinstance(url, str) else f"{row['url']}#{key}",
        "lang": lang if isinstance(lang, str) else "",
    }


def main() -> None:
    for row in read_index(Path(sys.argv[1])):
        if row["domain"] in ("encyclopedia", "prose") and row["kind"] in READABLE:
            found = list(file_documents(Path(sys.argv[1]), row))
            print(f"{len(found):>7} {sum(isinstance(f, BadFile) for f in found):>5} bad  {row['path']}")


if __name__ == "__main__":
    main()

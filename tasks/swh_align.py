"""Records whose content, path, language, licence and repository metadata do not belong together: found, repaired, reported.

GLM-5 fixes metadata that the Software Heritage archive misaligns (paper section 2.2). An export is a table of contents
joined with tables of metadata, and a join gone wrong shifts one column against another, swaps rows, repeats them or loses a
side. Here, in blocks of rows in the export's order:

1. hashes: sha1, sha1_git (blob id), sha256 and length against the content. What does not fit is joined again by hash,
   wherever in the block the right content stands; runs of one offset are reported as shifts.
2. places (path, url, repository): a path's extension and words against the content, by the offset that fits a run of rows
   best (Viterbi over offsets; metadata follows its hash unless the evidence says otherwise).
3. language and licence labels against what content and path say.
4. duplicated rows, rows without content and contents without metadata.

A record that nothing fits is rejected with its reason; no record is dropped without a line.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from tasks import code_lang, licences
from tasks.licences import is_licence_file
from tasks.records import Record
from tasks.swh_evidence import Evidence, best_offsets, same_language, settle_claims

# Column names in use: Software Heritage's own, The Stack v2's, and plain ones.
HASH_COLUMNS = {
    "sha1": "sha1", "content_sha1": "sha1", "content_id": "sha1",
    "sha1_git": "sha1_git", "blob_id": "sha1_git", "content_sha1_git": "sha1_git", "sha256": "sha256",
}  # fmt: skip
LENGTH_COLUMNS = ("length", "length_bytes", "size", "content_length")
REPOSITORY_COLUMNS = ("repo", "repo_name", "origin", "repository", "repo_url", "directory_id", "revision_id", "commit",
                      "snapshot_id", "branch_name", "filename")  # fmt: skip
HEADER_BYTES = 6000  # of a file, for its language and its licence header
_DIGITS = {"sha1": 40, "sha1_git": 40, "sha256": 64}


@dataclass
class Report:
    """What one run over an export found. `as_dict` is the JSON report."""

    records: int = 0
    checked: int = 0  # records with at least one hash or length
    found: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    shifts: list[dict] = field(default_factory=list)
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def note(self, table: Counter[str], kind: str, record: Record) -> None:
        table[kind] += 1
        if len(self.examples[kind]) < 5:
            self.examples[kind].append(record.path or record.id)

    def as_dict(self) -> dict:
        return {
            "records": self.records,
            "with_hash_or_length": self.checked,
            "found": dict(sorted(self.found.items())),
            "repaired": dict(sorted(self.repaired.items())),
            "rejected": dict(sorted(self.rejected.items())),
            "shifts": self.shifts[:200],
            "examples": {k: v for k, v in sorted(self.examples.items())},
        }


def content_hashes(content: bytes) -> dict[str, str]:
    """sha1, git's blob id and sha256 of a content, in hexadecimal."""
    blob = b"blob %d\0" % len(content) + content
    return {
        "sha1": hashlib.sha1(content, usedforsecurity=False).hexdigest(),
        "sha1_git": hashlib.sha1(blob, usedforsecurity=False).hexdigest(),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def stated_hashes(meta: dict) -> dict[str, str]:
    """The hashes that a record's metadata states, by kind; hexadecimal text, `swh:1:cnt:` identifiers, or bytes' hex."""
    stated: dict[str, str] = {}
    for column, kind in HASH_COLUMNS.items():
        value = meta.get(column)
        if isinstance(value, str):
            value = value.lower().removeprefix("swh:1:cnt:").removeprefix("\\x")
            if len(value) == _DIGITS[kind] and not set(value) - set("0123456789abcdef"):
                stated.setdefault(kind, value)
    swhid = meta.get("swhid")
    if isinstance(swhid, str) and swhid.startswith("swh:1:cnt:"):
        stated.setdefault("sha1_git", swhid[10:50].lower())
    return stated


def stated_length(meta: dict) -> int | None:
    """The content length that the metadata states."""
    for column in LENGTH_COLUMNS:
        value = meta.get(column)
        if isinstance(value, int | float) and not isinstance(value, bool) and value == int(value) and value >= 0:
            return int(value)
        if isinstance(value, str) and value.isdigit():
            return int(value)
    return None


def flat(record: Record) -> Record:
    """`record` with the columns of its metadata row (`meta["swh"]` of the ingest stage) beside the other meta keys."""
    row = record.meta.get("swh")
    if not isinstance(row, dict):
        return record
    return replace(record, meta={k: v for k, v in record.meta.items() if k != "swh"} | row)


def is_export(record: Record) -> bool:
    """Whether a record comes with what an archive export states about contents: a metadata row, a hash or a length."""
    return "swh" in record.meta or bool(stated_hashes(record.meta)) or stated_length(record.meta) is not None


def repository(record: Record) -> str:
    """Name of the repository that a record's metadata states, "" for none."""
    return next(
        (str(record.meta[c]) for c in ("repo", "repo_name", "origin", "repository", "repo_url") if record.meta.get(c)),
        "",
    )


def _with_place(record: Record, other: Record) -> Record:
    """`record` with the path, url and repository columns of `other`."""
    meta = {k: v for k, v in record.meta.items() if k not in REPOSITORY_COLUMNS}
    meta |= {k: v for k, v in other.meta.items() if k in REPOSITORY_COLUMNS}
    return replace(record, path=other.path, url=other.url, meta=meta)


def relabel(rows: list[Record], report: Report) -> Iterator[Record]:
    """Language and licence labels against what content, path and repository say.

    A file's own licence tag or header decides, then the LICENSE file of its repository in the same block, then what at
    least four in five of the repository's rows say (of five or more).
    """
    texts = [r.content[:HEADER_BYTES].decode("utf-8", "replace") for r in rows]
    stated: dict[str, Counter[str]] = defaultdict(Counter)
    texts_of: dict[str, str] = {}
    for row in rows:
        name = repository(row)
        if row.licence and name:
            stated[name][row.licence] += 1
        if name and is_licence_file(row.path) and row.path.count("/") <= 1:
            whole = row.content[:200_000].decode("utf-8", "replace")
            texts_of.setdefault(name, licences.identify(whole).expression)
    for row, text in zip(rows, texts):
        language, how = code_lang.detect(row.path, text)
        if row.lang and language and language not in code_lang.DATA_KINDS and not same_language(row.lang, language):
            report.note(report.found, "wrong_language", row)
            report.note(report.repaired, "language", row)
            row = replace(row, lang=language)
        if row.licence and not is_licence_file(row.path):
            name = repository(row)
            own = licences.header(text)
            common, count = stated[name].most_common(1)[0] if stated.get(name) else ("", 0)
            total = stated[name].total() if name in stated else 0
            right = own or texts_of.get(name, "") or (common if total >= 5 and count >= 0.8 * total else "")
            if right and licences.ids(right).isdisjoint(licences.ids(row.licence)):
                report.note(report.found, "wrong_licence", row)
                report.note(report.repaired, "licence_from_" + ("header" if own else "repository"), row)
                row = replace(row, licence=right)
        yield row


class Aligner:
    """Aligns the records of one export, block by block. `reject(record, reason, detail)` is told what fits nowhere."""

    def __init__(self, reject, *, reach: int = 16, block_rows: int = 20_000, block_bytes: int = 256 << 20):
        if reach < 0 or block_rows < 1 or block_bytes < 1:
            raise ValueError(f"reach {reach}, block_rows {block_rows}, block_bytes {block_bytes}: must be positive")
        self.report, self._reject = Report(), reject
        self.reach, self.block_rows, self.block_bytes = reach, block_rows, block_bytes
        self._seen: set[tuple[str, str, str]] = set()

    def run(self, records: Iterable[Record]) -> Iterator[Record]:
        """The records in order, repaired; those that nothing fits are left out after telling `reject`."""
        block: list[Record] = []
        size = 0
        for record in records:
            block.append(flat(record))
            size += len(record.content)
            if len(block) >= self.block_rows or size >= self.block_bytes:
                yield from self._block(block)
                block, size = [], 0
        if block:
            yield from self._block(block)

    def _drop(self, record: Record, reason: str, detail: str) -> None:
        self.report.note(self.report.rejected, reason, record)
        self._reject(record, reason, detail)

    def _block(self, rows: list[Record]) -> Iterator[Record]:
        report, start = self.report, self.report.records
        report.records += len(rows)
        hashes = [content_hashes(r.content) for r in rows]
        stated = [stated_hashes(r.meta) for r in rows]
        lengths = [stated_length(r.meta) for r in rows]
        report.checked += sum(bool(s) or n is not None for s, n in zip(stated, lengths))
        source = self._join(rows, hashes, stated, start)
        joined = set(source)
        evidence = Evidence([r.content or None for r in rows], [r.path for r in rows])
        place, followed = best_offsets(evidence, source, self.reach)
        lost = settle_claims(evidence, [bool(r.content) for r in rows], source, place, self.reach)
        self._report_runs("place", [None if f else p - i for i, (p, f) in enumerate(zip(place, followed))], start)
        kept: list[Record] = []
        for i, row in enumerate(rows):
            j, p = source[i], place[i]
            if not row.content:
                if i not in joined:  # else a content elsewhere has taken this row's metadata
                    report.note(report.found, "missing_content", row)
                    self._drop(row, "missing_content", "the export holds metadata but no content for this row")
                continue
            if j < 0 and (stated[i] or lengths[i] not in (None, len(row.content))):
                self._mismatch(row, hashes[i], stated[i], lengths[i])
                continue
            if j < 0 and not row.path and p == i:
                report.note(report.found, "missing_metadata", row)
            result = row
            if j >= 0 and j != i:
                report.note(report.found, "misjoined_row", row)
                report.note(report.repaired, "rejoined_by_hash", rows[j])
                result = replace(rows[j], content=row.content, id=row.id)
            if p != (j if j >= 0 else i):
                report.note(report.found, "misplaced_path", row)
                report.note(report.repaired, "moved_path", rows[p])
                result = _with_place(result, rows[p])
            if i in lost:
                report.note(report.found, "lost_path", result)
                self._drop(
                    result, "lost_path", f"its path {result.path!r} belongs to another content; its own is not there"
                )
                continue
            if j >= 0 and lengths[j] not in (None, len(row.content)):
                report.note(report.found, "wrong_length", result)
                report.note(report.repaired, "length", result)
                meta = result.meta | {c: len(row.content) for c in LENGTH_COLUMNS if c in result.meta}
                result = replace(result, meta=meta)
            if result.path and not evidence.fits(i, result.path):
                report.note(report.found, "path_against_content", result)
                if j < 0:  # no hash vouches for the row; with one, a strange extension is the repository's own doing
                    detail = f"the content reads as {evidence.language(i)} and does not name {result.path!r}"
                    self._drop(result, "path_against_content", detail)
                    continue
            key = (hashes[i]["sha1_git"], result.path, repository(result))
            if key in self._seen:
                report.note(report.found, "duplicated_row", result)
                self._drop(result, "duplicated_row", "the same content at the same path of the same repository")
                continue
            self._seen.add(key)
            kept.append(result)
        yield from relabel(kept, report)

    def _join(self, rows: list[Record], hashes: list[dict], stated: list[dict], start: int) -> list[int]:
        """For each content, the row whose stated hashes are its own: itself where that is so, -1 where none is."""
        owners: dict[tuple[str, str], list[int]] = defaultdict(list)
        for j, values in enumerate(stated):
            for kind, value in values.items():
                owners[kind, value].append(j)
        source, offset = [-1] * len(rows), 0
        taken = [False] * len(rows)

        def agrees(i: int, j: int) -> bool:
            return bool(stated[j]) and all(hashes[i][k] == v for k, v in stated[j].items())

        for i in range(len(rows)):
            if agrees(i, i):
                source[i], taken[i] = i, True
        for i in range(len(rows)):
            if source[i] < 0 and rows[i].content:
                near = {j for kind in _DIGITS for j in owners.get((kind, hashes[i][kind]), ())}
                fitting = [j for j in near if agrees(i, j) and not taken[j]]
                if fitting:
                    # Of several owners of one content: the one at the run's offset, then the nearest.
                    source[i] = min(fitting, key=lambda j: (abs(j - i - offset), j))
                    taken[source[i]] = True
                    offset = source[i] - i
        self._report_runs("hash", [j - i if j >= 0 else None for i, j in enumerate(source)], start)
        return source

    def _report_runs(self, column: str, offsets: list[int | None], start: int, least: int = 3) -> None:
        """Note the runs of rows that share one offset other than 0 as shifts of that column."""
        first, current = 0, None
        for i, offset in enumerate([*offsets, None]):
            if i < len(offsets) and offset is None and current is not None and i + 1 < len(offsets):
                if offsets[i + 1] == current:  # one row without evidence does not end a run
                    continue
            if offset != current or i == len(offsets):
                if current and i - first >= least:
                    shift = {"column": column, "first_row": start + first, "rows": i - first, "offset": current}
                    self.report.shifts.append(shift)
                first, current = i, offset

    def _mismatch(self, row: Record, hashes: dict, stated: dict, length: int | None) -> None:
        short = length is not None and len(row.content) < length
        reason = "truncated_content" if short else "hash_mismatch"
        self.report.note(self.report.found, reason, row)
        found = f"content has {len(row.content)} bytes, sha1_git {hashes['sha1_git']}"
        expected = f"metadata states {length} bytes, {', '.join(f'{k} {v}' for k, v in sorted(stated.items()))}"
        self._drop(row, reason, f"{found}; {expected}")

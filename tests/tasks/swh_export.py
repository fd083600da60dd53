"""An archive export made of real files, with faults of every kind planted in it, and what a repair of it is worth."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from tasks import code_lang
from tasks.records import Record, record_id
from tasks.swh_align import Aligner, content_hashes, repository
from tasks.swh_evidence import same_language

MOVED = ("rows_shifted", "path_shifted", "hash_shifted", "swapped", "lost_join")
LABELS = ("language", "licence")
REJECTED = ("truncated", "duplicated", "no_content")


@dataclass
class Export:
    """Records as an export would hold them, the truth by content hash, and the faults by content hash."""

    records: list[Record]
    truth: dict[str, Record]
    faults: dict[str, set[str]]


def clean_rows(files: Iterable[tuple[str, str, bytes, str]]) -> list[Record]:
    """Records of (repository, path, content, licence), each content once, with the columns that an export has."""
    rows, seen = [], set()
    for number, (repo, path, content, licence) in enumerate(files):
        hashes = content_hashes(content)
        if hashes["sha1_git"] in seen or not content.strip():
            continue
        seen.add(hashes["sha1_git"])
        language = code_lang.detect(path, content[:20_000].decode("utf-8", "replace"))[0]
        meta = {"sha1": hashes["sha1"], "blob_id": hashes["sha1_git"], "length_bytes": len(content), "repo_name": repo}
        identity = record_id("swh", path, number, content)
        rows.append(Record(identity, "code", content, path, "", "swh", "", language, licence, meta))
    return rows


def source_files(
    root: Path, projects: Iterable[str], limit: int, suffixes: Iterable[str]
) -> list[tuple[str, str, bytes, str]]:
    """Up to `limit` source files of each folder of `root`, as (project, path in it, content, "")."""
    found = []
    for project in sorted(projects):
        paths = sorted(p for p in (root / project).rglob("*") if p.suffix in suffixes and p.is_file())
        step = max(1, len(paths) // limit)
        for path in paths[::step][:limit]:
            content = path.read_bytes()
            if 200 < len(content) < 200_000:
                found.append((project, path.relative_to(root / project).as_posix(), content, ""))
    return found


def plant(rows: list[Record], seed: int, runs: int = 2, single: float = 0.02) -> Export:
    """`rows` with faults: `runs` runs of 25-60 rows for each kind of shift, and a share `single` of rows for each other kind."""
    rng = random.Random(seed)
    key = [r.meta["blob_id"] for r in rows]
    truth = dict(zip(key, rows))
    faults: dict[str, set[str]] = defaultdict(set)
    out = list(rows)
    free = set(range(len(rows)))

    def run_of(length: int) -> range | None:
        for _ in range(200):
            start = rng.randrange(0, max(1, len(rows) - length))
            if set(range(start, start + length)) <= free:
                free.difference_update(range(start, start + length))
                return range(start, start + length)
        return None

    def shifted(kind: str, k: int) -> None:
        span = run_of(rng.randint(25, 60))
        if span is None:
            return
        for i in span:
            j = span[(i - span.start + k) % len(span)]  # the last k rows get the first ones' values
            mine, other = rows[i], rows[j]
            hashes = {c: other.meta[c] for c in ("sha1", "blob_id", "length_bytes")}
            if kind == "rows_shifted":
                out[i] = replace(other, content=mine.content, id=mine.id)
            elif kind == "hash_shifted":
                out[i] = replace(mine, meta=mine.meta | hashes)
            else:
                out[i] = replace(mine, path=other.path, meta=mine.meta | {"repo_name": other.meta["repo_name"]})
            faults[key[i]].add(kind)

    for kind in ("rows_shifted", "path_shifted", "hash_shifted"):
        for number in range(runs):
            shifted(kind, rng.choice((1, 2, 3, 5, 11)) * (1 if number % 2 else -1))

    def some(share: float) -> list[int]:
        chosen = rng.sample(sorted(free), min(len(free), max(2, round(share * len(rows)))))
        free.difference_update(chosen)
        return chosen

    picked = some(2 * single)
    for a, b in zip(picked[::2], picked[1::2]):
        out[a] = replace(rows[b], content=rows[a].content, id=rows[a].id)
        out[b] = replace(rows[a], content=rows[b].content, id=rows[b].id)
        faults[key[a]].add("swapped"), faults[key[b]].add("swapped")
    languages = sorted({r.lang for r in rows if r.lang})
    for i in some(single):
        wrong = [x for x in languages if not same_language(x, rows[i].lang)]
        out[i] = replace(rows[i], lang=rng.choice(wrong))
        faults[key[i]].add("language")
    licences = sorted({r.licence for r in rows if r.licence})
    for i in some(single):
        out[i] = replace(rows[i], licence=rng.choice([x for x in licences if x != rows[i].licence]))
        faults[key[i]].add("licence")
    for i in some(single):
        out[i] = replace(rows[i], content=rows[i].content[: rng.randrange(len(rows[i].content))])
        faults[key[i]].add("truncated")
    extra: list[tuple[int, Record]] = []
    for i in some(single):
        extra.append((rng.randrange(len(rows)), rows[i]))
        faults[key[i]].add("duplicated")
    for i in some(single):
        if rng.random() < 0.5:  # the content stands elsewhere, without its metadata
            extra.append(
                (min(len(rows), i + rng.randint(1, 40)), Record(f"x{i}", "code", rows[i].content, source="swh"))
            )
            faults[key[i]].add("lost_join")
        else:
            faults[key[i]].add("no_content")
        out[i] = replace(out[i], content=b"")
    for place, row in sorted(extra, key=lambda e: -e[0]):
        out.insert(place, row)
    return Export(out, truth, dict(faults))


def measure(export: Export, reach: int = 16) -> dict:
    """Recall per kind of fault, precision of repairs, and what was done to rows without a fault."""
    rejected: Counter[str] = Counter()
    aligner = Aligner(lambda record, reason, detail: rejected.update([reason]), reach=reach)
    before = {r.id: r for r in export.records}
    right, changed, changed_right, out_keys = Counter(), 0, 0, Counter()
    clean_wrong = 0
    for record in aligner.run(export.records):
        key = content_hashes(record.content)["sha1_git"]
        out_keys[key] += 1
        truth = export.truth.get(key)
        if truth is None:
            continue
        same = (record.path, repository(record), record.licence) == (truth.path, repository(truth), truth.licence)
        same = same and record.meta.get("blob_id") == key and (same_language(record.lang, truth.lang) or not truth.lang)
        for kind in export.faults.get(key, ()):
            right[kind] += same
        given = before[record.id]
        if (record.path, record.lang, record.licence, record.meta) != (
            given.path,
            given.lang,
            given.licence,
            given.meta,
        ):
            changed += 1
            changed_right += same
        if key not in export.faults:
            clean_wrong += not same
    planted = Counter(kind for kinds in export.faults.values() for kind in kinds)
    for kind in ("truncated", "no_content"):
        right[kind] = sum(kind in kinds and not out_keys[k] for k, kinds in export.faults.items())
    right["duplicated"] = sum("duplicated" in kinds and out_keys[k] == 1 for k, kinds in export.faults.items())
    clean = [k for k in export.truth if k not in export.faults]
    return {
        "rows": len(export.records),
        "recall": {kind: [right[kind], planted[kind]] for kind in sorted(planted)},
        "repairs_right": [changed_right, changed],
        "clean_lost_or_changed": [clean_wrong + sum(not out_keys[k] for k in clean), len(clean)],
        "report": aligner.report.as_dict(),
    }

"""What workers do for tasks/dedup.py: sketch, group, cut sets, verify, write. Everything passes through files below `scratch`.

Documents are numbered through all input shards (`start` + row). A step's memory is that of one input shard, of one partition
of the shuffle, or of `VALUES` shingles; what is kept of the whole corpus grows with its duplicates alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tasks import documents, minhash
from tasks.mapshuffle import read_partition, save_array
from tasks.shingles import shingle_sets

BATCH = 512  # texts sketched at a time, at most,
BATCH_CHARS = 1 << 22  # and about so many characters: code points and hashes take some 20 bytes of each
VALUES = 1 << 22  # shingles held at a time while pairs are verified: 32 MB
EXACT = np.dtype([("key", np.uint64), ("low", np.uint64), ("doc", np.int64)])
BANDS = np.dtype([("key", np.uint64), ("doc", np.int64)])
COPIES = np.dtype([("doc", np.int64), ("first", np.int64)])
EDGES = np.dtype([("left", np.int64), ("right", np.int64)])
REMOVED = ("id", "source", "domain", "text")  # columns that the exclusions need
DUPLICATES_SCHEMA = pa.schema(
    [("id", pa.string()), ("keeper", pa.string()), ("reason", pa.string()), ("similarity", pa.float64())]
)


@dataclass(frozen=True)
class Job:
    """What every step needs to know: parameters, and the input shards with their first documents' numbers."""

    scratch: str
    ngram: int
    bands: int
    rows: int
    threshold: float
    quality_column: str
    across_domains: bool
    group_limit: int
    names: tuple[str, ...]
    paths: tuple[str, ...]
    starts: tuple[int, ...]  # one more than shards: the last is the number of documents
    scores: tuple[str, ...]

    def task(self, number: int) -> tuple[dict, int]:
        """The argument of a step for shard or partition `number`."""
        return asdict(self), number

    def folder(self, name: str) -> Path:
        return Path(self.scratch) / name


def _job(argument: tuple[dict, int]) -> tuple[Job, int]:
    return Job(**argument[0]), argument[1]


def sketch(argument: tuple[dict, int]) -> tuple[dict[str, np.ndarray], dict]:
    """Shard -> shuffle records `exact` and `bands`; keeps band keys, and what the keep rule asks for, by row."""
    job, shard = _job(argument)
    bands, exact, filled, meta = [], [], [], []
    for rows in _batches(Path(job.paths[shard]), ("id", "text", "domain", job.quality_column)):
        salts = None if job.across_domains else [documents.DOMAINS.index(row["domain"]) + 1 for row in rows]
        found = minhash.sketch([row["text"] for row in rows], job.ngram, job.bands, job.rows, salts)
        bands.append(found.bands)
        exact.append(found.exact)
        filled.append(found.words > 0)
        meta += [(float(r[job.quality_column] or 0.0), len(r["text"]), r["id"].encode("utf-8")) for r in rows]
    size = max((len(m[2]) for m in meta), default=1) or 1
    table = np.array(meta, dtype=[("quality", np.float64), ("length", np.int64), ("id", f"S{size}")])
    save_array(job.folder("meta") / f"{job.names[shard]}.npy", table)
    bands = np.concatenate(bands) if bands else np.empty((0, job.bands), dtype=np.uint64)
    save_array(job.folder("keys") / f"{job.names[shard]}.npy", bands)
    numbers = np.arange(job.starts[shard], job.starts[shard + 1])
    copies = np.empty(len(numbers), dtype=EXACT)
    copies["doc"] = numbers
    copies["key"], copies["low"] = (np.concatenate(exact) if exact else np.empty((0, 2), dtype=np.uint64)).T
    filled = np.concatenate(filled) if filled else np.empty(0, dtype=bool)
    records = np.empty(int(filled.sum()) * job.bands, dtype=BANDS)
    records["key"], records["doc"] = bands[filled].ravel(), np.repeat(numbers[filled], job.bands)
    return {"exact": copies, "bands": records}, {"wordless": int(len(filled) - filled.sum())}


def _batches(path: Path, columns: tuple[str, ...]) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict] = []
    chars = 0
    for row in documents.read_shard(path, columns):
        rows.append(row)
        chars += len(row["text"])
        if len(rows) == BATCH or chars > BATCH_CHARS:
            yield rows
            rows, chars = [], 0
    if rows:
        yield rows


def copies(argument: tuple[dict, int]) -> int:
    """Partition -> exact copies: every document whose key an earlier one has, with the earliest."""
    job, partition = _job(argument)
    records = read_partition(job.folder("sketch"), "exact", job.names, partition)
    records = records[np.lexsort((records["doc"], records["low"], records["key"]))]
    same = (records["key"][1:] == records["key"][:-1]) & (records["low"][1:] == records["low"][:-1])
    new = np.concatenate((np.ones(min(1, len(records)), dtype=bool), ~same))
    firsts = np.repeat(records["doc"][new], np.diff(np.append(np.flatnonzero(new), len(records))))
    out = np.empty(int((~new).sum()), dtype=COPIES)
    out["doc"], out["first"] = records["doc"][~new], firsts[~new]
    save_array(job.folder("copies") / f"{partition}.npy", out)
    return len(out)


def groups(argument: tuple[dict, int]) -> int:
    """Partition -> candidate groups among documents that are no exact copies of another; the number cut at the limit."""
    job, partition = _job(argument)
    records = read_partition(job.folder("sketch"), "bands", job.names, partition)
    records = records[~_is_in(records["doc"], np.load(job.folder("copies") / "all.npy", mmap_mode="r")["doc"])]
    found = minhash.candidate_groups(records["key"], records["doc"], job.group_limit)
    for name in ("members", "starts", "keys"):
        save_array(job.folder("groups") / f"{partition}.{name}.npy", getattr(found, name))
    return found.split


def _is_in(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Which of `values` are in the ascending `table`."""
    if not len(table):
        return np.zeros(len(values), dtype=bool)
    return table[np.minimum(np.searchsorted(table, values), len(table) - 1)] == values


def sets(argument: tuple[dict, int]) -> int:
    """Shard -> shingle sets of its candidate documents (`candidates.npy`); their number."""
    job, shard = _job(argument)
    candidates = np.load(job.folder("candidates.npy"), mmap_mode="r")
    first, last = np.searchsorted(candidates, job.starts[shard : shard + 2])
    wanted = set((candidates[first:last] - job.starts[shard]).tolist())
    values, starts, texts = [], [np.zeros(1, dtype=np.int64)], []

    def cut() -> None:
        part, bounds = shingle_sets(texts, job.ngram)
        values.append(part)
        starts.append(bounds[1:] + starts[-1][-1])
        texts.clear()

    for number, row in enumerate(documents.read_shard(Path(job.paths[shard]), ("text",)) if wanted else ()):
        if number in wanted:
            texts.append(row["text"])
            if len(texts) == BATCH or sum(map(len, texts)) > BATCH_CHARS:
                cut()
    if texts:
        cut()
    save_array(
        job.folder("sets") / f"{job.names[shard]}.values.npy",
        np.concatenate(values) if values else np.empty(0, np.uint64),
    )
    save_array(job.folder("sets") / f"{job.names[shard]}.starts.npy", np.concatenate(starts))
    return int(last - first)


class Corpus:
    """Rows of the per-shard files by document number, through memory maps."""

    def __init__(self, job: Job):
        self._job = job
        self._candidates = np.load(job.folder("candidates.npy"), mmap_mode="r")
        self._firsts = np.searchsorted(self._candidates, job.starts)

    def _by_shard(self, docs: np.ndarray) -> Iterator[tuple[int, slice]]:
        """(shard, slice of the ascending `docs`) for each shard that holds some."""
        at = np.searchsorted(docs, self._job.starts)
        yield from ((s, slice(at[s], at[s + 1])) for s in range(len(at) - 1) if at[s] < at[s + 1])

    def rows(self, folder: str, docs: np.ndarray) -> np.ndarray:
        """Rows of `<folder>/<shard>.npy` for ascending documents."""
        parts = [
            np.load(self._job.folder(folder) / f"{self._job.names[s]}.npy", mmap_mode="r")[
                docs[part] - self._job.starts[s]
            ]
            for s, part in self._by_shard(docs)
        ]
        if not parts:
            return np.load(self._job.folder(folder) / f"{self._job.names[0]}.npy", mmap_mode="r")[:0]
        return np.concatenate(parts)

    def _bounds(self, docs: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        for s, part in self._by_shard(docs):
            starts = np.load(self._job.folder("sets") / f"{self._job.names[s]}.starts.npy", mmap_mode="r")
            at = np.searchsorted(self._candidates, docs[part]) - self._firsts[s]
            yield s, starts[at], starts[at + 1]

    def sizes(self, docs: np.ndarray) -> np.ndarray:
        """Shingles of each of the ascending candidate documents."""
        parts = [ends - begins for _, begins, ends in self._bounds(docs)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def sets(self, docs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(values, starts) of the shingle sets of ascending candidate documents, as `shingle_sets` has them."""
        parts, sizes = [np.empty(0, dtype=np.uint64)], [np.zeros(1, dtype=np.int64)]
        for s, begins, ends in self._bounds(docs):
            values = np.load(self._job.folder("sets") / f"{self._job.names[s]}.values.npy", mmap_mode="r")
            length = ends - begins
            offset = np.repeat(begins - np.cumsum(length) + length, length)
            parts.append(values[offset + np.arange(length.sum())])
            sizes.append(length)
        return np.concatenate(parts), np.cumsum(np.concatenate(sizes))


def verify(argument: tuple[dict, int]) -> tuple[int, int]:
    """Partition -> pairs of its groups that are duplicates by true Jaccard similarity; (pairs compared, found)."""
    job, partition = _job(argument)
    corpus = Corpus(job)
    members, starts, keys = (
        np.load(job.folder("groups") / f"{partition}.{name}.npy", mmap_mode="r")
        for name in ("members", "starts", "keys")
    )
    docs, inverse = np.unique(members, return_inverse=True)
    load = np.concatenate(([0], np.cumsum(corpus.sizes(docs)[inverse])))[starts]
    edges, compared, first = [np.empty(0, dtype=EDGES)], 0, 0
    while first < len(keys):
        last = max(first + 1, int(np.searchsorted(load, load[first] + VALUES, side="right")) - 1)
        chunk = members[starts[first] : starts[last]]
        docs, inverse = np.unique(chunk, return_inverse=True)
        group = minhash.Groups(inverse, starts[first : last + 1] - starts[first], np.asarray(keys[first:last]), 0)
        left, right, _, pairs = minhash.verified_pairs(
            group, corpus.rows("keys", docs), *corpus.sets(docs), job.threshold
        )
        found = np.empty(len(left), dtype=EDGES)
        found["left"], found["right"] = docs[left], docs[right]
        edges.append(found)
        compared, first = compared + pairs, last
    out = np.concatenate(edges)
    save_array(job.folder("edges") / f"{partition}.npy", out)
    return compared, len(out)


def write(argument: tuple[dict, int]) -> dict:
    """Shard -> its documents that stay, its exclusions and its rows of duplicates.parquet, by `removed.npy`."""
    job, shard = _job(argument)
    removed = np.load(job.folder("removed.npy"), mmap_mode="r")
    first, last = np.searchsorted(removed["doc"], job.starts[shard : shard + 2])
    removed = removed[first:last]
    similarity = _similarity(Corpus(job), removed)
    out, path = job.folder("out") / job.names[shard], Path(job.paths[shard])
    keep = np.ones(job.starts[shard + 1] - job.starts[shard], dtype=bool)
    keep[removed["doc"] - job.starts[shard]] = False
    funnel: dict[str, Counter] = {}
    table: list[dict] = []
    entries = iter(zip(removed, similarity.tolist()))
    with documents.Exclusions(out, rows_per_shard=1 << 30) as excluded:
        for stays, row in zip(keep.tolist(), documents.read_shard(path, REMOVED if len(removed) else ("domain",))):
            count = funnel.setdefault(row["domain"], Counter())
            count["in"] += 1
            if stays:
                count["kept"] += 1
                continue
            entry, score = next(entries)
            reason = "exact_duplicate" if entry["exact"] else "near_duplicate"
            if entry["template"] >= 0:
                reason, score = "template_page", float(entry["template"])
            count[reason] += 1
            excluded.add(row, reason, score)
            keeper = bytes(entry["keeper_id"]).decode("utf-8")
            table.append({"id": row["id"], "keeper": keeper, "reason": reason, "similarity": score})
    written = documents.write_kept(out, path, keep, job.scores)
    documents.write_table(out / "duplicates.parquet", pa.Table.from_pylist(table, schema=DUPLICATES_SCHEMA))
    chained = sum(row["reason"] == "near_duplicate" and row["similarity"] < job.threshold for row in table)
    return {
        "documents": written["documents"],
        "bytes": written["bytes"],
        "funnel": {domain: dict(count) for domain, count in funnel.items()},
        "chained": chained,
    }


def _similarity(corpus: Corpus, removed: np.ndarray) -> np.ndarray:
    """True Jaccard similarity of removed documents to their keepers; 1 for exact copies, and unused for template pages."""
    out = np.ones(len(removed))
    near = np.flatnonzero(~removed["exact"] & (removed["template"] < 0))
    for begin in range(0, len(near), BATCH):
        part = near[begin : begin + BATCH]
        pairs = np.stack((removed["set"][part], removed["keeper_set"][part]))
        docs, inverse = np.unique(pairs, return_inverse=True)
        left, right = inverse.reshape(pairs.shape)
        scores = np.empty(len(part))
        minhash.jaccards(*corpus.sets(docs), left, right, scores)
        out[part] = scores
    return out

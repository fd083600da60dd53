"""What workers do for tasks/dedup.py up to verified pairs: sketch, copies, groups, sets, verify; and the driver's marks.

Everything passes through files below `scratch`. Documents are numbered through all input shards (`start` + row). A step's
memory is that of one input shard, of one partition of a shuffle, or of `VALUES` shingles. Of the whole corpus there are three
files that are read and filled through memory maps, 17 bytes a document, which the system may drop from memory at any time:

    first.npy      the first document with the same text (an exact copy's original), itself for the others
    candidate.npy  whether it shares a band with another
    root.npy       the smallest member of its cluster, -1 for a document alone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks import documents, minhash
from tasks.mapshuffle import mapped_array, partition_of, read_partition, save_array, staged
from tasks.shingles import shingle_sets

BATCH = 512  # texts sketched at a time, at most,
BATCH_CHARS = 1 << 22  # and about so many characters: code points and hashes take some 20 bytes of each
VALUES = 1 << 22  # shingles held at a time while pairs are verified: 32 MB
EXACT = np.dtype([("key", np.uint64), ("low", np.uint64), ("doc", np.int64)])
BANDS = np.dtype([("key", np.uint64), ("doc", np.int64)])
COPIES = np.dtype([("doc", np.int64), ("first", np.int64)])
EDGES = np.dtype([("left", np.int64), ("right", np.int64)])


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
    partitions: int  # of every shuffle
    names: tuple[str, ...]
    paths: tuple[str, ...]
    starts: tuple[int, ...]  # one more than shards: the last is the number of documents
    scores: tuple[str, ...]

    def over_shards(self) -> dict[str, tuple[dict, int]]:
        """Shard name -> argument of a step."""
        fields = asdict(self)
        return {name: (fields, number) for number, name in enumerate(self.names)}

    def over_partitions(self) -> dict[str, tuple[dict, int]]:
        """Partition's number as text -> argument of a step."""
        fields = asdict(self)
        return {str(number): (fields, number) for number in range(self.partitions)}

    def folder(self, name: str) -> Path:
        return Path(self.scratch) / name

    def mark(self, name: str, shard: int | None = None) -> np.ndarray:
        """One of the files of the whole corpus, or a shard's slice of it; not read before it is looked at."""
        array = np.load(self.folder(f"{name}.npy"), mmap_mode="r")
        return array if shard is None else array[self.starts[shard] : self.starts[shard + 1]]


def _job(argument: tuple[dict, int]) -> tuple[Job, int]:
    return Job(**argument[0]), argument[1]


# ---- candidates --------------------------------------------------------------------------------------------------


def sketch(argument: tuple[dict, int]) -> tuple[dict[str, np.ndarray], dict]:
    """Shard -> shuffle records `exact` and `bands`; keeps band keys, and what the keep rule asks for, by row.

    Copies inside the shard are found here, so that a text that comes a million times is one record of a shard.
    """
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
    records = np.empty(len(numbers), dtype=EXACT)
    records["doc"] = numbers
    records["key"], records["low"] = (np.concatenate(exact) if exact else np.empty((0, 2), dtype=np.uint64)).T
    repeated = _copies(records)
    save_array(job.folder("repeated") / f"{job.names[shard]}.npy", repeated)
    new = np.ones(len(numbers), dtype=bool)
    new[repeated["doc"] - job.starts[shard]] = False
    filled = np.concatenate(filled) if filled else np.empty(0, dtype=bool)
    wordless = int(len(filled) - filled.sum())
    filled &= new
    out = np.empty(int(filled.sum()) * job.bands, dtype=BANDS)
    out["key"], out["doc"] = bands[filled].ravel(), np.repeat(numbers[filled], job.bands)
    return {"exact": records[new], "bands": out}, {"wordless": wordless}


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


def _copies(records: np.ndarray) -> np.ndarray:
    """COPIES of `records` (EXACT): every document whose key an earlier one has, with the earliest."""
    records = records[np.lexsort((records["doc"], records["low"], records["key"]))]
    same = (records["key"][1:] == records["key"][:-1]) & (records["low"][1:] == records["low"][:-1])
    new = np.concatenate((np.ones(min(1, len(records)), dtype=bool), ~same))
    firsts = np.repeat(records["doc"][new], np.diff(np.append(np.flatnonzero(new), len(records))))
    out = np.empty(int((~new).sum()), dtype=COPIES)
    out["doc"], out["first"] = records["doc"][~new], firsts[~new]
    return out


def copies(argument: tuple[dict, int]) -> int:
    """Partition -> exact copies among the shards' first ones."""
    job, partition = _job(argument)
    out = _copies(read_partition(job.folder("sketch"), "exact", job.names, partition))
    save_array(job.folder("copies") / f"{partition}.npy", out)
    return len(out)


def mark_copies(job: Job) -> None:
    """first.npy, in the driver."""
    with mapped_array(job.folder("first.npy"), np.int64, job.starts[-1]) as first:
        for begin, end in zip(job.starts, job.starts[1:]):
            first[begin:end] = np.arange(begin, end)
        for partition in range(job.partitions):
            found = np.load(job.folder("copies") / f"{partition}.npy", mmap_mode="r")
            first[found["doc"]] = found["first"]
        for name in job.names:
            found = np.load(job.folder("repeated") / f"{name}.npy", mmap_mode="r")
            first[found["doc"]] = first[found["first"]]


def groups(argument: tuple[dict, int]) -> int:
    """Partition -> candidate groups among documents that are no exact copies of another; the number cut at the limit."""
    job, partition = _job(argument)
    records = read_partition(job.folder("sketch"), "bands", job.names, partition)
    records = records[job.mark("first")[records["doc"]] == records["doc"]]
    found = minhash.candidate_groups(records["key"], records["doc"], job.group_limit)
    for name in ("members", "starts", "keys"):
        save_array(job.folder("groups") / f"{partition}.{name}.npy", getattr(found, name))
    return found.split


def mark_candidates(job: Job) -> None:
    """candidate.npy, in the driver."""
    with mapped_array(job.folder("candidate.npy"), bool, job.starts[-1]) as candidate:
        for partition in range(job.partitions):
            candidate[np.load(job.folder("groups") / f"{partition}.members.npy", mmap_mode="r")] = True


def sets(argument: tuple[dict, int]) -> int:
    """Shard -> shingle sets of its candidate documents: `starts` of every document, `values`; their number."""
    job, shard = _job(argument)
    wanted = np.array(job.mark("candidate", shard))
    sizes, rows, texts, chars = np.zeros(len(wanted), dtype=np.int64), [], [], 0
    with staged(job.folder("sets") / f"{job.names[shard]}.values.bin") as path, open(path, "wb") as values:
        source = documents.read_shard(Path(job.paths[shard]), ("text",)) if wanted.any() else ()
        for number, row in enumerate(source):
            if wanted[number]:
                rows.append(number)
                texts.append(row["text"])
                chars += len(row["text"])
            if texts and (len(texts) == BATCH or chars > BATCH_CHARS or number == len(wanted) - 1):
                part, bounds = shingle_sets(texts, job.ngram)
                values.write(part.tobytes())
                sizes[rows] = np.diff(bounds)
                rows, texts, chars = [], [], 0
    save_array(job.folder("sets") / f"{job.names[shard]}.starts.npy", np.concatenate(([0], np.cumsum(sizes))))
    return int(wanted.sum())


class Corpus:
    """Rows of the per-shard files by document number, through memory maps."""

    def __init__(self, job: Job):
        self._job = job

    def _by_shard(self, docs: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """(shard, its rows) for each shard that holds some of the ascending `docs`."""
        at = np.searchsorted(docs, self._job.starts)
        yield from ((s, docs[at[s] : at[s + 1]] - self._job.starts[s]) for s in np.flatnonzero(np.diff(at)).tolist())

    def rows(self, folder: str, docs: np.ndarray) -> np.ndarray:
        """Rows of `<folder>/<shard>.npy` for ascending documents."""
        path = self._job.folder(folder)
        parts = [np.load(path / f"{self._job.names[s]}.npy", mmap_mode="r")[at] for s, at in self._by_shard(docs)]
        return np.concatenate(parts or [np.load(path / f"{self._job.names[0]}.npy", mmap_mode="r")[:0]])

    def _bounds(self, folder: str, docs: np.ndarray) -> Iterator[tuple[Path, np.ndarray, np.ndarray]]:
        """(file of uint64 values, where each one's begin, where they end), by shard, for ascending documents."""
        for s, at in self._by_shard(docs):
            path = self._job.folder(folder) / f"{self._job.names[s]}.values.bin"
            starts = np.load(path.with_name(f"{self._job.names[s]}.starts.npy"), mmap_mode="r")
            yield path, starts[at], starts[at + 1]

    def sizes(self, docs: np.ndarray) -> np.ndarray:
        """Shingles of each of the ascending candidate documents."""
        parts = [ends - begins for _, begins, ends in self._bounds("sets", docs)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def slices(self, folder: str, docs: np.ndarray) -> Callable[[int], np.ndarray]:
        """A function that gives the values of the n-th of ascending documents."""
        found = [(path, *span) for path, *ends in self._bounds(folder, docs) for span in zip(*ends)]

        def values(n: int) -> np.ndarray:
            path, begin, end = found[n]
            return np.fromfile(path, np.uint64, end - begin, offset=8 * begin)

        return values

    def sets(self, docs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(values, starts) of the shingle sets of ascending candidate documents, as `shingle_sets` has them."""
        parts, sizes = [np.empty(0, dtype=np.uint64)], [np.zeros(1, dtype=np.int64)]
        for path, begins, ends in self._bounds("sets", docs):
            length = ends - begins
            sizes.append(length)
            if length.any():
                offset = np.repeat(begins - np.cumsum(length) + length, length)
                parts.append(np.memmap(path, np.uint64, "r")[offset + np.arange(length.sum())])
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


# ---- clusters ----------------------------------------------------------------------------------------------------


def mark_roots(job: Job) -> None:
    """root.npy, in the driver."""
    with mapped_array(job.folder("root.npy"), np.int64, job.starts[-1]) as root:
        root[:] = -1
        files = [job.folder(kind) / f"{p}.npy" for kind in ("copies", "edges") for p in range(job.partitions)]
        for path in (*files, *(job.folder("repeated") / f"{name}.npy" for name in job.names)):
            pairs = np.load(path, mmap_mode="r")
            one, other = pairs.dtype.names
            minhash.join(np.ascontiguousarray(pairs[one]), np.ascontiguousarray(pairs[other]), root)
        minhash.flatten(root)


def best_first(rows: np.ndarray, *major: np.ndarray) -> np.ndarray:
    """The order of the keep rule: by `major` (last the first), then best quality, longest text, smallest id, smallest number.

    rows: [n] with fields quality, length, id, doc. Quality that is no number is worst.
    """
    return np.lexsort((rows["doc"], rows["id"], -rows["length"], -rows["quality"], *major))


def firsts(*sorted_columns: np.ndarray) -> np.ndarray:
    """Where a new value begins."""
    new = np.zeros(len(sorted_columns[0]), dtype=bool)
    new[:1] = True
    for column in sorted_columns:
        new[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(new)


def spread(root: np.ndarray) -> np.ndarray:
    """uint64 keys for a shuffle by root."""
    return (root.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)


def removed_type(width: int) -> np.dtype:
    """A removed document: its number, whether as an exact copy, the documents whose sets compare, the keeper's id of at most
    `width` bytes, and `template`: -1, or the cosine similarity of a template page (tasks/dedup_templates.py)."""
    numbers = [
        ("doc", np.int64),
        ("exact", bool),
        ("set", np.int64),
        ("keeper_set", np.int64),
        ("template", np.float64),
    ]
    return np.dtype([*numbers, ("keeper_id", f"S{width}")])


def removed_of(job: Job, shard: int) -> np.ndarray:
    """The documents of a shard that go, ascending."""
    inside = np.flatnonzero(job.mark("root", shard) >= 0)
    root, first = job.mark("root", shard)[inside], job.mark("first", shard)[inside]
    parts = [np.empty(0, removed_type(1))]
    partition = partition_of(spread(root), job.partitions)
    for number in np.unique(partition).tolist():
        keepers, here = np.load(job.folder("keepers") / f"{number}.npy", mmap_mode="r"), partition == number
        keeper = keepers[np.searchsorted(keepers["root"], root[here])]
        table = np.zeros(len(keeper), removed_type(keepers.dtype["id"].itemsize))
        table["doc"], table["set"], table["keeper_set"] = job.starts[shard] + inside[here], first[here], keeper["set"]
        table["exact"], table["keeper_id"], table["template"] = first[here] == keeper["set"], keeper["id"], -1.0
        parts.append(table[table["doc"] != keeper["doc"]])
    for path in sorted(job.folder("templates").glob("*.npy")):
        table = np.load(path, mmap_mode="r")
        begin, end = np.searchsorted(table["doc"], job.starts[shard : shard + 2])
        parts.append(table[begin:end])
    out = np.concatenate(parts)
    return out[np.argsort(out["doc"], kind="stable")]

"""Exact and near-duplicate removal over all document domains (GLM-4.5 section 2.2: MinHash deduplication).

    python -m tasks dedup

Reads documents of data/web, data/code and data/math; keeps one document of every duplicate cluster: the best by the
quality column, then the longest, then the smallest id. First exact copies (equal after lower case and white-space
collapse), then MinHash-LSH candidates over word n-grams (tasks/shingles.py says what a word is), verified by true Jaccard
similarity. A document without any word is compared exactly only. With `semdedup`, web pages of one template go too, by
embeddings and a check of the wording (tasks/semdedup.py; score = cosine). Everything removed is in the exclusions table (score =
similarity to the document kept) and, with its keeper's id, in duplicates.parquet; clusters.parquet has every cluster, and
metrics/dedup.json their sizes. `chained` there counts documents that reach their keeper only through others of the cluster.

Runs shard by shard on an engine (tasks/mapshuffle.py): sketches are shuffled by band, each partition finds and verifies its
pairs, union-find joins them, each shard is written out. Killed, it goes on with the shards that are not done.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib.recfunctions import repack_fields
from pydantic import Field

from tasks import dedup_steps, documents, mapshuffle, minhash
from tasks.dedup_templates import remove_templates
from tasks.semdedup import SemdedupConfig
from tasks.stage import Stage

SOURCES = ("data/web", "data/code", "data/math")
CLUSTERS_SCHEMA = pa.schema(
    [("keeper", pa.string()), ("size", pa.int64()), ("exact", pa.int64()), ("near", pa.int64())]
    + [("sample", pa.list_(pa.string()))]
)
SAMPLE = 5  # ids of a cluster that the report names
GROUP = 4096  # rows of a table that the driver holds at a time
DUPLICATES_SCHEMA = pa.schema(
    [("id", pa.string()), ("keeper", pa.string()), ("reason", pa.string()), ("similarity", pa.float64())]
)
REMOVED = ("id", "source", "domain", "text")  # columns that the exclusions need


class Config(mapshuffle.EngineConfig):
    ngram: int = Field(5, ge=1, le=64, description="words per shingle")
    bands: int = Field(25, ge=1, description="LSH bands; candidates share all rows of at least one")
    rows: int = Field(
        5, ge=1, description="signature values per band; a pair of similarity s is found by 1 - (1 - s^rows)^bands"
    )
    threshold: float = Field(0.8, gt=0, le=1, description="true Jaccard similarity from which two texts are duplicates")
    quality_column: str = Field("quality", description="score column that ranks duplicates; absent counts as 0")
    across_domains: bool = Field(True, description="compare documents of different domains too")
    group_limit: int = Field(
        2048, ge=2, description="candidates of one band compared with each other; a larger group is cut, see metrics"
    )
    partition_mb: int = Field(64, ge=1, description="band keys that one worker sorts at a time")
    semdedup: SemdedupConfig | None = Field(None, description="removal of template pages among web pages; null: none")
    embedder: str = Field("models/potion-base-8M", description="its embedding model, below data/acquire")


def size_histogram(sizes: Mapping[int, int]) -> dict[str, int]:
    """{size: clusters} by classes of size: 1, 2, 3-4, 5-8, 9-16, ... (upper bounds are powers of two)."""
    histogram: Counter[int] = Counter()
    for size, count in sizes.items():
        histogram[(size - 1).bit_length()] += count
    return {
        ("1" if k == 0 else "2" if k == 1 else f"{2 ** (k - 1) + 1}-{2**k}"): histogram[k]
        for k in sorted(histogram)
        if histogram[k]
    }


def make_job(config: Config, shards: Sequence[Path], scratch: Path, partitions: int = 0) -> dedup_steps.Job:
    """The job over input shards, in this order; as many partitions as `partition_mb` asks for, unless they are given."""
    footers = [documents.read_footer(path) for path in shards]
    starts = np.cumsum([0] + [rows for rows, _ in footers])
    size = int(starts[-1]) * config.bands * dedup_steps.BANDS.itemsize
    fields = {"ngram", "bands", "rows", "threshold", "quality_column", "across_domains", "group_limit"}
    return dedup_steps.Job(
        scratch=str(scratch),
        **config.model_dump(include=fields),
        partitions=partitions or max(1, -(-size // (config.partition_mb << 20))),
        names=tuple(f"{number:05d}" for number in range(len(shards))),
        paths=tuple(map(str, shards)),
        starts=tuple(starts.tolist()),
        scores=tuple(sorted({name for _, names in footers for name in names} - set(documents.COLUMNS))),
    )


def _unwatched(items: Iterable, total: int, label: str) -> Iterable:
    return items


def search(job: dedup_steps.Job, engine: mapshuffle.Engine, watch: Callable = _unwatched) -> dict[str, Any]:
    """All steps up to the keepers in the job's scratch; what was found, for the metrics. `watch` is `Stage.progress`."""
    shards, parts, folder = job.over_shards(), job.over_partitions(), job.folder

    def each(step: Callable, over: dict[str, Any]) -> Iterable:
        return watch(engine.map(step, over, folder("done") / step.__name__), len(over), f"{step.__name__} shard")

    def shuffle(step: Callable, over: dict[str, Any]) -> Iterable:
        results = engine.shuffle(step, over, job.partitions, folder(step.__name__))
        return watch(results, len(over), f"{step.__name__} shard")

    wordless = sum(result["wordless"] for result in shuffle(dedup_steps.sketch, shards))
    sum(each(dedup_steps.copies, parts))
    dedup_steps.mark_copies(job)
    split = sum(each(dedup_steps.groups, parts))
    dedup_steps.mark_candidates(job)
    sum(each(dedup_steps.sets, shards))
    compared = verified = 0
    for pairs, found in each(dedup_steps.verify, parts):
        compared, verified = compared + pairs, verified + found
    dedup_steps.mark_roots(job)
    sum(shuffle(members, shards))
    sizes: Counter[int] = Counter()
    for found in each(decide, parts):
        sizes.update({int(size): count for size, count in found.items()})
    sizes[1] = job.starts[-1] - sum(size * count for size, count in sizes.items())
    return {
        "clusters": size_histogram(sizes),
        "largest_cluster": max((size for size, count in sizes.items() if count), default=1),
        "largest": list(itertools.islice(clusters(job), SAMPLE)),
        "near_pairs": {"compared": compared, "verified": verified},
        "split_groups": split,
        "wordless": wordless,
    }


def clusters(job: dedup_steps.Job) -> Iterator[dict[str, Any]]:
    """Clusters of two and more, the largest first: the partitions' sorted files merged."""
    parts = (_table_rows(job.folder("clusters") / f"{number}.parquet") for number in range(job.partitions))
    for row in heapq.merge(*parts, key=lambda c: (-c["size"], c["keeper"], c["root"])):
        del row["root"]
        yield row


def members(argument: tuple[dict, int]) -> tuple[dict[str, np.ndarray], int]:
    """Shard -> shuffle records: of each text of a cluster that the shard holds, `best`: the copy that the keep rule takes and
    how many there are; of each cluster `sample`: the smallest ids."""
    job, shard = dedup_steps.Job(**argument[0]), argument[1]
    root = job.mark("root", shard)
    inside = np.flatnonzero(root >= 0)
    meta = np.load(job.folder("meta") / f"{job.names[shard]}.npy")[inside]
    numbers = [(name, np.int64) for name in ("root", "set", "doc", "size", "length")]
    rows = np.empty(
        len(inside), dtype=[("key", np.uint64), *numbers, ("quality", np.float64), ("id", meta["id"].dtype)]
    )
    rows["root"], rows["set"], rows["doc"] = root[inside], job.mark("first", shard)[inside], job.starts[shard] + inside
    rows["key"] = dedup_steps.spread(rows["root"])
    for name in meta.dtype.names:
        rows[name] = meta[name]
    rows = rows[dedup_steps.best_first(rows, rows["set"], rows["root"])]
    new = dedup_steps.firsts(rows["root"], rows["set"])
    best = rows[new]
    best["size"] = np.diff(np.append(new, len(rows)))
    return {"best": best, "sample": _sample(repack_fields(rows[["key", "root", "id"]]))}, len(inside)


def _sample(rows: np.ndarray) -> np.ndarray:
    """The `SAMPLE` smallest distinct ids of each root, in the order of roots."""
    rows = rows[np.lexsort((rows["id"], rows["root"]))]
    rows = rows[dedup_steps.firsts(rows["root"], rows["id"])]
    new = dedup_steps.firsts(rows["root"])
    sizes = np.diff(np.append(new, len(rows)))
    return rows[np.arange(len(rows)) - np.repeat(new, sizes) < SAMPLE]


def decide(argument: tuple[dict, int]) -> dict[str, int]:
    """Partition -> `keepers`, by root: who stays of a cluster, and `clusters`, the largest first; clusters per size."""
    job, partition = dedup_steps.Job(**argument[0]), argument[1]
    rows = mapshuffle.read_partition(job.folder("members"), "best", job.names, partition)
    rows = rows[dedup_steps.best_first(rows, rows["root"])]
    new = dedup_steps.firsts(rows["root"])
    keepers = rows[new][["root", "doc", "set", "id"]]
    mapshuffle.save_array(job.folder("keepers") / f"{partition}.npy", repack_fields(keepers))
    counts = np.diff(np.append(new, len(rows)))
    size = np.add.reduceat(rows["size"], new) if len(new) else np.empty(0, np.int64)
    copy = np.where(rows["set"] == np.repeat(keepers["set"], counts), rows["size"], 0)
    exact = np.add.reduceat(copy, new) - 1 if len(new) else size
    sample = _sample(mapshuffle.read_partition(job.folder("members"), "sample", job.names, partition)[["root", "id"]])
    offsets = np.append(dedup_steps.firsts(sample["root"]), len(sample)).astype(np.int32)
    table = pa.table(
        {
            "keeper": _text(keepers["id"]),
            "size": size,
            "exact": exact,
            "near": size - 1 - exact,
            "sample": pa.ListArray.from_arrays(offsets, _text(sample["id"])),
            "root": keepers["root"],
        }
    )
    order = np.lexsort((keepers["root"], keepers["id"], -size))
    with mapshuffle.staged(job.folder("clusters") / f"{partition}.parquet") as path:
        documents.write_table(path, table.take(pa.array(order)))
    return {str(n): int(count) for n, count in zip(*np.unique(size, return_counts=True))}


def _text(ids: np.ndarray) -> pa.Array:
    return pa.array(ids.tolist(), pa.binary()).cast(pa.string())


def write(argument: tuple[dict, int]) -> dict:
    """Step: shard -> its documents that stay, its exclusions and its rows of duplicates.parquet."""
    job, shard = dedup_steps.Job(**argument[0]), argument[1]
    removed = dedup_steps.removed_of(job, shard)
    similarity = _similarity(dedup_steps.Corpus(job), removed)
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


def _similarity(corpus: dedup_steps.Corpus, removed: np.ndarray) -> np.ndarray:
    """True Jaccard similarity of removed documents to their keepers; 1 for exact copies, and unused for template pages."""
    out = np.ones(len(removed))
    near = np.flatnonzero(~removed["exact"] & (removed["template"] < 0))
    for begin in range(0, len(near), dedup_steps.BATCH):
        part = near[begin : begin + dedup_steps.BATCH]
        pairs = np.stack((removed["set"][part], removed["keeper_set"][part]))
        docs, inverse = np.unique(pairs, return_inverse=True)
        left, right = inverse.reshape(pairs.shape)
        scores = np.empty(len(part))
        minhash.jaccards(*corpus.sets(docs), left, right, scores)
        out[part] = scores
    return out


def collect(job: dedup_steps.Job, engine: mapshuffle.Engine, out: Path, watch: Callable = _unwatched) -> dict:
    """Write every shard's share, put the files below `out`; counts of all shards."""
    total: Counter[str] = Counter()
    funnel: dict[str, Counter] = {}
    results = engine.map(write, job.over_shards(), job.folder("done") / "write")
    for result in watch(results, len(job.names), "write shard"):
        total.update({key: result[key] for key in ("documents", "bytes", "chained")})
        for domain, count in result["funnel"].items():
            funnel.setdefault(domain, Counter()).update(count)
    for number, name in enumerate(job.names):
        made = job.folder("out") / name
        for kind in ("documents", "exclusions"):
            mapshuffle.link_file(made / kind / "part-00000.parquet", out / kind / f"part-{number:05d}.parquet")
    shares = (row for name in job.names for row in _table_rows(job.folder("out") / name / "duplicates.parquet"))
    _write_rows(out / "duplicates.parquet", shares, DUPLICATES_SCHEMA)
    _write_rows(out / "clusters.parquet", clusters(job), CLUSTERS_SCHEMA)
    return {"total": total, "funnel": {d: dict(sorted(c.items())) for d, c in sorted(funnel.items())}}


def _table_rows(path: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=256):
            yield from batch.to_pylist()


def _write_rows(path: Path, rows: Iterator[dict[str, Any]], schema: pa.Schema) -> None:
    """A table as `documents.write_table` writes it, a group of rows in memory at a time."""
    with pq.ParquetWriter(path, schema, compression="zstd", compression_level=3, version="2.6") as writer:
        while group := list(itertools.islice(rows, GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
            group.clear()  # before the next is read


def run(stage: Stage) -> None:
    config: Config = stage.config
    sources = [stage.dep(source) for source in SOURCES if source in stage.spec.deps]
    shards = [path for source in sources for path in documents.document_shards(source)]
    out = stage.out("data/dedup")
    job = make_job(config, shards, stage.scratch)
    count = job.starts[-1]
    if not count:
        raise ValueError("dedup: no documents in data/web, data/code or data/math")
    stage.seen(count)
    minhash.near_duplicates(["compiled here once", "not by each worker"], 2, 2, 2, 0.5)
    with mapshuffle.open_engine(config) as engine:
        found = search(job, engine, stage.progress)
        if config.semdedup and (model := stage.dep("data/acquire") / config.embedder).is_dir():
            found["templates"] = remove_templates(
                job, config.semdedup, model, stage.rng_seed("semdedup"), engine, stage.progress
            )
        elif config.semdedup:
            stage.print(f"no embedding model {model}: template pages stay")
        made = collect(job, engine, out, stage.progress)
    removed = {
        reason: sum(c.get(reason, 0) for c in made["funnel"].values())
        for reason in ("exact_duplicate", "near_duplicate", "template_page")
    }
    stage.rows(documents=made["total"]["documents"], excluded=sum(removed.values()))
    stage.metric(
        documents_in=count,
        documents_out=made["total"]["documents"],
        bytes_out=made["total"]["bytes"],
        removed={reason: n for reason, n in removed.items() if n},
        funnel=made["funnel"],
        chained=made["total"]["chained"],
        **found,
    )
    stage.print(f"{count} documents, {removed} removed, {made['total']['documents']} kept")

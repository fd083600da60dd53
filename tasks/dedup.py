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

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
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


class Config(mapshuffle.EngineConfig):
    ngram: int = Field(5, ge=1, le=64, description="words per shingle")
    bands: int = Field(16, ge=1, description="LSH bands; candidates share all rows of at least one")
    rows: int = Field(8, ge=1, description="signature values per band; bands * rows permutations are computed")
    threshold: float = Field(0.8, gt=0, le=1, description="true Jaccard similarity from which two texts are duplicates")
    quality_column: str = Field("quality", description="score column that ranks duplicates; absent counts as 0")
    across_domains: bool = Field(True, description="compare documents of different domains too")
    group_limit: int = Field(
        2048, ge=2, description="candidates of one band compared with each other; a larger group is cut, see metrics"
    )
    partition_mb: int = Field(64, ge=1, description="band keys that one worker sorts at a time")
    semdedup: SemdedupConfig | None = Field(None, description="removal of template pages among web pages; null: none")
    embedder: str = Field("models/potion-base-8M", description="its embedding model, below data/acquire")


def size_histogram(sizes: Sequence[int]) -> dict[str, int]:
    """Clusters per size class: 1, 2, 3-4, 5-8, 9-16, ... (upper bounds are powers of two)."""
    histogram: Counter[int] = Counter((size - 1).bit_length() for size in sizes)
    return {
        ("1" if k == 0 else "2" if k == 1 else f"{2 ** (k - 1) + 1}-{2**k}"): histogram[k] for k in sorted(histogram)
    }


def keepers(root: np.ndarray, meta: np.ndarray) -> np.ndarray:
    """int64 [n]: who stays of each one's cluster: best quality, then longest text, then smallest id.

    root: int64 [n], equal within a cluster; meta: [n] with fields quality, length, id. Quality that is no number is worst.
    """
    order = np.lexsort((meta["id"], -meta["length"], -meta["quality"], root))
    first = np.ones(len(root), dtype=bool)
    first[1:] = root[order[1:]] != root[order[:-1]]
    out = np.empty(len(root), dtype=np.int64)
    out[order] = np.repeat(order[first], np.diff(np.append(np.flatnonzero(first), len(root))))
    return out


def make_job(config: Config, shards: Sequence[Path], scratch: Path) -> dedup_steps.Job:
    """The job over input shards, in this order."""
    footers = [documents.read_footer(path) for path in shards]
    starts = np.cumsum([0] + [rows for rows, _ in footers])
    return dedup_steps.Job(
        scratch=str(scratch),
        **config.model_dump(
            include={"ngram", "bands", "rows", "threshold", "quality_column", "across_domains", "group_limit"}
        ),
        names=tuple(f"{number:05d}" for number in range(len(shards))),
        paths=tuple(map(str, shards)),
        starts=tuple(starts.tolist()),
        scores=tuple(sorted({name for _, names in footers for name in names} - set(documents.COLUMNS))),
    )


def _unwatched(items: Iterable, total: int, label: str) -> Iterable:
    return items


def search(job: dedup_steps.Job, partitions: int, engine: mapshuffle.Engine, watch: Callable = _unwatched) -> dict:
    """All steps up to `removed.npy` in the job's scratch; what was found, for the metrics. `watch` is `Stage.progress`."""
    shards = {name: job.task(number) for number, name in enumerate(job.names)}
    parts = {str(number): job.task(number) for number in range(partitions)}
    folder = job.folder

    def each(step: Callable, over: dict[str, Any]) -> list:
        return list(watch(engine.map(step, over, folder("done") / step.__name__), len(over), f"{step.__name__} shard"))

    sketched = engine.shuffle(dedup_steps.sketch, shards, partitions, folder("sketch"))
    wordless = sum(result["wordless"] for result in watch(sketched, len(shards), "sketch shard"))
    each(dedup_steps.copies, parts)
    copies = np.concatenate([np.load(folder("copies") / f"{part}.npy") for part in parts])
    copies = copies[np.argsort(copies["doc"])]
    mapshuffle.save_array(folder("copies") / "all.npy", copies)
    split = sum(each(dedup_steps.groups, parts))
    candidates = [np.unique(np.load(folder("groups") / f"{part}.members.npy")) for part in parts]
    mapshuffle.save_array(folder("candidates.npy"), np.unique(np.concatenate(candidates)))
    each(dedup_steps.sets, shards)
    verified = each(dedup_steps.verify, parts)
    edges = np.concatenate([np.load(folder("edges") / f"{part}.npy") for part in parts])
    clusters = _decide(job, copies, edges)
    return {
        "clusters": clusters,
        "metrics": {
            "clusters": size_histogram([1] * (job.starts[-1] - sum(c["size"] for c in clusters)))
            | size_histogram([c["size"] for c in clusters]),
            "largest_cluster": max((c["size"] for c in clusters), default=1),
            "largest": clusters[:SAMPLE],
            "near_pairs": {"compared": sum(c for c, _ in verified), "verified": sum(v for _, v in verified)},
            "split_groups": split,
            "wordless": wordless,
        },
    }


def _decide(job: dedup_steps.Job, copies: np.ndarray, edges: np.ndarray) -> list[dict]:
    """Clusters of two and more, largest first; writes `removed.npy`: document, keeper's id, and whose sets compare."""
    docs = np.unique(np.concatenate((copies["doc"], copies["first"], edges["left"], edges["right"])))
    meta = dedup_steps.Corpus(job).rows("meta", docs)
    left, right = (
        np.searchsorted(docs, np.concatenate(pair))
        for pair in ((copies["first"], edges["left"]), (copies["doc"], edges["right"]))
    )
    root = minhash.components(left, right, len(docs))
    keep = keepers(root, meta)
    text = docs.copy()  # equal for exact copies: the first of them
    text[np.searchsorted(docs, copies["doc"])] = copies["first"]
    gone = np.flatnonzero(keep != np.arange(len(docs)))
    fields = [("doc", np.int64), ("exact", bool), ("set", np.int64), ("keeper_set", np.int64), ("template", np.float64)]
    removed = np.empty(len(gone), dtype=[*fields, ("keeper_id", meta["id"].dtype)])
    removed["doc"], removed["set"], removed["keeper_set"] = docs[gone], text[gone], text[keep[gone]]
    removed["template"] = -1.0  # or a template page's cosine similarity: tasks/dedup_templates.py
    removed["exact"], removed["keeper_id"] = text[gone] == text[keep[gone]], meta["id"][keep[gone]]
    mapshuffle.save_array(job.folder("removed.npy"), removed)
    exact = np.bincount(keep[gone[removed["exact"]]], minlength=len(docs))
    order = np.argsort(keep, kind="stable")
    bounds = np.flatnonzero(np.diff(keep[order], prepend=-1, append=-1))
    found = []
    for first, last in pairwise(bounds.tolist()):
        keeper = int(keep[order[first]])
        ids = sorted(set(meta["id"][order[first:last]].tolist()))[:SAMPLE]
        entry = {"keeper": meta["id"][keeper].decode(), "size": last - first, "exact": int(exact[keeper])}
        found.append(entry | {"near": last - first - 1 - entry["exact"], "sample": [i.decode() for i in ids]})
    return sorted(found, key=lambda c: (-c["size"], c["keeper"]))


def collect(job: dedup_steps.Job, engine: mapshuffle.Engine, out: Path, watch: Callable = _unwatched) -> dict:
    """Write every shard's share, put the files below `out`; counts of all shards."""
    shards = {name: job.task(number) for number, name in enumerate(job.names)}
    total: Counter[str] = Counter()
    funnel: dict[str, Counter] = {}
    results = engine.map(dedup_steps.write, shards, job.folder("done") / "write")
    for result in watch(results, len(shards), "write shard"):
        total.update({key: result[key] for key in ("documents", "bytes", "chained")})
        for domain, count in result["funnel"].items():
            funnel.setdefault(domain, Counter()).update(count)
    tables = []
    for number, name in enumerate(job.names):
        made = job.folder("out") / name
        for kind in ("documents", "exclusions"):
            mapshuffle.link_file(made / kind / "part-00000.parquet", out / kind / f"part-{number:05d}.parquet")
        tables.append(pq.read_table(made / "duplicates.parquet"))
    documents.write_table(out / "duplicates.parquet", pa.concat_tables(tables))
    return {"total": total, "funnel": {d: dict(sorted(c.items())) for d, c in sorted(funnel.items())}}


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
    partitions = -(-count * config.bands * dedup_steps.BANDS.itemsize // (config.partition_mb << 20))
    minhash.near_duplicates(["compiled here once", "not by each worker"], 2, 2, 2, 0.5)
    with mapshuffle.open_engine(config) as engine:
        found = search(job, partitions, engine, stage.progress)
        if config.semdedup and (model := stage.dep("data/acquire") / config.embedder).is_dir():
            found["metrics"]["templates"] = remove_templates(job, config.semdedup, model, stage.rng_seed("semdedup"))
        elif config.semdedup:
            stage.print(f"no embedding model {model}: template pages stay")
        made = collect(job, engine, out, stage.progress)
    clusters = pa.Table.from_pylist(found["clusters"], schema=CLUSTERS_SCHEMA)
    documents.write_table(out / "clusters.parquet", clusters)
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
        **found["metrics"],
    )
    stage.print(f"{count} documents, {removed} removed, {made['total']['documents']} kept")

"""Template pages in stage dedup: SemDedup over the web pages that exact and MinHash deduplication leave (tasks/semdedup.py).

Three steps on the stage's engine: embed each shard's pages; give each page to its cluster, whose centres the driver fits on a
sample, in a shuffle by cluster; compare the pages of each cluster. Embeddings and wording lie in the stage's scratch and a
step holds one shard's or one partition's: about `PARTITION` bytes, whatever the number of pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tasks import dedup_steps, documents
from tasks.mapshuffle import Engine, read_partition, save_array, staged
from tasks.quality import StaticEmbedder
from tasks.semdedup import SAMPLE, SemdedupConfig, assign, centres, clusters, compare, group_sizes, overlap, size_report
from tasks.semdedup import wording as wording_of

BATCH = 512
PARTITION = 64 << 20  # bytes of embeddings that one worker takes at a time
PIECE = 8  # a cluster expected to hold more than so many times `max_cluster` is cut at random before it is compared


def _pages(job: dedup_steps.Job, shard: int) -> Iterator[tuple[int, str]]:
    """(row, text) of every web page of a shard that stays so far."""
    gone = set((dedup_steps.removed_of(job, shard)["doc"] - job.starts[shard]).tolist())
    for number, row in enumerate(documents.read_shard(Path(job.paths[shard]), ("text", "domain"))):
        if row["domain"] == "web" and number not in gone:
            yield number, row["text"]


@lru_cache(maxsize=1)
def _embedder(directory: str) -> StaticEmbedder:
    return StaticEmbedder(directory)


def embed(argument: tuple[dict, int, dict]) -> list[int]:
    """Shard -> `pages`: document and embedding of its pages that have one; `wording`: their trigrams; [pages, embedded]."""
    job, shard, model = dedup_steps.Job(**argument[0]), argument[1], _embedder(argument[2]["model"])
    record = np.dtype([("doc", np.int64), ("x", np.float32, (model.dimension,))])
    sizes = np.zeros(job.starts[shard + 1] - job.starts[shard], dtype=np.int64)
    out, rows, texts = [np.empty(0, record)], [], []
    pages = 0

    def flush() -> None:
        x = model.embed(texts)
        norm = np.linalg.norm(x, axis=1)
        known = np.flatnonzero(norm > 1e-9)
        part = np.empty(len(known), record)
        part["doc"], part["x"] = np.array(rows, dtype=np.int64)[known] + job.starts[shard], x[known] / norm[known, None]
        out.append(part)
        rows.clear()
        texts.clear()

    with staged(job.folder("wording") / f"{job.names[shard]}.values.bin") as path, open(path, "wb") as values:
        for row, text in _pages(job, shard):
            grams = wording_of(text)
            values.write(grams.tobytes())
            sizes[row] = len(grams)
            rows.append(row)
            texts.append(text)
            pages += 1
            if len(texts) == BATCH:
                flush()
        flush()
    save_array(job.folder("wording") / f"{job.names[shard]}.starts.npy", np.concatenate(([0], np.cumsum(sizes))))
    found = np.concatenate(out)
    save_array(job.folder("pages") / f"{job.names[shard]}.npy", found)
    return [pages, len(found)]


def share(argument: tuple[dict, int, dict]) -> tuple[dict[str, np.ndarray], int]:
    """Shard -> shuffle records `pages` by cluster, and by piece of a cluster that is too large."""
    job, shard = dedup_steps.Job(**argument[0]), argument[1]
    pages = np.load(job.folder("pages") / f"{job.names[shard]}.npy")
    pieces, centre = np.load(job.folder("pieces.npy")), np.load(job.folder("centres.npy"))
    cluster = assign(pages["x"], centre) if len(centre) else np.zeros(len(pages), dtype=np.int64)
    records = np.empty(len(pages), dtype=[("key", np.uint64), ("part", np.int64), *pages.dtype.descr])
    piece = (dedup_steps.spread(pages["doc"]) >> np.uint64(40)).astype(np.int64) % pieces[cluster]
    records["part"] = (cluster << 20) + piece
    records["key"] = dedup_steps.spread(records["part"])
    records["doc"], records["x"] = pages["doc"], pages["x"]
    return {"pages": records}, len(records)


def pick(argument: tuple[dict, int, dict]) -> dict[str, Any]:
    """Partition -> `templates`: the pages of its clusters that go, as `dedup_steps.removed_of` reads them; counts."""
    job, partition, config = dedup_steps.Job(**argument[0]), argument[1], SemdedupConfig(**argument[2]["config"])
    records = read_partition(job.folder("share"), "pages", job.names, partition)
    records = records[np.lexsort((records["doc"], records["part"]))]
    corpus = dedup_steps.Corpus(job)
    sizes, groups, counts = [], Counter(), Counter()
    removed = [np.empty(0, dedup_steps.removed_type(1))]
    bounds = np.flatnonzero(np.diff(records["part"], prepend=-1, append=-1))
    for first, last in zip(bounds, bounds[1:]):
        docs, x_nd = records["doc"][first:last], records["x"][first:last]
        for rows in clusters(x_nd, config.cluster_size, config.max_cluster, argument[2]["seed"], depth=1):
            keys = corpus.rows("meta", docs[rows])
            rank = np.empty(len(rows), dtype=[("doc", np.int64), *keys.dtype.descr])
            rank["doc"] = docs[rows]
            for name in keys.dtype.names:
                rank[name] = keys[name]
            order = dedup_steps.best_first(rank)
            same = _same_wording(corpus, docs[rows], order, config.shared)
            found, checked, refused = compare(x_nd[rows[order]], config.threshold, same)
            sizes.append(len(rows))
            counts.update(checked=checked, refused=refused, removed=len(found))
            groups.update(group_sizes(found))
            table = np.zeros(len(found), dedup_steps.removed_type(keys.dtype["id"].itemsize))
            for at, (page, (keeper, cosine)) in enumerate(found.items()):
                table[at]["doc"], table[at]["template"] = rank["doc"][order[page]], cosine
                table[at]["keeper_id"] = keys["id"][order[keeper]]
            removed.append(table)
    table = np.concatenate(removed)
    save_array(job.folder("templates") / f"{partition}.npy", table[np.argsort(table["doc"])])
    return {"sizes": sizes, "groups": groups, "counts": counts}


def _same_wording(
    corpus: dedup_steps.Corpus, docs: np.ndarray, order: np.ndarray, shared: float
) -> Callable[[int, int], bool]:
    """As `semdedup.same_template`, for the n-th of `docs` in this order."""
    texts = corpus.slices("wording", docs)

    def same(i: int, j: int) -> bool:
        a, b = texts(order[i]), texts(order[j])
        return max(len(a), len(b)) <= 3 * min(len(a), len(b)) and overlap(a, b) >= shared

    return same


def _fit(job: dedup_steps.Job, known: list[int], config: SemdedupConfig, seed: int) -> None:
    """centres.npy, float32 [k, d], none for a single cluster, and pieces.npy, int64 [k]: how many each is cut into."""
    total = sum(known)
    k = min(-(-total // config.cluster_size), SAMPLE // 4)
    starts, rng = np.cumsum([0, *known]), np.random.default_rng(seed)
    sample = np.arange(total) if total <= SAMPLE else np.sort(rng.choice(total, SAMPLE, replace=False))
    at = np.searchsorted(sample, starts)
    parts = [
        np.load(job.folder("pages") / f"{job.names[s]}.npy", mmap_mode="r")["x"][sample[at[s] : at[s + 1]] - starts[s]]
        for s in range(len(known))
    ]
    x_nd = np.concatenate(parts)
    centre = centres(x_nd, k, rng) if k > 1 else x_nd[:0]
    found = assign(x_nd, centre) if len(centre) else np.zeros(len(x_nd), dtype=np.int64)
    expected = np.bincount(found, minlength=max(1, len(centre))) * (total / max(1, len(sample)))
    save_array(job.folder("pieces.npy"), np.ceil(expected / (PIECE * config.max_cluster)).astype(np.int64).clip(1))
    save_array(job.folder("centres.npy"), centre)


def remove_templates(
    job: dedup_steps.Job, config: SemdedupConfig, model: Path, seed: int, engine: Engine, watch: Callable
) -> dict[str, Any]:
    """Add template pages to what `dedup_steps.removed_of` gives; the numbers for the metrics.

    The page that stays of a template is the best by quality, then the longest, then the one with the smallest id.
    """
    more = {"model": str(model), "config": config.model_dump(), "seed": seed}
    shards = {name: (*argument, more) for name, argument in job.over_shards().items()}

    def over(results: Iterator, count: int, label: str) -> list:
        return list(watch(results, count, f"templates: {label}"))

    embedded = over(engine.map(embed, shards, job.folder("done") / "embed"), len(shards), "embed shard")
    known = [n for _, n in embedded]
    _fit(job, known, config, seed)
    size = sum(known) * (24 + 4 * _embedder(str(model)).dimension)
    partitions = {str(n): (next(iter(shards.values()))[0], n, more) for n in range(max(1, -(-size // PARTITION)))}
    over(engine.shuffle(share, shards, len(partitions), job.folder("share")), len(shards), "share shard")
    found = over(engine.map(pick, partitions, job.folder("done") / "pick"), len(partitions), "compare partition")
    groups, counts = Counter(), Counter(removed=0, checked=0, refused=0)
    for part in found:
        groups.update(part["groups"])
        counts.update(part["counts"])
    return {
        "pages": sum(n for n, _ in embedded),
        "groups": {str(n): groups[n] for n in sorted(groups, key=int)},
        **counts,
        **size_report([n for part in found for n in part["sizes"]]),
    }

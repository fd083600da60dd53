"""Exact and near-duplicate removal over all document domains (GLM-4.5 section 2.2: MinHash deduplication).

    python -m tasks dedup

Reads documents of data/web, data/code and data/math; keeps one document of every duplicate cluster: the best by the
quality column, then the longest, then the smallest id. First exact copies (equal after lower case and white-space
collapse), then MinHash-LSH candidates over word n-grams, verified by true Jaccard similarity. Everything removed is in the
exclusions table (score = similarity to the document kept) and, with its keeper's id, in duplicates.parquet;
metrics/dedup.json has the cluster-size histogram. `chained` there counts documents that reach their keeper only through
others of the cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pydantic import Field

from tasks import documents, minhash
from tasks.stage import Stage, StageConfig

SOURCES = ("data/web", "data/code", "data/math")
DUPLICATES_SCHEMA = pa.schema(
    [("id", pa.string()), ("keeper", pa.string()), ("reason", pa.string()), ("similarity", pa.float64())]
)


class Config(StageConfig):
    ngram: int = Field(5, ge=1, description="words per shingle")
    bands: int = Field(16, ge=1, description="LSH bands; candidates share all rows of at least one")
    rows: int = Field(8, ge=1, description="signature values per band; bands * rows permutations are computed")
    threshold: float = Field(0.8, gt=0, le=1, description="true Jaccard similarity from which two texts are duplicates")
    quality_column: str = Field("quality", description="score column that ranks duplicates; absent counts as 0")
    across_domains: bool = Field(True, description="compare documents of different domains too")


@dataclass
class Duplicates:
    """Clusters of a list of texts: `root[i]` is the smallest index of text i's cluster, `key[i]` its exact-copy hash."""

    root: list[int]
    key: list[str]
    first: dict[str, int]
    shingles: dict[int, np.ndarray]
    compared: int
    verified: int

    def similarity(self, i: int, j: int) -> float:
        """True Jaccard similarity of two texts' word n-gram sets; 1 for exact copies."""
        return 1.0 if self.key[i] == self.key[j] else minhash.jaccard(self._set(i), self._set(j))

    def _set(self, i: int) -> np.ndarray:
        return self.shingles[i] if i in self.shingles else self.shingles[self.first[self.key[i]]]


def find_duplicates(texts: Sequence[str], config: Config) -> Duplicates:
    """Cluster texts: exact copies first, then verified MinHash-LSH candidates among the distinct ones."""
    first: dict[str, int] = {}
    key = [minhash.exact_key(text) for text in texts]
    exact = [first.setdefault(k, i) for i, k in enumerate(key)]
    unique = [i for i, j in enumerate(exact) if i == j]
    hasher = minhash.WordHasher()
    sets = [minhash.shingles(texts[i], config.ngram, hasher) for i in unique]
    signature = minhash.signatures(sets, config.bands * config.rows, seed=1)
    near = minhash.near_duplicates(sets, signature, config.bands, config.rows, config.threshold)
    root_of = {i: unique[r] for i, r in zip(unique, near.root)}
    return Duplicates([root_of[j] for j in exact], key, first, dict(zip(unique, sets)), near.candidates, near.verified)


def choose(indices: Sequence[int], quality: Sequence[float], lengths: Sequence[int], ids: Sequence[str]) -> int:
    """The member of a cluster that stays: best quality, then longest text, then smallest id."""
    return min(indices, key=lambda i: (-quality[i], -lengths[i], ids[i]))


def size_histogram(sizes: Sequence[int]) -> dict[str, int]:
    """Clusters per size class: 1, 2, 3-4, 5-8, 9-16, ... (upper bounds are powers of two)."""
    histogram: Counter[int] = Counter((size - 1).bit_length() for size in sizes)
    return {
        ("1" if k == 0 else "2" if k == 1 else f"{2 ** (k - 1) + 1}-{2**k}"): histogram[k] for k in sorted(histogram)
    }


def run(stage: Stage) -> None:
    config: Config = stage.config
    rows = [
        row for source in SOURCES if source in stage.spec.deps for row in documents.read_documents(stage.dep(source))
    ]
    if not rows:
        raise ValueError("dedup: no documents in data/web, data/code or data/math")
    stage.seen(len(rows))
    ids = [row["id"] for row in rows]
    lengths = [len(row["text"]) for row in rows]
    quality = [float(row.get(config.quality_column) or 0.0) for row in rows]
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault("all" if config.across_domains else row["domain"], []).append(i)

    removed: dict[int, tuple[str, int, float]] = {}  # index -> (reason, keeper, similarity to it)
    sizes: list[int] = []
    compared = verified = 0
    for members in groups.values():
        found = find_duplicates([rows[i]["text"] for i in members], config)
        compared, verified = compared + found.compared, verified + found.verified
        clusters: dict[int, list[int]] = {}
        for position, r in enumerate(found.root):
            clusters.setdefault(r, []).append(position)
        columns = [[column[i] for i in members] for column in (quality, lengths, ids)]
        for cluster in clusters.values():
            sizes.append(len(cluster))
            keep = choose(cluster, *columns)
            for position in cluster:
                if position != keep:
                    exact = found.key[position] == found.key[keep]
                    reason = "exact_duplicate" if exact else "near_duplicate"
                    removed[members[position]] = (reason, members[keep], found.similarity(position, keep))

    out = stage.out("data/dedup")
    funnel: dict[str, Counter] = {}

    def kept() -> Iterator[dict]:
        for i, row in enumerate(rows):
            count = funnel.setdefault(row["domain"], Counter())
            count["in"] += 1
            if i in removed:
                reason, _, similarity = removed[i]
                count[reason] += 1
                excluded.add(row, reason, similarity)
            else:
                count["kept"] += 1
                yield row

    with documents.Exclusions(out) as excluded:
        written = documents.write_documents(out, kept())
    table = [{"id": ids[i], "keeper": ids[k], "reason": r, "similarity": s} for i, (r, k, s) in sorted(removed.items())]
    documents.write_table(out / "duplicates.parquet", pa.Table.from_pylist(table, schema=DUPLICATES_SCHEMA))
    reasons = Counter(reason for reason, _, _ in removed.values())
    stage.rows(documents=written["documents"], excluded=len(removed))
    stage.metric(
        documents_in=len(rows),
        documents_out=written["documents"],
        bytes_out=written["bytes"],
        removed=dict(sorted(reasons.items())),
        funnel={d: dict(sorted(c.items())) for d, c in sorted(funnel.items())},
        clusters=size_histogram(sizes),
        largest_cluster=int(np.max(sizes)),
        near_pairs={"compared": compared, "verified": verified},
        chained=sum(reason == "near_duplicate" and s < config.threshold for reason, _, s in removed.values()),
    )
    stage.print(f"{len(rows)} documents, {dict(reasons)} removed, {written['documents']} kept")

"""Template pages in stage dedup: SemDedup over the web pages that exact and MinHash deduplication leave (tasks/semdedup.py).

Embeddings and wording go to files in the stage's scratch and are read through memory maps; in memory are one shard's texts, and
twice the embeddings while they are clustered (1 KB a page and copy).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tasks import dedup_steps, documents, mapshuffle
from tasks.quality import StaticEmbedder
from tasks.semdedup import SemdedupConfig, group_sizes, overlap, semdedup, size_report, wording

BATCH = 512


def _pages(job: dedup_steps.Job, gone: np.ndarray) -> Iterator[tuple[int, dict[str, Any]]]:
    """(document number, row) of every web page that is not among the removed documents `gone`."""
    for shard, path in enumerate(job.paths):
        rows = documents.read_shard(Path(path), ("id", "text", "domain", job.quality_column))
        for doc, row in enumerate(rows, job.starts[shard]):
            at = np.searchsorted(gone, doc)
            if row["domain"] == "web" and not (at < len(gone) and gone[at] == doc):
                yield doc, row


class Wording:
    """Trigram sets of pages on disk, by position."""

    def __init__(self, path: Path):
        self._path, self._file, self._starts = path, open(path, "wb"), [0]

    def add(self, text: str) -> None:
        grams = wording(text)
        self._file.write(grams.tobytes())
        self._starts.append(self._starts[-1] + len(grams))

    def close(self) -> None:
        self._file.close()
        size = self._starts[-1]
        self._grams = np.memmap(self._path, np.uint64, "r") if size else np.zeros(0, np.uint64)

    def same(self, shared: float, i: int, j: int) -> bool:
        """As `semdedup.same_template`."""
        a, b = (self._grams[self._starts[n] : self._starts[n + 1]] for n in (i, j))
        return max(len(a), len(b)) <= 3 * min(len(a), len(b)) and overlap(a, b) >= shared


def remove_templates(job: dedup_steps.Job, config: SemdedupConfig, model: Path, seed: int) -> dict[str, Any]:
    """Add template pages to the job's `removed.npy`; the numbers for the metrics.

    The page that stays of a template is the best by quality, then the longest, then the one with the smallest id.
    """
    removed = np.load(job.folder("removed.npy"))
    removed = removed[removed["template"] < 0]  # a run that was killed after this step has some already
    embedder, numbers, keys, vectors = StaticEmbedder(model), [], [], []
    words = Wording(job.folder("wording.bin"))
    texts: list[str] = []

    def flush() -> None:
        vectors.append(embedder.embed(texts))
        texts.clear()

    for doc, row in _pages(job, removed["doc"]):
        numbers.append(doc)
        keys.append((float(row[job.quality_column] or 0.0), len(row["text"]), row["id"]))
        words.add(row["text"])
        texts.append(row["text"])
        if len(texts) >= BATCH:
            flush()
    flush()
    words.close()
    found = semdedup(
        np.concatenate(vectors), keys, config.threshold, seed,
        same=lambda i, j: words.same(config.shared, i, j),
        cluster_size=config.cluster_size, max_cluster=config.max_cluster,
    )  # fmt: skip
    rows = np.zeros(len(found.removed), removed.dtype)
    for at, (page, (keeper, cosine)) in enumerate(sorted(found.removed.items())):
        rows[at]["doc"], rows[at]["keeper_id"], rows[at]["template"] = numbers[page], keys[keeper][2].encode(), cosine
    joined = np.concatenate((removed, rows))
    mapshuffle.save_array(job.folder("removed.npy"), joined[np.argsort(joined["doc"], kind="stable")])
    return {
        "pages": len(numbers),
        "removed": len(rows),
        "groups": group_sizes(found.removed),
        "checked": found.checked,
        "refused": found.refused,
        **size_report(found.sizes),
    }

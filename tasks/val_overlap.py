"""How much of the validation text stands in the training text: shared runs of 13 words, per validation document.

    python -m tasks.val_overlap data/decontaminate [--val-fraction 0.05]

Near-duplicates were removed before (stage dedup), so what is left is passages: licences, boilerplate of manuals, quoted
text. Stage pack leaves validation documents out whose share is above `max_val_overlap` (null: none is searched). Only runs
whose hash is 0 modulo `KEPT` are compared, so memory is a fraction of the validation text; training text is streamed.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tasks.overlap import gram_keys
from tasks.shingles import word_hashes
from tasks.tokens import document_split

NGRAM, KEPT = 13, 4


def keys_of(text: str, n: int = NGRAM) -> np.ndarray:
    """Sorted distinct keys of the text's runs of `n` words that are kept, uint64."""
    words = word_hashes(text)
    keys, _, _ = gram_keys(words, np.array([0, len(words)], np.int64), np.array([n], np.int64))
    return np.unique(keys[keys % np.uint64(KEPT) == 0])


def overlaps(documents: Callable[[], Iterable[Mapping[str, Any]]], fraction: float) -> dict[str, float]:
    """Share of the kept runs that training documents have too, by id of each validation document that has any.

    `documents()` yields the rows (id, text, meta) anew; it is read twice.
    """
    held: dict[str, np.ndarray] = {}
    for row in documents():
        if document_split(row, fraction) == "val" and row["id"] not in held:
            held[row["id"]] = keys_of(row["text"])
    wanted = np.unique(np.concatenate([np.empty(0, np.uint64), *held.values()]))
    seen = np.zeros(len(wanted), bool)
    for row in documents() if len(wanted) else ():
        if document_split(row, fraction) == "train":
            keys = keys_of(row["text"])
            at = np.minimum(np.searchsorted(wanted, keys), len(wanted) - 1)
            seen[at[wanted[at] == keys]] = True
    shares = {}
    for identity, keys in held.items():
        if len(keys):
            shares[identity] = float(seen[np.searchsorted(wanted, keys)].mean())
    return shares


def main() -> None:
    from tasks.documents import read_documents

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--val-fraction", type=float, default=0.05)
    args = parser.parse_args()
    domains: dict[str, str] = {}

    def rows() -> Iterator[dict[str, Any]]:
        for row in read_documents(args.directory, ("id", "text", "domain", "meta")):
            domains[row["id"]] = row["domain"]
            yield row

    by_domain: dict[str, list[float]] = defaultdict(list)
    for identity, share in overlaps(rows, args.val_fraction).items():
        by_domain[domains[identity]].append(share)
    print("domain        validation documents   mean share of runs in training text   above one half")
    for domain, shares in sorted(by_domain.items()):
        print(f"{domain:14}{len(shares):20}{np.mean(shares):39.3f}{sum(s > 0.5 for s in shares):17}")


if __name__ == "__main__":
    main()

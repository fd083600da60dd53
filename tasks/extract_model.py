"""The block classifier: what a page's blocks are, from bytes to the probability of being main content.

Stored as safetensors (conf/extraction.safetensors, made by `python -m tasks.extract_train`): two sets of boosted trees
(the second reads the first one's opinion of neighbours and containers), and the log-odds of class names and words.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from tasks import extract_features, extract_trees
from tasks.extract_hash import fnv1a, hash_table
from tasks.extract_names import element_names
from tasks.extract_scan import WORDS, scan

MODEL_PATH = Path(__file__).resolve().parents[1] / "conf" / "extraction.safetensors"
STAGES = ("first", "second")
HOPELESS = 0.03


@dataclass(frozen=True)
class Trees:
    """Boosted regression trees as arrays over nodes; `roots` index them, a leaf has left -1."""

    roots: np.ndarray  # int32[T]
    feature: np.ndarray  # int32[N]
    threshold: np.ndarray  # float32[N]
    left: np.ndarray  # int32[N]; the right child is left + 1
    value: np.ndarray  # float32[N]
    bias: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return extract_trees.trees(
            x, self.roots, self.feature, self.threshold, self.left, self.value, np.float32(self.bias)
        )


@dataclass(frozen=True)
class Blocks:
    """A page's blocks: arrays of tasks/extract_scan.scan over the serialised bytes, and names of the elements."""

    buf: np.ndarray
    elements: np.ndarray
    text: np.ndarray
    blocks: np.ndarray
    stats: np.ndarray
    words: np.ndarray
    word_block: np.ndarray
    names: np.ndarray
    name_owner: np.ndarray
    hidden: np.ndarray
    title_size: float

    @cached_property
    def raw(self) -> bytes:
        return self.text.tobytes()

    def __len__(self) -> int:
        return len(self.blocks)

    def string(self, number: int) -> str:
        start, end = self.blocks[number, :2]
        return self.raw[start:end].decode("utf-8", "ignore")

    @property
    def lengths(self) -> np.ndarray:
        """Words per block, as the features count them."""
        return self.stats[:, WORDS] + 0.1 * self.stats[:, 2]


_NO_SLOTS, _NO_VALUES = hash_table([], [], 4)


def title_words(title: str) -> list[int]:
    """Hashes of the words of a page's title, cut as `scan` cuts words."""
    cut = "".join(c if c.isalnum() or c == "'" or ord(c) > 127 else " " for c in title[:400])
    return [fnv1a("".join(chr(ord(c) | 32) if "A" <= c <= "Z" else c for c in w).encode()) for w in cut.split()]


def segment(html: str) -> tuple[Blocks, object]:
    """(blocks, the parsed tree) of a page's HTML."""
    from resiliparse.parse.html import HTMLTree

    tree = HTMLTree.parse(html)
    raw = tree.document.html.encode("utf-8", "ignore") if tree.document else b""
    buf = np.frombuffer(raw, np.uint8)
    wanted = sorted(set(title_words(tree.title or "")))[:200]
    table = hash_table(wanted, [1.0] * len(wanted), 9) if wanted else (_NO_SLOTS, _NO_VALUES)
    elements, text, blocks, stats, words, word_block = scan(buf, *table)
    names, owner, hidden = element_names(buf, elements)
    size = float(len(wanted))
    return Blocks(buf, elements, text, blocks, stats, words, word_block, names, owner, hidden, size), tree


Table = tuple[np.ndarray, np.ndarray]


def features(page: Blocks, names: Table, words: Table) -> tuple[np.ndarray, np.ndarray]:
    """(X, near) of tasks/extract_features.features."""
    return extract_features.features(
        page.elements, page.hidden, page.names, page.name_owner, *names, page.blocks, page.stats,
        page.words, page.word_block, *words, page.title_size, len(extract_features.NAMES),
    )  # fmt: skip


@dataclass(frozen=True)
class BlockClassifier:
    """Probability that a block belongs to the main content, and the threshold at which it is kept."""

    first: Trees
    second: Trees
    names: Table
    words: Table
    threshold: float

    def __call__(self, page: Blocks) -> np.ndarray:
        """float32[B]; deterministic, the same on every machine up to float rounding."""
        x, near = features(page, self.names, self.words)
        p = self.first(x)
        open_ = p >= HOPELESS  # the second trees are spared what the first are sure of
        width = x.shape[1] + len(extract_trees.SECOND)
        rows = extract_trees.second(x, near, page.elements, page.blocks, p, width)
        p[open_] = self.second(rows[open_])
        return p


@lru_cache(1)
def load(path: Path = MODEL_PATH) -> BlockClassifier:
    """The classifier of a file. ValueError when its features are not this code's."""
    from safetensors import safe_open

    with safe_open(str(path), "numpy") as file:
        meta = json.loads((file.metadata() or {}).get("model", "{}"))
        if meta.get("features") != str(feature_digest()):
            raise ValueError(f"{path}: made for other features; run python -m tasks.extract_train")
        get = file.get_tensor
        stages = [
            Trees(
                get(f"{s}.roots"), get(f"{s}.feature").astype(np.int32), get(f"{s}.threshold"),
                get(f"{s}.left").astype(np.int32), get(f"{s}.value"), float(meta[f"{s}.bias"]),
            )
            for s in STAGES
        ]  # fmt: skip
        tables = [hash_table(get(f"{t}.keys").tolist(), get(f"{t}.scores").tolist(), 13) for t in ("names", "words")]
    return BlockClassifier(*stages, *tables, float(meta["threshold"]))


def feature_digest() -> int:
    """Changes when the features' names or order do."""
    return fnv1a(",".join((*extract_features.NAMES, *extract_trees.SECOND)).encode())

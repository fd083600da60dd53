"""Tokenized conversations with loss masks on disk: written by sft_data, read by sft and distill.

    set = SftSet("data/sft_data", "train")
    family, ids, mask = set[0]

Check it:  python -m pytest tests/tasks/test_sft.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

CHAT = "chat"  # the family name of plain conversations


class SftWriter:
    """Collects samples and writes them as flat arrays: ids, mask, offsets [n+1], family [n]."""

    def __init__(self, names: list[str], vocab_size: int) -> None:
        self.names, self.dtype = names, np.uint16 if vocab_size <= 1 << 16 else np.uint32
        self.rows: list[tuple[int, list[int], list[int]]] = []

    def add(self, family: str, ids: list[int], mask: list[int]) -> None:
        self.rows.append((self.names.index(family), ids, mask))

    def write(self, folder: Path, order_seed: int) -> dict[str, int]:
        """Shuffle by seed, write, and return counts."""
        folder.mkdir(parents=True)
        random.Random(order_seed).shuffle(self.rows)
        lengths = [len(ids) for _, ids, _ in self.rows]
        np.save(folder / "ids.npy", np.array([t for _, ids, _ in self.rows for t in ids], dtype=self.dtype))
        np.save(folder / "mask.npy", np.array([t for *_, mask in self.rows for t in mask], dtype=np.uint8))
        np.save(folder / "offsets.npy", np.cumsum([0, *lengths], dtype=np.int64))
        np.save(folder / "family.npy", np.array([family for family, *_ in self.rows], dtype=np.uint8))
        return {"samples": len(self.rows), "tokens": sum(lengths), "trained": sum(sum(m) for *_, m in self.rows)}


class SftSet:
    """One split on disk: `set[i]` is (family name, ids, mask) with ids and mask as numpy arrays."""

    def __init__(self, root: Path, split: str) -> None:
        folder = Path(root) / split
        if not (folder / "ids.npy").is_file():
            raise ValueError(f"{folder} holds no SFT samples; run the stage sft_data")
        self.names = json.loads((Path(root) / "families.json").read_text())["names"]
        self.ids, self.mask = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("ids", "mask"))
        self.offsets, self.family = np.load(folder / "offsets.npy"), np.load(folder / "family.npy")

    def __len__(self) -> int:
        return len(self.family)

    def __getitem__(self, i: int) -> tuple[str, np.ndarray, np.ndarray]:
        cut = slice(self.offsets[i], self.offsets[i + 1])
        return self.names[self.family[i]], self.ids[cut], self.mask[cut]

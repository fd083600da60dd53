"""Token shards on disk: memory-mapped, document boundaries kept, written once by `pack` and read by every training stage.

A directory holds `<split>/<domain>.bin` (little-endian uint16, or uint32 when the vocabulary needs it),
`<split>/<domain>.idx` (the int64 offsets of the documents in .npy format, n_docs + 1 of them), `token_bytes.npy` (bytes
of text per token id, 0 for special tokens, so that bits per byte is exact on any window) and `meta.json`. Splits are train
and val; every document ends with <|endoftext|>.

Look at one:  python -m tasks.tokens data/pack/pretrain
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tasks import storage

SPLITS = ("train", "val")
VAL_FRACTION = 0.05


def unit_hash(text: str) -> float:
    """A number in [0, 1) from the SHA-256 of a text: the same everywhere, unrelated between neighbours."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") / 2.0**64


def split_of(document_id: str, val_fraction: float = VAL_FRACTION) -> str:
    """'val' or 'train' by the document's id alone, so that a document falls on the same side in every stage."""
    return "val" if unit_hash(f"split:{document_id}") < val_fraction else "train"


def document_split(row: Mapping[str, Any], val_fraction: float = VAL_FRACTION) -> str:
    """A document made of others carries their split in `meta` (key "split"); any other is placed by its id.

    `row` has id and meta (JSON text). ValueError when the split named there is none.
    """
    if '"split"' in row["meta"]:
        split = json.loads(row["meta"]).get("split")
        if split not in SPLITS:
            raise ValueError(f"document {row['id']}: meta.split is {split!r}, expected one of {', '.join(SPLITS)}")
        return split
    return split_of(row["id"], val_fraction)


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest little-endian type that holds the vocabulary."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class TokenWriter:
    """Writes a directory of token shards; a context manager that writes offsets and `meta.json` on a clean exit."""

    def __init__(self, directory: Path, vocab_size: int, eot_id: int, token_bytes: np.ndarray) -> None:
        if len(token_bytes) != vocab_size:
            raise ValueError(f"token_bytes has {len(token_bytes)} entries for a vocabulary of {vocab_size}")
        self.directory, self.vocab_size, self.eot_id = Path(directory), vocab_size, eot_id
        self.token_bytes = np.asarray(token_bytes, dtype=np.int32)
        self._files: dict[tuple[str, str], Any] = {}
        self._offsets: dict[tuple[str, str], list[int]] = {}
        self._bytes: dict[tuple[str, str], int] = {}

    def add(self, split: str, domain: str, ids: Sequence[int], text_bytes: int) -> None:
        """Append one document: its token ids without the end mark, which is added here, and its size in UTF-8 bytes."""
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
        array = np.asarray(ids, dtype=np.int64)
        if array.size and (array.min() < 0 or array.max() >= self.vocab_size):
            raise ValueError(f"{domain}: token id outside the vocabulary of {self.vocab_size}")
        key = (split, domain)
        if key not in self._files:
            path = self.directory / split / f"{domain}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[key] = open(path, "wb")
            self._offsets[key], self._bytes[key] = [0], 0
        array = np.append(array, self.eot_id).astype(token_dtype(self.vocab_size))
        self._files[key].write(array.tobytes())
        self._offsets[key].append(self._offsets[key][-1] + array.size)
        self._bytes[key] += text_bytes

    def close(self) -> dict[str, Any]:
        """Finish every file; returns what `meta.json` holds."""
        domains: dict[str, dict[str, Any]] = {}
        for domain in sorted({d for _, d in self._files}):
            domains[domain] = {}
            for split in SPLITS:
                offsets = self._offsets.get((split, domain), [0])
                path = self.directory / split / f"{domain}.idx"
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "wb") as file:
                    np.save(file, np.asarray(offsets, dtype="<i8"), allow_pickle=False)
                if (split, domain) in self._files:
                    self._files[split, domain].close()
                else:
                    path.with_suffix(".bin").touch()
                size = self._bytes.get((split, domain), 0)
                domains[domain][split] = {"docs": len(offsets) - 1, "tokens": offsets[-1], "bytes": size}
        meta = {
            "dtype": token_dtype(self.vocab_size).name,
            "vocab_size": self.vocab_size,
            "eot_id": self.eot_id,
            "domains": domains,
        }
        with open(self.directory / "token_bytes.npy", "wb") as file:
            np.save(file, self.token_bytes.astype("<i4"), allow_pickle=False)
        (self.directory / "meta.json").write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n")
        return meta

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            for file in self._files.values():
                file.close()


class TokenShard:
    """The documents of one domain and split. `tokens` is a read-only memory map, `offsets` int64 [n_docs + 1]."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path = Path(path)
        self.offsets = np.load(self.path.with_suffix(".idx"), allow_pickle=False)
        data = storage.local(self.path)
        size = data.stat().st_size // dtype.itemsize
        if size * dtype.itemsize != data.stat().st_size or int(self.offsets[-1]) != size:
            raise ValueError(f"{self.path}: holds {size} tokens, but its index ends at {int(self.offsets[-1])}")
        self.tokens = np.memmap(data, dtype=dtype, mode="r") if size else np.zeros(0, dtype)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """Token ids int64 of one document, end mark included."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]].astype(np.int64)

    def window(self, start: int, length: int) -> np.ndarray:
        """`length` ids int64 from position `start` of the concatenated documents, read as a circle."""
        total = len(self.tokens)
        start %= total
        if start + length <= total:
            return self.tokens[start : start + length].astype(np.int64)
        return self.tokens[np.arange(start, start + length) % total].astype(np.int64)


class TokenSet:
    """A directory that `TokenWriter` wrote. Raises ValueError when it is none."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        try:
            self.meta = json.loads((self.directory / "meta.json").read_text())
        except FileNotFoundError:
            raise ValueError(f"{directory}: no meta.json here; a directory of token shards was expected") from None
        self.vocab_size: int = self.meta["vocab_size"]
        self.eot_id: int = self.meta["eot_id"]
        self.token_bytes = np.load(self.directory / "token_bytes.npy", allow_pickle=False)

    @property
    def domains(self) -> list[str]:
        return sorted(self.meta["domains"])

    def tokens(self, domain: str, split: str = "train") -> int:
        """Number of tokens of a domain in a split."""
        return int(self.meta["domains"][domain][split]["tokens"])

    def shard(self, domain: str, split: str = "train") -> TokenShard:
        """One domain's documents; ValueError lists the domains when there is no such one."""
        if domain not in self.meta["domains"]:
            raise ValueError(f"{self.directory}: no domain {domain!r}; it has {', '.join(self.domains) or 'none'}")
        return TokenShard(self.directory / split / f"{domain}.bin", np.dtype(self.meta["dtype"]).newbyteorder("<"))


def token_byte_lengths(tokenizer: Any) -> np.ndarray:
    """Bytes of text that each token id stands for: int32 [vocab_size]; 0 for special tokens.

    `tokenizer` is a tokenizers.Tokenizer with a byte-level alphabet, where one character of a token is one byte.
    """
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    lengths = np.zeros(size, dtype=np.int32)
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        lengths[index] = 0 if index in special else len(token)
    return lengths


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Documents, tokens and bytes per domain of a token shard directory.")
    parser.add_argument("directory")
    args = parser.parse_args(argv)
    try:
        tokens = TokenSet(Path(args.directory))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"vocabulary {tokens.vocab_size}, {tokens.meta['dtype']}")
    for domain in tokens.domains:
        for split in SPLITS:
            c = tokens.meta["domains"][domain][split]
            ratio = f"{c['bytes'] / c['tokens']:.2f} bytes per token" if c["tokens"] else ""
            print(f"{domain:<14} {split:<6} {c['docs']:>9} documents {c['tokens']:>13} tokens {ratio}")


if __name__ == "__main__":
    main()

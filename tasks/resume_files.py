"""The files of a resume checkpoint: what each rank writes, the index over them, their check, and reading parts of them.

    model-00001-of-00004.safetensors ...       what rank 0 (1, 2, 3) owns of the weights; optimizer-... likewise
    index.json                                 {"model": {name: {dtype, shape, parts}}}; a part is [file, byte, start, length,
                                               stride, count]: where it is stored, and which elements they are
    trainer.json                               counters
    manifest.json                              bytes and hash of every other file; written last

One process writes model.safetensors and optimizer.safetensors without an index, whose headers say as much: checkpoints from
before there was one are read the same way. A part of a tensor is stored flat under "<name>@<first element>", and its place
in the header's metadata. Whatever number of ranks wrote it, any number reads it, each only the bytes that it asks for.

Check it:  python -m pytest tests/tasks/test_resume.py tests/tasks/test_resume_ranks.py
"""

from __future__ import annotations

import bisect
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from model.state_parts import Piece, Region, Source
from tasks.files import canonical_json

MANIFEST, INDEX, STATE = "manifest.json", "index.json", "trainer.json"
BLOCK = 1 << 22
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def file_hash(path: Path) -> str:
    """Hex XXH3-128 of a file's content: 20 GB a second, against accidents, not against an attacker."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as handle:
        while block := handle.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def to_host(pieces: Iterable[Piece], copy: bool) -> list[Piece]:
    """The pieces in host memory; `copy`: in memory of their own, so that training may go on."""
    return [
        Piece(p.name, p.shape, p.values.detach().to("cpu", copy=copy, memory_format=torch.contiguous_format), p.region)
        for p in pieces
    ]


# ---- writing


def write_synced(path: Path, text: str) -> None:
    """A text file that has reached the disk."""
    with open(path, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())


def write_part(path: Path, pieces: Sequence[Piece]) -> dict[str, Any]:
    """Write one rank's pieces as a safetensors file and flush it; its row of the manifest: bytes and hash."""
    tensors: dict[str, Tensor] = {}
    places: dict[str, list[Any]] = {}
    taken: dict[int, list[tuple[int, int]]] = {}
    for piece in pieces:
        value, key = piece.values, piece.name
        if piece.region is not None:
            key, value = f"{piece.name}@{piece.region.start}", value.reshape(-1)
            places[key] = [piece.name, list(piece.shape), *vars(piece.region).values()]
        assert key not in tensors, f"{key} is given twice"
        value = value.contiguous()
        first, last = value.data_ptr(), value.data_ptr() + piece.nbytes
        ranges = taken.setdefault(value.untyped_storage().data_ptr(), [])
        if any(first < end and start < last for start, end in ranges):
            value = value.clone()  # safetensors refuses tensors that share memory
        ranges.append((first, last))
        tensors[key] = value
    # safetensors refuses an empty file; an optimizer without state yet is one.
    metadata = {"pieces": canonical_json(places)} if places else None
    save_file(tensors or {"empty": torch.zeros(1)}, path, metadata)
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())
    return {"bytes": path.stat().st_size, "xxh3_128": file_hash(path)}


def part_name(stem: str, rank: int, world: int) -> str:
    """The file of a rank: model.safetensors, or model-00002-of-00004.safetensors."""
    return f"{stem}.safetensors" if world == 1 else f"{stem}-{rank + 1:05d}-of-{world:05d}.safetensors"


def write_end(folder: Path, listed: dict[str, dict[str, Any]], state: Mapping[str, Any]) -> None:
    """Index, counters and, last, the manifest of a folder in which all ranks have written their files.

    ValueError when the files do not cover every element of every tensor once.
    """
    index = read_headers(folder)
    complete(index)
    rows = dict(listed)
    texts = {STATE: json.dumps(state, sort_keys=True)}
    if any(len(part_files(folder, stem)) > 1 for stem in index):
        texts[INDEX] = canonical_json(index)
    for name, text in texts.items():
        write_synced(folder / name, text)
        rows[name] = {"bytes": (folder / name).stat().st_size, "xxh3_128": file_hash(folder / name)}
    rows = dict(sorted(rows.items()))
    manifest = {"files": rows, "check": xxhash.xxh3_128(canonical_json(rows).encode()).hexdigest()}
    write_synced(folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))


# ---- the index


def _stem(path: Path) -> str:
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)


def part_files(folder: Path, stem: str) -> list[Path]:
    """All files of a stem, in the order of ranks."""
    return [path for path in sorted(folder.glob(f"{stem}*.safetensors")) if _stem(path) == stem]


def read_headers(folder: Path) -> dict[str, dict[str, Any]]:
    """The index of a folder, from the headers of its safetensors files: {stem: {name: {dtype, shape, parts}}}."""
    index: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = index.setdefault(_stem(path), {})
        with open(path, "rb") as handle:
            size = int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(size))
        places = json.loads((header.pop("__metadata__", None) or {}).get("pieces", "{}"))
        for key, row in header.items():
            if key == "empty" and row["shape"] == [1]:
                continue
            name, shape, *region = places.get(key) or [key, row["shape"], *_all_of(row["shape"])]
            entry = tensors.setdefault(name, {"dtype": row["dtype"], "shape": shape, "parts": []})
            if entry["dtype"] != row["dtype"] or entry["shape"] != shape:
                raise ValueError(f"{path.name}: {name} is {row['dtype']} {shape} here, not as in the other files")
            entry["parts"].append([path.name, 8 + size + row["data_offsets"][0], *region])
    return index


def _all_of(shape: Sequence[int]) -> list[int]:
    return [0, math.prod(shape), math.prod(shape), 1]


def _runs(parts: Iterable[Sequence[Any]], size: int) -> list[tuple[int, int, str, int]]:
    """(first, last, file, byte of the first) of every stored run of a tensor of `size`-byte elements, ascending."""
    found = []
    for file, byte, *region in parts:
        for number, (first, last) in enumerate(Region(*region).runs()):
            found.append((first, last, file, byte + number * region[1] * size))
    return sorted(found)


def complete(index: Mapping[str, Mapping[str, Any]]) -> None:
    """ValueError when an element of a tensor was written by no rank, or by two."""
    for stem, tensors in index.items():
        for name, row in tensors.items():
            at = 0
            for first, last, file, _ in _runs(row["parts"], 1):
                if first != at:
                    what = "twice" if first < at else "by no rank"
                    raise ValueError(
                        f"{stem}: elements {min(first, at)}..{max(first, at)} of {name} are written {what} ({file})"
                    )
                at = last
            if at != math.prod(row["shape"]):
                raise ValueError(f"{stem}: elements {at}..{math.prod(row['shape'])} of {name} are written by no rank")


# ---- checking and reading


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder.name} has no {MANIFEST}: it was not written to its end")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        listed, check = manifest["files"], manifest["check"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder.name}/{MANIFEST} is not readable: {error}") from None
    if xxhash.xxh3_128(canonical_json(listed).encode()).hexdigest() != check:
        raise ValueError(f"{folder.name}/{MANIFEST} does not match its own checksum")
    return listed


def check_checkpoint(folder: Path, rank: int = 0, world: int = 1) -> None:
    """ValueError naming the file when a checkpoint directory is not what was written; a rank hashes its share of the files."""
    listed = _manifest(folder)
    for name, expected in sorted(listed.items(), key=lambda row: (-row[1]["bytes"], row[0]))[rank::world]:
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{folder.name}/{name} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise ValueError(f"{folder.name}/{name} has {file.stat().st_size} bytes, {expected['bytes']} were written")
        if file_hash(file) != expected["xxh3_128"]:
            raise ValueError(f"{folder.name}/{name} does not match its hash: the file was damaged after it was written")


class Stored(Source):
    """The tensors of one stem of a checkpoint folder; `bytes_read` counts what was asked for so far."""

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        self.folder, self.index, self.bytes_read = folder, index, 0

    def __iter__(self) -> Iterator[str]:
        return iter(self.index)

    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, name: object) -> bool:
        return name in self.index

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.index[name]["shape"])

    def read(self, name: str, region: Region | None = None) -> Tensor:
        row = self.index[name]
        wanted = region or Region(*_all_of(row["shape"]))
        out = torch.empty(wanted.numel, dtype=_DTYPES[row["dtype"]])
        size = out.element_size()
        memory = memoryview(out.view(torch.uint8).numpy()) if wanted.numel else memoryview(b"")
        stored = _runs(row["parts"], size)
        at = 0
        for first, last in wanted.runs():
            place = max(0, bisect.bisect_right(stored, first, key=lambda run: run[0]) - 1)
            while first < last:
                start, end, file, byte = stored[place]
                stop = min(last, end)
                assert start <= first < stop, f"{name} was not written whole"
                self._fill(memory[at : at + (stop - first) * size], file, byte + (first - start) * size)
                at += (stop - first) * size
                first, place = stop, place + 1
        return out if region else out.view(row["shape"])

    def _fill(self, memory: memoryview, file: str, byte: int) -> None:
        with open(self.folder / file, "rb", buffering=0) as handle:
            handle.seek(byte)
            while memory:
                count = handle.readinto(memory[:BLOCK])
                if not count:
                    raise ValueError(f"{self.folder.name}/{file} ends too early")
                self.bytes_read += count
                memory = memory[count:]


def open_checkpoint(folder: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """The tensors of each stem, to be read when asked for, and the counters of a folder that has been checked."""
    index = json.loads((folder / INDEX).read_text("utf-8")) if (folder / INDEX).is_file() else read_headers(folder)
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    return {stem: Stored(folder, rows) for stem, rows in index.items()}, state

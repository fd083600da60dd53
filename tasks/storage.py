"""Shards on an object store (DESIGN.md section 4): where `storage:` of params.yaml names a prefix such as s3://bucket/run1.

Each shard of documents, records or tokens is then an object, and the file of its name in the stage's out is a pointer: one
JSON line with address, bytes, sha256 and rows. The pointers are the manifest that DVC keeps; readers open either kind of
file by `local(path)`. Objects are named by their content and never overwritten, so that a rerun uploads nothing twice; a
pointer is written only when its object is there whole. Credentials and endpoint come from the environment (AWS_*).

    python -m tasks.storage data/web          lists the stored shards of a directory and checks that each is there
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.files import atomic_write, sha256_file
from tasks.params import ROOT
from tasks.remote import BLOCK_BYTES, Interrupted, file_system, open_file, retry, scheme

MARK = ".storage"
SHARDS = ("documents/part-*.parquet", "records/part-*.parquet", "train/*.bin", "val/*.bin")
_HEAD = b'{"address":'
_EVICT_AFTER_S = 600


@dataclass(frozen=True)
class Pointer:
    """One object of a store. `rows` is -1 where the file is no table."""

    address: str
    bytes: int
    sha256: str
    rows: int

    def write(self, path: Path) -> None:
        atomic_write(path, json.dumps(asdict(self), separators=(",", ":")) + "\n")


def check_prefix(prefix: str) -> str:
    """The prefix without its last slash; ValueError when it is no s3:// address."""
    if not isinstance(prefix, str) or scheme(prefix) != "s3" or not prefix.removeprefix("s3://").strip("/"):
        raise ValueError(f"params.yaml: storage: expected an address like s3://bucket/prefix, found {prefix!r}")
    return prefix.rstrip("/")


def mark(directory: Path, prefix: str) -> None:
    """Say that the shards written below `directory` go to `prefix`. The mark is no part of the output."""
    (Path(directory) / MARK).write_text(check_prefix(prefix), encoding="utf-8")


def prefix_of(directory: Path) -> str:
    """Where the shards of a directory go; "" for the local disk."""
    path = Path(directory) / MARK
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def read_pointer(path: Path) -> Pointer | None:
    """What a pointer file says, or None when the file is the shard itself. FileNotFoundError when it is not there."""
    with open(path, "rb") as handle:
        if handle.read(len(_HEAD)) != _HEAD:
            return None
        text = _HEAD + handle.read(1 << 16)
    try:
        return Pointer(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: a damaged pointer to a stored shard ({error})") from None


def _rows(path: Path) -> int:
    if path.suffix != ".parquet":
        return -1
    import pyarrow.parquet as pq

    return pq.read_metadata(path).num_rows


def put(path: Path, prefix: str) -> Pointer:
    """Upload a file and put its pointer in its place; the same content is uploaded once. Interrupted when it cannot be."""
    known = read_pointer(path)
    if known is not None:
        return known
    digest, size = sha256_file(path), path.stat().st_size
    pointer = Pointer(f"{prefix}/{digest[:2]}/{digest}{path.suffix}", size, digest, _rows(path))
    fs, key = file_system(pointer.address)

    def upload() -> None:
        if not _has(fs, key, size):
            fs.put_file(str(path), key)  # an object appears only when all of it has arrived
            if not _has(fs, key, size):
                raise OSError("the object is not there, or not whole, after its upload")

    try:
        retry(upload, f"{path} to {pointer.address}")
    except (FileNotFoundError, PermissionError) as error:
        raise ValueError(f"storage: {pointer.address} cannot be written ({error or type(error).__name__})") from None
    pointer.write(path)
    return pointer


def _has(fs: object, key: str, size: int) -> bool:
    try:
        return fs.info(key)["size"] == size
    except FileNotFoundError:
        return False


def put_all(directory: Path) -> int:
    """Upload every shard of a marked directory that is still a file, and remove the mark; how many shards are stored."""
    prefix, directory = prefix_of(directory), Path(directory)
    if not prefix:
        return 0
    paths = sorted(p for pattern in SHARDS for p in directory.glob(pattern) if p.stat().st_size)
    for path in paths:
        put(path, prefix)
    (directory / MARK).unlink()
    return len(paths)


# ---- reading -----------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    return Path(os.environ.get("ARCLINE_CACHE") or ROOT / "work" / "cache") / "shards"


def local(path: str | Path) -> Path:
    """The shard's bytes as a local file: itself, or a copy of the stored object whose hash was checked.

    Copies stay in a cache (ARCLINE_CACHE, work/cache) of ARCLINE_CACHE_GB, 16 unless told; the longest unused go first.
    ValueError when the object is gone or is another than its pointer says, Interrupted when the store cannot be reached.
    """
    path = Path(path)
    pointer = read_pointer(path)
    if pointer is None:
        return path
    target = cache_folder() / f"{pointer.sha256}{Path(pointer.address).suffix}"
    if target.is_file() and target.stat().st_size == pointer.bytes:
        os.utime(target)
        return target
    _make_room(pointer.bytes)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        digest = _download(pointer, staging)
        if digest != pointer.sha256:
            raise ValueError(f"{path}: {pointer.address} has sha256 {digest}, expected {pointer.sha256}")
        os.replace(staging, target)
    except FileNotFoundError:
        raise ValueError(f"{path}: the stored shard {pointer.address} is not there any more") from None
    finally:
        staging.unlink(missing_ok=True)
    return target


def _download(pointer: Pointer, target: Path) -> str:
    digest = hashlib.sha256()
    with open_file(pointer.address) as stream, open(target, "wb") as out:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
            out.write(block)
    return digest.hexdigest()


def _make_room(size: int) -> None:
    bound = float(os.environ.get("ARCLINE_CACHE_GB") or 16) * 1e9
    files = []
    for path in cache_folder().glob("*"):
        try:
            files.append((path.stat().st_mtime, path.stat().st_size, path))
        except FileNotFoundError:
            continue
    total = sum(f[1] for f in files) + size
    for used, length, path in sorted(files):
        if (
            total <= bound or time.time() - used < _EVICT_AFTER_S
        ):  # one in use stays readable, one about to be must stay
            break
        path.unlink(missing_ok=True)
        total -= length


def stored(directory: Path) -> Iterator[tuple[Path, Pointer]]:
    """The pointers of a stage's output directory."""
    for path in sorted(p for pattern in SHARDS for p in Path(directory).glob(pattern)):
        if (pointer := read_pointer(path)) is not None:
            yield path, pointer


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="List the stored shards of a directory; exit 1 when one is missing.")
    parser.add_argument("directory", type=Path)
    missing = 0
    for path, pointer in stored(parser.parse_args(argv).directory):
        fs, key = file_system(pointer.address)
        try:
            there = retry(lambda fs=fs, key=key, size=pointer.bytes: _has(fs, key, size), pointer.address)
        except Interrupted as error:
            raise SystemExit(f"error: {error}") from None
        missing += not there
        print(
            f"{pointer.rows:>9} rows {pointer.bytes:>12} bytes  {path.name}  {pointer.address}{'' if there else '  MISSING'}"
        )
    raise SystemExit(1 if missing else 0)


if __name__ == "__main__":
    main()

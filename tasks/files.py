"""Files that appear whole or not at all, content hashes, and the derivation of seeds.

Every output of the line passes through `atomic_dir` or `atomic_write`: written beside its final place, fsynced, renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_MASK63 = (1 << 63) - 1


def fsync_dir(path: Path) -> None:
    """Flush a directory entry, so that a rename in it survives a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(root: Path) -> None:
    """Flush every file and directory below `root`."""
    for directory, _, names in os.walk(root):
        for name in names:
            with open(os.path.join(directory, name), "rb") as handle:
                os.fsync(handle.fileno())
        fsync_dir(Path(directory))


def remove(path: Path) -> None:
    """Remove a file or a directory tree; absent is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace_path(new: Path, final: Path) -> None:
    """Put `new` (file or directory) in the place of `final`. A reader sees the old or the new one, never a mixture.

    A directory cannot be renamed over a filled one, so the old one first moves aside; after a kill between the two
    renames the final path is absent, which every reader reports as such.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.is_dir() and not final.is_symlink():
        aside = final.with_name(f".{final.name}.old")
        remove(aside)
        os.rename(final, aside)
        os.rename(new, final)
        remove(aside)
    else:
        os.replace(new, final)
    fsync_dir(final.parent)


@contextlib.contextmanager
def atomic_dir(final: Path) -> Iterator[Path]:
    """Yield a fresh directory beside `final`; on success it is fsynced and takes `final`'s place, on error it is removed."""
    final = Path(final)
    staging = final.with_name(f".{final.name}.partial")
    remove(staging)
    staging.mkdir(parents=True)
    try:
        yield staging
    except BaseException:
        remove(staging)
        raise
    fsync_tree(staging)
    replace_path(staging, final)


def atomic_write(path: Path, data: bytes | str) -> None:
    """Write a file whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with open(staging, "wb") as handle:
        handle.write(data.encode() if isinstance(data, str) else data)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(staging, path)
    fsync_dir(path.parent)


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def list_files(root: Path) -> list[Path]:
    """Every file below `root` but byte-code caches, sorted by relative POSIX path."""
    files = [p for p in Path(root).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return sorted(files, key=lambda p: p.relative_to(root).as_posix())


def content_hash(path: Path) -> str:
    """Identity of a dependency's content: a stage's output answers by its manifest, anything else by its bytes.

    Raises FileNotFoundError when `path` does not exist.
    """
    path = Path(path)
    if path.is_file():
        return sha256_file(path)
    if not path.is_dir():
        raise FileNotFoundError(f"dependency {path} does not exist: run the stage that produces it first")
    manifest = path / "manifest.json"
    if manifest.is_file():
        return sha256_file(manifest)
    digest = hashlib.sha256()
    for file in list_files(path):
        digest.update(f"{file.relative_to(path).as_posix()}\0{sha256_file(file)}\n".encode())
    return digest.hexdigest()


def derive_seed(seed: int, *item: object) -> int:
    """A 63-bit seed for one random choice, from the line's seed and what the choice is about.

    Built on SHA-256, so neighbouring items give unrelated streams and the same item the same stream on any machine.
    """
    text = canonical_json([seed, *[str(part) for part in item]])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") & _MASK63

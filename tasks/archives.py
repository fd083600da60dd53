"""Read chosen files out of untrusted archives: wheels and zips, tarballs, Debian packages. Nothing in them is ever run.

Members are streamed into memory one by one and handed to the caller; no name taken from an archive reaches the file
system here. Absolute paths, `..`, links, devices and oversized members are reported instead of yielded, and an archive
that decompresses beyond `Limits.total_bytes` or holds too many members is an error (a decompression bomb).

Look inside one:  python -m tasks.archives FILE --glob '**/*.html'
"""

from __future__ import annotations

import argparse
import bz2
import contextlib
import gzip
import io
import lzma
import re
import shutil
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

TAR_SUFFIXES = (".tar.gz", ".tgz", ".tar", ".tar.bz2", ".tar.xz")
READ_ERRORS = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError)


class ArchiveError(ValueError):
    """The archive cannot be read, or reading on would be unsafe; the message names the file."""


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes of decompressed data."""

    member_bytes: int = 64 << 20
    total_bytes: int = 1 << 30
    members: int = 200_000


@dataclass(frozen=True)
class Member:
    """One member: `path` is relative, '/'-separated and safe; `data` is None when it was `refused` (the reason)."""

    path: str
    data: bytes | None
    refused: str = ""


@lru_cache(maxsize=1024)
def compile_glob(pattern: str) -> re.Pattern[str]:
    """`*` and `?` stay within one path component, `**/` spans any number (also none), `[a-z]` is a class."""
    out, i = [], 0
    while i < len(pattern):
        if pattern.startswith("**/", i):
            out.append("(?:.*/)?")
            i += 3
        elif pattern.startswith("**", i):
            out.append(".*")
            i += 2
        elif pattern[i] == "*":
            out.append("[^/]*")
            i += 1
        elif pattern[i] == "?":
            out.append("[^/]")
            i += 1
        elif pattern[i] == "[" and "]" in pattern[i:]:
            end = pattern.index("]", i)
            out.append("[" + pattern[i + 1 : end].replace("\\", r"\\").replace("!", "^", 1) + "]")
            i = end + 1
        else:
            out.append(re.escape(pattern[i]))
            i += 1
    return re.compile("".join(out), re.DOTALL)


def matches(path: str, globs: Sequence[str], excludes: Sequence[str] = ()) -> bool:
    """True when some glob matches the whole of `path` and no exclude does."""
    hit = any(compile_glob(g).fullmatch(path) for g in globs)
    return hit and not any(compile_glob(g).fullmatch(path) for g in excludes)


def safe_path(name: str) -> str | None:
    """A normalised relative path for an archive's member name, or None when the name is unsafe to use."""
    if not name or "\x00" in name or "\\" in name or name.startswith("/") or re.match(r"[A-Za-z]:", name):
        return None
    parts = [p for p in name.split("/") if p not in ("", ".")]
    if not parts or ".." in parts or any(len(p.encode("utf-8", "replace")) > 200 for p in parts) or len(name) > 1000:
        return None
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return None
    return "/".join(parts)


class _Counted(io.RawIOBase):
    """A reader that refuses to give more than `limit` bytes: what keeps a gzip bomb from filling memory or time."""

    def __init__(self, raw: BinaryIO, limit: int, label: str):
        self._raw, self._left, self._label = raw, limit, label

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        data = self._raw.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise ArchiveError(f"{self._label}: decompresses beyond the limit; refused as a decompression bomb")
        buffer[: len(data)] = data
        return len(data)


def gunzip_limited(data: bytes, limit: int, label: str) -> bytes:
    """Decompress a gzip member of at most `limit` bytes; ArchiveError when it is larger, truncated or not gzip."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            out = stream.read(limit + 1)
    except READ_ERRORS as error:
        raise ArchiveError(f"{label}: not readable as gzip ({error})") from None
    if len(out) > limit:
        raise ArchiveError(f"{label}: decompresses beyond {limit} bytes; refused as a decompression bomb")
    return out


def _zip_members(path: Path, globs: Sequence[str], excludes: Sequence[str], limits: Limits) -> Iterator[Member]:
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        if len(infos) > limits.members:
            raise ArchiveError(f"{path.name}: {len(infos)} members, more than {limits.members}")
        left = limits.total_bytes
        for info in infos:
            if info.is_dir():
                continue
            name = safe_path(info.filename)
            if name is None:
                yield Member(info.filename, None, "unsafe path")
            elif (info.external_attr >> 28) == 0o12:
                yield Member(name, None, "link")
            elif matches(name, globs, excludes):
                try:
                    with archive.open(info) as stream:  # the size in the header may lie: read by limit
                        data = stream.read(limits.member_bytes + 1)
                except (
                    *READ_ERRORS,
                    NotImplementedError,
                ):  # of an unknown method, say: the others have their own places
                    yield Member(name, None, "encrypted" if info.flag_bits & 1 else "unreadable member")
                    continue
                left -= len(data)
                if left < 0:
                    raise ArchiveError(f"{path.name}: decompresses beyond the limit; refused as a decompression bomb")
                yield Member(name, None, "too large") if len(data) > limits.member_bytes else Member(name, data)


def _unicode(name: str) -> str:
    """A member's name as valid Unicode: bytes that are not UTF-8 become U+FFFD."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _tar_members(
    stream: BinaryIO, label: str, globs: Sequence[str], excludes: Sequence[str], limits: Limits, strip: bool | None
) -> Iterator[Member]:
    counted = io.BufferedReader(_Counted(stream, limits.total_bytes, label), 1 << 18)
    with tarfile.open(fileobj=counted, mode="r|", errorlevel=1) as archive:
        for count, info in enumerate(archive):
            if count >= limits.members:
                raise ArchiveError(f"{label}: more than {limits.members} members")
            archive.members = []  # tarfile keeps every header otherwise
            if info.isdir():
                continue
            name = safe_path(_unicode(info.name))
            if name is not None and strip is not False:
                rest = name.partition("/")[2]
                if strip and not rest:
                    continue
                name = rest or name  # of an archive without a root, files at the top keep their names
            if name is None:
                yield Member(_unicode(info.name), None, "unsafe path")
            elif not info.isreg():
                if matches(name, globs, excludes):
                    yield Member(name, None, "link" if info.issym() or info.islnk() else "not a regular file")
            elif matches(name, globs, excludes):
                if info.size > limits.member_bytes:
                    yield Member(name, None, "too large")
                    continue
                yield Member(name, archive.extractfile(info).read())


@contextlib.contextmanager
def _deb_stream(path: Path) -> Iterator[BinaryIO]:
    tool = shutil.which("dpkg-deb")
    if tool is None:
        raise ArchiveError(f"{path.name}: reading a Debian package needs the program dpkg-deb, which is not installed")
    process = subprocess.Popen([tool, "--fsys-tarfile", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process.stdout
        process.stdout.read()
        if process.wait() != 0:
            raise ArchiveError(
                f"{path.name}: dpkg-deb failed: {process.stderr.read().decode('utf-8', 'replace').strip()}"
            )
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()
        process.wait()


def read_archive(
    path: str | Path,
    globs: Sequence[str] = ("**",),
    excludes: Sequence[str] = (),
    limits: Limits | None = None,
    strip_root: bool | None = None,
) -> Iterator[Member]:
    """Yield the matching members of an archive in its own order, and a `Member` with `refused` for each unsafe one.

    `strip_root` drops the first path component before matching, and what has only one (default: in tarballs, whose root is
    `name-version/`, and files beside it keep their names).
    ArchiveError when the archive is truncated, of unknown kind, or a decompression bomb.
    """
    path, limits = Path(path), limits or Limits()
    name = path.name.lower()
    try:
        if name.endswith((".whl", ".zip")):
            yield from _zip_members(path, globs, excludes, limits)
        elif name.endswith(".deb"):
            with _deb_stream(path) as stream:
                yield from _tar_members(stream, path.name, globs, excludes, limits, strip=bool(strip_root))
        elif name.endswith(TAR_SUFFIXES):
            openers = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".tar": open}
            with openers[path.suffix.lower()](path, "rb") as stream:
                yield from _tar_members(stream, path.name, globs, excludes, limits, strip_root)
        else:
            raise ArchiveError(f"{path.name}: expected one of .whl .zip .deb {' '.join(TAR_SUFFIXES)}")
    except ArchiveError:
        raise
    except READ_ERRORS as error:
        raise ArchiveError(f"{path.name}: cannot be read ({type(error).__name__}: {error})") from None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="List the members of an archive that match.")
    parser.add_argument("archive")
    parser.add_argument("--glob", action="append", default=[])
    args = parser.parse_args(argv)
    for member in read_archive(args.archive, args.glob or ["**"]):
        print(f"{len(member.data or b''):>10} {member.path} {member.refused}")


if __name__ == "__main__":
    main()

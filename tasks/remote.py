"""Files behind addresses: local paths, http(s):// and s3:// through fsspec, with retries; shards on an object store.

A stage's out may hold, instead of a table's shards, `<table>/shards.json`: the addresses, sizes, hashes and row counts of
shards on the object store that `storage:` of params.yaml names (DESIGN.md section 4). Objects are named by their hash, are
never overwritten, and are listed only after they were written whole. Credentials and endpoints come from the environment
(AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...), never from parameters.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

SCHEMES = ("http", "https", "s3")
BLOCK_BYTES = 4 << 20
ATTEMPTS = 6
FIRST_WAIT_S = 0.2
# Answers of a server that another try does not change.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError)


class Interrupted(Exception):
    """The other side could not be reached, after every retry. Never a fault of the data: the run must stop and resume."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file to read. `name` is relative to what the source lists, the same on every machine."""

    address: str
    name: str
    size: int = -1  # -1: the server does not say
    version: str = ""  # time stamp or entity tag: a changed file is another input
    refused: str = ""  # why it must not be opened: "symlink", "unsafe_path"


def scheme(address: str) -> str:
    """ "" for a local path, else one of SCHEMES; ValueError for anything else (chained file systems too)."""
    head, separator, rest = address.partition("://")
    if not separator or head == "file":
        return ""
    if head not in SCHEMES or "::" in address:
        raise ValueError(f"{address}: expected a local path or one of {', '.join(s + '://' for s in SCHEMES)}")
    return head


def local_path(address: str) -> Path:
    return Path(os.path.expanduser(address.removeprefix("file://")))


def file_system(address: str) -> tuple[Any, str]:
    """(fsspec file system, path in it) of a remote address."""
    import fsspec

    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme(address) == "s3":
        options |= {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}}
        options["anon"] = os.environ.get("ARCLINE_S3_ANONYMOUS", "") not in (
            "",
            "0",
        )  # public buckets, without an account
    return fsspec.core.url_to_fs(address, **options)


def retry(action: Callable[[], Any], what: str) -> Any:
    """`action()`, again after growing waits while the connection fails; Interrupted when it never succeeds."""
    wait = FIRST_WAIT_S
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except _FINAL:
            raise
        except Exception as error:  # aiohttp, botocore and fsspec each raise their own kinds for one lost connection
            if attempt == ATTEMPTS:
                raise Interrupted(f"{what}: {type(error).__name__}: {error} (after {ATTEMPTS} attempts)") from error
        time.sleep(wait)
        wait *= 2
    raise AssertionError


class RemoteReader(io.RawIOBase):
    """A seekable reader of one remote file by range requests: a lost connection costs one block, asked for again."""

    def __init__(self, address: str):
        self.address = address
        self._fs, self._path = file_system(address)
        info = retry(lambda: self._fs.info(self._path), address)
        size = info.get("size")
        if size is None or info.get("partial") is False:
            raise ValueError(f"{address}: the server gives no size or no ranges")
        self.size, self._at = int(size), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self.size, self._at + len(buffer))
        if end <= self._at:
            return 0
        data = retry(lambda: self._range(self._at, end), f"{self.address} bytes {self._at}-{end}")
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _range(self, start: int, end: int) -> bytes:
        data = self._fs.cat_file(self._path, start=start, end=end)
        if len(data) != end - start:
            raise OSError(f"got {len(data)} of {end - start} bytes")
        return data


class _Whole(io.RawIOBase):
    """A reader of a server that knows no ranges: from the beginning again, up to the place, after a lost connection."""

    def __init__(self, address: str):
        self.address, self._at, self._stream = address, 0, None
        self._fs, self._path = file_system(address)

    def readable(self) -> bool:
        return True

    def _read(self, size: int) -> bytes:
        if self._stream is None:
            self._stream = self._fs.open(self._path, "rb", block_size=0)
            left = self._at
            while left and (data := self._stream.read(min(left, BLOCK_BYTES))):
                left -= len(data)
            if left:
                raise OSError("the file became shorter")
        try:
            return self._stream.read(size)
        except BaseException:
            self._stream = None
            raise

    def readinto(self, buffer: Any) -> int:
        data = retry(lambda: self._read(len(buffer)), f"{self.address} at byte {self._at}")
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def open_file(address: str) -> BinaryIO:
    """A buffered reader of a local or remote file. Remote errors are Interrupted or FileNotFoundError/PermissionError."""
    if not scheme(address):
        return open(local_path(address), "rb")
    try:
        return io.BufferedReader(RemoteReader(address), BLOCK_BYTES)
    except ValueError:
        return io.BufferedReader(_Whole(address), BLOCK_BYTES)


# ---- listing -----------------------------------------------------------------------------------------------------


def list_inputs(address: str, suffixes: tuple[str, ...] = ()) -> list[InputFile]:
    """The files that a path, a directory or a glob (`*`, `?`, `[a-z]`, `**`) names, sorted; FileNotFoundError for none.

    `suffixes` limits what is taken from directories, not what is named or matched. Symbolic links below a directory come
    out refused: nothing outside it is ever read.
    """
    files = _list_remote(address, suffixes) if scheme(address) else _list_local(address, suffixes)
    if not files:
        raise FileNotFoundError(
            f"{address}: no file there" + (f" that ends in {' '.join(suffixes)}" if suffixes else "")
        )
    return sorted(files, key=lambda f: f.name)


def _static_prefix(pattern: str) -> str:
    """The directory before the first component with a glob character."""
    parts = pattern.split("/")
    first = next((i for i, p in enumerate(parts) if glob.has_magic(p)), len(parts) - 1)
    return "/".join(parts[:first])


def readable_name(name: str) -> str:
    """A file's name as valid Unicode: bytes that are not UTF-8 become U+FFFD."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _fits(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether components of a path fit those of a pattern, in which `**` stands for any number of them."""
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_fits(names[i:], parts[1:]) for i in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], parts[0]) and _fits(names[1:], parts[1:])


def _glob(pattern: str) -> Iterator[str]:
    """What a pattern names. Unlike glob.glob, `**` does not go through links: they may lead outside, or in circles.

    Such links are among what is given, whether their names fit or not.
    """
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.iglob(pattern, include_hidden=True)
        return
    first = parts.index("**")
    head = "/".join(parts[:first]) or ("/" if pattern.startswith("/") else ".")
    for root in glob.iglob(head, include_hidden=True) if glob.has_magic(head) else [head]:
        for folder, directories, names in os.walk(root):
            inside = [] if folder == root else os.path.relpath(folder, root).split("/")
            for name in sorted(directories) + names:
                full = os.path.join(folder, name)
                link = name in directories and os.path.islink(full)
                if link or _fits([*inside, name], parts[first:]):
                    yield full if head != "." else os.path.normpath(full)


def _local_file(path: str, name: str) -> InputFile:
    name = readable_name(name)
    if os.path.islink(path):
        return InputFile(path, name, refused="symlink")
    state = os.stat(path)
    return InputFile(path, name, state.st_size, str(state.st_mtime_ns))


def _list_local(address: str, suffixes: tuple[str, ...]) -> list[InputFile]:
    path = str(local_path(address))
    if os.path.isfile(path):
        state = os.stat(path)  # named by the user: a link is followed
        return [InputFile(path, readable_name(os.path.basename(path)), state.st_size, str(state.st_mtime_ns))]
    found = []
    if os.path.isdir(path):
        for folder, directories, names in os.walk(path):
            for directory in directories:
                full = os.path.join(folder, directory)
                if os.path.islink(full):
                    found.append(InputFile(full, readable_name(os.path.relpath(full, path)), refused="symlink"))
            for name in names:
                full = os.path.join(folder, name)
                if name.lower().endswith(suffixes or "") and (os.path.islink(full) or os.path.isfile(full)):
                    found.append(_local_file(full, os.path.relpath(full, path)))
        return found
    root = _static_prefix(path) or ("/" if path.startswith("/") else ".")
    for match in _glob(path):
        if os.path.islink(match) and os.path.isdir(match) and "**" in path:
            found.append(InputFile(match, readable_name(os.path.relpath(match, root)), refused="symlink"))
        elif os.path.isfile(match):
            found.append(_local_file(match, os.path.relpath(match, root)))
        elif os.path.isdir(match) and not os.path.islink(match):
            base = readable_name(os.path.relpath(match, root))
            found += [
                InputFile(f.address, os.path.join(base, f.name), f.size, f.version, f.refused)
                for f in _list_local(match, suffixes)
            ]
    return list({f.address: f for f in found}.values())


def _list_remote(address: str, suffixes: tuple[str, ...]) -> list[InputFile]:
    fs, path = file_system(address)

    def entries() -> dict[str, dict]:
        if glob.has_magic(path) and not (scheme(address) != "s3" and "?" in address and "*" not in address):
            return {k: v for k, v in fs.glob(path, detail=True).items() if v.get("type") == "file"}
        if scheme(address) == "s3" and not fs.isfile(path):
            return {k: v for k, v in fs.find(path, detail=True).items() if k.lower().endswith(suffixes or "")}
        return {path: fs.info(path)}

    root = _static_prefix(path)
    found = []
    for name, info in retry(entries, address).items():
        base = root if glob.has_magic(path) else path if name != path else path.rpartition("/")[0]
        relative = name[len(base) :].lstrip("/") if name.startswith(base) else name
        size, tag = info.get("size"), info.get("ETag") or info.get("LastModified") or ""
        if info.get("type", "file") == "file":
            found.append(
                InputFile(fs.unstrip_protocol(name), relative, -1 if size is None else int(size), str(tag).strip('"'))
            )
    return found


@contextlib.contextmanager
def as_local(file: InputFile, folder: Path) -> Iterator[Path]:
    """The file as a local path; a remote one is copied below `folder` while in use."""
    if not scheme(file.address):
        yield local_path(file.address)
        return
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / os.path.basename(file.name)
    try:
        with open_file(file.address) as stream, open(target, "wb") as out:
            while block := stream.read(BLOCK_BYTES):
                out.write(block)
        yield target
    finally:
        target.unlink(missing_ok=True)

"""Trees of files: directories and archives of HTML, PDFs and sources, and git repositories at a ref.

Nothing outside the named root is read: symbolic links, submodules and paths with `..` are reported, not followed. Of a git
repository only objects are read, through libgit2: no checkout, so no hook and no filter ever runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from tasks.archives import ArchiveError, matches, read_archive, safe_path
from tasks.archives import Limits as ArchiveLimits
from tasks.licences import identify
from tasks.readers import DATA_ERRORS, Limits, Rejected, make_record, open_plain, read_bounded
from tasks.records import Record
from tasks.remote import InputFile, as_local, local_path, open_file, readable_name

ARCHIVES = (".zip", ".whl", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
LICENCE = re.compile(r"(?i)(un)?(licen[cs]e|copying)([.-].*)?")
_MAX_DEPTH = 200


def read_page_file(file: InputFile, source: Any, limits: Limits) -> Iterator[Record | Rejected]:
    """One file of a directory of HTML or PDFs: one record. `.gz` and `.zst` files are decompressed within bounds."""
    yield _whole_file(file, source, limits, expected=False)


def read_tree_file(file: InputFile, source: Any, limits: Limits) -> Iterator[Record | Rejected]:
    """One file of a source tree, or the members of an archive of one."""
    if source.unpack and not file.refused:
        yield from _archive(file, source, limits)
    else:
        yield _whole_file(file, source, limits, expected=True)


def _whole_file(file: InputFile, source: Any, limits: Limits, expected: bool) -> Record | Rejected:
    if file.refused:
        return Rejected(file.name, file.name, file.refused, "links are not followed", expected=expected)
    if file.size > limits.record_bytes and not file.name.endswith((".gz", ".zst")):
        return Rejected(file.name, file.name, "too_large", f"{file.size} bytes, limit {limits.record_bytes}")
    try:
        if file.name.endswith((".gz", ".zst")):
            with open_plain(file, limits) as stream:
                content = read_bounded(stream, limits.record_bytes)
        else:
            with open_file(file.address) as stream:
                content = read_bounded(stream, limits.record_bytes)
    except DATA_ERRORS as error:
        return Rejected(file.name, file.name, "unreadable", f"{type(error).__name__}: {error}")
    return make_record(source, file, 1, source.kind, content, limits, expected=expected)


def _archive(file: InputFile, source: Any, limits: Limits) -> Iterator[Record | Rejected]:
    """Members of an archive. It is read through a local copy when it is remote."""
    number = 0
    bounds = ArchiveLimits(limits.record_bytes, int((64 << 20) + limits.expansion * max(0, file.size)))
    try:
        with as_local(file, source.scratch) as path:
            for member in read_archive(path, source.globs, source.exclude, bounds):
                number += 1
                if member.data is None:
                    reason = member.refused.replace(" ", "_")
                    fine = reason in ("link", "not_a_regular_file")
                    yield Rejected(
                        file.name, member.path, reason, "an archive's member that is not read", expected=fine
                    )
                else:
                    yield make_record(
                        source, file, number, source.kind, member.data, limits, path=member.path, expected=True
                    )
    except ArchiveError as error:
        yield Rejected(file.name, f"after member {number}", "archive_unreadable", str(error))


# ---- git ---------------------------------------------------------------------------------------------------------


def _repository(source: Any, path: Path) -> Any:
    import pygit2

    pygit2.option(pygit2.enums.Option.SET_OWNER_VALIDATION, 0)  # objects are only read; nothing configured there is run
    try:
        repository = pygit2.Repository(str(path), pygit2.enums.RepositoryOpenFlag.NO_SEARCH)
    except (pygit2.GitError, KeyError) as error:
        raise ValueError(f"source {source.name!r}: path: {path.name}: not a git repository ({error})") from None
    if not Path(os.path.realpath(repository.path)).is_relative_to(os.path.realpath(path)):
        raise ValueError(
            f"source {source.name!r}: path: {path.name} is a linked worktree or submodule whose objects lie elsewhere; "
            f"name the repository itself"
        )
    return repository


def resolve_ref(source: Any, path: Path) -> str:
    """The commit (40 hex digits) that the source's `ref` names in a repository; ValueError names source and key."""
    import pygit2

    repository = _repository(source, path)
    try:
        return str(repository.revparse_single(source.ref).peel(pygit2.Commit).id)
    except (KeyError, ValueError, pygit2.GitError) as error:
        branches = ", ".join(sorted(repository.branches)[:20]) or "none"
        raise ValueError(
            f"source {source.name!r}: ref: {source.ref!r} is no commit of {path.name} ({error}); its branches: {branches}"
        ) from None


def read_git(file: InputFile, source: Any, limits: Limits) -> Iterator[Record | Rejected]:
    """Every file of a repository at the commit `file.version`, in git's own order, with path, commit and licence file."""
    import pygit2

    repository = _repository(source, local_path(file.address))
    commit = repository.get(file.version)
    meta = {"repo": file.name, "commit": str(commit.id), "date": commit.commit_time}
    remote = next((r.url for r in repository.remotes if r.name == "origin"), "")
    if re.match(r"https?://[^@]+$|git@", remote or ""):
        meta["origin"] = remote
    licences = [e.name for e in commit.tree if e.name and LICENCE.fullmatch(e.name) and e.name.isascii()]
    licence = ""
    if licences:
        meta["licence_file"] = min(licences)
        licence = _licence(repository, commit.tree[meta["licence_file"]].id)
    number = 0
    try:
        for path, entry, refused in _entries(repository, commit.tree, "", 0):
            if not (refused == "unsafe_path" or matches(path, source.globs, source.exclude) or path in licences):
                continue
            number += 1
            yield _blob(repository, file, source, limits, number, path, entry, refused, licence, meta)
    except (pygit2.GitError, KeyError, *DATA_ERRORS) as error:
        detail = f"after file {number}: {type(error).__name__}: {error}; the rest of the tree is not read"
        yield Rejected(file.name, f"after file {number}", "corrupt_repository", detail)


def _licence(repository: Any, blob: Any) -> str:
    """The repository's licence, an SPDX expression, from its licence file; "" when that is none known or damaged."""
    import pygit2

    try:
        if repository.odb.read_header(blob)[1] > 1 << 20:
            return ""
        return identify(repository[blob].data.decode("utf-8", "replace")).expression
    except (pygit2.GitError, KeyError, AttributeError):
        return ""


def _blob(
    repository: Any,
    file: InputFile,
    source: Any,
    limits: Limits,
    number: int,
    path: str,
    entry: Any,
    refused: str,
    licence: str,
    meta: dict,
) -> Record | Rejected:
    import pygit2

    if refused:
        return Rejected(file.name, path, refused, "not followed", expected=refused in ("symlink", "submodule"))
    try:
        _, size = repository.odb.read_header(entry.id)
        if size > limits.record_bytes:
            return Rejected(file.name, path, "too_large", f"{size} bytes, limit {limits.record_bytes}")
        content = repository[entry.id].data
    except KeyError:
        return Rejected(file.name, path, "missing_object", f"{entry.id} is not in the repository (a partial clone?)")
    except (pygit2.GitError, *DATA_ERRORS) as error:
        return Rejected(file.name, path, "corrupt_object", f"{entry.id}: {error}")
    meta = meta | {"blob": str(entry.id)}
    return make_record(
        source,
        file,
        number,
        source.kind,
        content,
        limits,
        path=path,
        fields={"licence": source.licence or licence},
        meta=meta,
        expected=True,
    )


def _entries(repository: Any, tree: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any, str]]:
    """(path, entry, why it must not be read or "") of every file below a tree."""
    import pygit2

    for entry in tree:
        name = readable_name(entry.name or "")
        path = f"{prefix}{name}"
        if "/" in name or safe_path(path) is None or ".git" in PurePosixPath(path.lower()).parts:
            yield path, entry, "unsafe_path"
        elif entry.filemode == pygit2.enums.FileMode.TREE:
            if depth >= _MAX_DEPTH:
                yield path, entry, "unsafe_path"
            else:
                yield from _entries(repository, repository[entry.id], f"{path}/", depth + 1)
        elif entry.filemode == pygit2.enums.FileMode.LINK:
            yield path, entry, "symlink"
        elif entry.filemode == pygit2.enums.FileMode.COMMIT:
            yield path, entry, "submodule"
        else:
            yield path, entry, ""


def tree_files(files: Sequence[InputFile], source: Any) -> list[InputFile]:
    """The files of a directory that the source's globs name, without version-control folders; licence files always."""
    kept = []
    for file in files:
        parts = PurePosixPath(file.name).parts
        wanted = matches(file.name, source.globs, source.exclude) or LICENCE.fullmatch(parts[-1])
        if wanted and not {".git", ".hg", ".svn"} & set(parts):
            kept.append(file)
    return kept

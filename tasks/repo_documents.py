"""Repository-level documents of the code stage: files of one repository put together in the order of their imports.

A group is a run of files in that order, within a bound of characters; which groups are put together is told by a hash, as
`repo_share` of them. A file is then part of the repository's document and no document by itself, so nothing is there twice.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np

from tasks import documents
from tasks.code_features import comment_mark
from tasks.repo_order import order, pack
from tasks.tokens import unit_hash

_CLOSING = {"css": " */", "html": " -->", "xml": " -->"}
_OPENING = {"css": "/*", "html": "<!--", "xml": "<!--"}


def heading(path: str, text: str, language: str) -> str:
    """The line that names a file within a repository's document, as a comment of its language."""
    mark = _OPENING.get(language) or comment_mark(text, language)
    return f"{mark} {path}{_CLOSING.get(language, '')}\n"


def _prefix(row: dict) -> str:
    """What names the repository and release in a row's source: all that stands before the file's path."""
    return row["source"].removesuffix(json.loads(row["meta"])["path"])


def combine_runs(rows: Iterable[dict], share: float, limit: int) -> Iterator[dict]:
    """`combine` for each run of rows of one repository: no more than one repository is held in memory.

    Trees, git repositories and archives give their files together; of an export that scatters them nothing is combined.
    """
    for _, run in groupby(rows, key=_prefix):
        yield from combine(list(run), share, limit)


def combine(rows: list[dict], share: float, limit: int) -> list[dict]:
    """`rows` with `share` of the groups of files of each repository in one document each, at the place of its first file.

    Rows are documents whose meta has item and path; groups hold two files or more and at most `limit` characters.
    """
    if not share:
        return rows
    metas = [json.loads(row["meta"]) for row in rows]
    repos: dict[str, dict[str, int]] = defaultdict(dict)
    for n, (row, meta) in enumerate(zip(rows, metas)):
        repos[_prefix(row)].setdefault(meta["path"], n)  # releases of one project are repositories of their own
    replaced: dict[int, dict] = {}
    gone: set[int] = set()
    for prefix, paths in sorted(repos.items()):
        if len(paths) < 2:
            continue
        files = {path: (rows[n]["text"], rows[n]["lang"]) for path, n in paths.items()}
        texts = {path: heading(path, text, lang) + text.rstrip("\n") + "\n" for path, (text, lang) in files.items()}
        for group in pack(order(files), {path: len(text) + 1 for path, text in texts.items()}, limit):
            if unit_hash(f"repo:{prefix}:{group[0]}") >= share:
                continue
            members = [paths[path] for path in group]
            languages = Counter(rows[n]["lang"] for n in members)
            found = sorted({metas[n]["licence"] for n in members} - {""})
            meta = {
                "kind": "repo",
                "item": metas[members[0]]["item"],
                "path": group[0],
                "files": group,
                "licence": found[0] if len(found) == 1 else " AND ".join(f"({x})" if " OR " in x else x for x in found),
                "licence_from": "files",
            }
            scores = {
                k: float(np.round(np.mean([rows[n][k] for n in members]), 5)) for k in ("quality", "quality_tier")
            }
            text = "\n".join(texts[path] for path in group)
            language = min(languages, key=lambda x: (-languages[x], x))
            first = min(members)
            replaced[first] = documents.document(text, prefix + group[0], "code", lang=language, meta=meta, **scores)
            gone.update(members)
    return [replaced.get(n, row) for n, row in enumerate(rows) if n in replaced or n not in gone]

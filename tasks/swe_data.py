"""Repository-level sequences: relevant files, the issue, the discussion, the pull request, the unified diff (notes D.3).

    python -m tasks swe_data

Two sources. Successive releases of one project in data/acquire (every item of the index with more than one version): each
new changelog entry is an issue, and the changed files that share its words are its patch. Git histories (`git_repos`: path,
name, full commit): each commit is a pull request, what its message says it fixes the issue. One document per change, domain
swe; a change to files of the code corpus is on their side of the validation split (`meta.split`); what is left out is in
data/swe_data/exclusions with its reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import xxhash
from pydantic import BaseModel, ConfigDict, Field

from tasks import changes, code_lang, documents
from tasks.changes import Change
from tasks.code_text import decode, is_training_file
from tasks.stage import Stage, StageConfig
from tasks.texts import read_index
from tasks.tokens import SPLITS, split_of

_CHANGELOG = ("changelog", "changes", "history", "news", "release")


class GitRepo(BaseModel):
    """A git history to read. The commit is what gives the result its identity."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    path: str = Field(description="directory of the repository, from the project's root")
    name: str
    revision: str = Field(pattern="^[0-9a-f]{40}$", description="full commit hash to read back from")
    max_commits: int = Field(1000, ge=1)


class Config(StageConfig):
    domains: tuple[str, ...] = Field(("swe",), description="domains of the index whose releases are compared")
    git_repos: tuple[GitRepo, ...] = ()
    max_groups: int = Field(3, ge=1, description="groups of changed files (a source file and its tests) per issue")
    least_score: float = Field(1.0, ge=0, description="how well a changelog entry must match a group's changes")
    related_files: int = Field(1, ge=0, description="unchanged files added per change, by shared words")
    max_file_chars: int = Field(
        4000, ge=200, description="characters per relevant file; excerpts around the changes above"
    )
    max_diff_chars: int = Field(12_000, ge=200, description="changes with longer diffs are left out")
    max_source_bytes: int = Field(200_000, ge=1, description="larger source files are not compared")
    max_chars: int = Field(20_000, ge=500, description="relevant files are dropped from the end until a document fits")
    val_fraction: float = Field(
        0.05, ge=0, lt=1, description="as in `pack`: a change to a file that the code corpus holds out is held out too"
    )
    without_issue: bool = Field(True, description="keep changes that no issue explains, as plain pull requests")


def render(change: Change, config: Config) -> str:
    """One change as text. Relevant files come first and as they were before it; without an issue that part is absent."""
    head = f"Repository: {change.repo} at {change.base}\n"
    tail = []
    if change.issue_title:
        number = f" #{change.references[0]}" if change.references else ""
        body = f"\n{change.issue_body}" if change.issue_body and change.issue_body != change.issue_title else ""
        tail.append(f"Issue{number}: {change.issue_title}{body}\n")
    tail += [f"Comment:\n{comment}\n" for comment in change.discussion]
    tail.append(f"Pull request: {change.pr_title}\n{change.pr_body}".rstrip() + "\n")
    tail.append("".join(f.diff() for f in change.files))
    rest = "\n".join(tail)
    files, left = [], config.max_chars - len(head) - len(rest)
    old = [(f.path, changes.excerpt(f, config.max_file_chars)) for f in change.files if f.old is not None]
    old += [(path, text[: config.max_file_chars]) for path, text in change.related]
    for path, text in old:
        block = f"File: {path}\n{text.rstrip()}\n"
        if len(block) + 1 <= left:
            files.append(block)
            left -= len(block) + 1
    return "\n".join([head, *files, rest])


def _versions(stage: Stage) -> dict[str, list[tuple[str, dict[str, str], str, str]]]:
    """item -> [(version, {path: source}, changelog, licence)], oldest first, for items with more than one version."""
    config: Config = stage.config
    acquired = stage.dep("data/acquire")
    rows = [r for r in read_index(acquired) if r["domain"] in config.domains and is_training_file(r)]
    by_item: dict[str, dict[str, list[dict]]] = {}
    for row in rows:
        by_item.setdefault(row["item"], {}).setdefault(row["version"], []).append(row)
    result = {}
    for item in sorted(by_item):
        if len(by_item[item]) < 2:
            continue
        releases = []
        for version in sorted(by_item[item], key=changes.version_key):
            sources, changelog, licence = {}, "", ""
            for row in sorted(by_item[item][version], key=lambda r: r["path"]):
                path = row.get("member") or row["path"].removeprefix("files/").partition("/")[2]
                name = PurePosixPath(path).name.lower()
                licence = row["licence"]
                is_log = name.startswith(_CHANGELOG) and len(PurePosixPath(path).parts) <= 2
                language = code_lang.detect(path, "")[0]
                if not is_log and (language in code_lang.DATA_KINDS or not language):
                    continue
                stage.seen()
                if not is_log and row["bytes"] > config.max_source_bytes:
                    continue
                try:
                    text = decode((acquired / row["path"]).read_bytes())
                except (ValueError, OSError) as error:
                    stage.reject(row["path"], "unreadable", str(error))
                    continue
                if is_log:
                    changelog += text
                else:
                    sources[path] = text
            releases.append((version, sources, changelog, licence))
        result[item] = releases
    return result


def fault(change: Change, diff: str, config: Config) -> tuple[str, float] | None:
    """Why a change makes no document, or None."""
    if not diff:
        return "empty_diff", 0
    if len(diff) > config.max_diff_chars:
        return "long_diff", len(diff)
    if not change.issue_title and not config.without_issue:
        return "no_issue", 0
    if all(f.old is None for f in change.files) and not change.issue_title:
        return "only_new_files", len(change.files)
    return None


class CodeSplits:
    """On which side of the train/validation split the code stage's files are, by repository and path and by content."""

    def __init__(self, directory: Path, val_fraction: float):
        self._of: dict[tuple[str, str] | int, str] = {}
        for row in documents.read_documents(directory, columns=("id", "text", "meta")):
            meta = json.loads(row["meta"])
            split = split_of(row["id"], val_fraction)
            keys = [(meta["item"], path) for path in meta.get("files", [meta["path"]])]
            for key in [*keys, xxhash.xxh3_64_intdigest(row["text"].encode())]:
                if split == "val" or key not in self._of:
                    self._of[key] = split

    def of(self, change: Change) -> str | None:
        """The side of a change: val when any file it shows is held out, train when some file is known and none is."""
        shown = [(f.path, text) for f in change.files for text in (f.old, f.new) if text] + list(change.related)
        keys = [(change.repo, path) for path, _ in shown]
        keys += [xxhash.xxh3_64_intdigest(text.encode("utf-8", "replace")) for _, text in shown]
        found = {self._of[key] for key in keys if key in self._of}
        return "val" if "val" in found else "train" if found else None


def run(stage: Stage) -> None:
    config: Config = stage.config
    splits = CodeSplits(stage.dep("data/code"), config.val_fraction)
    out = stage.out("data/swe_data")
    counts: Counter[str] = Counter()
    per_repo: Counter[str] = Counter()

    def found() -> Iterator[tuple[str, str, Change]]:
        limits = {
            "max_groups": config.max_groups,
            "least_score": config.least_score,
            "related_files": config.related_files,
        }
        for item, releases in _versions(stage).items():
            pairs = list(zip(releases, releases[1:]))
            for old, new in stage.progress(pairs, label=f"{item} releases"):
                for change in changes.release_changes(item, old[:3], new[:3], **limits):
                    yield "release", new[3], change
        for repo in config.git_repos:
            path = stage.root / repo.path if not Path(repo.path).is_absolute() else Path(repo.path)
            history = changes.git_changes(path, repo.name, repo.revision, repo.max_commits, config.related_files)
            for change in stage.progress(history, label=f"{repo.name} commits"):
                stage.seen()
                yield "commit", "", change

    def kept() -> Iterator[dict]:
        for kind, licence, change in found():
            source = f"{change.repo}/{change.base}..{change.target}"
            diff = "".join(f.diff() for f in change.files)
            problem = fault(change, diff, config)
            if problem:
                excluded.add({"source": source, "text": change.issue_body or change.pr_title}, *problem)
                continue
            counts[kind] += 1
            counts["with_issue"] += bool(change.issue_title)
            counts["with_test_change"] += any(changes.is_test(f.path) for f in change.files)
            counts["references"] += len(change.references)
            per_repo[change.repo] += 1
            meta = {
                "kind": kind,
                "repo": change.repo,
                "base": change.base,
                "target": change.target,
                "references": list(change.references),
                "files": [f.path for f in change.files],
                "licence": licence,
            }
            side = splits.of(change)
            if side:
                meta["split"] = side
                counts[f"split_{side}"] += 1
            language = code_lang.detect(change.files[0].path, "")[0]
            yield documents.document(render(change, config), source, "swe", lang=language, meta=meta)

    with documents.Exclusions(out) as excluded:
        written = documents.write_documents(out, kept())
    stage.rows(documents=written["documents"], excluded=sum(excluded.counts.values()))
    stage.metric(
        documents=written["documents"],
        bytes=written["bytes"],
        **{k: counts[k] for k in ("release", "commit", "with_issue", "with_test_change", "references")},
        split_by_code_files={side: counts[f"split_{side}"] for side in SPLITS},
        repositories=dict(sorted(per_repo.items())),
        removed=dict(sorted(excluded.counts.items())),
    )
    stage.print(
        f"{written['documents']} changes, {counts['with_issue']} with an issue, removed {dict(excluded.counts)}"
    )

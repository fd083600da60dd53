"""Software changes as records: from successive releases of a project, and from a git history.

A change is what an issue asked for and what a pull request did: issue text, files as they were, unified diff. Between two
releases, changelog entries stand for issues, and each group of changed files (a source file with its tests) goes to the
entry whose words it shares most. Used by `python -m tasks swe_data`.
"""

from __future__ import annotations

import difflib
import math
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath

_STOP = frozenset(
    "the and for with that this from not are was were has have had but all any can now when where which will would should into"
    " its it's also than then them they been being use used using add added fix fixed return returns self none true false def"
    " class import issue https http www github com pull issues org new old more some such only".split()
)
_REFERENCE = re.compile(
    r"(?<![\w/&])#(\d{1,6})\b|:(?:issue|pr|pull|gh|bpo|user)?:`(\d{1,6})`|/(?:issues|pull)/(\d{1,6})\b"
)


def _lines(text: str | None) -> list[str]:
    """Lines with their ends; only a line feed ends one, as in git."""
    return re.findall(r"[^\n]*\n|[^\n]+", text or "")


@lru_cache(maxsize=4096)
def _diff(path: str, old: str | None, new: str | None) -> str:
    if old == new:
        return ""
    mode = "new file mode 100644\n" if old is None else "deleted file mode 100644\n" if new is None else ""
    names = ("/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}")
    body = "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(_lines(old), _lines(new), *names)
    )
    return f"diff --git a/{path} b/{path}\n{mode}{body}"


@dataclass(frozen=True)
class FileChange:
    """One file before and after; None means that it was not there."""

    path: str
    old: str | None
    new: str | None

    def diff(self) -> str:
        """Unified diff with git's headers and three lines of context."""
        return _diff(self.path, self.old, self.new)


@dataclass(frozen=True)
class Change:
    """A change to a repository at `base` (a version or a commit)."""

    repo: str
    base: str
    target: str
    files: tuple[FileChange, ...]
    issue_title: str = ""
    issue_body: str = ""
    discussion: tuple[str, ...] = ()
    pr_title: str = ""
    pr_body: str = ""
    references: tuple[int, ...] = ()
    related: tuple[tuple[str, str], ...] = field(default=())  # unchanged files worth reading: (path, text)


def references(text: str) -> tuple[int, ...]:
    """Issue and pull-request numbers in a text, in order, once each."""
    found = (int(next(g for g in m.groups() if g)) for m in _REFERENCE.finditer(text))
    return tuple(dict.fromkeys(found))


def changelog_entries(text: str) -> list[tuple[str, str]]:
    """(section heading, entry) of every bullet of a changelog in rst or Markdown; nested bullets belong to their parent."""
    entries: list[tuple[str, str]] = []
    heading, current, indent = "", None, 0
    lines = text.expandtabs(4).split("\n")
    for number, line in enumerate(lines):
        following = lines[number + 1].strip() if number + 1 < len(lines) else ""
        bullet = re.match(r"^( {0,3})[-*+] +(\S.*)$", line)
        if bullet and (current is None or len(bullet[1]) <= indent):
            current, indent = [bullet[2]], len(bullet[1])
            entries.append((heading, ""))
        elif current is not None and (not line.strip() or len(line) - len(line.lstrip()) > indent):
            current.append(line.strip())
        else:
            current = None
            if line.startswith("#") or (line.strip() and re.fullmatch(r"([=\-~^\"'#*+.`])\1{2,}", following)):
                heading = line.strip("# ").strip()
        if current is not None:
            entries[-1] = (entries[-1][0], clean_entry(" ".join(" ".join(current).split())))
    return [e for e in entries if e[1]]


def clean_entry(text: str) -> str:
    """A changelog entry without link targets and roles: `#12 <https://...>`__ becomes #12, :pr:`12` becomes #12."""
    text = re.sub(r"`([^`<]+?)\s*<[^>]*>`__?", r"\1", text)
    text = re.sub(r":(?:issue|pr|pull|gh):`#?(\d+)`", r"#\1", text)
    text = re.sub(r":[\w:+-]+:`~?([^`<]*?)(?:\s*<[^>]*>)?`", r"\1", text)
    text = re.sub(r"\[([^\]]+)\]\([^)\s]+\)", r"\1", text)
    return text.replace("``", "`").strip()


def version_key(version: str) -> tuple:
    """Sort key of release numbers: numeric parts as numbers, pre-releases before their release."""
    parts = re.findall(r"\d+|[a-z]+", version.lower())
    return tuple((1, int(p), "") if p.isdigit() else (0, 0, p) for p in parts) + ((0, 1, ""),)


def terms(text: str) -> Counter[str]:
    """Words of a text or of code: identifiers whole and in parts (snake case, camel case), common words left out."""
    found: Counter[str] = Counter()
    for word in re.findall(r"[A-Za-z_][\w]*", text):
        pieces = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", word)
        for piece in {word.lower().strip("_"), *(p.lower() for p in pieces)}:
            if len(piece) > 2 and piece not in _STOP:
                found[piece] += 1
    return found


@lru_cache(maxsize=4096)
def _term_set(text: str) -> frozenset[str]:
    return frozenset(terms(text))


def is_test(path: str) -> bool:
    """Whether a path belongs to a test suite."""
    parts = [p.lower() for p in PurePosixPath(path).parts]
    return (
        any(p in ("test", "tests", "testing") for p in parts[:-1])
        or re.match(r"(test_|.*_test\.|conftest\.)", parts[-1]) is not None
    )


def group_key(path: str) -> str:
    """A source file and its tests share one: the stem without `test_` and leading underscores."""
    stem = PurePosixPath(path).stem.lower()
    stem = re.sub(r"^tests?_|_tests?$", "", stem).strip("_")
    return str(PurePosixPath(path).parent).lower() + "/init" if stem == "init" else stem


def _assign(
    entries: Sequence[str], groups: Sequence[Sequence[FileChange]], most: int, least: float
) -> dict[int, list[int]]:
    """entry index -> group indices: best pairs first; a group goes to one entry, an entry takes up to `most` groups."""
    group_terms = []
    for group in groups:
        changed = " ".join(line[1:] for f in group for line in f.diff().split("\n") if line[:1] in "+-")
        group_terms.append(set(terms(changed + " " + " ".join(f.path for f in group))))
    entry_terms = [set(terms(e)) for e in entries]
    frequency = Counter(t for bag in [*group_terms, *entry_terms] for t in bag)
    total = len(group_terms) + len(entry_terms)
    weight = {t: math.log(total / c) for t, c in frequency.items()}
    pairs = []
    for e, left in enumerate(entry_terms):
        norm = math.sqrt(sum(weight[t] ** 2 for t in left)) or 1.0
        for g, right in enumerate(group_terms):
            shared = left & right
            score = sum(weight[t] for t in sorted(shared)) / norm
            if len(shared) > 1 and score >= least:
                pairs.append((-round(score, 9), e, g))
    taken: set[int] = set()
    result: dict[int, list[int]] = {}
    for _, e, g in sorted(pairs):
        if g not in taken and len(result.get(e, [])) < most:
            taken.add(g)
            result.setdefault(e, []).append(g)
    return result


def _related(files: Mapping[str, str], text: str, without: set[str], count: int) -> tuple[tuple[str, str], ...]:
    """The `count` files that share most of a text's rarer words, a file's path counting for more than its content."""
    wanted = set(terms(text))
    bags = {path: _term_set(content) for path, content in files.items() if path not in without and not is_test(path)}
    frequency = Counter(t for bag in bags.values() for t in bag)
    scores = []
    for path, bag in bags.items():
        score = sum(math.log((1 + len(bags)) / frequency[t]) for t in sorted(wanted & bag))
        score += sum(3.0 for t in wanted & set(terms(path)))
        scores.append((-round(score, 9), path))
    return tuple((path, files[path]) for score, path in sorted(scores)[:count] if score < 0)


def release_changes(
    repo: str,
    old: tuple[str, Mapping[str, str], str],
    new: tuple[str, Mapping[str, str], str],
    *,
    max_groups: int = 3,
    least_score: float = 1.0,
    related_files: int = 1,
) -> Iterator[Change]:
    """Changes between two releases, each given as (version, {path: source text}, changelog text).

    One change per new changelog entry that some changed files match, then one per remaining group of changed files, without
    an issue.
    """
    before, after = old[1], new[1]
    changed = [FileChange(p, before.get(p), after.get(p)) for p in sorted(before.keys() | after.keys())]
    changed = [f for f in changed if f.old != f.new]
    keyed: dict[str, list[FileChange]] = {}
    for change in changed:
        keyed.setdefault(group_key(change.path), []).append(change)
    groups = [sorted(keyed[k], key=lambda f: (is_test(f.path), f.path)) for k in sorted(keyed)]
    known = {e for _, e in changelog_entries(old[2])}
    entries = [(h, e) for h, e in changelog_entries(new[2]) if e not in known]
    assigned = _assign([e for _, e in entries], groups, max_groups, least_score)
    for index in sorted(assigned):
        heading, entry = entries[index]
        files = tuple(f for g in sorted(assigned[index]) for f in groups[g])
        numbers = references(entry)
        title = re.split(r"(?<=[a-z`)])(?<!e\.g)(?<!i\.e)[.:;]\s", entry)[0]
        title = title if len(title) <= 100 else title[:97].rsplit(" ", 1)[0] + " ..."
        section = heading if not re.search(r"\d", heading) else ""
        yield Change(
            repo, old[0], new[0], files, title, entry, (), f"{section}: {title}" if section else title,
            "".join(f"Closes #{n}. " for n in numbers).strip(), numbers,
            _related(before, entry, {f.path for f in files}, related_files),
        )  # fmt: skip
    matched = {g for gs in assigned.values() for g in gs}
    for g, group in enumerate(groups):
        if g not in matched:
            names = ", ".join(PurePosixPath(f.path).name for f in group[:3])
            yield Change(repo, old[0], new[0], tuple(group), pr_title=f"Change {names} between {old[0]} and {new[0]}")


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", "-c", "core.quotePath=false", "-c", "diff.noprefix=false", "-C", str(repository), *arguments]
    run = subprocess.run(command, capture_output=True, check=False)
    if run.returncode:
        raise ValueError(
            f"{repository}: git {arguments[0]} failed: {run.stderr.decode(errors='replace').strip()[:300]}"
        )
    return run.stdout.decode("utf-8", "replace")


def git_changes(repository: Path, name: str, revision: str, most: int, related_files: int = 1) -> Iterator[Change]:
    """The last `most` commits without merges up to `revision`, oldest first, as changes.

    The subject is the pull request's title; the issue is what the message says it fixes. Binary files are left out.
    ValueError when the directory is no git repository or the revision is not in it.
    """
    log = _git(
        repository, "log", "--no-merges", f"--max-count={most}", "--format=%H%x1f%P%x1f%s%x1f%b%x1e", revision, "--"
    )
    for record in reversed([r for r in log.split("\x1e") if r.strip()]):
        commit, parents, subject, body = record.strip("\n").split("\x1f")
        parent = parents.split(" ")[0]
        listing = _git(
            repository, "diff-tree", "-r", "--root", "--no-commit-id", "--no-renames", "--numstat", "-z", commit
        )
        files = []
        for line in (x for x in listing.split("\0") if x):
            added, removed, path = line.split("\t", 2)
            if added != "-":
                files.append(FileChange(path, _blob(repository, parent, path), _blob(repository, commit, path)))
        body = re.sub(r"^(Signed-off-by|Co-authored-by|Change-Id|Reviewed-by):.*$", "", body, flags=re.M | re.I).strip()
        numbers = references(f"{subject}\n{body}")
        fixes = re.findall(
            r"(?i)\b(?:fix(?:es|ed)?|close[sd]?|resolve[sd]?)\b:?\s+[^\n]*?#\d+[^\n]*", f"{subject}\n{body}"
        )
        related: tuple = ()
        if parent and related_files:
            paths = [p for p in _git(repository, "ls-tree", "-r", "-z", "--name-only", parent).split("\0") if p]
            directories = {str(PurePosixPath(f.path).parent) for f in files}
            near = [
                p
                for p in paths
                if str(PurePosixPath(p).parent) in directories and p.endswith(PurePosixPath(files[0].path).suffix)
            ]
            texts = {p: _blob(repository, parent, p) or "" for p in near[:40]} if files else {}
            related = _related(texts, f"{subject} {body}", {f.path for f in files}, related_files)
        yield Change(
            name, parent[:12] or "empty", commit[:12], tuple(files), "; ".join(fixes), body if fixes else "", (), subject, body,
            numbers, related,
        )  # fmt: skip


def _blob(repository: Path, commit: str, path: str) -> str | None:
    if not commit:
        return None
    run = subprocess.run(["git", "-C", str(repository), "show", f"{commit}:{path}"], capture_output=True, check=False)
    return run.stdout.decode("utf-8", "replace") if run.returncode == 0 else None


def excerpt(change: FileChange, limit: int, around: int = 12) -> str:
    """The old text of a changed file; when longer than `limit` characters, its first lines and those near the changes, with
    `...` for what is left out."""
    old = change.old or ""
    if len(old) <= limit:
        return old
    lines = old.splitlines()
    matcher = difflib.SequenceMatcher(None, lines, (change.new or "").splitlines(), autojunk=True)
    while around >= 0:
        wanted = set(range(min(around, 8)))
        for tag, first, last, _, _ in matcher.get_opcodes():
            if tag != "equal":
                wanted.update(range(max(0, first - around), min(len(lines), last + around)))
        out, previous = [], -1
        for number in sorted(wanted):
            if number >= len(lines):
                continue
            if number != previous + 1:
                out.append("...")
            out.append(lines[number])
            previous = number
        text = "\n".join(out + (["..."] if previous + 1 < len(lines) else [])) + "\n"
        if len(text) <= limit:
            return text
        around -= 3
    return text[:limit].rsplit("\n", 1)[0] + "\n...\n"

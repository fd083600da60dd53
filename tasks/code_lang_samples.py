"""Labelled source files out of packages, to train and test the content classifier of programming languages.

A file's label is its folder in a labelled collection (Pygments' examplefiles, Prism's language tests), else what
tasks/code_lang.py makes of its name, data and mark-up languages told apart (`json`, `toml`, `markdown`, ...). Test material
is held out by package: no package gives files to both sides.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tasks import archives, code_lang, code_lang_names, licences

MAX_CHARS = 16_000
_MIN_CHARS = 24
_PER_PACKAGE = 120  # files of one language out of one package, drawn by hash
# Formats that tasks/code_lang.py calls data or prose.
FORMATS = {
    "json": "json", "yaml": "yaml yml", "toml": "toml", "xml": "xml xsd svg rdf xsl xslt plist",
    "ini": "ini cfg editorconfig desktop", "markdown": "md markdown", "restructuredtext": "rst",
    "tex": "tex sty cls ltx", "csv": "csv tsv", "diff": "diff patch", "hcl": "hcl tf tfvars",
    "gettext catalog": "po pot", "text": "txt",
}  # fmt: skip
_BY_FORMAT = {extension: name for name, extensions in FORMATS.items() for extension in extensions.split()}
_NAMES = {
    "pipfile": "toml", "cargo.lock": "toml", "poetry.lock": "toml", "dockerfile": "dockerfile", "setup.cfg": "ini",
    "tox.ini": "ini", ".gitconfig": "ini", "package.json": "json", "license": "text", "copying": "text",
    "readme": "text", "changelog": "text", "authors": "text", "install": "text", "news": "text",
}  # fmt: skip
_EXTRA = {
    "f": "fortran", "v": "", "m": "", "vh": "verilog", "sv": "verilog", "svh": "verilog", "cu": "",
    "s": "assembly", "cls": "", "in": "", "am": "makefile", "pro": "", "t": "", "i": "", "inc": "", "def": "",
    "r": "r", "rd": "",
}  # fmt: skip
# Collections' own names -> ours.
_FOLDERS = {
    "common_lisp": "common lisp", "viml": "vim script", "vb": "visual basic", "objective_c": "objective-c",
    "bash": "shell", "sh": "shell", "zsh": "shell", "batch": "batchfile", "cpp": "c++", "csharp": "c#",
    "fsharp": "f#", "objectivec": "objective-c", "objective-c": "objective-c", "js": "javascript",
    "ts": "typescript", "markup": "html", "docker": "dockerfile", "make": "makefile", "nasm": "assembly",
    "gas": "assembly", "ca65asm": "assembly", "asm6502": "assembly", "armasm": "assembly",
    "protobuf": "protocol buffer", "lisp": "emacs lisp", "emacs-lisp": "emacs lisp", "common-lisp": "common lisp",
    "rest": "restructuredtext", "rst": "restructuredtext", "latex": "tex", "octave": "matlab",
    "visual-basic": "visual basic", "vb.net": "visual basic", "vim": "vim script", "coffee-script": "coffeescript",
    "pwsh": "powershell", "postgres": "sql", "mysql": "sql", "delphi": "pascal", "systemverilog": "verilog",
    "fortranfixed": "fortran", "splus": "r", "md": "markdown", "terraform": "hcl", "python3": "python",
    "emacs": "emacs lisp", "elisp": "emacs lisp", "visual basic .net": "visual basic",
}  # fmt: skip


_INI = re.compile(r"^\[[^\]\n]+\]\s*$", re.M)
_VISUAL_BASIC = re.compile(
    r"(?i)^[ \t]*(option explicit|attribute vb_|(public|private) (sub|function|const|declare) )", re.M
)


class Sample(NamedTuple):
    language: str
    package: str
    path: str
    text: str


def label(path: str, text: str, languages: frozenset[str]) -> str:
    """Language of a file by its place and name, "" when they don't settle it."""
    pure = PurePosixPath(path)
    parts, name = pure.parts, pure.name.lower()
    for mark in ("examplefiles", "tests/languages", "tests/snippets"):
        found = re.search(rf"(?:^|/){mark}/([^/]+)/", path)
        if found:
            folder = found[1].lower()
            folder = _FOLDERS.get(folder, folder)
            return folder if folder in languages and not name.endswith((".output", ".md")) else ""
    if parts[0] == "samples" and len(parts) > 2:  # Linguist's: a folder for each language
        language = _FOLDERS.get(parts[1].lower(), parts[1].lower())
        return language if language in languages else ""
    if "visual/samples/" in path:  # Rouge's: the file is named after its language
        language = _FOLDERS.get(name, name.replace("_", " "))
        return language if language in languages else ""
    if name in _NAMES or name.startswith("dockerfile"):
        return _NAMES.get(name, "dockerfile")
    extension = name.rpartition(".")[2] if "." in name.lstrip(".") else ""
    if name.startswith("requirements") and extension == "txt":  # a format of its own
        return ""
    if extension in _BY_FORMAT and extension != "cls":
        return "" if _BY_FORMAT[extension] == "ini" and not _INI.search(text) else _BY_FORMAT[extension]
    if extension == "bas" and not _VISUAL_BASIC.search(text):  # some other BASIC
        return ""
    if extension in _EXTRA and _EXTRA[extension]:
        return _EXTRA[extension]
    language = code_lang_names.by_name(name, text)
    if language:
        return language
    language, how = code_lang.label_by_name(path, text)
    if how in ("content", "unknown") and code_lang_names.is_paper(name) and parts[0] != "debian":
        return "text"
    if how in ("folder label", "content", "unknown") or parts[0] == "debian":
        return ""
    return _FOLDERS.get(language, language)


def snippet(path: str, text: str) -> str:
    """The code of a sample file: Prism's tests carry expected tokens after a rule, Pygments' after a heading."""
    if path.endswith(".test") and "tests/languages/" in path:
        return re.split(r"^-{20,}$", text, maxsplit=1, flags=re.M)[0]
    if "tests/snippets/" in path:
        return text.partition("---input---")[2].partition("---tokens---")[0]
    return text


def _usable(text: str) -> bool:
    """Neither too short nor minified, generated in one line or binary."""
    lines = text.splitlines() or [""]
    return len(text.strip()) >= _MIN_CHARS and max(map(len, lines[:50])) < 2000 and text.count("\ufffd") < 3


def package_name(path: Path) -> str:
    """Name of an archive without its version."""
    return re.split(r"[_-]v?\d", path.name.removesuffix(".tar"))[0].lower()


def read_package(path: Path, languages: frozenset[str], per_package: int = _PER_PACKAGE) -> tuple[list[Sample], str]:
    """(samples, licences that its licence files state) of an archive or folder; at most `per_package` samples of a language,
    six times as many where it holds over 40 languages, no repeats."""
    package = package_name(path)
    seen: set[bytes] = set()
    found: dict[str, list[Sample]] = defaultdict(list)
    stated: dict[str, str] = {}
    for name, data in _files(path):
        if licences.is_licence_file(name) and name.count("/") < 2 and len(stated) < 4:
            stated[name] = data.decode("utf-8", "replace")
        text = snippet(name, data[: 4 * MAX_CHARS].decode("utf-8", "replace").replace("\r\n", "\n"))[:MAX_CHARS]
        language = label(name, text, languages) if _usable(text) else ""
        digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        if language in languages and digest not in seen:
            seen.add(digest)
            found[language].append(Sample(language, package, name, text))
    out: list[Sample] = []
    for language in sorted(found):
        samples = sorted(found[language], key=lambda s: hashlib.sha256(s.path.encode()).digest())
        out += samples[: per_package * (6 if len(found) > 40 else 1)]
    return out, " AND ".join(sorted(set(licences.by_folder(stated).values())))


def read_packages(
    paths: Iterable[Path],
    languages: frozenset[str],
    per_package: int = _PER_PACKAGE,
    about: dict[str, dict[str, str]] | None = None,
    workers: int = 1,
) -> Iterator[Sample]:
    """Samples of archives (or of folders, one package each), read by `workers` processes; no text twice.

    `about` gets the sha256 of every archive and the licences that its licence files state, by the archive's name.
    """
    paths = sorted(paths, key=lambda p: p.name)
    reader = partial(read_package, languages=languages, per_package=per_package)
    seen: set[bytes] = set()
    with multiprocessing.get_context("spawn").Pool(workers) if workers > 1 else nullcontext() as pool:
        for path, (samples, licence) in zip(
            paths, pool.imap(reader, paths) if pool else map(reader, paths), strict=True
        ):
            if about is not None:
                of = "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
                package = package_name(path)
                about[path.name] = {"package": package, "sha256": of, "licence": licence}
            for sample in samples:
                digest = hashlib.sha256(sample.text.encode("utf-8", "replace")).digest()
                if digest not in seen:
                    seen.add(digest)
                    yield sample


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file() and not file.is_symlink() and file.stat().st_size < 400_000:
                yield file.relative_to(path).as_posix(), file.read_bytes()
        return
    limits = archives.Limits(member_bytes=400_000)
    for member in archives.read_archive(path, limits=limits):
        if member.data is not None:
            yield member.path, member.data


def without_copies(samples: Iterable[Sample], of: Iterable[Sample]) -> list[Sample]:
    """`samples` but for those equal to one of `of`, or that share half of their lines or of the other's with one.

    Lines under 20 characters and those that more than five of `of` have (licence notices) do not count.
    """
    of = list(of)
    whole = {s.text.strip() for s in of}
    others = [_long_lines(s) for s in of]
    holders: dict[str, list[int]] = defaultdict(list)
    for i, lines in enumerate(others):
        for line in lines:
            holders[line].append(i)
    holders = {line: where for line, where in holders.items() if len(where) <= 5}
    sizes = [sum(line in holders for line in lines) for lines in others]
    kept = []
    for sample in samples:
        if sample.text.strip() in whole:
            continue
        lines = _long_lines(sample)
        shared = Counter(i for line in lines for i in holders.get(line, ()))
        if not any(n >= 2 and 2 * n >= min(sizes[i], len(lines)) for i, n in shared.items()):
            kept.append(sample)
    return kept


def _long_lines(sample: Sample) -> set[str]:
    return {line for line in map(str.strip, sample.text.splitlines()) if len(line) >= 20}


def crops(sample: Sample, count: int, seed: int) -> Iterator[str]:
    """`count` random windows of 3 to 40 lines of a sample: what a small file or a snippet looks like."""
    rng = random.Random(f"{seed} {sample.package} {sample.path}")
    lines = sample.text.splitlines(keepends=True)
    for _ in range(count):
        size = min(len(lines), rng.randint(3, 40))
        start = rng.randint(0, len(lines) - size)
        yield "".join(lines[start : start + size])

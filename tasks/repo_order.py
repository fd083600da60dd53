"""Files of one repository in the order of their imports, and repository-level documents made of them (GLM-4.5 section 2.2).

A file comes after the files of the same repository that it imports, so that a model reads definitions before uses. Imports
are read by pattern for Python, JavaScript/TypeScript, C/C++/Objective-C, Go, Rust, Java/Kotlin/Scala, PHP, Ruby, Lua, Haskell
and Julia, and resolved inside the repository alone; cycles are broken at the file whose path sorts first among those with
the fewest imports left.

Print an order:  python -m tasks.repo_order FOLDER
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

_PYTHON = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#;]+)|import[ \t]+([^\n#;]+))", re.M
)
_SCRIPT = re.compile(r"(?:\bfrom\s*|\bimport\s*\(?\s*|\brequire\s*\(\s*|\bexport\s+\*\s+from\s*)[\"']([^\"'\n]+)[\"']")
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*(?:include|import)[ \t]*[<\"]([^>\"\n]+)[>\"]", re.M)
_GO = re.compile(r"^import\s+(?:\(([^)]*)\)|(?:[\w.]+\s+)?\"([^\"\n]+)\")", re.M)
_RUST_MOD = re.compile(r"^[ \t]*(?:pub(?:\([^)]*\))?\s+)?mod\s+(\w+)\s*;", re.M)
_RUST_USE = re.compile(
    r"^[ \t]*(?:pub(?:\([^)]*\))?\s+)?use\s+((?:crate|self|super)(?:::\w+)*)(?:::\{([^;]*)\})?", re.M
)
_JVM = re.compile(r"^[ \t]*import\s+(?:static\s+)?([\w.]+)", re.M)
_PHP = re.compile(
    r"^[ \t]*use\s+(?:function\s+)?([\w\\]+)|\b(?:require|include)(?:_once)?\b[^;\n]*?[\"']([^\"'\n]+\.php)[\"']", re.M
)
_RUBY = re.compile(r"^[ \t]*(require_relative|require|load)[ (]+[\"']([^\"'\n]+)[\"']", re.M)
_LUA = re.compile(r"\brequire\b\s*\(?\s*[\"']([\w./-]+)[\"']")
_HASKELL = re.compile(r"^import\s+(?:safe\s+)?(?:qualified\s+)?([A-Z][\w.]*)", re.M)
_JULIA = re.compile(r"\binclude\(\s*\"([^\"\n]+)\"")

_SCRIPT_ENDS = ("", ".ts", ".tsx", ".js", ".jsx", ".mjs", ".cjs", ".d.ts", ".vue", ".svelte", "/index.ts", "/index.tsx",
                "/index.js", "/index.mjs")  # fmt: skip


class Tree:
    """The paths of one repository, looked up whole or by their last parts."""

    def __init__(self, paths: Iterable[str]):
        self.paths = frozenset(paths)
        self.by_tail: dict[str, list[str]] = defaultdict(list)
        self.by_folder: dict[str, list[str]] = defaultdict(list)
        for path in sorted(self.paths):
            parts = PurePosixPath(path).parts
            for n in range(len(parts)):
                self.by_tail["/".join(parts[n:])].append(path)
            self.by_folder[posixpath.dirname(path)].append(path)

    def exact(self, path: str) -> list[str]:
        path = posixpath.normpath(path)
        return [path] if path in self.paths else []

    def tail(self, tail: str, near: str = "") -> list[str]:
        """The one path that ends in `tail`; of several the one that shares most with the path `near`, shortest first."""
        found = self.by_tail.get(tail, [])
        if len(found) <= 1:
            return found
        return [min(found, key=lambda p: (-len(posixpath.commonprefix([p, near])), len(p), p))]


def _python(path: str, text: str, tree: Tree) -> Iterable[str]:
    folder = posixpath.dirname(path)

    def module(name: str, base: str | None) -> list[str]:
        inner = name.replace(".", "/")
        for end in (".py", "/__init__.py", ".pyi", ".pyx"):
            if base is None:
                found = tree.tail(inner + end, path) if inner else []
            else:
                found = tree.exact(
                    posixpath.join(base, inner + end) if inner else posixpath.join(base, end.lstrip("/"))
                )
            if found:
                return found
        return []

    for origin, names, plain in _PYTHON.findall(text):
        if plain:
            for name in plain.split(","):
                yield from module(name.split(" as ")[0].strip(), None)
            continue
        dots = len(origin) - len(origin.lstrip("."))
        base = posixpath.normpath(posixpath.join(folder, *[".."] * (dots - 1))) if dots else None
        stem = origin.lstrip(".")
        imported = [n.split(" as ")[0].strip() for n in names.strip("()").replace("\n", ",").split(",")]
        inner = [f for n in imported if n.isidentifier() for f in module(f"{stem}.{n}".strip("."), base)]
        yield from inner or module(stem, base)
        if inner and stem:
            yield from module(stem, base)


def _script(path: str, text: str, tree: Tree) -> Iterable[str]:
    for name in _SCRIPT.findall(text):
        if name.startswith("."):
            whole = posixpath.join(posixpath.dirname(path), name)
            stem = re.sub(r"\.(js|mjs|cjs)$", "", whole)  # TypeScript's sources are imported under their compiled names
            candidates = [whole + end for end in _SCRIPT_ENDS] + [stem + end for end in _SCRIPT_ENDS[1:]]
            yield from next((f for f in map(tree.exact, candidates) if f), [])
        elif name.startswith(("@/", "~/")):
            yield from next((f for f in (tree.tail(name[2:] + end, path) for end in _SCRIPT_ENDS) if f), [])


def _include(path: str, text: str, tree: Tree) -> Iterable[str]:
    for name in _INCLUDE.findall(text):
        yield from tree.exact(posixpath.join(posixpath.dirname(path), name)) or tree.tail(
            posixpath.normpath(name), path
        )


def _go(path: str, text: str, tree: Tree) -> Iterable[str]:
    for block, single in _GO.findall(text):
        for name in re.findall(r"\"([^\"\n]+)\"", block) or [single]:
            parts = name.split("/")
            for n in range(len(parts)):
                folder = "/".join(parts[n:])
                files = [f for f in tree.by_folder.get(folder, []) if f.endswith(".go") and not f.endswith("_test.go")]
                if files and folder != posixpath.dirname(path):
                    yield from files
                    break


def _rust(path: str, text: str, tree: Tree) -> Iterable[str]:
    folder, stem = posixpath.dirname(path), PurePosixPath(path).stem
    inner = folder if stem in ("mod", "lib", "main") else posixpath.join(folder, stem)
    for name in _RUST_MOD.findall(text):
        yield from tree.exact(posixpath.join(inner, f"{name}.rs")) or tree.exact(posixpath.join(inner, name, "mod.rs"))
    root = path.rpartition("src/")[0] + "src" if "src/" in path else folder
    for name, group in _RUST_USE.findall(text):
        parts = name.split("::")
        base = {"crate": root, "self": inner, "super": posixpath.dirname(inner)}[parts[0]]
        tails = (
            [parts[1:]]
            if not group
            else [[*parts[1:], n.strip().split("::")[0].split(" ")[0]] for n in group.split(",")]
        )
        for tail in tails:
            for n in range(len(tail), 0, -1):
                where = posixpath.join(base, *tail[:n])
                found = tree.exact(where + ".rs") or tree.exact(where + "/mod.rs")
                if found:
                    yield from found
                    break


def _jvm(path: str, text: str, tree: Tree) -> Iterable[str]:
    for name in _JVM.findall(text):
        parts = name.split(".")
        for n in range(len(parts), 1, -1):
            inner = "/".join(parts[:n])
            found = next((f for f in (tree.tail(inner + end, path) for end in (".java", ".kt", ".scala")) if f), [])
            if found:
                yield from found
                break


def _php(path: str, text: str, tree: Tree) -> Iterable[str]:
    for used, required in _PHP.findall(text):
        if required:
            yield from tree.exact(posixpath.join(posixpath.dirname(path), required.lstrip("/"))) or tree.tail(
                required.lstrip("/"), path
            )
            continue
        parts = used.strip("\\").split("\\")
        for n in range(min(3, len(parts))):  # the name space's root is seldom a folder
            found = tree.tail("/".join(parts[n:]) + ".php", path)
            if found:
                yield from found
                break


def _ruby(path: str, text: str, tree: Tree) -> Iterable[str]:
    for how, name in _RUBY.findall(text):
        name = name if name.endswith(".rb") else name + ".rb"
        yield from (
            tree.exact(posixpath.join(posixpath.dirname(path), name))
            if how == "require_relative"
            else tree.tail(name, path)
        )


def _lua(path: str, text: str, tree: Tree) -> Iterable[str]:
    for name in _LUA.findall(text):
        inner = name.replace(".", "/")
        yield from tree.tail(inner + ".lua", path) or tree.tail(inner + "/init.lua", path)


def _haskell(path: str, text: str, tree: Tree) -> Iterable[str]:
    for name in _HASKELL.findall(text):
        yield from tree.tail(name.replace(".", "/") + ".hs", path)


def _julia(path: str, text: str, tree: Tree) -> Iterable[str]:
    for name in _JULIA.findall(text):
        yield from tree.exact(posixpath.join(posixpath.dirname(path), name))


_READERS: dict[str, Callable[[str, str, Tree], Iterable[str]]] = {
    "python": _python, "cython": _python, "javascript": _script, "typescript": _script, "vue": _script, "svelte": _script,
    "c": _include, "c++": _include, "objective-c": _include, "objective-c++": _include, "cuda": _include, "go": _go,
    "rust": _rust, "java": _jvm, "kotlin": _jvm, "scala": _jvm, "groovy": _jvm, "php": _php, "ruby": _ruby, "lua": _lua,
    "haskell": _haskell, "julia": _julia,
}  # fmt: skip


def imports(path: str, text: str, language: str, tree: Tree) -> set[str]:
    """Paths of the repository that a file imports, itself left out; empty for languages without a reader."""
    reader = _READERS.get(language)
    return set(reader(path, text, tree)) - {path} if reader else set()


def components(needs: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected groups of {path: imported paths} (Tarjan's algorithm), those that others import first."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    groups: list[list[str]] = []
    for root in sorted(needs):
        if root in number:
            continue
        number[root] = lowest[root] = len(number)
        stack.append(root)
        on_stack.add(root)
        work = [(root, iter(sorted(needs[root])))]
        while work:
            path, rest = work[-1]
            other = next(rest, None)
            if other is None:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[path])
                if lowest[path] == number[path]:
                    at = stack.index(path)
                    groups.append(sorted(stack[at:]))
                    on_stack.difference_update(stack[at:])
                    del stack[at:]
            elif other not in number:
                number[other] = lowest[other] = len(number)
                stack.append(other)
                on_stack.add(other)
                work.append((other, iter(sorted(needs[other]))))
            elif other in on_stack:
                lowest[path] = min(lowest[path], number[other])
    return groups


def order(files: Mapping[str, tuple[str, str]]) -> list[str]:
    """Paths of {path: (text, language)}, imported files first; the same whatever the mapping's order.

    Files come just before the first that needs them. Within a cycle the file with the fewest imports left in it comes next,
    then by path.
    """
    tree = Tree(files)
    needs = {path: imports(path, *files[path], tree) for path in sorted(files)}
    done: list[str] = []
    for group in components(needs):
        left = {path: needs[path].intersection(group) for path in group}
        while left:
            path = min(left, key=lambda p: (len(left[p]), p))
            del left[path]
            done.append(path)
            for wanted in left.values():
                wanted.discard(path)
    return done


def pack(paths: Iterable[str], sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Consecutive groups of at least two ordered paths of at most `limit` characters in all; a longer file stands alone
    and makes no group."""
    groups: list[list[str]] = []
    current: list[str] = []
    used = 0
    for path in [*paths, None]:
        size = sizes[path] if path is not None else limit + 1
        if used + size > limit:
            if len(current) > 1:
                groups.append(current)
            current, used = [], 0
        if path is not None and size <= limit:
            current.append(path)
            used += size
    return groups


def main() -> None:
    from tasks import code_lang

    root = Path(sys.argv[1])
    files = {}
    for file in sorted(p for p in root.rglob("*") if p.is_file()):
        path = file.relative_to(root).as_posix()
        text = file.read_text(encoding="utf-8", errors="replace")
        language = code_lang.detect(path, text)[0]
        if language in _READERS:
            files[path] = (text, language)
    tree = Tree(files)
    for path in order(files):
        print(path, "<-", ", ".join(sorted(imports(path, *files[path], tree))) or "-")


if __name__ == "__main__":
    main()

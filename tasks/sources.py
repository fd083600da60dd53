"""`sources:` of params.yaml: what each entry may say, which files it names, and the units of work they make.

    sources:
      - {name: crawl, type: warc, path: "crawl/*.warc.gz"}
      - {name: notes, type: jsonl, path: "s3://bucket/notes-*.jsonl.zst", columns: {text: body, lang: language}}
      - {name: arcline, type: git, path: ../arcline, ref: main, licence: Apache-2.0}

A unit is a run of whole files of one source, in order; units are read in parallel and put together in order.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter, ValidationError

from tasks.documents import DOMAINS
from tasks.files import canonical_json
from tasks.readers import Limits, Rejected
from tasks.readers_swh import build_index, read_swh
from tasks.readers_table import read_arrow, read_jsonl, read_parquet
from tasks.readers_tree import ARCHIVES, read_git, read_page_file, read_tree_file, resolve_ref, tree_files
from tasks.readers_warc import read_warc_file
from tasks.records import Record
from tasks.remote import InputFile, list_inputs, local_path, open_file, readable_name, scheme

PACKED = ("", ".gz", ".zst")
Kind = Literal["html", "pdf", "code", "text"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Source(_Strict):
    """What every entry may say."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="the records' `source`; unique")
    path: str = Field(min_length=1, description="file, directory or glob; local, http(s):// or s3://")
    licence: str = Field("", description="SPDX expression of records that name none themselves")
    domain: str = Field("", description=f"domain of plain texts: one of {', '.join(DOMAINS)}; empty: the stage decides")
    limit: int | None = Field(None, ge=1, description="read the first records only, this many")
    version: str = Field(
        "", description="any text; change it when the data behind `path` changed, so that they are read anew"
    )
    _scratch: Path = PrivateAttr(Path("."))

    @property
    def scratch(self) -> Path:
        """Where a reader may keep temporary files."""
        return self._scratch


class Warc(Source):
    """WARC or WET files, plain, gzip or zstd."""

    type: Literal["warc", "wet"]


class Columns(_Strict):
    """Which column holds which field of a record; for JSON a dotted name reaches into objects."""

    text: str = Field("text", description="the content: text, or bytes")
    url: str | None = None
    lang: str | None = None
    licence: str | None = None
    charset: str | None = None
    path: str | None = None
    keep: tuple[str, ...] = Field((), description="further columns, kept in the record's meta")

    def get(self, field: str) -> str | None:
        return getattr(self, field, None)


class Table(Source):
    """JSON lines, parquet, or a Hugging Face dataset directory (`save_to_disk`, or a hub repository's files)."""

    type: Literal["jsonl", "parquet", "hf"]
    kind: Kind = "text"
    columns: Columns = Columns()
    split: str = Field("", description="hf: one split; empty: all")


class Files(Source):
    """A directory of HTML or PDF files, or a tree (or archives) of source files."""

    type: Literal["html", "pdf", "tree"]
    kind: Kind | None = Field(None, description="tree: code (the default) or text")  # type: ignore[assignment]
    globs: tuple[str, ...] = ("**",)
    exclude: tuple[str, ...] = ()
    _unpack: bool = PrivateAttr(False)

    @property
    def unpack(self) -> bool:
        """Whether the files are archives to be read; archives inside a tree are not."""
        return self._unpack

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.kind is None:
            object.__setattr__(self, "kind", "code" if self.type == "tree" else self.type)
        elif self.type != "tree" and self.kind != self.type:
            raise ValueError(f"kind: a source of type {self.type} gives records of kind {self.type}, not {self.kind}")


class Git(Source):
    """Bare or normal git repositories on disk: every file at a ref."""

    type: Literal["git"]
    kind: Kind = "code"
    ref: str = Field("HEAD", description="branch, tag or commit")
    globs: tuple[str, ...] = ("**",)
    exclude: tuple[str, ...] = ()


class SwhColumns(_Strict):
    """Columns of the content table."""

    key: str
    text: str = "content"


class SwhMetadata(_Strict):
    """The metadata table: where it is, its key column, and which of its columns hold a record's fields."""

    path: str = Field(min_length=1)
    key: str
    columns: Columns = Columns()


class Swh(Source):
    """A Software Heritage-style export: content table and metadata table, parquet or JSON lines."""

    type: Literal["swh"]
    kind: Kind = "code"
    columns: SwhColumns
    metadata: SwhMetadata
    _index: str = PrivateAttr("")

    @property
    def index(self) -> str:
        return self._index


AnySource = Annotated[Warc | Table | Files | Git | Swh, Field(discriminator="type")]
_ADAPTER: TypeAdapter = TypeAdapter(AnySource)
_SUFFIXES = {
    "warc": (".warc", ".arc"),
    "wet": (".wet", ".warc"),
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet", ".pq"),
    "html": (".html", ".htm", ".xhtml"),
    "pdf": (".pdf",),
    "hf": tuple(s + p for s in (".jsonl", ".json") for p in PACKED) + (".parquet", ".arrow"),
}


def parse_sources(entries: Any) -> list[Source]:
    """The entries of `sources:`; ValueError names each wrong entry, key and value."""
    if not isinstance(entries, list):
        raise ValueError(f"params.yaml: sources: expected a list of entries, found {type(entries).__name__}")
    found, wrong, names = [], [], set()
    for number, entry in enumerate(entries):
        name = entry.get("name", "?") if isinstance(entry, dict) else "?"
        place = f"  params.yaml: sources[{number}] ({name})"
        try:
            source = _ADAPTER.validate_json(json.dumps(entry))
        except ValidationError as error:
            for problem in error.errors():
                keys = ".".join(map(str, problem["loc"][1:] if problem["loc"] else ()))
                said = "unknown key" if problem["type"] == "extra_forbidden" else problem["msg"]
                kind = f" for type {entry['type']}" if said == "unknown key" else ""
                wrong.append(f"{place}: {keys or 'entry'}: {said}{kind} (found {problem['input']!r:.120})")
            continue
        if source.domain and source.domain not in DOMAINS:
            wrong.append(f"{place}: domain: {source.domain!r} is not one of {', '.join(DOMAINS)}")
        if source.name in names:
            wrong.append(f"{place}: name: given twice")
        if isinstance(source, Table) and source.split and source.type != "hf":
            wrong.append(f"{place}: split: only a source of type hf has splits")
        names.add(source.name)
        found.append(source)
    if wrong:
        raise ValueError("the entries of sources: do not fit\n" + "\n".join(wrong))
    return found


# ---- files and units ---------------------------------------------------------------------------------------------


def list_files(source: Source) -> list[InputFile]:
    """The files of a source, sorted by name; ValueError names source and key when there are none."""
    try:
        if isinstance(source, Git):
            return _repositories(source)
        if source.type == "hf":
            return _dataset_files(source)
        suffixes = tuple(s + p for s in _SUFFIXES.get(source.type, ()) for p in PACKED)
        files = list_inputs(source.path, suffixes)
    except (FileNotFoundError, PermissionError) as error:
        raise ValueError(f"source {source.name!r}: path: {error}") from None
    except ValueError as error:
        place = f"source {source.name!r}: "
        raise ValueError(f"{place}{str(error).removeprefix(place)}") from None
    if isinstance(source, Files):
        source._unpack = source.type == "tree" and all(f.name.lower().endswith(ARCHIVES) for f in files)
        files = tree_files(files, source) if source.type == "tree" and not source.unpack else files
        if not files:
            raise ValueError(f"source {source.name!r}: globs: {list(source.globs)} match no file below {source.path}")
    return files


def _repositories(source: Git) -> list[InputFile]:
    if scheme(source.path):
        raise ValueError(f"{source.path}: a git repository must be on disk; clone it first (git clone --bare)")
    import glob

    paths = sorted(glob.glob(str(local_path(source.path))))
    paths = [p for p in paths if Path(p).is_dir()]
    if not paths:
        raise FileNotFoundError(f"{source.path}: no directory there")
    found, wrong = [], []
    for path in paths:
        real = Path(path).resolve()
        name = readable_name((real.parent if real.name == ".git" else real).name.removesuffix(".git"))
        try:
            found.append(InputFile(path, name, version=resolve_ref(source, Path(path))))
        except ValueError as error:  # of many repositories, one without commits must not stop the others
            wrong.append(error)
            found.append(InputFile(path, name, refused=f"no_such_commit: {error}"))
    if len(wrong) == len(found):
        raise wrong[0]
    return found


def _dataset_files(source: Table) -> list[InputFile]:
    """The data files of a Hugging Face dataset directory: those that `state.json` lists, else all of the hub's layout."""
    if scheme(source.path):
        return _of_split([f for f in list_inputs(source.path) if _is_data(f)], source)
    root = local_path(source.path)
    if not root.is_dir():
        raise FileNotFoundError(f"{source.path}: no directory there")
    files = {f.name: f for f in list_inputs(source.path)}
    states = sorted(n for n in files if n.rpartition("/")[2] == "state.json")
    if not states:
        return _of_split(_links_within([f for f in files.values() if _is_data(f)], root), source)
    found = []
    for state in states:
        folder = state.rpartition("/")[0]
        if source.split and folder.rpartition("/")[2] != source.split:
            continue
        with open_file(files[state].address) as stream:
            listed = json.loads(stream.read(1 << 24)).get("_data_files", [])
        for entry in listed:
            name = f"{folder}/{entry['filename']}" if folder else entry["filename"]
            if name not in files or files[name].refused:
                raise ValueError(f"path: {state} lists {entry['filename']!r}, which is no file of the dataset")
            found.append(files[name])
    if not found:
        raise ValueError(
            f"split: no split {source.split!r}; there are {', '.join(s.rpartition('/')[0] for s in states)}"
        )
    return found


def _is_data(file: InputFile) -> bool:
    if not file.name.endswith(_SUFFIXES["hf"]) or "/." in f"/{file.name}":
        return False
    return not re.search(r"(^|/)(dataset_infos?|dataset_dict|state|README).*\.json$", file.name)


def _links_within(files: list[InputFile], root: Path) -> list[InputFile]:
    """Links that stay inside the directory are files, as in the hub's cache; the others stay refused."""
    real, out = root.resolve(), []
    for file in files:
        target = Path(file.address).resolve()
        if file.refused and target.is_relative_to(real) and target.is_file():
            state = target.stat()
            file = InputFile(str(target), file.name, state.st_size, str(state.st_mtime_ns))
        out.append(file)
    return out


def _of_split(files: list[InputFile], source: Table) -> list[InputFile]:
    if not files:
        raise ValueError(f"path: {source.path}: no data file of a dataset there ({' '.join(_SUFFIXES['hf'])})")
    if not source.split:
        return files
    split = re.escape(source.split)
    kept = [f for f in files if re.search(rf"(^|/){split}(/|[-.][^/]*$|$)", f.name)]
    if not kept:
        raise ValueError(f"split: no file of split {source.split!r} among {', '.join(f.name for f in files[:10])}")
    return kept


@dataclass(frozen=True)
class Unit:
    """Consecutive whole files of one source; `identity` changes with anything that shapes its records."""

    source: Source
    files: tuple[InputFile, ...]
    identity: str


def plan_units(sources: list[Source], unit_bytes: int) -> list[Unit]:
    """Units of about `unit_bytes`, in order. A source with a limit is one unit, as are the files of one repository."""
    units = []
    for source in sources:
        groups: list[list[InputFile]] = [[]]
        size = 0
        for file in list_files(source):
            if groups[-1] and source.limit is None and (isinstance(source, Git) or size >= unit_bytes):
                groups.append([])
                size = 0
            groups[-1].append(file)
            size += max(file.size, 1 << 12)
        for group in groups:
            about = [source.model_dump(mode="json"), [[f.name, f.size, f.version, f.refused] for f in group]]
            identity = hashlib.sha256(canonical_json(about).encode("utf-8", "surrogateescape")).hexdigest()[:24]
            units.append(Unit(source, tuple(group), identity))
    return units


def prepare(sources: list[Source], scratch: Path, limits: Limits) -> Iterator[tuple[Source, list[Rejected]]]:
    """What a source needs before its units are read: the index over an export's metadata table."""
    for source in sources:
        source._scratch = scratch
        if isinstance(source, Swh):
            files = list_inputs(source.metadata.path, tuple(s + p for s in (".parquet", ".jsonl") for p in PACKED))
            about = canonical_json(
                [source.metadata.model_dump(mode="json"), [[f.name, f.size, f.version] for f in files]]
            )
            source._index = hashlib.sha256(about.encode()).hexdigest()[:24]
            bad_path = scratch / f"{source.index}.rejects.json"
            if not bad_path.is_file():
                bad = build_index(files, source, limits, scratch / f"{source.index}.sqlite")
                bad_path.write_text(json.dumps([[b.file, b.record, b.reason, b.detail] for b in bad]))
            yield source, [Rejected(*row) for row in json.loads(bad_path.read_text())]


def _reader(source: Source, file: InputFile) -> Callable[..., Iterator[Record | Rejected]]:
    if isinstance(source, Warc):
        return read_warc_file
    if isinstance(source, Git):
        return read_git
    if isinstance(source, Swh):
        return read_swh
    if isinstance(source, Files):
        return read_tree_file if source.type == "tree" else read_page_file
    if source.type == "hf":
        return (
            read_parquet
            if file.name.endswith(".parquet")
            else read_arrow
            if file.name.endswith(".arrow")
            else read_jsonl
        )
    return read_parquet if source.type == "parquet" else read_jsonl


def read_unit(unit: Unit, limits: Limits) -> Iterator[Record | Rejected]:
    """Every record and reject of a unit, in order; the same each time."""
    left = unit.source.limit
    for file in unit.files:
        if file.refused and not isinstance(unit.source, Files):
            reason, _, detail = file.refused.partition(": ")
            yield Rejected(file.name, file.name, reason, detail or "links are not followed")
            continue
        if file.size == 0 and not isinstance(unit.source, (Files, Git)):
            yield Rejected(file.name, "", "empty_file", "zero bytes")
            continue
        for found in _reader(unit.source, file)(file, unit.source, limits):
            yield found
            if left is not None and isinstance(found, Record):
                left -= 1
                if not left:
                    return

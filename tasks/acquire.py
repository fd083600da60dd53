"""Stage acquire: fetch the pinned corpus, unpack it safely, write its pages as WARC and everything else as files.

    dvc repro acquire        (or, for debugging: python -m tasks acquire)

Reads conf/corpus.yaml. Writes data/acquire: warc/part-*.warc.gz (all HTML), files/<item>/<path> (code, text, TeX, PDF,
...; several versions of a project as files/<item>-<version>/), models/, items.json (what was had, from which version and
hash, and what was not) and index.parquet (one row per file: item, version, path, member, kind, domain, use, licence,
licence_file, bytes, sha256, url; `path` is relative to data/acquire, for pages the WARC file that holds them).
Downloads are kept in work/cache (or $ARCLINE_CACHE) by hash, so a second run and an offline run fetch nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import pyarrow as pa
from pydantic import Field

from tasks.archives import TAR_SUFFIXES, ArchiveError, Limits, Member, matches, read_archive
from tasks.corpus import Corpus, Item, choose, load_corpus
from tasks.documents import write_table
from tasks.fetch import Fetched, Fetcher, Wanted
from tasks.stage import Stage, StageConfig
from tasks.warc import WarcWriter

LICENCE = re.compile(r"(licen[cs]e|copying|copyright|notice)([.\-_][\w.\-]*)?", re.IGNORECASE)
LICENCE_GLOBS = (
    "**/[lL][iI][cC][eE][nN][cCsS][eE]*",
    "**/[cC][oO][pP][yY][iI][nN][gG]*",
    "**/[cC]opyright",
    "**/NOTICE*",
)
ARCHIVES = (".whl", ".zip", ".deb", *TAR_SUFFIXES)
COLUMNS = ("item", "version", "path", "member", "kind", "domain", "use", "licence", "licence_file")
INDEX_SCHEMA = pa.schema(
    [(c, pa.string()) for c in COLUMNS] + [("bytes", pa.int64())] + [("sha256", pa.string()), ("url", pa.string())]
)


class Config(StageConfig):
    """Parameters of the stage."""

    sets: dict[str, bool | Literal["auto"]] = Field(
        description="set name -> true (must be had), auto (had where its registry's program and the network allow), false"
    )
    without: tuple[str, ...] = Field((), description="item names to leave out of the chosen sets")
    workers: int = Field(8, ge=1, description="concurrent downloads")
    member_mb: int = Field(64, ge=1, description="largest file taken out of an archive, MB")
    archive_mb: int = Field(1024, ge=1, description="largest decompressed size of an archive, MB")
    warc_shard_mb: int = Field(24, ge=1, description="page bytes per WARC file, MB, before compression")


def cache_dir(root: Path) -> Path:
    """Where downloads are kept: $ARCLINE_CACHE, else work/cache of this checkout. Not part of a result's identity."""
    return Path(os.environ.get("ARCLINE_CACHE") or root / "work" / "cache")


def run(stage: Stage) -> None:
    config: Config = stage.config
    corpus = load_corpus(stage.dep("conf/corpus.yaml"))
    if unknown := set(config.without) - {item.name for item in corpus.items}:
        raise ValueError(f"acquire.without: the corpus list has no item {', '.join(sorted(unknown))}")
    chosen = [(item, required) for item, required in choose(corpus, config.sets) if item.name not in config.without]
    out = stage.out("data/acquire")
    fetched = _fetch(stage, chosen)
    writer = _Writer(stage, corpus, out)
    for item, folder, _, file in stage.progress(fetched, label="unpacked"):
        writer.unpack(item, folder, file)
    writer.close()
    _report(stage, writer, chosen, fetched)


def _fetch(stage: Stage, chosen: list[tuple[Item, bool]]) -> list[tuple[Item, str, Wanted, Fetched]]:
    """Everything that could be had, in the list's order. ValueError lists each required file that could not."""
    wanted = [(item, required, folder, w) for item, required in chosen for folder, w in item.wanted().items()]
    fetcher = Fetcher(cache_dir(stage.root), stage.print, stage.config.workers, stage.root)
    results = fetcher.fetch_all(dict.fromkeys(w for *_, w in wanted))
    failed = [(required, results[w]) for _, required, _, w in wanted if not isinstance(results[w], Fetched)]
    for required, error in failed:
        if not required:
            stage.print(f"left out: {error}")
    if errors := [str(error) for required, error in failed if required]:
        raise ValueError(f"{len(errors)} required file(s) of the corpus could not be had:\n  " + "\n  ".join(errors))
    return [(item, folder, w, results[w]) for item, _, folder, w in wanted if isinstance(results[w], Fetched)]


class _Writer:
    """Lays the members of archives out below `out` and collects the index."""

    def __init__(self, stage: Stage, corpus: Corpus, out: Path):
        self.stage, self.corpus, self.out = stage, corpus, out
        config: Config = stage.config
        self.limits = Limits(config.member_mb << 20, config.archive_mb << 20)
        self.warc = WarcWriter(out / "warc", corpus.date, config.warc_shard_mb << 20)
        self.index: list[dict[str, Any]] = []
        self.models: list[str] = []

    def unpack(self, item: Item, folder: str, file: Fetched) -> None:
        """Read one archive. A whole archive that cannot be read, or a member that is unsafe, is a rejected record."""
        if item.registry == "local" and not file.path.name.endswith(ARCHIVES):
            self.index.append(self._single(item, folder, file))
            return
        models = {m.path: m for m in self.corpus.models if m.item == item.name}
        extra = (*LICENCE_GLOBS, *((item.url_index,) if item.url_index else ()))
        names, pages, rows = [], [], []
        strip = not file.path.name.endswith((".whl", ".zip", ".deb"))
        try:
            for member in read_archive(file.path, (*item.globs, *extra, *models), (), self.limits, strip):
                is_licence = LICENCE.fullmatch(member.path.rpartition("/")[2]) is not None
                names += [member.path] if is_licence and member.data else []
                plain = matches(member.path, item.globs, item.excludes)
                model = models.get(member.path)
                index = member.path == item.url_index
                if not (is_licence or plain or model or index or member.refused == "unsafe path"):
                    continue
                self.stage.seen()
                if member.data is None:
                    self.stage.reject(f"{folder}/{member.path}", f"archive_member_{member.refused.replace(' ', '_')}")
                elif model:
                    self._model(model, member.data)
                elif index:
                    pages.append(member)
                elif plain and item.kind_of(member.path) == "html":
                    pages.append(member)
                elif plain or "/" not in member.path or item.registry == "apt" or ".dist-info/" in member.path:
                    rows.append(self._file(item, folder, file, member, "licence" if not plain else ""))
        except ArchiveError as error:
            self.stage.seen()
            self.stage.reject(folder, "archive_unreadable", str(error))
        rows += self._pages(item, file, pages)
        for row in rows:
            row["licence_file"] = nearest_licence(row["member"], names)
        self.index += rows

    def _single(self, item: Item, folder: str, file: Fetched) -> dict[str, Any]:
        """A local file that is no archive: a WARC as it is, a page into our WARC, anything else below files/."""
        name, url = file.path.name, f"local:{item.name}/{file.path.name}"
        self.stage.seen()
        if re.search(r"\.warc(\.gz)?$", name):
            shutil.copyfile(file.path, self.out / "warc" / f"{folder}-{name}")
            member = Member(name, file.path.read_bytes())
            row = self._row(item, file, member, f"warc/{folder}-{name}", "warc", url)
        elif item.kind_of(name) == "html":
            row = self._pages(item, file, [Member(name, file.path.read_bytes())])[0]
        else:
            row = self._file(item, folder, file, Member(name, file.path.read_bytes()), "")
        return row | {"licence_file": ""}

    def _row(self, item: Item, file: Fetched, member: Member, path: str, kind: str, url: str) -> dict[str, Any]:
        row = {"item": item.name, "version": file.version, "path": path, "member": member.path, "kind": kind}
        row |= {"domain": item.domain, "use": item.use, "licence": item.licence, "bytes": len(member.data)}
        return row | {"sha256": hashlib.sha256(member.data).hexdigest(), "url": url}

    @staticmethod
    def _package_url(item: Item, file: Fetched, member: str) -> str:
        return quote(f"package:{item.registry}/{item.package or item.name}/{file.version}/{member}", safe="/:@")

    def _file(self, item: Item, folder: str, file: Fetched, member: Member, kind: str) -> dict[str, Any]:
        path = f"files/{folder}/{member.path}"
        target = self.out / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(member.data)
        kind = kind or item.kind_of(member.path)
        return self._row(item, file, member, path, kind, self._package_url(item, file, member.path))

    def _pages(self, item: Item, file: Fetched, members: list[Member]) -> list[dict[str, Any]]:
        """Pages into the WARC, under their real addresses and with their labels where the package tells them."""
        known: Mapping[str, Any] = {}
        if item.url_index:
            found = [m for m in members if m.path == item.url_index]
            members = [m for m in members if m.path != item.url_index]
            known = json.loads(found[0].data) if found else {}
        base = item.url_index.rpartition("/")[0] + "/" if "/" in item.url_index else ""
        package = f"{item.registry}/{item.package or item.name}/{file.version}"
        rows = []
        for member in sorted(members, key=lambda m: m.path):
            entry = known.get(member.path.removeprefix(base), {})
            url = entry.get("url") or self._package_url(item, file, member.path)
            label = "forms=" + ",".join(sorted(set(entry["forms"]))) if entry.get("forms") else ""
            shard = self.warc.write_page(url, member.data, package, label)
            rows.append(self._row(item, file, member, f"warc/{shard.name}", "html", url))
        return rows

    def _model(self, model: Any, data: bytes) -> None:
        digest = hashlib.sha256(data).hexdigest()
        if model.sha256 and digest != model.sha256:
            raise ValueError(
                f"corpus list: models: {model.target} of item {model.item} has sha256 {digest}, expected {model.sha256}"
            )
        target = self.out / "models" / model.target
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        self.models.append(model.target)

    def close(self) -> None:
        self.warc.close()
        columns = INDEX_SCHEMA.names
        self.index.sort(key=lambda row: (row["item"], row["version"], row["member"]))
        rows = [{c: row[c] for c in columns} for row in self.index]
        write_table(self.out / "index.parquet", pa.Table.from_pylist(rows, schema=INDEX_SCHEMA))


def nearest_licence(member: str, licence_files: list[str]) -> str:
    """The licence file of the closest enclosing directory, else any at the top or in a wheel's metadata, else ""."""
    folder = member
    by_folder: dict[str, list[str]] = {}
    for name in licence_files:
        by_folder.setdefault(name.rpartition("/")[0], []).append(name)
    while "/" in folder:
        folder = folder.rpartition("/")[0]
        if folder in by_folder:
            return min(by_folder[folder])
    if "" in by_folder:
        return min(by_folder[""])
    rest = [n for n in licence_files if ".dist-info/" in n or n.startswith("usr/share/doc/")]
    return min(rest, default="")


def _report(stage: Stage, writer: _Writer, chosen: list, fetched: list) -> None:
    had = Counter(item.name for item, *_ in fetched)
    items = [
        {"item": item.name, "set": item.set, "registry": item.registry, "domain": item.domain, "licence": item.licence}
        | {
            "files": [
                {"file": f.path.name, "version": f.version, "sha256": f.sha256} for i, _, _, f in fetched if i is item
            ]
        }
        | {"state": "had" if had[item.name] == len(item.wanted()) else "partly had" if had[item.name] else "not had"}
        for item, _ in chosen
    ]
    used = {name: any(e["set"] == name and e["files"] for e in items) for name in stage.config.sets}
    sets = {name: {"asked": value, "used": used[name]} for name, value in sorted(stage.config.sets.items())}
    programs = {name: shutil.which(name) is not None for name in ("npm", "apt-get", "dpkg-deb")}
    text = json.dumps(
        {"sets": sets, "programs": programs, "items": items}, indent=1, sort_keys=True, ensure_ascii=False
    )
    (writer.out / "items.json").write_text(text + "\n", encoding="utf-8")
    kinds, domains, size = Counter(), Counter(), Counter()
    for row in writer.index:
        kinds[row["kind"]] += 1
        domains[row["domain"]] += 1
        size[row["domain"]] += row["bytes"]
    downloaded = sum({f.sha256: f.path.stat().st_size for *_, f in fetched}.values())
    stage.metric(
        files=dict(sorted(kinds.items())),
        megabytes={name: round(n / 1e6, 2) for name, n in sorted(size.items())},
        download_megabytes=round(downloaded / 1e6, 2),
        items={"asked": len(chosen), "had": sum(e["state"] == "had" for e in items)},
        without_licence_file=sum(not row["licence_file"] for row in writer.index),
    )
    stage.rows(files=len(writer.index), pages=kinds["html"], items=len(had), models=len(writer.models))
    stage.rows(**{f"set:{name}": int(value) for name, value in used.items()})
    stage.print(
        f"{len(had)} items, {downloaded / 1e6:.0f} MB of archives, {len(writer.index)} files: {dict(domains.most_common())}"
    )

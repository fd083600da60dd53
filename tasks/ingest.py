"""Stage ingest: the user's own data, as `sources:` of params.yaml lists it, to records of one shape.

    dvc repro ingest            (or, for debugging: python -m tasks ingest)

Writes records/ (tasks/records.py), which web, code and math read beside data/acquire; rejects/ (what could not be read, with
file, record and reason) and skipped/ (what is no fault but no record either: pictures in a source tree, links, submodules,
pages of other types). An empty list gives an empty table. Files are read in units, several at a time; a unit's place is
written down with each shard, and a killed run goes on from there: no record is lost or doubled.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field

from tasks import storage
from tasks.files import atomic_write
from tasks.mapshuffle import EngineConfig, open_engine
from tasks.readers import Limits, Rejected
from tasks.records import RecordWriter
from tasks.sources import Unit, parse_sources, plan_units, prepare, read_unit
from tasks.stage import Stage


class Config(EngineConfig):
    """Parameters of the stage."""

    max_record_mb: float = Field(32.0, gt=0, le=1024, description="a larger page, file or text is rejected")
    max_expansion: float = Field(
        200.0, gt=1, description="decompressed bytes per compressed one of a file, beyond 64 MB"
    )
    shard_mb: float = Field(
        128.0, gt=0, le=1024, description="content per shard of records, and input per unit of work"
    )


def read_into(task: tuple[Unit, str, Limits, int, str]) -> dict[str, Any]:
    """Read a unit into shards below a folder, going on where its journal ends; returns the journal.

    Each shard goes to the object store `prefix` when there is one, and its place in the folder is a pointer.
    """
    unit, name, limits, shard_bytes, prefix = task
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / "journal.json"
    state = {"found": 0, "shards": 0, "reject_bytes": 0, "records": 0, "bytes": 0, "kinds": {}}
    if journal.is_file():
        state = json.loads(journal.read_text())
    for shard in folder.glob("part-*.parquet"):
        if int(shard.stem[5:]) >= state["shards"]:
            shard.unlink()
    kinds = Counter(state["kinds"])
    with open(folder / "rejects.jsonl", "ab") as rejects:
        rejects.truncate(state["reject_bytes"])
        rejects.seek(0, os.SEEK_END)
        writer = RecordWriter(folder, shard_bytes, first=state["shards"])

        def save() -> None:
            if state["shards"] < writer.shards:
                shard = folder / f"part-{writer.shards - 1:05d}.parquet"
                storage.put(shard, prefix) if prefix else _sync(shard)
            rejects.flush()
            os.fsync(rejects.fileno())
            state.update(shards=writer.shards, reject_bytes=rejects.tell(), kinds=dict(sorted(kinds.items())))
            atomic_write(journal, json.dumps(state))

        for found in itertools.islice(read_unit(unit, limits), state["found"], None):
            state["found"] += 1
            if isinstance(found, Rejected):
                rejects.write(_reject_line(unit.source.name, found))
                continue
            kinds[found.kind] += 1
            state["records"] += 1
            state["bytes"] += len(found.content)
            if writer.add(found):
                save()
        writer.close_shard()
        save()
    return state


def _sync(path: Path) -> None:
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())


def _reject_line(source: str, found: Rejected) -> bytes:
    line = {"id": f"{source}:{found.file}:{found.record}", "reason": found.reason, "detail": found.detail[:2000]}
    return json.dumps(line | {"expected": found.expected}, ensure_ascii=True).encode() + b"\n"


def run(stage: Stage) -> None:
    config: Config = stage.config
    limits = Limits(int(config.max_record_mb * (1 << 20)), config.max_expansion)
    shard_bytes = int(config.shard_mb * (1 << 20))
    sources = parse_sources(stage.params["sources"])
    scratch = stage.scratch
    numbers: dict[str, Counter] = {s.name: Counter() for s in sources}
    kinds: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    out = stage.out("data/ingest")
    for source, bad in prepare(sources, scratch, limits):
        stage.seen(len(bad))
        for found in bad:
            stage.reject(f"{source.name}:{found.file}:{found.record}", found.reason, found.detail)
    units = plan_units(sources, shard_bytes)
    if units:
        size = sum(max(0, f.size) for u in units for f in u.files)
        stage.print(f"{len(sources)} sources, {sum(len(u.files) for u in units)} files, {size / 1e6:.1f} MB")
    prefix = storage.prefix_of(out)
    tasks = {u.identity: (u, str(scratch / u.identity), limits, shard_bytes, prefix) for u in units}
    with open_engine(config) as engine:
        journals = engine.map(read_into, tasks, scratch / "units")
        shards = _collect(stage, units, stage.progress(journals, len(units), "units"), numbers, kinds, skipped)
    RecordWriter(out / "records", first=shards).close()  # an empty shard when there is no record at all
    total = sum(n["records"] for n in numbers.values())
    stage.metric(
        records=total,
        kinds=dict(sorted(kinds.items())),
        sources={name: dict(sorted(n.items())) for name, n in sorted(numbers.items())},
        skipped=dict(sorted(skipped.items())),
    )
    stage.rows(records=total, skipped=skipped.total())
    stage.print(f"{total} records {dict(sorted(kinds.items()))}, {skipped.total()} files skipped")


def _collect(
    stage: Stage,
    units: list[Unit],
    journals: Iterable[dict[str, Any]],
    numbers: dict[str, Counter],
    kinds: Counter,
    skipped: Counter,
) -> int:
    """Put the units together in order; the number of shards."""
    out, shards = stage.out("data/ingest"), 0
    (out / "records").mkdir()
    (out / "skipped").mkdir()
    with open(out / "skipped" / "part-00000.jsonl", "w", encoding="utf-8") as skips:
        for unit, state in zip(units, journals):
            folder = stage.scratch / unit.identity
            for number in range(state["shards"]):
                _link(folder / f"part-{number:05d}.parquet", out / "records" / f"part-{shards:05d}.parquet")
                shards += 1
            numbers[unit.source.name].update({k: state[k] for k in ("records", "bytes")})
            kinds.update(state["kinds"])
            stage.seen(state["records"])
            for line in (folder / "rejects.jsonl").read_text().splitlines():
                found = json.loads(line)
                if found.pop("expected"):
                    skips.write(json.dumps(found, ensure_ascii=True) + "\n")
                    skipped[found["reason"]] += 1
                else:
                    stage.seen()
                    stage.reject(found["id"], found["reason"], found["detail"])
                    numbers[unit.source.name]["rejected"] += 1
    return shards


def _link(old: Path, new: Path) -> None:
    """A second name for a shard, as the first must outlive a kill before the outputs have taken their place."""
    try:
        os.link(old, new)
    except OSError:  # another file system, or one without links
        import shutil

        shutil.copyfile(old, new)

"""How cost grows with the number of documents: the dedup stage, and the web path from page to filtered, scored document.

    python -m tests.bench.growth                                      # what make bench prints: dedup 10k and 100k, web 500 and 2k
    python -m tests.bench.growth dedup --sizes 10000 100000 1000000   # the million: 2 GB of text, 5 GB of disk
    python -m tests.bench.growth dedup --kind copies --sizes 100000 1000000   # half of all documents repeat another
    python -m tests.bench.growth dedup --templates                    # with SemDedup (needs data/acquire's embedding model)
    python -m tests.bench.growth web --sizes 10000 100000             # the web path does about a hundred pages a second and core

Real documents, and from the second round on perturbed ones (tests/bench/dedup.py's 300-word chunks with fifteen words in a
hundred changed; pages of data/acquire with a word in eight changed between their tags). `copies` has 40 random words a
document, each twice, with a word or white space added. A stage runs as a user runs it, from parquet to parquet, in processes
of its own. documents/s and MB/s are per core: divided by CPU seconds of all processes; MB are those of the input's text.
`marginal` is what the documents beyond the size before cost, so without the start of processes and the training of
classifiers, which every run pays once. Memory is the highest sum over the stage's processes: `own` is what they
allocated, `with files` counts mapped files and shared libraries too, once for each process. `bytes a document` is the
growth of `own` since the size before.

A million pages through the web path have not been run (some three hours of one core): the path works unit by unit, so its
cost is linear in them, and the marginal figure is what to multiply.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks import documents
from tasks.params import ROOT, load_params
from tasks.records import Record, record_id, write_records
from tasks.warc import Page, read_warc
from tests.bench import dedup

STAGE = """
import json, resource, sys, time
from pathlib import Path
from tasks.spec import stage_module
from tasks.stage import run_stage_for_test
if __name__ == "__main__":
    name, tmp, config, deps = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
    began, deps = time.monotonic(), {key: Path(path) for key, path in deps.items()}
    run_stage_for_test(stage_module(name), config, deps=deps, outs=[f"data/{name}"], tmp=tmp)
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps({"cpu": sum(u.ru_utime + u.ru_stime for u in usage), "wall": time.monotonic() - began}))
"""


def tree_memory(pid: int) -> tuple[int, int]:
    """(bytes allocated, resident bytes) of a process and all below it, summed; 0 for one that has ended."""
    own = resident = 0
    try:
        with open(f"/proc/{pid}/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        own, resident = (int(fields[name].split()[0]) << 10 for name in ("RssAnon", "VmRSS"))
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as children:
                for child in children.read().split():
                    more = tree_memory(int(child))
                    own, resident = own + more[0], resident + more[1]
    except (OSError, KeyError):  # it ended meanwhile
        pass
    return own, resident


def measure(stage: str, tmp: Path, config: dict, deps: dict[str, Path]) -> dict[str, float]:
    """Run a stage in a process of its own; its cpu and wall seconds, and peak memory: own and resident bytes of the tree."""
    (tmp / "stage.py").write_text(STAGE)
    paths = json.dumps({name: str(path) for name, path in deps.items()})
    command = [sys.executable, str(tmp / "stage.py"), stage, str(tmp), json.dumps(config), paths]
    peak = (0, 0)
    with (
        open(tmp / "log", "w+") as log,
        subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=log) as running,
    ):
        while running.poll() is None:
            peak = tuple(map(max, peak, tree_memory(running.pid)))
            time.sleep(0.02)
        log.seek(0)
        lines = log.read().splitlines()
    if running.returncode:
        raise SystemExit(f"bench growth: stage {stage} failed: {lines[-1:]}")
    return json.loads(lines[-1]) | {"own": peak[0], "resident": peak[1]}


def table(stage: str, sizes: list[int], run: Callable[[int, Path], tuple[dict, float, str]]) -> None:
    """`run(size, folder)` gives (measured, megabytes, remark) for each size; print a line for each."""
    before: tuple[int, float, dict] | None = None
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="growth-") as tmp:
            cost, megabytes, remark = run(size, Path(tmp))
        line = (
            f"  {size:8} {megabytes:7.1f} MB  {size / cost['cpu']:7.0f} documents/s {megabytes / cost['cpu']:6.2f} MB/s"
        )
        line += f"  wall {cost['wall']:4.0f} s  memory {cost['own'] / 1e6:5.0f} MB own, {cost['resident'] / 1e6:5.0f} with files"
        if before:
            count, size_mb, old = size - before[0], megabytes - before[1], before[2]
            cpu = max(1e-9, cost["cpu"] - old["cpu"])
            line += f"  marginal {count / cpu:.0f} documents/s, {size_mb / cpu:.2f} MB/s, "
            line += f"{(cost['own'] - old['own']) / count:.0f} bytes a document"
        print(f"{line}; {remark}", flush=True)
        before = size, megabytes, cost


# ---- dedup -------------------------------------------------------------------------------------------------------


def copies(count: int) -> Iterator[str]:
    """`count` texts of 40 random words, every second one a near or a trivial copy of the one before."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randrange(3, 9))) for _ in range(20_000)]
    for number in range(count // 2):
        text = " ".join(rng.choices(words, k=40))
        yield text
        yield text + (" end" if number % 2 else "  ")


def dedup_stage(kind: str, workers: int, templates: bool) -> Callable[[int, Path], tuple[dict, float, str]]:
    def run(size: int, tmp: Path) -> tuple[dict, float, str]:
        texts = copies(size) if kind == "copies" else dedup.stream(size)
        rows = (documents.document(text, f"bench/{i}", "web") for i, text in enumerate(texts))
        written = documents.write_documents(tmp / "in", rows)
        deps, config = {"data/web": tmp / "in"}, {"workers": workers}
        if templates:
            deps["data/acquire"], config["semdedup"] = ROOT / "data/acquire", {}
        cost = measure("dedup", tmp, config, deps)
        found = json.loads((tmp / "metrics/dedup.json").read_text())
        remark = f"{sum(found['removed'].values())} removed, {found['near_pairs']['compared']} pairs compared"
        return cost, written["bytes"] / 1e6, remark

    return run


# ---- web ---------------------------------------------------------------------------------------------------------


def pages() -> list[bytes]:
    """The HTML pages of data/acquire."""
    return [
        item.body
        for path in sorted((ROOT / "data/acquire/warc").glob("*.warc*"))
        for item in read_warc(path)
        if isinstance(item, Page)
    ]


def perturbed(real: list[bytes], count: int) -> Iterator[Record]:
    """`count` pages; from the second round on with a word in eight of their text changed."""
    rng = random.Random(0)
    for number in range(count):
        body = real[number % len(real)]
        if number >= len(real):
            body = re.sub(
                rb"(?<=[ >])[a-z]{3,}(?=[ .,<])",
                lambda m: m[0] if rng.randrange(8) else b"%s%c" % (m[0], 97 + rng.randrange(26)),
                body,
            )
        path = f"{number}.html"
        yield Record(record_id("bench", path, 0, body), "html", body, path, f"http://bench/{number}", "bench")


def small_base(tmp: Path) -> Path:
    """data/acquire without its pages and with one encyclopedia file: what the classifiers learn from stays small."""
    base, source = tmp / "acquire", ROOT / "data/acquire"
    base.mkdir()
    for name in ("files", "models"):
        (base / name).symlink_to(source / name)
    for name in ("items.json", "manifest.json"):
        shutil.copy(source / name, base / name)
    index = pq.read_table(source / "index.parquet")
    smallest = min((r for r in index.to_pylist() if r["domain"] == "encyclopedia"), key=lambda r: r["bytes"])
    other = pc.and_(pc.not_equal(index["domain"], "encyclopedia"), pc.not_equal(index["kind"], "html"))
    pq.write_table(index.filter(pc.or_(other, pc.equal(index["url"], smallest["url"]))), base / "index.parquet")
    return base


def web_stage(workers: int) -> Callable[[int, Path], tuple[dict, float, str]]:
    real = pages()
    config = load_params(ROOT)["web"] | {"workers": workers}

    def run(size: int, tmp: Path) -> tuple[dict, float, str]:
        written = write_records(tmp / "ingest", perturbed(real, size), shard_bytes=16 << 20)
        deps = {"data/acquire": small_base(tmp), "data/ingest": tmp / "ingest"}
        cost = measure("web", tmp, config, deps)
        found = json.loads((tmp / "metrics/web.json").read_text())
        return cost, written["bytes"] / 1e6, f"{found['documents'].get('web', 0)} pages kept"

    return run


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", choices=("dedup", "web", []), default=[])
    parser.add_argument("--sizes", type=int, nargs="+", help="documents; dedup 10000 100000, web 500 2000")
    parser.add_argument("--kind", choices=("run", "copies"), default="run")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--templates", action="store_true", help="with SemDedup")
    args = parser.parse_args(arguments)
    for stage in args.stages or ("dedup", "web"):
        print(f"stage {stage}, {args.workers} worker(s)", flush=True)
        if stage == "dedup":
            run = dedup_stage(args.kind, args.workers, args.templates)
        else:
            run = web_stage(args.workers)
        table(stage, args.sizes or {"dedup": [10_000, 100_000], "web": [500, 2000]}[stage], run)


if __name__ == "__main__":
    main()

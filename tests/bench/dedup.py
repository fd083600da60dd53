"""Near-duplicate search: documents per CPU second, planted recall and memory beside peers, and how the stage's cost grows.

    python -m tests.bench.dedup                        # 20,000 documents beside datasketch, rensa and datatrove
    python -m tests.bench.dedup --grow 10000 100000    # the whole dedup stage, files in and out; add 1000000 for the million
    python -m tests.bench.dedup --overlap              # decontamination: documents per CPU second

The documents are 300-word chunks of real ones (data/web, data/code, data/math; data/acquire's are read through them), with
one in twenty a planted near-duplicate: six words replaced, in one run (`run`: true Jaccard similarity about .94, where any
16 x 8 LSH should find all) or spread (`spread`: about .82, right at the threshold, where 16 bands of 8 rows find .97 of
them by construction). Word 5-grams, 128 permutations, 16 bands of 8 rows, shingling included; ours verifies its candidates
by true Jaccard similarity besides. Recall is over planted pairs: candidates for the peers, verified clusters for ours, of
those whose true similarity reaches the threshold. More documents than there are come from perturbing real ones: every
word in twenty replaced, which is no near-duplicate. Peers that are not installed are skipped with a word.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from tasks import documents, minhash, shingles
from tasks.params import ROOT

REQUIRED = 12_000  # documents per CPU second, ours
WORDS, REPLACED, NGRAM, BANDS, ROWS, THRESHOLD = 300, 6, 5, 16, 8, 0.8


def chunks() -> Iterator[str]:
    """300-word chunks of the line's own documents."""
    for name in ("web", "code", "math"):
        if (ROOT / "data" / name / "documents").is_dir():
            for row in documents.read_documents(ROOT / "data" / name, ("text",)):
                words = row["text"].split()
                yield from (" ".join(words[i : i + WORDS]) for i in range(0, len(words) - WORDS + 1, WORDS))


def plant(text: str, rng: random.Random, kind: str) -> str:
    """Six words replaced: in one run, or spread over the text."""
    words = text.split()
    start = rng.randrange(len(words) - REPLACED)
    places = range(start, start + REPLACED) if kind == "run" else rng.sample(range(len(words)), REPLACED)
    for place in places:
        words[place] = f"planted{rng.randrange(10**6)}"
    return " ".join(words)


def corpus(count: int, kind: str, seed: int = 0) -> tuple[list[str], list[tuple[int, int]]]:
    """(documents, planted pairs): 19 of 20 documents chunks, perturbed ones when there are too few, then the planted."""
    rng = random.Random(seed)
    real = list(chunks())
    if len(real) < 100:
        raise SystemExit("bench dedup: no documents in data/web, data/code, data/math; run those stages first")
    rng.shuffle(real)
    originals = count - count // 20
    texts = real[:originals]
    while len(texts) < originals:
        words = real[len(texts) % len(real)].split()
        for place in rng.sample(range(len(words)), len(words) // 20 * 3):
            words[place] = f"{words[place]}{rng.randrange(100)}"
        texts.append(" ".join(words))
    pairs = [(i, originals + k) for k, i in enumerate(rng.sample(range(originals), count - originals))]
    return texts + [plant(texts[i], rng, kind) for i, _ in pairs], pairs


# ---- contestants: texts -> (function that says whether a pair was found, candidate pairs) -------------------------


def ours(texts: list[str]) -> tuple[Callable[[int, int], bool], int]:
    found = minhash.near_duplicates(texts, NGRAM, BANDS, ROWS, THRESHOLD)
    return lambda i, j: found.root[i] == found.root[j], found.compared


def _grams(text: str) -> set[str]:
    words = text.lower().split()
    return {" ".join(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}


def _pairs(partners: list[set[int]]) -> tuple[Callable[[int, int], bool], int]:
    return lambda i, j: i in partners[j] or j in partners[i], sum(map(len, partners))


def datasketch(texts: list[str]) -> tuple[Callable[[int, int], bool], int]:
    import xxhash
    from datasketch import MinHash, MinHashLSH

    lsh, partners = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS)), []
    for number, text in enumerate(texts):
        m = MinHash(num_perm=BANDS * ROWS, hashfunc=xxhash.xxh32_intdigest)
        m.update_batch([gram.encode() for gram in _grams(text)])
        partners.append(set(lsh.query(m)))
        lsh.insert(number, m)
    return _pairs(partners)


def rensa(texts: list[str]) -> tuple[Callable[[int, int], bool], int]:
    from rensa import RMinHash, RMinHashLSH

    lsh, partners = RMinHashLSH(threshold=THRESHOLD, num_perm=BANDS * ROWS, num_bands=BANDS), []
    for number, text in enumerate(texts):
        m = RMinHash(num_perm=BANDS * ROWS, seed=42)
        m.update(list(_grams(text)))
        partners.append(set(lsh.query(m)))
        lsh.insert(number, m)
    return _pairs(partners)


def datatrove(texts: list[str]) -> tuple[Callable[[int, int], bool], int]:
    """Its own signature step with words split at spaces (its word tokenizer needs spacy), its bands put into buckets here."""
    import xxhash
    from datatrove.pipeline.dedup import minhash as theirs

    spaces = type("Spaces", (), {"word_tokenize": staticmethod(str.split)})
    config = theirs.MinhashConfig(n_grams=NGRAM, num_buckets=BANDS, hashes_per_bucket=ROWS)
    with (
        tempfile.TemporaryDirectory() as tmp,
        mock.patch.object(theirs, "load_word_tokenizer", lambda language: spaces()),
    ):
        step = theirs.MinhashDedupSignature(output_folder=tmp, config=config)
    step._hash_func = lambda gram: xxhash.xxh64_intdigest(gram.encode())  # its own gives xxhash 4 a str, which refuses
    buckets, partners = {}, []
    for number, text in enumerate(texts):
        met: set[int] = set()
        for band, part in enumerate(step.get_signature(step.get_shingles(text))):
            bucket = buckets.setdefault((band, *part), [])
            met.update(bucket)
            bucket.append(number)
        partners.append(met)
    return _pairs(partners)


PEERS = {"ours": ours, "datasketch": datasketch, "rensa": rensa, "datatrove": datatrove}


def compare(count: int, kind: str, names: list[str], repeats: int) -> dict[str, dict]:
    """Contestants in turn over the same documents; best CPU time of `repeats`."""
    texts, planted = corpus(count, kind)
    values, starts = shingles.shingle_sets([texts[i] for pair in planted for i in pair], NGRAM)
    sets = [values[a:b] for a, b in zip(starts, starts[1:])]
    similar = [p for p, a, b in zip(planted, sets[::2], sets[1::2]) if minhash.jaccard(a, b) >= THRESHOLD]
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(
        f"{count} documents, {size:.1f} MB; {len(planted)} planted ({kind}), {len(similar)} with Jaccard >= {THRESHOLD}"
    )
    rows = {}
    for name in names:
        try:
            PEERS[name](texts[:100])
        except ImportError as error:
            print(f"  {name:11} skipped: {error}")
            continue
        best, before = float("inf"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(repeats if name == "ours" else 1):
            start = time.process_time()
            found, candidates = PEERS[name](texts)
            best = min(best, time.process_time() - start)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        recall = sum(found(*pair) for pair in similar) / max(1, len(similar))
        rows[name] = {"docs_per_s": count / best, "mb_per_s": size / best, "candidates": candidates, "recall": recall}
        version = "" if name == "ours" else importlib.metadata.version(name)
        print(
            f"  {name:11}{version:9} {count / best:8.0f} documents/s  {size / best:6.1f} MB/s  recall {recall:.3f}  "
            f"{candidates} pairs  +{grown:.0f} MB",
            flush=True,
        )
    return rows


# ---- the whole stage ---------------------------------------------------------------------------------------------

STAGE = """
import json, resource, sys, time
from pathlib import Path
from tasks import dedup
from tasks.stage import run_stage_for_test
if __name__ == "__main__":
    tmp, workers = Path(sys.argv[1]), int(sys.argv[2])
    dedup.minhash.near_duplicates(["warm"], 2, 2, 2, 0.5)
    began, cpu = time.monotonic(), time.process_time()
    run_stage_for_test(dedup, {"workers": workers}, deps={"data/web": tmp / "in"}, outs=["data/dedup"], tmp=tmp)
    usage = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = time.process_time() - cpu + usage[1].ru_utime + usage[1].ru_stime
    own = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))  # ru_maxrss has the parent's
    rss = max(own, usage[1].ru_maxrss) / 1024
    print(json.dumps({"cpu": cpu, "wall": time.monotonic() - began, "rss_mb": rss}))
"""


def grow(counts: list[int], workers: int) -> None:
    """The dedup stage from parquet to parquet at growing sizes: documents per CPU second, peak memory of one process."""
    print(f"dedup stage, {workers} worker(s), peak memory of the largest process")
    for count in counts:
        with tempfile.TemporaryDirectory() as tmp:
            texts, planted = corpus(count, "run")
            rows = (documents.document(text, f"bench/{i}", "web") for i, text in enumerate(texts))
            written = documents.write_documents(Path(tmp) / "in", rows)
            del texts
            (Path(tmp) / "stage.py").write_text(STAGE)
            command = [sys.executable, f"{tmp}/stage.py", tmp, str(workers)]
            out = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True, stdout=subprocess.PIPE)
            cost = json.loads(out.stdout.splitlines()[-1])
            found = json.loads((Path(tmp) / "metrics/dedup.json").read_text())
            free = shutil.disk_usage(tmp).free >> 30
        print(
            f"  {count:8} documents {written['bytes'] / 1e6:7.0f} MB: {count / cost['cpu']:6.0f} documents/s per core, "
            f"wall {cost['wall']:.0f} s, {cost['rss_mb']:.0f} MB; {sum(found['removed'].values())} removed of "
            f"{len(planted)} planted and what the originals repeat; {found['near_pairs']}; {free} GB disk left",
            flush=True,
        )


def overlap(count: int) -> None:
    """Decontamination against the line's held-out problems and data/acquire's evaluation sets."""
    from tasks import decontaminate

    acquired = ROOT / "data/acquire"
    extra = list(decontaminate.acquired_items(acquired)) if acquired.is_dir() else []
    start = time.process_time()
    index = decontaminate.build_index(decontaminate.Config(), extra)
    index.search("warm up the compiled code with one text")
    print(f"{len(index.names)} items indexed in {time.process_time() - start:.1f} CPU s")
    texts, _ = corpus(count, "run")
    size, start = sum(len(text.encode()) for text in texts) / 1e6, time.process_time()
    hits = sum(bool(index.search(text)) for text in texts)
    cpu = time.process_time() - start
    print(f"{count / cpu:.0f} documents/s, {size / cpu:.1f} MB/s per core; {hits} of {count} documents hold an item")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--kind", nargs="+", choices=("run", "spread"), default=["run", "spread"])
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--grow", type=int, nargs="+", help="sizes at which to run the whole stage")
    parser.add_argument("--workers", type=int, default=2, help="with --grow")
    parser.add_argument("--overlap", action="store_true")
    args = parser.parse_args()
    if args.grow:
        grow(args.grow, args.workers)
    elif args.overlap:
        overlap(args.documents)
    else:
        for kind in args.kind:
            rows = compare(args.documents, kind, args.only, args.repeats)
            if "ours" in rows:
                print(f"  ours {rows['ours']['docs_per_s']:.0f} documents/s; required {REQUIRED}")


if __name__ == "__main__":
    main()

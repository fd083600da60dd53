"""Near-duplicate search: documents per CPU second, planted recall and memory beside peers, and how the stage's cost grows.

    python -m tests.bench.dedup                        # 20,000 documents beside datasketch, rensa and datatrove
    python -m tests.bench.dedup --curve                # what other bands and rows find, by similarity, and cost
    python -m tests.bench.dedup --grow 10000 100000    # the whole dedup stage and its memory (tests/bench/growth.py)
    python -m tests.bench.dedup --overlap              # decontamination: documents per CPU second

The documents are 300-word chunks of real ones (data/web, data/code, data/math; data/acquire's are read through them), with
one in twenty a planted near-duplicate: six words replaced, in one run (`run`: true Jaccard similarity about .94) or spread
(`spread`: about .82, right at the threshold). A pair of similarity s is a candidate with probability 1 - (1 - s^rows)^bands:
16 bands of 8 rows, as is usual and as the peers have here, find .947 of pairs at .80 and .974 at .82; the stage's own 25
bands of 5 find .99995 at .80 for as many permutations, and its check by true similarity costs little for the more
candidates (--curve). Word 5-grams, shingling included; ours verifies besides. Recall is over planted pairs: candidates for
the peers, verified clusters for ours, of those whose true similarity reaches the threshold. More documents than there are
come from perturbing real ones: fifteen words in a hundred changed, which is no near-duplicate. Peers that are not
installed are skipped with a word.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import numpy as np

from tasks import documents, minhash, shingles
from tasks.dedup import Config
from tasks.params import ROOT

REQUIRED = 12_000  # documents per CPU second, ours
WORDS, REPLACED, NGRAM, THRESHOLD = 300, 6, 5, 0.8
BANDS, ROWS = 16, 8  # of the peers: 128 permutations, as is usual


def chunks() -> Iterator[str]:
    """300-word chunks of the line's own documents."""
    for name in ("web", "code", "math"):
        if (ROOT / "data" / name / "documents").is_dir():
            for row in documents.read_documents(ROOT / "data" / name, ("text",)):
                words = row["text"].split()
                yield from (" ".join(words[i : i + WORDS]) for i in range(0, len(words) - WORDS + 1, WORDS))


def plant(text: str, rng: random.Random, kind: str, replaced: int = REPLACED) -> str:
    """Words replaced: in one run, or spread over the text."""
    words = text.split()
    start = rng.randrange(len(words) - replaced)
    places = range(start, start + replaced) if kind == "run" else rng.sample(range(len(words)), replaced)
    for place in places:
        words[place] = f"planted{rng.randrange(10**6)}"
    return " ".join(words)


def stream(count: int, kind: str = "run", seed: int = 0, pairs: list[tuple[int, int]] | None = None) -> Iterator[str]:
    """19 of 20 documents are chunks, perturbed ones when there are too few, then come the planted; `pairs` gets theirs."""
    rng = random.Random(seed)
    real = list(chunks())
    if len(real) < 100:
        raise SystemExit("bench dedup: no documents in data/web, data/code, data/math; run those stages first")
    rng.shuffle(real)
    originals = count - count // 20
    wanted = rng.sample(range(originals), count - originals)
    places, kept = {i: k for k, i in enumerate(wanted)}, {}
    for number in range(originals):
        text = real[number % len(real)]
        if number >= len(real):
            words = text.split()
            for place in rng.sample(range(len(words)), len(words) // 20 * 3):
                words[place] = f"{words[place]}{rng.randrange(100)}"
            text = " ".join(words)
        if number in places:
            kept[number] = text
        yield text
    for k, i in enumerate(wanted):
        if pairs is not None:
            pairs.append((i, originals + k))
        yield plant(kept[i], rng, kind)


def corpus(count: int, kind: str, seed: int = 0) -> tuple[list[str], list[tuple[int, int]]]:
    """(documents, planted pairs), in memory."""
    pairs: list[tuple[int, int]] = []
    return list(stream(count, kind, seed, pairs)), pairs


# ---- contestants: texts -> (function that says whether a pair was found, candidate pairs) -------------------------


def ours(texts: list[str], bands: int | None = None, rows: int | None = None) -> tuple[Callable[[int, int], bool], int]:
    """With the stage's own bands and rows, or others."""
    config = Config()
    found = minhash.near_duplicates(texts, NGRAM, bands or config.bands, rows or config.rows, THRESHOLD)
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


PEERS = {
    "ours": ours,
    "ours 16x8": partial(ours, bands=BANDS, rows=ROWS),
    "datasketch": datasketch,
    "rensa": rensa,
    "datatrove": datatrove,
}


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
        for _ in range(repeats if name.startswith("ours") else 1):
            start = time.process_time()
            found, candidates = PEERS[name](texts)
            best = min(best, time.process_time() - start)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        recall = sum(found(*pair) for pair in similar) / max(1, len(similar))
        rows[name] = {"docs_per_s": count / best, "mb_per_s": size / best, "candidates": candidates, "recall": recall}
        version = "" if name.startswith("ours") else importlib.metadata.version(name)
        print(
            f"  {name:11}{version:9} {count / best:8.0f} documents/s  {size / best:6.1f} MB/s  recall {recall:.3f}  "
            f"{candidates} pairs  +{grown:.0f} MB",
            flush=True,
        )
    return rows


# ---- what a choice of bands and rows finds -----------------------------------------------------------------------

SHAPES = ((16, 8), (18, 7), (21, 6), (25, 5))


def curve(count: int) -> None:
    """Share of pairs that meet in a band by true Jaccard similarity, beside 1 - (1 - s^rows)^bands; cost of each shape."""
    rng = random.Random(1)
    texts = list(itertools.islice(stream(count), count - count // 20))
    changed = [plant(text, rng, "spread", rng.randrange(2, 10)) for text in texts]
    values, starts = shingles.shingle_sets([t for pair in zip(texts, changed) for t in pair], NGRAM)
    sets = [values[a:b] for a, b in zip(starts, starts[1:])]
    similar = np.array([minhash.jaccard(a, b) for a, b in zip(sets[::2], sets[1::2])])
    steps = (0.75, 0.80, 0.82, 0.85, 0.90)
    shares = [similar[abs(similar - s) < 0.01] for s in steps]
    print("found / by the formula" + "".join(f"{s:10.2f} ({len(part)})" for s, part in zip(steps, shares)))
    for bands, rows in SHAPES:
        keys, start = [], time.process_time()
        for side in (texts, changed):
            parts = (minhash.sketch(side[i : i + 512], NGRAM, bands, rows).bands for i in range(0, len(side), 512))
            keys.append(np.concatenate(list(parts)))
        cpu, met = time.process_time() - start, (keys[0] == keys[1]).any(axis=1)
        cells = [
            f"{met[abs(similar - s) < 0.01].mean():.4f} / {(1 - (1 - part**rows) ** bands).mean():.4f}"
            for s, part in zip(steps, shares)
        ]
        print(
            f"  {bands} bands of {rows}: " + "  ".join(cells) + f"  {2 * len(texts) / cpu:.0f} sketches/s", flush=True
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
    parser.add_argument("--curve", action="store_true", help="recall by similarity for several shapes")
    parser.add_argument("--overlap", action="store_true")
    args = parser.parse_args()
    if args.grow:
        from tests.bench import growth

        growth.main(["dedup", "--workers", str(args.workers), "--sizes", *map(str, args.grow)])
    elif args.curve:
        curve(args.documents)
    elif args.overlap:
        overlap(args.documents)
    else:
        for kind in args.kind:
            rows = compare(args.documents, kind, args.only, args.repeats)
            if "ours" in rows:
                print(f"  ours {rows['ours']['docs_per_s']:.0f} documents/s; required {REQUIRED}")


if __name__ == "__main__":
    main()

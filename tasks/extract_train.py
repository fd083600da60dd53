"""Train the block classifier of tasks/extract.py from pages with known main content.

    python -m tasks.extract_train PAGES --exclude GOLD_DIR     (writes conf/extraction.safetensors)

PAGES is a copy of WCXB (github: Murrough-Foley/web-content-extraction-benchmark, CC-BY-4.0): html/*.html.gz beside
ground-truth/*.json of its `dev` part, 1,497 pages of 1,295 domains, seven kinds of page; its `test` part (other
domains) is held out. Needs scikit-learn; the model that it writes does not. With --exclude, pages that share a host or
an 8-word run of main content in quantity with a benchmark's pages are left out, and how many is printed.

A block's label is the share of its words that stand in the expected text with three of their neighbours. A block weighs
as much as its words do in its page's score, so that long pages and long blocks count as they do in the mean F1.
The first trees see the block; the second see what the first, fitted on other sites, say of its surroundings: here all
of the first trees are asked, in use plain blocks leave them early. Trained on the sums that are left then, the second
lost F1: 0.0007 on articles of the held-out fold, 0.003 on the gold pages. Same pages, same bytes: the shipped file with
GOLD_DIR = ../shared/gold/article-extraction, in three minutes of one core.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from numba import njit

from tasks import extract_trees
from tasks.extract import NotText, decode_html
from tasks.extract_hash import fnv1a, hash_table
from tasks.extract_model import MODEL_PATH, STAGES, BlockClassifier, Blocks, Trees, feature_digest, features, segment

FOLDS = 3
TREES = {"first": 100, "second": 110}
BINS = 96  # quantiles of a feature that trees may split at; the library's own weighted ones take minutes
SAMPLE = 250  # blocks of a page that the trees are fitted on, drawn evenly
PAGE_WEIGHT = {"article": 1.0, "documentation": 1.0, "forum": 0.8}  # other kinds: what is main there is a convention
OTHER_WEIGHT = 0.4
DROP_WORDS, DROP_NAMES = 0.35, 0.15  # share of pages whose words (as in another language) or class names are hidden
_TOKEN = re.compile(r"[\u3040-\u9fff\u0e00-\u0fff]|[^\W\u3040-\u9fff\u0e00-\u0fff]+")
Scores = tuple[list[int], list[float]]


@dataclass
class Example:
    """A page, its blocks' labels in [0, 1] and their lengths in tokens."""

    name: str
    host: str
    kind: str
    page: Blocks
    labels: np.ndarray
    tokens: np.ndarray
    expected: str

    @property
    def fold(self) -> int:
        return fnv1a(self.host.encode()) % FOLDS


def tokens(text: str) -> list[str]:
    """Lower-case words; single characters where a script has no spaces."""
    return _TOKEN.findall(text.lower())


def block_labels(page: Blocks, expected: str, n: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """(share of each block's tokens that the expected text holds, tokens per block)."""
    want = tokens(expected)
    grams = Counter(tuple(want[i : i + n]) for i in range(max(1, len(want) - n + 1)))
    lines = Counter(tuple(tokens(line)) for line in expected.splitlines())
    texts = [tuple(tokens(page.string(b))) for b in range(len(page))]
    sequence = [token for text in texts for token in text]
    owner = np.repeat(np.arange(len(page)), [len(text) for text in texts])
    covered = np.zeros(len(sequence), bool)
    for i in range(len(sequence) - n + 1):
        if tuple(sequence[i : i + n]) in grams:
            covered[i : i + n] = True
    count = np.bincount(owner, minlength=len(page)).astype(float)
    labels = np.bincount(owner, covered, minlength=len(page)) / np.maximum(count, 1)
    places = defaultdict(list)
    for b, text in enumerate(texts):
        if text and text in lines and len(text) < 12:
            labels[b] = max(labels[b], 0.9)
        elif len(text) < n and labels[b] < 1:
            labels[b] = 0.0
        if text and labels[b] > 0.5:
            places[text].append(b)
    mass = labels * np.minimum(count, 50)
    around = np.convolve(mass, np.ones(9), "same") - mass if len(mass) >= 9 else mass.sum() - mass
    for text, found in places.items():  # a text that stands on the page more often than expected: where its kind is
        allowed = max(1, lines[text], grams[text[:n]] if len(text) >= n else 0)
        for b in sorted(found, key=lambda b: (-around[b], b))[allowed:]:
            labels[b] = 0.0
    return labels, count


def read_examples(folder: Path) -> list[Example]:
    """Pages of a WCXB part whose expected text is there and stands on the page (half of it at least)."""
    examples = []
    files = sorted((folder / "ground-truth").glob("*.json"))
    if not files:
        raise ValueError(f"{folder}: no ground-truth/*.json")
    for file in files:
        row = json.loads(file.read_text())
        expected = (row.get("ground_truth") or {}).get("main_content") or ""
        if len(expected) < 100:
            continue
        body = gzip.decompress((folder / "html" / f"{file.stem}.html.gz").read_bytes())
        try:
            page, _ = segment(decode_html(body)[0])
        except NotText:
            continue
        labels, count = block_labels(page, expected)
        if (labels * count).sum() < 0.5 * len(tokens(expected)):
            continue
        kind = ((row.get("_internal") or {}).get("page_type") or {}).get("primary", "")
        host = (urlsplit(row.get("url") or "").hostname or file.stem).removeprefix("www.")
        examples.append(Example(file.stem, host, kind, page, labels, count, expected))
    return examples


def without(examples: list[Example], texts: Sequence[str], urls: Sequence[str]) -> list[Example]:
    """Examples of none of the hosts and sharing less than 5 % of their 8-token runs with any of the texts."""
    hosts = {(urlsplit(url).hostname or "").removeprefix("www.") for url in urls}

    def runs(text: str) -> set[tuple[str, ...]]:
        words = tokens(text)
        return {tuple(words[i : i + 8]) for i in range(len(words) - 7)}

    seen = set().union(*map(runs, texts))
    return [e for e in examples if e.host not in hosts and len(r := runs(e.expected)) * 0.05 >= len(r & seen)]


def log_odds(examples: Sequence[Example], least: int, most: int) -> tuple[Scores, Scores]:
    """Shrunk log-odds of (class names, words of short blocks) over pages, for those on `least` hosts or more."""
    sums: list[dict[int, list]] = [{}, {}]
    for example in examples:
        page = example.page
        weight = np.minimum(example.tokens, 60) + 1
        good, mass = np.zeros(len(page.elements)), np.zeros(len(page.elements))
        np.add.at(good, page.blocks[:, 2], weight * example.labels)
        np.add.at(mass, page.blocks[:, 2], weight)
        for e in range(len(page.elements) - 1, 0, -1):
            good[page.elements[e, 1]] += good[e]
            mass[page.elements[e, 1]] += mass[e]
        short = example.tokens[page.word_block] < 15
        b = page.word_block[short]
        for store, keys, hits, all_ in (
            (sums[0], page.names, good[page.name_owner], mass[page.name_owner]),
            (sums[1], page.words[short], example.labels[b], np.ones(len(b))),
        ):
            unique, where = np.unique(keys, return_inverse=True)
            hit, total = np.bincount(where, hits), np.bincount(where, all_)
            for key, h, t in zip(unique.tolist(), hit, total, strict=True):
                if t > 0 and key:
                    row = store.setdefault(key, [0.0, 0, set()])
                    row[0] += h / t
                    row[1] += 1
                    row[2].add(example.host)
    out = []
    for store in sums:
        base = sum(r[0] for r in store.values()) / max(1, sum(r[1] for r in store.values()))
        rows = []
        for key, (hit, count, hosts) in store.items():
            if len(hosts) >= least:
                mean = (hit + 4 * base) / (count + 4)
                score = np.log(mean / (1 - mean)) - np.log(base / (1 - base))
                rows.append((abs(score) * np.log(len(hosts)), key, round(float(score) * count / (count + 6), 3)))
        rows = sorted(rows, reverse=True)[:most]
        out.append((sorted(k for _, k, _ in rows), [s for k, s in sorted((k, s) for _, k, s in rows)]))
    return out[0], out[1]


def design(examples: Sequence[Example], tables: tuple[Scores, Scores], augment: bool) -> tuple[list, list]:
    """Per page (X, near); with `augment`, words or class names are hidden on a fixed share of the pages."""
    none = hash_table([], [], 4)
    full = [hash_table(keys, scores, 13) for keys, scores in tables]
    xs, nears = [], []
    for example in examples:
        draw = fnv1a(example.name.encode()) / 2**32
        names = none if augment and draw < DROP_NAMES else full[0]
        words = none if augment and (draw * 97) % 1 < DROP_WORDS else full[1]
        x, near = features(example.page, names, words)
        xs.append(x)
        nears.append(near)
    return xs, nears


def weights(example: Example) -> np.ndarray:
    """A block's weight: its part in the page's score, the page's total held under three."""
    w = (example.tokens + 1) / ((example.tokens * example.labels).sum() + 60)
    return w * min(1.0, 3 / w.sum()) * PAGE_WEIGHT.get(example.kind, OTHER_WEIGHT)


def fit(xs: Sequence[np.ndarray], examples: Sequence[Example], count: int) -> Trees:
    """Boosted trees; a block counts less the nearer its label is to a half."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    random = np.random.default_rng(0)
    picks = [np.sort(random.permutation(len(e.page))[:SAMPLE]) for e in examples]
    x = np.concatenate([x[pick] for x, pick in zip(xs, picks, strict=True)])
    y = np.concatenate([e.labels[pick] for e, pick in zip(examples, picks, strict=True)])
    w = np.concatenate([weights(e)[pick] * len(e.page) / len(pick) for e, pick in zip(examples, picks, strict=True)])
    w = w / w.mean()
    model = HistGradientBoostingClassifier(
        max_iter=count, learning_rate=0.1, max_leaf_nodes=24, min_samples_leaf=60, l2_regularization=5.0,
        max_features=0.4, early_stopping=False, random_state=0,
    )  # fmt: skip
    edges = [np.unique(np.quantile(column, np.linspace(0, 1, BINS), method="lower")) for column in x.T]
    binned = np.stack([np.searchsorted(e, column, "left") for e, column in zip(edges, x.T, strict=True)], 1)
    model.fit(binned, y >= 0.5, sample_weight=w * (0.3 + 0.7 * np.abs(2 * y - 1)))
    return export(model, edges)


def export(model, edges: Sequence[np.ndarray] | None = None) -> Trees:
    """Arrays of a fitted model: siblings side by side. With `edges`, the model was fitted on bin numbers of them."""
    feature, threshold, left, value, roots = [], [], [], [], []
    for (predictor,) in model._predictors:
        nodes = predictor.nodes
        place = {0: len(feature)}
        queue = [0]
        roots.append(len(feature))
        for array in (feature, threshold, left, value):
            array.append(0)
        while queue:
            node = queue.pop(0)
            row, at = nodes[node], place[node]
            if row["is_leaf"]:
                left[at], value[at] = -1, float(row["value"])
                continue
            column, cut = int(row["feature_idx"]), float(row["num_threshold"])
            feature[at], threshold[at], left[at] = (
                column,
                float(edges[column][int(cut)]) if edges else cut,
                len(feature),
            )
            for child in (int(row["left"]), int(row["right"])):
                place[child] = len(feature)
                queue.append(child)
                for array in (feature, threshold, left, value):
                    array.append(0)
    f32, i32 = np.float32, np.int32
    return Trees(
        np.array(roots, i32), np.array(feature, i32), np.array(threshold, f32), np.array(left, i32),
        np.array(value, f32), float(model._baseline_prediction.ravel()[0]),
    )  # fmt: skip


@njit(cache=True)
def all_trees(x, roots, feature, threshold, left, value, bias):
    """extract_trees.trees without leaving early: probability float32[B] by every tree."""
    out = np.empty(len(x), np.float32)
    for b in range(len(x)):
        total = bias
        for root in roots:
            node = root
            while left[node] >= 0:
                node = left[node] + (x[b, feature[node]] > threshold[node])
            total += value[node]
        out[b] = 1 / (1 + np.exp(-total))
    return out


def page_score(example: Example, keep: np.ndarray) -> tuple[float, float]:
    """(precision, recall) of a choice of blocks, in tokens."""
    good = example.tokens * example.labels
    hit = good[keep].sum()
    return hit / max(example.tokens[keep].sum(), 1e-9), hit / max(good.sum(), 1e-9)


def f1(scores: Sequence[tuple[float, float]]) -> float:
    p, r = np.mean(scores, 0)
    return float(2 * p * r / max(p + r, 1e-9))


def train(examples: list[Example], least: int = 8) -> tuple[BlockClassifier, tuple[Scores, Scores]]:
    """The classifier, its threshold chosen on folds by host; prints what the folds say."""
    folds = [[e for e in examples if e.fold == k] for k in range(FOLDS)]
    rest = [[e for e in examples if e.fold != k] for k in range(FOLDS)]
    order, xs, nears, first = [], [], [], []
    for k in range(FOLDS):
        x, near = design(folds[k], log_odds(rest[k], least, 4000), augment=True)
        order += folds[k]
        xs += x
        nears += near
    inside = [[i for i, e in enumerate(order) if e.fold != k] for k in range(FOLDS)]
    for k in range(FOLDS):
        model = fit([xs[i] for i in inside[k]], [order[i] for i in inside[k]], TREES["first"])
        arrays = (model.roots, model.feature, model.threshold, model.left, model.value, np.float32(model.bias))
        first += [all_trees(xs[i], *arrays) for i, e in enumerate(order) if e.fold == k]
    width = xs[0].shape[1] + len(extract_trees.SECOND)
    seen = [
        extract_trees.second(x, near, e.page.elements, e.page.blocks, p, width)
        for x, near, e, p in zip(xs, nears, order, first, strict=True)
    ]
    held = [i for i, e in enumerate(order) if e.fold == 0]
    model = fit([seen[i] for i in inside[0]], [order[i] for i in inside[0]], TREES["second"])
    chosen = {i: model(seen[i]) for i in held}
    articles = [i for i in held if order[i].kind == "article"]
    scores = {t: f1([page_score(order[i], chosen[i] >= t) for i in articles]) for t in (0.3, 0.4, 0.5, 0.6)}
    alone = {t: round(f1([page_score(order[i], first[i] >= t) for i in articles]), 4) for t in scores}
    print("held-out fold, articles, by threshold: first trees alone", alone)
    print("with the second", {t: round(score, 4) for t, score in scores.items()})
    # the optimum is flat: of what is as good, the most precise
    threshold = max(t for t, score in scores.items() if score >= max(scores.values()) - 0.002)
    by_kind = defaultdict(list)
    for i in held:
        by_kind[order[i].kind].append(page_score(order[i], chosen[i] >= threshold))
    print("held-out fold, token F1 by kind:", {k: round(f1(v), 4) for k, v in sorted(by_kind.items())})
    tables = log_odds(examples, least, 4000)
    last = [fit(xs, order, TREES["first"]), fit(seen, order, TREES["second"])]
    return BlockClassifier(*last, *(hash_table(*t, 13) for t in tables), threshold), tables


def save(path: Path, model: BlockClassifier, tables: tuple[Scores, Scores], note: str) -> None:
    from safetensors.numpy import save_file

    tensors = {}
    meta = {"features": str(feature_digest()), "threshold": str(model.threshold), "training_data": note}
    for name, trees in zip(STAGES, (model.first, model.second), strict=True):
        meta[f"{name}.bias"] = repr(trees.bias)
        tensors |= {f"{name}.roots": trees.roots, f"{name}.feature": trees.feature.astype(np.uint8)}
        tensors |= {f"{name}.left": trees.left.astype(np.int16), f"{name}.threshold": trees.threshold}
        tensors |= {f"{name}.value": trees.value}
    for name, (keys, scores) in zip(("names", "words"), tables, strict=True):
        tensors |= {f"{name}.keys": np.array(keys, np.uint32), f"{name}.scores": np.array(scores, np.float16)}
    save_file(tensors, str(path), {"model": json.dumps(meta, sort_keys=True)})  # several keys would have no fixed order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", type=Path)
    parser.add_argument("--out", type=Path, default=MODEL_PATH)
    parser.add_argument("--exclude", type=Path, help="folder with a ground-truth.json of id -> articleBody and url")
    args = parser.parse_args()
    examples = read_examples(args.pages)
    print(
        f"{len(examples)} pages, {len({e.host for e in examples})} hosts, {sum(len(e.page) for e in examples)} blocks"
    )
    if args.exclude:
        gold = json.loads((args.exclude / "ground-truth.json").read_text()).values()
        kept = without(examples, [g["articleBody"] for g in gold], [g["url"] for g in gold])
        print(f"{len(examples) - len(kept)} pages left out: host or text of {args.exclude.name}")
        examples = kept
    model, tables = train(examples)
    save(args.out, model, tables, "WCXB dev (Murrough-Foley/web-content-extraction-benchmark), CC-BY-4.0")
    print(f"threshold {model.threshold}; {args.out.stat().st_size} bytes in {args.out}")


if __name__ == "__main__":
    main()

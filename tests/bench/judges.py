"""What the judges of documents are worth: world knowledge, educational value, machine-made text, SemDedup.

    python -m tests.bench.judges                            # all of them, figures and documents per second
    python -m tests.bench.judges knowledge educational machine-text semdedup
    python -m tests.bench.judges train-machine-text         # writes tasks/machine_text.json

Needs the outputs of the web and math stages; packages that only carry test text (gensim, faker, ...) are used when installed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from tasks import documents
from tasks.educational import EducationalConfig, EducationalScorer, weak_examples
from tasks.knowledge import KnowledgeClassifier, KnowledgeConfig
from tasks.machine_text import FEATURES, MODEL, MachineTextDetector, TemplateCounter, text_features
from tasks.quality import StaticEmbedder, roc_auc
from tasks.semdedup import SemdedupConfig, same_template, semdedup, size_report
from tests.bench import machine_text_data as data

ROOT = Path(__file__).resolve().parents[2]
EMBEDDER = ROOT / "data/acquire/models/potion-base-8M"
TUTORIAL = re.compile(r"(?i)(tutorial|intro\d?|howto|cookbook|concepts|overview|quickstart)[^/]*$|/tutorial/[^/]+$")
LISTING = re.compile(
    r"(?i)(changelog|/changes|/release-|genindex|modindex|copyright|sitemap|legal|bookindex|toc-|index\.)[^/]*$"
)


def auc(positive: np.ndarray, negative: np.ndarray) -> float:
    labels = np.r_[np.ones(len(positive), bool), np.zeros(len(negative), bool)]
    return round(roc_auc(np.r_[positive, negative], labels), 4)


def pages() -> list[dict]:
    return [r for r in documents.read_documents(ROOT / "data/web", ("text", "domain", "lang", "source", "url"))]


def knowledge_figures(embedder: StaticEmbedder) -> dict[str, float]:
    """ROC-AUC. Trained on half of the English and French entries and half of the pages and prose; the rest is held out."""
    rows = pages()
    entries = {
        g: [r["text"] for r in rows if r["domain"] == "encyclopedia" and r["lang"] == g] for g in ("en", "fr", "es")
    }
    web = [r for r in rows if r["domain"] == "web"]
    prose = [r["text"] for r in rows if r["domain"] == "prose"]
    classifier = KnowledgeClassifier(embedder, KnowledgeConfig(examples=6000))
    classifier.fit(entries["en"][::2] + entries["fr"][::2], [r["text"] for r in web[1::2]] + prose[::2])
    kinds = {
        "held-out English entries": entries["en"][1:2000:2],
        "Spanish entries": entries["es"][:1000],
        "English pages": [r["text"] for r in web[::2] if r["lang"] == "en"],
        "non-English pages": [r["text"] for r in web[::2] if r["lang"] != "en"],
        "prose": prose[1::2],
        "Wikipedia articles of gensim": data.wikipedia(),
        "news of gensim": data.news(),
    }
    start = time.process_time()
    scores = {kind: classifier.score(texts) for kind, texts in kinds.items() if texts}
    seconds = time.process_time() - start
    figures: dict[str, float] = {}
    for positive, negative in (
        ("held-out English entries", "English pages"),
        ("held-out English entries", "prose"),
        ("Spanish entries", "non-English pages"),
        ("Wikipedia articles of gensim", "English pages"),
        ("Wikipedia articles of gensim", "news of gensim"),
    ):
        if positive in scores and negative in scores:
            figures[f"{positive} / {negative}"] = auc(scores[positive], scores[negative])
    for kind, found in scores.items():
        figures[f"share of {kind} at the threshold"] = round(float((found >= classifier.config.threshold).mean()), 4)
    figures["documents per second"] = round(sum(map(len, scores.values())) / seconds)
    return figures


def educational_figures(embedder: StaticEmbedder) -> dict[str, float]:
    """Chunk-and-aggregate against scoring the first chunk alone, on pages that the scorer never saw."""
    scorer = EducationalScorer(embedder, EducationalConfig())
    scorer.fit(*weak_examples(ROOT / "data/acquire", scorer.config))
    rows = [r for r in pages() if r["domain"] == "web" and r["lang"] == "en"]
    docs = [r for r in rows if "formasaurus" not in r["source"]]
    listings = [r["text"] for r in docs if LISTING.search(r["url"])]
    tutorials = [r["text"] for r in docs if TUTORIAL.search(r["url"]) and not LISTING.search(r["url"])]
    forms = [r["text"] for r in rows if "formasaurus" in r["source"]]

    def truncated(texts: list[str]) -> np.ndarray:
        return scorer.chunk_scores([text[: scorer.config.chars] for text in texts])

    start = time.process_time()
    whole = {k: scorer.score(v) for k, v in (("t", tutorials), ("l", listings), ("f", forms))}
    seconds = time.process_time() - start
    figures: dict[str, float] = {
        "tutorials / changelogs and indices, AUC": auc(whole["t"], whole["l"]),
        "tutorials / home and log-in pages, AUC": auc(whole["t"], whole["f"]),
    }
    long = [r["text"] for r in docs if len(r["text"]) > 15_000]
    long = [long[i] for i in np.linspace(0, len(long) - 1, min(40, len(long))).round().astype(int)]
    rng, spread, shift = random.Random(0), {"chunks": [], "truncation": []}, {"chunks": [], "truncation": []}
    front = "\n\n".join(listings)[:6000]
    every = np.array([scorer.chunk_scores([t[i : i + 1500] for i in range(0, len(t), 1500)]).mean() for t in long])
    base = {"chunks": scorer.score(long), "truncation": truncated(long)}
    for i, text in enumerate(long):
        paragraphs = [p for p in text.split("\n\n") if p.strip()]
        size = max(1, len(paragraphs) // 10)
        sections = ["\n\n".join(paragraphs[j : j + size]) for j in range(0, len(paragraphs), size)]
        permuted = ["\n\n".join(rng.sample(sections, len(sections))) for _ in range(6)]
        for name, score in (("chunks", scorer.score), ("truncation", truncated)):
            spread[name].append(score(permuted).std())
            shift[name].append(abs(score([front + "\n\n" + text])[0] - base[name][i]))
    for name in ("chunks", "truncation"):
        figures[f"{name}: standard deviation over orders of the sections"] = round(float(np.mean(spread[name])), 4)
        figures[f"{name}: shift by 6000 characters of front matter"] = round(float(np.mean(shift[name])), 4)
        ranks = [np.argsort(np.argsort(v, kind="stable"), kind="stable") for v in (base[name], every)]
        figures[f"{name}: rank correlation with the mean of all of the text"] = round(
            float(np.corrcoef(*ranks)[0, 1]), 4
        )
    figures["long documents"] = len(long)
    figures["documents per second"] = round(len(tutorials + listings + forms) / seconds)
    return figures


def machine_text_figures() -> dict[str, float]:
    """The shipped detector, and the template counter, on sources and generators that it was not trained on."""
    detector = MachineTextDetector()
    held = {name: texts for name, texts in data.labelled_set().items() if name not in data.TRAIN}
    start = time.process_time()
    scores = {name: detector.score(texts) for name, texts in held.items()}
    seconds = time.process_time() - start
    counter = TemplateCounter()
    for texts in held.values():
        counter.add(texts)
    single = {name: found >= detector.threshold for name, found in scores.items()}
    template = {name: np.array([counter.share(t, 5) >= 0.8 for t in texts]) for name, texts in held.items()}
    figures: dict[str, float] = {"threshold": detector.threshold}
    for kind, hit in (("single text", single), ("with templates", {k: single[k] | template[k] for k in held})):
        made = np.concatenate([hit[k] for k in held if k.startswith("made:")])
        real = np.concatenate([hit[k] for k in held if k.startswith("real:")])
        figures[f"{kind}: precision"] = round(float(made.sum() / max(1, made.sum() + real.sum())), 4)
        figures[f"{kind}: recall"] = round(float(made.mean()), 4)
        figures[f"{kind}: real text removed"] = round(float(real.mean()), 4)
    for name in held:
        figures[f"removed of {name} ({len(held[name])})"] = round(float((single[name] | template[name]).mean()), 3)
    whole = [r for r in pages() if r["domain"] == "web" and len(r["text"]) >= 300]
    hits = detector.score([r["text"] for r in whole]) >= detector.threshold
    english = np.array([r["lang"] == "en" for r in whole])
    figures["English pages removed"] = round(float(hits[english].mean()), 4)
    figures["non-English pages removed"] = round(float(hits[~english].mean()), 4)
    figures["documents per second"] = round(sum(map(len, held.values())) / seconds)
    return figures


def train_machine_text() -> None:
    """Fit the trees on data.TRAIN and write them; the threshold is fixed at 0.9. Prints cross-validated figures."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    sets = {name: texts for name, texts in data.labelled_set().items() if name in data.TRAIN}
    if missing := data.TRAIN - sets.keys():
        raise SystemExit(f"not all training sources are here: {', '.join(sorted(missing))}")
    x = np.array([text_features(t) for texts in sets.values() for t in texts])
    y = np.concatenate([np.full(len(texts), name.startswith("made:")) for name, texts in sets.items()])
    weight = np.concatenate([np.full(len(texts), 1 / len(texts)) for texts in sets.values()])
    for kind in (True, False):
        weight[y == kind] *= len(y) / 2 / weight[y == kind].sum()

    def fit(rows: np.ndarray) -> HistGradientBoostingClassifier:
        options = {
            "max_iter": 80,
            "max_leaf_nodes": 8,
            "learning_rate": 0.12,
            "l2_regularization": 5,
            "min_samples_leaf": 15,
        }
        model = HistGradientBoostingClassifier(random_state=0, early_stopping=False, **options)
        return model.fit(x[rows], y[rows], sample_weight=weight[rows])

    threshold, fold = 0.9, np.arange(len(y)) % 5
    hits = np.concatenate([fit(fold != f).predict_proba(x[fold == f])[:, 1] >= threshold for f in range(5)])
    truth = np.concatenate([y[fold == f] for f in range(5)])
    print(f"5 folds: precision {truth[hits].mean():.4f}, recall {hits[truth].mean():.4f}, {len(y)} texts")
    model = fit(np.ones(len(y), bool))
    trees = []
    for (tree,) in model._predictors:
        n = tree.nodes
        leaf = n["is_leaf"].astype(bool)
        trees.append(
            {
                "feature": np.where(leaf, -1, n["feature_idx"]).tolist(),
                "threshold": [0.0 if end else float(v) for end, v in zip(leaf, n["num_threshold"])],
                "left": n["left"].tolist(),
                "right": n["right"].tolist(),
                "value": [round(float(v), 6) if end else 0.0 for end, v in zip(leaf, n["value"])],
            }
        )
    base = float(model._baseline_prediction.ravel()[0])
    sources = {name: len(texts) for name, texts in sets.items()}
    about = {"features": FEATURES, "threshold": threshold, "base": base, "trees": trees, "trained_on": sources}
    MODEL.write_text(json.dumps(about, separators=(",", ":")) + "\n", encoding="utf-8")
    raw = MachineTextDetector()._trees.raw(x)
    np.testing.assert_allclose(raw, model.decision_function(x), atol=1e-3)
    print(f"{MODEL.name}: {MODEL.stat().st_size} bytes")


def semdedup_figures(embedder: StaticEmbedder) -> dict[str, float]:
    """Planted template pages among pages of one subject: real documentation, articles, and texts on the same topics."""
    rng = random.Random(0)
    planted = {
        name: [next(source) for _ in range(80)]
        for name, source in (
            ("city pages", data.city_pages(rng)),
            ("letters", data.mail_merge(rng)),
            ("product pages", data.product_pages(rng)),
            ("weather reports", data.weather_reports(rng)),
        )
    }
    topical = {
        "articles": data.wikipedia(),
        "news": data.news(),
        "answers on the same topics": data.model_samples("smollm2"),
        "documentation": [
            r["text"] for r in pages() if r["domain"] == "web" and r["lang"] == "en" and len(r["text"]) > 500
        ],
    }
    pools = planted | topical
    texts = [t for pool in pools.values() for t in pool]
    kind = [name for name, pool in pools.items() for _ in pool]
    config, keys = SemdedupConfig(), [(0.0, len(t), f"{i:06d}") for i, t in enumerate(texts)]
    x = embedder.embed(texts)
    figures: dict[str, float] = {}
    for name, same in (("cosine alone", None), ("with the check", same_template(texts, config.shared))):
        start = time.process_time()
        found = semdedup(x, keys, config.threshold, 0, same=same, cluster_size=config.cluster_size)
        seconds = time.process_time() - start
        removed = Counter(kind[i] for i in found.removed)
        right = sum(kind[i] == kind[k] for i, (k, _) in found.removed.items() if kind[i] in planted)
        wrong = sum(removed[k] for k in removed if k != "documentation") - right
        figures[f"{name}: precision, templates against articles, news, answers"] = round(
            right / max(1, right + wrong), 4
        )
        for pool in pools:
            figures[f"{name}: removed of {len(pools[pool])} {pool}"] = removed[pool]
        figures[f"{name}: documents per second"] = round(len(texts) / seconds)
    figures |= {f"clusters: {k}": v for k, v in size_report(found.sizes).items()}
    pairs = [(i, k) for i, (k, _) in found.removed.items() if kind[i] == "documentation"]
    for i, k in pairs[:: max(1, len(pairs) // 6)]:
        print(f"  removed of documentation: {texts[i][:60]!r} for {texts[k][:60]!r}")
    return figures


def main() -> None:
    parts = {
        "knowledge": lambda: knowledge_figures(StaticEmbedder(EMBEDDER)),
        "educational": lambda: educational_figures(StaticEmbedder(EMBEDDER)),
        "machine-text": machine_text_figures,
        "semdedup": lambda: semdedup_figures(StaticEmbedder(EMBEDDER)),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", help=", ".join([*parts, "train-machine-text"]) + "; all but the last when none"
    )
    args = parser.parse_args()
    if unknown := set(args.parts) - {*parts, "train-machine-text"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if not EMBEDDER.is_dir() or not (ROOT / "data/web/documents").is_dir():
        raise SystemExit("needs data/acquire with its models, and data/web: dvc repro web math")
    carriers = ("gensim", "faker", "mimesis", "lorem_text", "essential_generators", "markovify")
    if missing := [name for name in carriers if find_spec(name) is None]:
        print(f"not installed, and their texts left out: {', '.join(missing)}")
    for name in args.parts or parts:
        if name == "train-machine-text":
            train_machine_text()
            continue
        print(f"== {name}", flush=True)
        for key, value in parts[name]().items():
            print(f"  {key:<70} {value}", flush=True)


if __name__ == "__main__":
    main()

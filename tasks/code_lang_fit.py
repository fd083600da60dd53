"""Train conf/code_lang.safetensors from packages: `python -m tasks.code_lang_fit FOLDER... [--out MODEL]`.

The folders hold the archives that conf/code_lang_packages.txt lists (registry, name, version), as `apt-get source
--download-only`, `apt-get download`, `npm pack`, `pip download --no-binary` and `git archive` leave them, or unpacked packages.
Packages named in HELD_OUT are never trained on, nor are copies of their files: accuracy is measured on them. The model's
metadata name every package, its sha256, licence and the number of its files. Same packages, same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from tasks.code_lang_model import MODEL, CodeLanguageModel, features
from tasks.code_lang_samples import Sample, crops, read_packages, without_copies

LANGUAGES = tuple(
    (
        "ada|assembly|awk|batchfile|c|c#|c++|clojure|cmake|cobol|coffeescript|common lisp|crystal|css|csv|d|dart|diff"
        "|dockerfile|elixir|elm|emacs lisp|erlang|f#|fortran|gettext catalog|glsl|go|groovy|haskell|haxe|hcl|html|ini"
        "|java|javascript|json|julia|kotlin|less|lua|makefile|markdown|matlab|meson|nim|nix|objective-c|ocaml|pascal"
        "|perl|php|postscript|powershell|prolog|protocol buffer|puppet|python|r|racket|restructuredtext|ruby|rust|scala"
        "|scheme|scss|shell|smalltalk|solidity|sql|swift|tcl|tex|text|toml|typescript|vala|verilog|vhdl|vim script"
        "|visual basic|vue|xml|yaml|zig"
    ).split("|")
)
# Collections of odd files from many projects: the nearest thing to what a crawl of repositories brings.
HELD_OUT = (
    "github-linguist", "gtksourceview", "kde+syntax", "kde.syntax", "lexilla", "ohcount", "rouge-ruby", "ruby-rouge", "rust-bat",
)  # fmt: skip
_WORDS, _FEATURES, _DIM = 8000, 36000, 48
_PER_LANGUAGE = 360
_BATCH, _DROPPED = 256, 0.2


def held_out(package: str) -> bool:
    return package.startswith(HELD_OUT)


def balance(samples: Iterable[Sample], per_language: int = _PER_LANGUAGE) -> list[Sample]:
    """At most `per_language` samples of each language, taken from its packages in turn."""
    by: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        by[sample.language][sample.package].append(sample)
    out: list[Sample] = []
    for _, packages in sorted(by.items()):
        queues = [
            sorted(files, key=lambda s: hashlib.sha256(s.path.encode()).digest())
            for _, files in sorted(packages.items())
        ]
        turns = (sample for turn in itertools.zip_longest(*queues) for sample in turn if sample is not None)
        out += itertools.islice(turns, per_language)
    return out


def weights(samples: Sequence[Sample]) -> np.ndarray:
    """Sampling weights, float64 (N,), mean 1: within a language every package counts by the cube root of its files; a
    language by its packages (at most 64) to the power 0.5, so that rare ones are not found more often than they occur."""
    files = Counter((s.language, s.package) for s in samples)
    packages = Counter(language for language, _ in files)
    raw = np.array([files[s.language, s.package] ** (-2 / 3) for s in samples])
    total: dict[str, float] = defaultdict(float)
    for sample, w in zip(samples, raw):
        total[sample.language] += w
    out = np.array([w / total[s.language] * min(64, packages[s.language]) ** 0.5 for s, w in zip(samples, raw)])
    return out / out.mean()


def select(counted: Sequence[tuple[str, Counter[str], float]], size: int, packages: Sequence[str]) -> list[str]:
    """The `size` features whose presence says most about the language (mutual information under the sample weights), of
    those that two packages have: what one project's files share says nothing about another's."""
    mass: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    spread: dict[str, int] = defaultdict(int)
    first: dict[str, str] = {}
    common: set[str] = set()
    prior: dict[str, float] = defaultdict(float)
    for (language, counts, weight), package in zip(counted, packages, strict=True):
        prior[language] += weight
        for feature in counts:
            mass[feature][language] += weight
            spread[feature] += 1
            if first.setdefault(feature, package) != package:
                common.add(feature)
    total = sum(prior.values())
    worth = {}
    for feature, by_language in mass.items():
        if spread[feature] < 6 or feature not in common:
            continue
        n = sum(by_language.values())
        gain = 0.0
        for language, m in by_language.items():
            p = prior[language] / total
            gain += m / total * math.log(m / total / (n / total * p))
            absent = (prior[language] - m) / total
            if absent > 1e-12:
                gain += absent * math.log(absent / ((1 - n / total) * p + 1e-12))
        rest = sum(v for lang, v in prior.items() if lang not in by_language) / total
        worth[feature] = gain + rest * math.log(1 / (1 - n / total + 1e-12))
    return sorted(worth, key=lambda f: (-worth[f], f))[:size]


def encode(counts: Counter[str], index: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    found = [(index[f], n) for f, n in counts.items() if f in index] or [(0, 1)]
    rows, n = np.array(sorted(found), np.int64).T
    w = 1 + np.log(n.astype(np.float32))
    return rows, w / np.sqrt((w**2).sum())


def train(
    documents: Sequence[tuple[np.ndarray, np.ndarray]],
    labels: np.ndarray,
    weight: np.ndarray,
    shape: tuple[int, int, int],
    epochs: int = 10,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Embedding (F, D), output (D, L) and bias (L,) by Adam on the weighted cross-entropy; one thread, deterministic."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    table = torch.nn.EmbeddingBag(shape[0], shape[1], mode="sum")
    torch.nn.init.normal_(table.weight, std=0.05)
    head = torch.nn.Linear(shape[1], shape[2])
    parameters = [*table.parameters(), *head.parameters()]
    steps = epochs * math.ceil(len(documents) / _BATCH)
    optimizer = torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.02, 1 - s / steps))
    target, w = torch.tensor(labels), torch.tensor(weight, dtype=torch.float32)
    loss_of = torch.nn.CrossEntropyLoss(reduction="none", label_smoothing=0.03)
    generator = torch.Generator().manual_seed(seed)
    # documents are drawn by weight, so that rare languages are seen as often as frequent ones
    for _ in range(epochs):
        order = torch.multinomial(w.clamp(max=60.0), len(documents), replacement=True, generator=generator)
        for batch in order.split(_BATCH):
            rows = [torch.from_numpy(documents[i][0]) for i in batch.tolist()]
            values = torch.cat([torch.from_numpy(documents[i][1]) for i in batch.tolist()])
            values = values * (torch.rand(len(values), generator=generator) >= _DROPPED)  # no file needs every word
            offsets = torch.tensor([0, *[len(r) for r in rows[:-1]]]).cumsum(0)
            hidden = table(torch.cat(rows), offsets, per_sample_weights=values)
            hidden = torch.nn.functional.dropout(hidden, 0.1)
            loss = loss_of(head(hidden), target[batch]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return table.weight.detach().numpy(), head.weight.detach().numpy().T, head.bias.detach().numpy()


def save(
    path: Path,
    names: Sequence[str],
    words: Sequence[str],
    vectors: np.ndarray,
    out: np.ndarray,
    bias: np.ndarray,
    about: Mapping[str, Any],
) -> None:
    scales = np.abs(vectors).max(0) / 127
    tensors = {
        "vocabulary": np.frombuffer("\x1e".join(words).encode("utf-8"), np.uint8),
        "vectors": np.rint(vectors / scales).astype(np.int8),
        "scales": scales.astype(np.float32),
        "out": np.ascontiguousarray(out).astype(np.float16),
        "bias": bias.astype(np.float32),
    }
    meta = {"languages": list(names), **about}
    save_file(tensors, path, {"model": json.dumps(meta, sort_keys=True)})  # several keys would have no fixed order


def evaluate(
    identify: Callable[[str], tuple[str, float]], samples: Sequence[Sample]
) -> dict[str, tuple[int, float, list[tuple[str, int]]]]:
    """{language: (files, share identified, most frequent confusions)}."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for sample in samples:
        found[sample.language][identify(sample.text)[0]] += 1
    return {
        lang: (
            counts.total(),
            counts[lang] / counts.total(),
            [(other, n) for other, n in counts.most_common(4) if other != lang],
        )
        for lang, counts in sorted(found.items())
    }


def fit(
    samples: Sequence[Sample],
    path: Path,
    size: tuple[int, int, int] = (_WORDS, _FEATURES, _DIM),
    seed: int = 0,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Train on all of `samples` (whole files and two crops of each) and write the model to `path`."""
    names = sorted({s.language for s in samples})
    texts = [(s.language, text) for s in samples for text in (s.text, *crops(s, 2, seed))]
    base, packages = weights(samples), [s.package for s in samples]
    weight = np.repeat(base, 3)
    raw = [(s.language, features(s.text[:3000]), w) for s, w in zip(samples, base)]
    known = frozenset(
        f for f in select([(n, Counter({f: 1 for f in c if "\x1f" not in f}), w) for n, c, w in raw], size[0], packages)
    )
    counted = [features(text, known) for _, text in texts]
    words = select([(texts[i][0], counted[i], weight[i]) for i in range(0, len(texts), 3)], size[1], packages)
    words = sorted(set(words) | known)
    index = {word: i for i, word in enumerate(words)}
    documents = [encode(c, index) for c in counted]
    labels = np.array([names.index(language) for language, _ in texts])
    vectors, out, bias = train(documents, labels, weight, (len(words), size[2], len(names)), seed=seed)
    files = Counter(s.language for s in samples)
    made = {"seed": seed, "size": list(size), "files": dict(sorted(files.items()))}
    save(path, names, words, vectors, out, bias, made | dict(about or {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=MODEL)
    args = parser.parse_args()
    paths = [path for folder in args.folders for path in sorted(folder.iterdir())]
    packages: dict[str, dict[str, str]] = {}
    samples = list(read_packages(paths, frozenset(LANGUAGES), about=packages))
    held = [s for s in samples if held_out(s.package)]
    chosen = balance(without_copies((s for s in samples if not held_out(s.package)), held))
    files = Counter(s.package for s in chosen)
    sources = [
        {"archive": name, "files": files[entry["package"]], **entry}
        for name, entry in sorted(packages.items())
        if files[entry["package"]]
    ]
    fit(chosen, args.out, about={"sources": sources})
    report = evaluate(CodeLanguageModel(args.out).identify, balance(held, 40))
    for language, (files, share, confusions) in report.items():
        print(f"{language:18} {files:5} {share:.3f} {confusions}")
    print(f"macro {np.mean([share for _, share, _ in report.values()]):.4f} over {len(report)} languages")


if __name__ == "__main__":
    main()

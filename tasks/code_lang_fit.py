"""Train conf/code_lang.safetensors from packages: `python -m tasks.code_lang_fit FOLDER... [--out MODEL]`.

The folders hold the archives that conf/code_lang_packages.txt lists (registry, name, version), as `apt-get source
--download-only`, `apt-get download`, `npm pack`, `pip download --no-binary` and `git archive` leave them, or unpacked packages.
Packages named in HELD_OUT are never trained on, nor are copies of their files: accuracy is measured on them. Labels get a
second look (tasks/code_lang_clean.py). The model's metadata name every package, its sha256, licence and the number of its
files. Same packages, same bytes, whatever `--workers`.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import multiprocessing
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from scipy.sparse import csr_matrix

from tasks.code_lang_clean import clean
from tasks.code_lang_model import MODEL, CodeLanguageModel, features, tokens
from tasks.code_lang_samples import Sample, crops, package_name, read_packages, without_copies

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
_WORDS, _FEATURES, _DIM = 8000, 50000, 48
_EPOCHS, _CROPS = 5, 1
_PER_LANGUAGE = 300
_BATCH, _DROPPED = 512, 0.2


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
            for _, files in sorted(packages.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())
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


def matrix(counted: Iterable[Counter[str]]) -> tuple[csr_matrix, list[str]]:
    """Counts as a matrix, float32 (documents, features), and the features' names."""
    index: dict[str, int] = {}

    def places(counts: Counter[str]) -> tuple[array, array]:
        return array("i", [index.setdefault(f, len(index)) for f in counts]), array("f", counts.values())

    found = [places(counts) for counts in counted]
    return stack(found, len(index)), list(index)


def select(
    counts: csr_matrix,
    names: Sequence[str],
    languages: Sequence[str],
    weight: np.ndarray,
    packages: Sequence[str],
    size: int,
) -> list[int]:
    """Columns of the `size` features whose presence says most about the language (mutual information under the documents'
    weights), of those that six documents and two packages have: what one project's files share says nothing on another's."""
    present = counts.copy()
    present.data[:] = 1
    of_language = _groups(languages, weight)
    of_package = _groups(packages, np.ones(len(packages)))
    spread = np.diff((of_package @ present).tocsc().indptr)
    usable = np.flatnonzero((np.asarray(present.sum(0)).ravel() >= 6) & (spread >= 2))
    present = present[:, usable]
    both = (of_language @ present).toarray() / weight.sum()  # language and feature
    feature = both.sum(0)
    language = np.asarray(of_language.sum(1)) / weight.sum()
    neither = np.maximum(language - both, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.where(both > 0, both * np.log(both / (feature * language)), 0).sum(0)
        rest = neither * np.log(neither / ((1 - feature) * language + 1e-12))
        gain += np.where(neither > 1e-12, rest, 0).sum(0)
    gain = dict(zip(usable.tolist(), np.round(gain, 12).tolist(), strict=True))
    return sorted(gain, key=lambda i: (-gain[i], names[i]))[:size]


def _groups(keys: Sequence[str], weight: np.ndarray) -> csr_matrix:
    """Weights as a matrix (distinct keys in order, documents)."""
    place = {key: i for i, key in enumerate(sorted(set(keys)))}
    return csr_matrix((weight, ([place[k] for k in keys], np.arange(len(keys)))), (len(place), len(keys)))


def encode(counts: csr_matrix) -> csr_matrix:
    """1 + log count, each document normalised."""
    out = counts.tocsr().astype(np.float32)
    out.sort_indices()
    out.data = 1 + np.log(out.data)
    length = np.sqrt(np.add.reduceat(np.append(out.data**2, 0), out.indptr[:-1])) if out.nnz else np.ones(out.shape[0])
    sizes = np.diff(out.indptr)
    out.data /= np.repeat(np.where(sizes > 0, length, 1), sizes).astype(np.float32)
    return out


def train(
    documents: csr_matrix,
    labels: np.ndarray,
    weight: np.ndarray,
    shape: tuple[int, int, int],
    epochs: int = _EPOCHS,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Embedding (F, D), output (D, L) and bias (L,) by Adam on the weighted cross-entropy; one thread, deterministic."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    table = torch.nn.EmbeddingBag(shape[0], shape[1], mode="sum")
    torch.nn.init.normal_(table.weight, std=0.05)
    head = torch.nn.Linear(shape[1], shape[2])
    parameters = [*table.parameters(), *head.parameters()]
    size = min(_BATCH, max(8, documents.shape[0] // 32))
    steps = epochs * math.ceil(documents.shape[0] / size)
    optimizer = torch.optim.AdamW(parameters, lr=0.025, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.02, 1 - s / steps))
    target, w = torch.tensor(labels), torch.tensor(weight, dtype=torch.float32)
    loss_of = torch.nn.CrossEntropyLoss(reduction="none", label_smoothing=0.03)
    generator = torch.Generator().manual_seed(seed)
    # documents are drawn by weight, so that rare languages are seen as often as frequent ones
    for _ in range(epochs):
        order = torch.multinomial(w.clamp(max=60.0), documents.shape[0], replacement=True, generator=generator)
        for batch in order.split(size):
            part = documents[batch.numpy()]
            rows, values = torch.from_numpy(part.indices.astype(np.int64)), torch.from_numpy(part.data)
            values = values * (torch.rand(len(values), generator=generator) >= _DROPPED)  # no file needs every word
            offsets = torch.from_numpy(part.indptr[:-1].astype(np.int64))
            hidden = table(rows, offsets, per_sample_weights=values)
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
    workers: int = 1,
) -> None:
    """Train on all of `samples` (whole files and crops of each) and write the model to `path`.

    `size`: words that stand for themselves, features, dimensions. `workers` processes count features; the model is the same.
    """
    languages, packages = [s.language for s in samples], [s.package for s in samples]
    names = sorted(set(languages))
    base = weights(samples)
    whole = [s.text for s in samples]
    cut = [text for s in samples for text in crops(s, _CROPS, seed)]
    half, turn = [], Counter[str]()  # every second file of a language says which features are worth it
    for i, language in enumerate(languages):
        half += [i] * (turn[language] % 2 == 0)
        turn[language] += 1

    def best(counted: Iterable[Counter[str]], most: int) -> list[str]:
        counts, found = matrix(counted)
        of = [languages[i] for i in half], base[half], [packages[i] for i in half]
        return [found[i] for i in select(counts, found, *of, most)]

    known = frozenset(best(_map(workers, tokens_of, [whole[i][:3000] for i in half]), size[0]))
    words = best(_map(workers, features, [whole[i] for i in half], known), size[1])
    words = sorted(set(words) | known)
    index = {word: i for i, word in enumerate(words)}
    documents = encode(stack(_map(workers, rows, whole + cut, known, index), len(words)))
    labels = np.array([names.index(language) for language in languages])
    labels = np.concatenate([labels, np.repeat(labels, _CROPS)])
    weight = np.concatenate([base, np.repeat(base, _CROPS)])
    shape = (len(words), size[2], len(names))
    vectors, out, bias = train(documents, labels, weight, shape, seed=seed)
    files = Counter(languages)
    made = {"seed": seed, "size": list(size), "files": dict(sorted(files.items()))}
    save(path, names, words, vectors, out, bias, made | dict(about or {}))


def tokens_of(text: str) -> Counter[str]:
    return Counter(tokens(text))


def rows(text: str, known: frozenset[str], index: Mapping[str, int]) -> tuple[array, array]:
    """(columns, counts) of a text's features that `index` has."""
    found = [(index[f], n) for f, n in features(text, known).items() if f in index]
    return array("i", [i for i, _ in found]), array("f", [n for _, n in found])


def stack(found: Iterable[tuple[array, array]], width: int) -> csr_matrix:
    """Rows as one matrix, float32 (documents, width)."""
    columns, values, ends = array("i"), array("f"), array("q", [0])
    for places, counts in found:
        columns.extend(places)
        values.extend(counts)
        ends.append(len(columns))
    parts = (np.frombuffer(values, np.float32), np.frombuffer(columns, np.int32), np.array(ends))
    return csr_matrix(parts, (len(ends) - 1, width))


_job: list[Any] = []  # what a forked worker does: a function and its fixed arguments


def _map(workers: int, function: Callable[..., Any], texts: Sequence[str], *fixed: Any) -> Iterator[Any]:
    """function(text, *fixed) of every text in order, by forked processes that inherit `fixed` instead of receiving it."""
    if workers < 2:
        yield from (function(text, *fixed) for text in texts)
        return
    _job[:] = [function, fixed]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield from pool.imap(_work, texts, chunksize=32)


def _work(text: str) -> Any:
    return _job[0](text, *_job[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=MODEL)
    parser.add_argument("--workers", type=int, default=1, help="processes that read and count")
    args = parser.parse_args()
    paths = [path for folder in args.folders for path in sorted(folder.iterdir())]
    packages: dict[str, dict[str, str]] = {}
    mine = [path for path in paths if not held_out(package_name(path))]
    theirs = [path for path in paths if held_out(package_name(path))]
    held = list(clean(read_packages(theirs, frozenset(LANGUAGES), workers=args.workers)))
    samples = read_packages(mine, frozenset(LANGUAGES), about=packages, workers=args.workers)
    chosen = without_copies(balance(clean(samples)), held)
    files = Counter(s.package for s in chosen)
    sources = [
        {"archive": name, "files": files[entry["package"]], **entry}
        for name, entry in sorted(packages.items())
        if files[entry["package"]]
    ]
    fit(chosen, args.out, about={"sources": sources}, workers=args.workers)
    report = evaluate(CodeLanguageModel(args.out).identify, balance(held, 40))
    for language, (files, share, confusions) in report.items():
        print(f"{language:18} {files:5} {share:.3f} {confusions}")
    print(f"macro {np.mean([share for _, share, _ in report.values()]):.4f} over {len(report)} languages")


if __name__ == "__main__":
    main()

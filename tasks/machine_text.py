"""Machine-made text: placeholder, Markov, template and language-model text among documents (GLM-5, notes D.2: none is wanted).

    python -m tasks.machine_text < page.txt             the score and the features of one text

Two detectors without a heavy model. `MachineTextDetector` scores one text from its statistics: repetition, compression,
the shape of sentences, how words recur, what balances, stock phrases. Its weights are in machine_text.json, made by
`python -m tests.bench.judges train-machine-text` on real prose and generated text (tests/bench/machine_text_data.py), with
a threshold set on training sources left out in turn. `TemplateCounter` sees what one text cannot show: wording with the
same words around other names and numbers in many documents of the corpus.
"""

from __future__ import annotations

import json
import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field

MODEL = Path(__file__).with_name("machine_text.json")
CHARS = 3000  # of a text's beginning that are looked at
PLACEHOLDER = 0.3  # share of the placeholder's Latin that Latin itself does not reach
RUN = 8  # words of a template's wording
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*|\d+")
_SENTENCE = re.compile(r"(?<=[.!?。！？])\s+|(?<=[。！？])|\n{2,}")
_STOCK = re.compile(
    r"\b(it(?:'s| is) (?:essential|important|crucial|worth noting)|in conclusion|in summary|additionally|furthermore|moreover"
    r"|overall,|ultimately|whether you(?:'re| are)|not only|wide range of|plays? a (?:crucial|vital|significant) role|journey"
    r"|ensur(?:e|es|ing)|enhanc(?:e|es|ing)|crucial|vital|embrac(?:e|ing)|unlock|delve|tapestry|essential for|here are some"
    r"|there are several|one of the most|can help you|looking for|unique|sustainable|benefits? of|well-being)\b",
    re.IGNORECASE,
)
_PLACEHOLDER = frozenset(
    "lorem ipsum dolor sit amet consectetur adipiscing adipisicing elit sed eiusmod tempor incididunt labore dolore magna"
    " aliqua enim veniam quis nostrud exercitation ullamco laboris nisi aliquip commodo consequat duis aute irure"
    " reprehenderit voluptate velit esse cillum fugiat nulla pariatur excepteur sint occaecat cupidatat proident sunt culpa"
    " officia deserunt mollit anim laborum quasi architecto beatae vitae dicta explicabo nemo ipsam quia voluptas aspernatur"
    " odit fugit consequuntur magni dolores eos ratione sequi nesciunt".split()
)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
FEATURES = (
    "compression self_prediction distinct_words repeated_2 repeated_3 repeated_5 hapax sentence_mean sentence_spread"
    " first_words overlap_next recurrence recurrence_far unbalanced comma quote dash digits capitals question stock"
    " placeholder function_share function_entropy line_spread paragraph_spread word_length odd_end"
).split()


class MachineTextConfig(BaseModel):
    """What is removed as machine-made."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    threshold: float | None = Field(None, ge=0, le=1, description="score from which a text goes; null: the model's own")
    min_chars: int = Field(300, ge=0, description="shorter texts are not judged alone")
    template_documents: int = Field(5, ge=2, description="wording in at least this many documents is a template's")
    template_share: float = Field(0.8, gt=0, le=1, description="share of template wording from which a document goes")


def words_of(text: str) -> list[str]:
    """Lower-case words and numbers; single characters where a script has no spaces (more than 12 letters in a word)."""
    out: list[str] = []
    for word in _WORD.findall(text.lower()):
        if ord(word[0]) >= 0x2E80 and len(word) > 1:
            out += word
        else:
            out.append(word)
    return out


def _repeated(words: Sequence[str], n: int) -> float:
    total = len(words) - n + 1
    return 1 - len({tuple(words[i : i + n]) for i in range(total)}) / total if total > 0 else 0.0


def _size(data: bytes) -> int:
    return len(zlib.compress(data, 6))


def _spread(values: Sequence[float]) -> float:
    """Standard deviation over mean; 0 for fewer than two values."""
    return float(np.std(values) / max(np.mean(values), 1e-9)) if len(values) > 1 else 0.0


def text_features(text: str) -> list[float]:
    """The floats named in FEATURES of the text's first CHARS characters. They work without knowing the language."""
    text = text[:CHARS]
    words = words_of(text)
    n = max(1, len(words))
    counts = Counter(words)
    head = words[:150]
    sentences = [s for s in _SENTENCE.split(text) if len(s.strip()) > 1]
    lengths = [len(s) for s in sentences] or [len(text)]
    bags = [{w for w in words_of(s) if len(w) > 3} for s in sentences]
    pairs = [(a, b) for a, b in zip(bags, bags[1:]) if a and b]
    openers = Counter(s.split()[0].lower() for s in sentences if s.split())
    seen: dict[str, int] = {}
    near = far = content = 0
    for i, word in enumerate(words):
        if len(word) > 4:
            content += 1
            if word in seen:
                near += i - seen[word] <= 40
                far += i - seen[word] > 40
            seen[word] = i
    data = text.encode("utf-8", "replace")
    half = len(data) // 2
    common = [c for _, c in sorted(counts.items(), key=lambda p: (-p[1], p[0]))[:12]]
    shares = np.array(common, float) / max(1, sum(common))
    lines = [len(line) for line in text.split("\n") if line.strip()] or [0]
    paragraphs = [len(p) for p in re.split(r"\n\s*\n", text) if p.strip()] or [0]
    size = max(1, len(text))
    unbalanced = sum(abs(text.count(a) - text.count(b)) for a, b in ("()", "[]", "“”", "«»")) + text.count('"') % 2
    return [
        _size(data) / max(1, len(data)) if len(data) > 200 else 0.5,
        1 - (_size(data) - _size(data[:half])) / max(1, _size(data[half:])),
        len(set(head)) / max(1, len(head)),
        _repeated(words, 2),
        _repeated(words, 3),
        _repeated(words, 5),
        sum(c == 1 for c in counts.values()) / n,
        math.log1p(float(np.mean(lengths))),
        _spread(lengths),
        max(openers.values(), default=0) / max(1, len(sentences)) if len(sentences) > 3 else 0.0,
        float(np.mean([len(a & b) / min(len(a), len(b)) for a, b in pairs])) if pairs else 0.0,
        near / max(1, content),
        far / max(1, content),
        math.log1p(1000 * unbalanced / size),
        1000 * sum(text.count(c) for c in ",、，") / size / 20,
        1000 * sum(text.count(c) for c in "\"“”«»'’") / size / 20,
        1000 * sum(text.count(c) for c in "-–—:;") / size / 20,
        sum(map(str.isdigit, text)) / size,
        sum(map(str.isupper, text)) / size,
        1000 * sum(text.count(c) for c in "?!？！") / size / 5,
        math.log1p(100 * len(_STOCK.findall(text)) / n),
        sum(w in _PLACEHOLDER for w in words) / n,
        sum(common) / n,
        float(-(shares * np.log(shares + 1e-9)).sum()),
        _spread(lines),
        _spread(paragraphs),
        sum(map(len, words)) / n / 10,
        float(len(sentences) > 1 and text.rstrip()[-1:].isalnum()),
    ]


class Trees:
    """Gradient-boosted regression trees as flat arrays: raw score = base + the sum of one leaf of each tree."""

    def __init__(self, base: float, trees: Sequence[dict[str, list[float]]]):
        self.base, self.trees = base, [{k: np.asarray(v) for k, v in t.items()} for t in trees]

    def raw(self, x_nf: np.ndarray) -> np.ndarray:
        """float64 [n]; x float [n, f]. A value equal to a node's threshold goes left."""
        total = np.full(len(x_nf), self.base)
        rows = np.arange(len(x_nf))
        for tree in self.trees:
            node = np.zeros(len(x_nf), int)
            while True:
                feature = tree["feature"][node].astype(int)
                inner = feature >= 0
                if not inner.any():
                    break
                left = x_nf[rows, np.maximum(feature, 0)] <= tree["threshold"][node]
                following = np.where(left, tree["left"][node], tree["right"][node]).astype(int)
                node = np.where(inner, following, node)
            total += tree["value"][node]
        return total


class MachineTextDetector:
    """The shipped detector of single texts; ValueError when its file was made for other features."""

    def __init__(self, path: str | Path = MODEL):
        model = json.loads(Path(path).read_text(encoding="utf-8"))
        if model.get("features") != FEATURES:
            raise ValueError(f"{path}: made for other features than this version computes; train it again")
        self._trees = Trees(model["base"], model["trees"])
        self.threshold = float(model["threshold"])

    def score(self, texts: Sequence[str]) -> np.ndarray:
        """How machine-made each text reads, 0..1, float64 [n]."""
        if not len(texts):
            return np.zeros(0)
        x = np.array([text_features(t) for t in texts])
        score = 1 / (1 + np.exp(-np.clip(self._trees.raw(x), -30, 30)))
        return np.round(np.where(x[:, FEATURES.index("placeholder")] >= PLACEHOLDER, 1.0, score), 5)

    def made(self, texts: Sequence[str], config: MachineTextConfig) -> list[float | None]:
        """The score of each text that is to be removed, None for one that stays (or is too short to be judged)."""
        limit = self.threshold if config.threshold is None else config.threshold
        scores = self.score(texts).tolist()
        return [s if s >= limit and len(t) >= config.min_chars else None for t, s in zip(texts, scores, strict=True)]


class TemplateCounter:
    """Which share of a document's wording stands, with other names and numbers in it, in many documents of the corpus.

    The wording is every run of RUN words in which numbers and capitalised words are slots, at most half of them. Documents
    a table of `1 << bits` cells (4 bytes each), whatever the size of the corpus; a collision can only raise a count.
    """

    def __init__(self, bits: int = 22):
        self._count = np.zeros(1 << bits, np.uint32)
        self._mask = (1 << bits) - 1

    def cells(self, text: str) -> np.ndarray:
        """Distinct cells of the text's runs, sorted."""
        words = [
            "#" if w[0].isdigit() else "^" if w[0].isupper() else w
            for w in _WORD.findall(text[: 10 * CHARS])
            if w.strip()
        ]
        if len(words) < RUN:
            return np.zeros(0, np.int64)
        codes = {w: xxhash.xxh3_64_intdigest(w.encode("utf-8", "replace")) for w in set(words)}
        code = np.fromiter((codes[w] for w in words), np.uint64, len(words))
        slots = np.cumsum([0] + [w in "#^" for w in words])
        few = slots[RUN:] - slots[:-RUN] <= RUN // 2
        runs = np.zeros(len(few), np.uint64)
        for k in range(RUN):  # a polynomial of the words' hashes, modulo 2 ** 64
            runs = runs * _FACTOR + code[k : k + len(few)]
        return np.unique((runs[few] >> np.uint64(20)) & np.uint64(self._mask)).astype(np.int64)

    def add(self, texts: Iterable[str]) -> None:
        """Count documents; each counts once per run."""
        for text in texts:
            self._count[self.cells(text)] += 1

    def save(self, path: str | Path) -> None:
        np.save(path, self._count, allow_pickle=False)

    @classmethod
    def load(cls, path: str | Path) -> TemplateCounter:
        """A counter of the size it was saved with."""
        found = cls(bits=1)
        found._count = np.load(path, allow_pickle=False)
        found._mask = len(found._count) - 1
        return found

    def share(self, text: str, documents: int) -> float:
        """Share of the text's runs that at least `documents` counted documents have; 0 for fewer than ten runs."""
        cells = self.cells(text)
        return round(float((self._count[cells] >= documents).mean()), 5) if len(cells) >= 10 else 0.0


def main() -> None:
    text = sys.stdin.read()
    detector = MachineTextDetector()
    print(json.dumps({"score": float(detector.score([text])[0]), "threshold": detector.threshold}))
    print(json.dumps({k: round(v, 4) for k, v in zip(FEATURES, text_features(text), strict=True)}))


if __name__ == "__main__":
    main()

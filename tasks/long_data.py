"""Long-context sequences for the growing contexts of mid-training (notes D.5 to D.7).

    python -m tasks long_data

Per context length: `interleaved` sequences, in which segments of similar documents take turns so that related evidence is
spread over all depths; `negatives` sequences (NExtLong), in which the chunks of one document stand apart, separated by
similar chunks of other documents; for the longest context also MRCR-like conversations (tasks/mrcr.py). Similarity is the
cosine of hashed TF-IDF vectors. Documents of domain long; meta names kind, context, split and the documents used: a
sequence is made of training documents or of validation documents, never of both.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash
from pydantic import Field

from tasks import documents, mrcr, shingles
from tasks.stage import Stage, StageConfig
from tasks.tokens import document_split

SOURCES = ("data/decontaminate", "data/decontaminate_swe")


class Config(StageConfig):
    contexts: tuple[int, ...] = Field((512, 1024, 2048), min_length=1, description="context lengths in tokens, growing")
    chars_per_token: float = Field(2.8, gt=0, description="of the tokenizer on this corpus; sizes the sequences")
    fill: float = Field(0.95, gt=0, le=1, description="part of the context that a sequence is sized for")
    interleaved: tuple[int, ...] = Field((120, 100, 80), description="interleaved sequences per context")
    negatives: tuple[int, ...] = Field((40, 40, 40), description="hard-negative sequences per context")
    mrcr: int = Field(80, ge=0, description="MRCR-like conversations, for the last context only")
    needles: tuple[int, ...] = Field((2, 4), description="needle counts of the conversations, in turn; up to 8")
    max_documents: int = Field(6000, ge=2, description="documents considered, by a hash of their ids")
    min_chars: int = Field(600, ge=1, description="shorter documents are not used")
    documents_per_sequence: tuple[int, int] = Field(
        (2, 4), description="similar documents that take turns, least and most"
    )
    segments: int = Field(3, ge=2, description="segments that each interleaved document is cut into")
    min_similarity: float = Field(0.2, ge=-1, le=1, description="cosine from which two documents count as similar")
    val_fraction: float = Field(
        0.05, ge=0, lt=1, description="as in `pack`: a sequence is made of one split's documents"
    )
    dimensions: int = Field(1024, ge=16, description="buckets of the hashed TF-IDF")


class HashedTfidf:
    """The similarity model: log term counts times inverse document frequency of the texts it was made from, hashed with
    signs into a fixed number of buckets."""

    def __init__(self, texts: Sequence[str], dimensions: int, max_chars: int = 4000):
        self.dimensions, self.max_chars = dimensions, max_chars
        seen = [self._count(t)[0] for t in texts]
        self._words, frequency = np.unique(np.concatenate(seen), return_counts=True)
        self._idf = np.log((1 + len(texts)) / frequency)
        self._idf_unseen = float(np.log(1 + len(texts)))

    def _count(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        return np.unique(shingles.word_hashes(text[: self.max_chars]), return_counts=True)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors, float32 [len(texts), dimensions] (zero for a text without words)."""
        rows = np.zeros((len(texts), self.dimensions), dtype=np.float32)
        for row, text in zip(rows, texts):
            words, counts = self._count(text)
            at = np.searchsorted(self._words, words)
            known = self._words[np.minimum(at, len(self._words) - 1)] == words
            idf = np.where(known, self._idf[np.minimum(at, len(self._words) - 1)], self._idf_unseen)
            sign = np.where(words >> np.uint64(63), 1.0, -1.0)
            bucket = (words % np.uint64(self.dimensions)).astype(np.int64)
            row += np.bincount(bucket, np.log1p(counts) * idf * sign, self.dimensions).astype(np.float32)
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        return rows / np.where(norms == 0, 1, norms)


def nearest(vectors: np.ndarray, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(indices, cosines), each [len(queries), count]: the most similar rows of `vectors`, best first."""
    count = min(count, len(vectors))
    indices = np.empty((len(queries), count), dtype=np.int64)
    values = np.empty((len(queries), count), dtype=np.float32)
    for start in range(0, len(queries), 512):
        scores = queries[start : start + 512] @ vectors.T
        top = np.argpartition(-scores, count - 1, axis=1)[:, :count]
        found = np.take_along_axis(scores, top, axis=1)
        order = np.lexsort((top, -found), axis=1)
        indices[start : start + 512] = np.take_along_axis(top, order, axis=1)
        values[start : start + 512] = np.take_along_axis(found, order, axis=1)
    return indices, values


def boundary(text: str, position: int, reach: int) -> int:
    """The best place to cut `text` at or up to `reach` characters before `position`: paragraph, line, sentence, word, any."""
    low = max(1, position - reach)
    for pattern in (r"\n\s*\n", r"\n", r"[.!?]\s", r"\s"):
        ends = [m.end() for m in re.finditer(pattern, text[low:position])]
        if ends:
            return low + ends[-1]
    return position


def piece(text: str, length: int, rng: random.Random) -> str:
    """A contiguous part of about `length` characters, cut at boundaries."""
    if len(text) <= length:
        return text.strip()
    start = rng.randrange(len(text) - length + 1)
    start = boundary(text, start, min(start, 400)) if start > 1 else 0
    return text[start : boundary(text, min(len(text), start + length), length // 4)].strip()


def segments(text: str, count: int) -> list[str]:
    """`text` in up to `count` consecutive parts of similar length; joined they are the text, white space at cuts aside."""
    cuts, last = [0], 0
    for k in range(1, count):
        at = boundary(text, len(text) * k // count, max(1, len(text) // (2 * count)))
        if at > last:
            cuts.append(at)
            last = at
    parts = [text[a:b].strip() for a, b in zip(cuts, [*cuts[1:], len(text)])]
    return [p for p in parts if p]


def interleave(texts: Sequence[str], count: int) -> str:
    """Segments of the texts in turn: first of each, second of each, ... Each text keeps its own order."""
    parts = [segments(t, count) for t in texts]
    return "\n\n".join(p[k] for k in range(count) for p in parts if k < len(p))


def with_negatives(text: str, negatives: Sequence[Sequence[str]], count: int) -> str:
    """The text's `count` chunks, each followed by its hard negatives (NExtLong); the last chunk closes the sequence."""
    chunks = segments(text, count)
    out = []
    for number, chunk in enumerate(chunks):
        out.append(chunk)
        if number < len(chunks) - 1 and number < len(negatives):
            out += negatives[number]
    return "\n\n".join(out)


def clusters(vectors: np.ndarray, least: int, most: int, min_similarity: float) -> Iterator[list[int]]:
    """Groups of `least` to `most` rows with a cosine of at least `min_similarity` to the group's first, the tightest first.

    A row is in one group at most.
    """
    neighbours, cosines = nearest(vectors, vectors, 4 * most)
    used: set[int] = set()
    for seed in np.argsort(-cosines[:, 1:most].mean(axis=1), kind="stable").tolist():
        if seed in used:
            continue
        group = [seed]
        for other, cosine in zip(neighbours[seed].tolist(), cosines[seed].tolist()):
            if len(group) == most or cosine < min_similarity:
                break
            if other != seed and other not in used:
                group.append(other)
        if len(group) >= least:
            used.update(group)
            yield group


def _load(stage: Stage, config: Config) -> list[dict]:
    rows = []
    for source in SOURCES:
        for row in documents.read_documents(stage.dep(source), ["id", "text", "source", "domain", "lang", "meta"]):
            stage.seen()
            if len(row["text"]) >= config.min_chars:
                rows.append(row)
    seed = stage.rng_seed("documents") & 0xFFFFFFFF
    rows.sort(key=lambda r: (xxhash.xxh3_64_intdigest(r["id"].encode(), seed=seed), r["id"]))
    return rows[: config.max_documents]


def _check(config: Config) -> None:
    for name in ("interleaved", "negatives"):
        if len(getattr(config, name)) != len(config.contexts):
            raise ValueError(f"long_data.{name} needs one count per context, {len(config.contexts)} in all")
    if list(config.contexts) != sorted(set(config.contexts)):
        raise ValueError(f"long_data.contexts must grow, got {list(config.contexts)}")
    if not 2 <= config.documents_per_sequence[0] <= config.documents_per_sequence[1]:
        raise ValueError("long_data.documents_per_sequence must be (least, most) with 2 <= least <= most")
    if config.mrcr and not all(1 <= n <= 8 for n in config.needles):
        raise ValueError(f"long_data.needles must lie in 1..8, got {list(config.needles)}")


class Builder:
    """Makes the sequences of one split (train or val) from the documents of that split alone."""

    def __init__(self, stage: Stage, split: str, rows: list[dict]):
        self.stage, self.config, self.split, self.rows = stage, stage.config, split, rows
        self.texts = [row["text"] for row in rows]
        self.embed = HashedTfidf(self.texts, self.config.dimensions)
        self.vectors = self.embed(self.texts)
        self.made: Counter[str] = Counter()
        self.not_made: Counter[str] = Counter()

    def _rng(self, *item: object) -> random.Random:
        return random.Random(self.stage.rng_seed(self.split, *item))

    def document(self, text: str, kind: str, context: int, number: int, used: Sequence[int], **extra: object) -> dict:
        self.made[f"{kind}_{context}"] += 1
        ids = [self.rows[i]["id"] for i in used]
        meta = {"kind": kind, "context": context, "split": self.split, "documents": ids, **extra}
        languages = Counter(self.rows[i]["lang"] for i in used)
        lang = max(sorted(languages), key=lambda x: languages[x]) if languages else "en"
        return documents.document(text, f"{kind}/{self.split}/{context}/{number:05d}", "long", lang=lang, meta=meta)

    def interleaved(self, context: int, mine: np.ndarray, count: int, limit: int) -> Iterator[dict]:
        """Up to `count` sequences from the documents `mine`."""
        config, rng = self.config, self._rng("interleaved", context)
        if len(mine) < 2:
            return
        groups = clusters(self.vectors[mine], *config.documents_per_sequence, config.min_similarity)
        for number, group in zip(range(count), groups):
            used = mine[group].tolist()
            pieces = [piece(self.texts[i], limit // len(used) - 2 * config.segments, rng) for i in used]
            yield self.document(interleave(pieces, config.segments), "interleaved", context, number, used)

    def negatives(self, context: int, count: int, limit: int) -> Iterator[dict]:
        """Up to `count` NExtLong sequences; half of each is its own document."""
        config, rng = self.config, self._rng("negatives", context)
        for number, i in enumerate(rng.sample(range(len(self.rows)), min(count, len(self.rows)))):
            own = piece(self.texts[i], limit // 2, rng)
            chunks = segments(own, config.segments)
            near, _ = nearest(self.vectors, self.embed(chunks), 24)
            room = (limit - len(own)) // max(1, len(chunks) - 1)
            used, fillers = [i], []
            for row in near[:-1].tolist():
                other = next((j for j in row if j not in used), None)
                if other is None:
                    break
                used.append(other)
                fillers.append([piece(self.texts[other], max(80, room - 6), rng)])
            yield self.document(with_negatives(own, fillers, config.segments), "negatives", context, number, used)

    def conversations(self, context: int, count: int, limit: int) -> Iterator[dict]:
        """Up to `count` MRCR-like conversations in the chat template; what the corpus is too poor for is counted."""
        from tasks import chat

        config = self.config
        bank = mrcr.sentence_bank(t for t, row in zip(self.texts, self.rows) if row["domain"] not in ("code", "swe"))
        overhead = len("<|user|><|assistant|></think>")
        for number in range(count):
            needles = config.needles[number % len(config.needles)]
            variant = mrcr.VARIANTS[(number // len(config.needles)) % 2]
            try:
                found = mrcr.conversation(bank, self._rng("mrcr", context, number), limit, needles, variant, overhead)
            except ValueError as error:
                self.not_made[str(error)] += 1
                continue
            text = chat.render([*found.messages, {"role": "assistant", "content": found.answer}])
            extra = {"needles": needles, "wanted": found.wanted, "variant": variant}
            yield self.document(text, "mrcr", context, number, [], **extra)

    def sequences(self, share: float) -> Iterator[dict]:
        """Every sequence of this split: `share` of the configured counts, rounded."""
        config = self.config
        for n, context in enumerate(config.contexts):
            limit = int(context * config.chars_per_token * config.fill)
            # Each context has documents of its own, so that no text comes back at another length.
            mine = np.arange(n, len(self.rows), len(config.contexts))
            yield from self.interleaved(context, mine, round(config.interleaved[n] * share), limit)
            yield from self.negatives(context, round(config.negatives[n] * share), limit)
        yield from self.conversations(context, round(config.mrcr * share), limit)


def run(stage: Stage) -> None:
    config: Config = stage.config
    _check(config)
    rows = _load(stage, config)
    if len(rows) < 2:
        raise ValueError(
            f"long_data: {len(rows)} documents of at least {config.min_chars} characters, too few to combine"
        )
    made: dict[str, dict[str, int]] = {}
    not_made: Counter[str] = Counter()

    def everything() -> Iterator[dict]:
        for split, share in (("train", 1 - config.val_fraction), ("val", config.val_fraction)):
            mine = [row for row in rows if document_split(row, config.val_fraction) == split]
            if mine and share:
                builder = Builder(stage, split, mine)
                yield from builder.sequences(share)
                made[split] = dict(sorted(builder.made.items()))
                not_made.update(builder.not_made)

    written = documents.write_documents(stage.out("data/long_data"), everything())
    for reason, count in sorted(not_made.items()):
        stage.print(f"{count} conversations not made: {reason}")
    stage.rows(documents=written["documents"])
    stage.metric(
        documents=written["documents"],
        bytes=written["bytes"],
        considered=len(rows),
        made=made,
        conversations_not_made=sum(not_made.values()),
    )
    stage.print(f"{written['documents']} sequences, {written['bytes'] / 1e6:.1f} MB: {made}")

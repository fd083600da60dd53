"""Pack: documents -> memory-mapped token shards, one per domain and split (DESIGN.md section 4).

    python -m tasks pack-pretrain
    python -m tasks pack-midtrain

Every document of the stage's document inputs is tokenized (in batches, on all cores), ended with <|endoftext|> and
appended to its domain. A document is validation text by the hash of its id, so it is that in every corpus it appears in;
one that was made from others (interleaved texts) says its side itself, in `meta`.
Text that looks like a special token stays text. A share of the source code is rearranged for fill-in-the-middle
(GLM-4.5 §2.2), half of it prefix-suffix-middle, half suffix-prefix-middle. `max_mb` caps a domain by keeping a hash-chosen
sample. `repeats` weighs training documents by a score column, such as their quality bucket (GLM-4.5 §2.2 up-samples the top
buckets): one of weight 2 is packed twice, in another part of the shard, one of weight 0.5 with probability one half, and
under a cap the budget goes to the heavy ones. The largest number of copies is kept in meta.json, so that `max_epochs` of a
training stage counts passes over a document, not over the shard (tasks/samplers.py).
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.special_tokens import END_OF_TEXT, FIM_TOKENS
from tasks.stage import Stage, StageConfig
from tasks.tokens import SPLITS, TokenWriter, document_split, token_byte_lengths, unit_hash
from tasks.val_overlap import overlaps

TOKENIZER = "data/tokenizer"
CODE = "code"


class Repeats(BaseModel):
    """How often training documents are packed, by a score column."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    column: str = Field(description="score column; a document without it has weight 1")
    steps: tuple[tuple[float, float], ...] = Field(description="(value from which on, weight), ascending")

    @model_validator(mode="after")
    def _ascending(self) -> Repeats:
        starts = [start for start, _ in self.steps]
        if not starts or starts != sorted(set(starts)) or min(weight for _, weight in self.steps) < 0:
            raise ValueError(f"steps must have ascending values and weights of 0 or more, found {list(self.steps)}")
        return self

    def weight(self, row: Mapping[str, Any]) -> float:
        """Copies wanted of a document: the weight of the last step that its value reaches, 1 below the first."""
        value = row[self.column]
        return 1.0 if value is None else next((w for start, w in reversed(self.steps) if value >= start), 1.0)


class Config(StageConfig):
    val_fraction: float = Field(0.05, ge=0, lt=1, description="share of documents held out, by the hash of their id")
    fim_rate: float = Field(0.0, ge=0, le=1, description="share of code documents rearranged for fill-in-the-middle")
    fim_spm: float = Field(0.5, ge=0, le=1, description="share of those in suffix-prefix-middle order; the rest is PSM")
    max_mb: dict[str, float] = Field({}, description="cap per domain in MB of text (10^6 bytes); absent: everything")
    repeats: dict[str, Repeats] = Field({}, description="domain -> up- and down-sampling of its training documents")
    max_val_overlap: float | None = Field(
        None,
        ge=0,
        le=1,
        description="validation documents of which training text holds more are left out; null: not searched",
    )
    batch_documents: int = Field(256, ge=1, description="documents tokenized at once")


def fim_pieces(document_id: str, text: str) -> tuple[str, str, str]:
    """(prefix, middle, suffix) of a document, cut at two places chosen by its id; joined they are the text."""
    cuts = sorted(int(unit_hash(f"fim:{document_id}:{i}") * (len(text) + 1)) for i in range(2))
    return text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]


def _documents(stage: Stage) -> Iterator[dict[str, Any]]:
    from tasks.documents import read_documents

    columns = ("id", "text", "domain", "meta", *sorted({r.column for r in stage.config.repeats.values()}))
    for dep in stage.spec.deps:
        if dep.startswith("data/") and dep != TOKENIZER:  # the rest is code
            yield from read_documents(stage.dep(dep), columns=columns)


def _weight(config: Config, row: Mapping[str, Any]) -> float:
    """Copies wanted of a document; of validation text always one."""
    rule = config.repeats.get(row["domain"])
    if rule is None or document_split(row, config.val_fraction) != "train":
        return 1.0
    return rule.weight(row)


def copies(weight: float, share: float, document_id: str) -> int:
    """`weight` * `share` copies on average: a hash of the id rounds to a neighbouring whole number."""
    return max(0, math.ceil(weight * share - unit_hash(f"cap:{document_id}")))


def _shares(stage: Stage, config: Config) -> dict[str, float]:
    """Which share of each capped domain is kept, copies counted."""
    if not config.max_mb:
        return {}
    total: Counter[str] = Counter()
    for row in _documents(stage):
        total[row["domain"]] += len(row["text"].encode("utf-8")) * _weight(config, row)
    return {d: min(1.0, mb * 1e6 / total[d]) for d, mb in config.max_mb.items() if total[d]}


def _leaked(stage: Stage, config: Config) -> set[str]:
    """Ids of the validation documents that stand in the training text too largely (tasks/val_overlap.py)."""
    if config.max_val_overlap is None:
        return set()
    found = overlaps(lambda: _documents(stage), config.val_fraction)
    return {identity for identity, share in found.items() if share > config.max_val_overlap}


def _load_tokenizer(path: Path) -> Any:
    # The stage entry turns the tokenizer's own threads off; here they are the work, and their number changes no result.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # a document that spells "<|user|>" must not become the control token
    return tokenizer


def run(stage: Stage) -> None:
    config: Config = stage.config
    tokenizer = _load_tokenizer(stage.dep(TOKENIZER))
    special = {t: tokenizer.token_to_id(t) for t in (END_OF_TEXT, *FIM_TOKENS)}
    if missing := sorted(t for t, i in special.items() if i is None):
        raise ValueError(f"{TOKENIZER}/tokenizer.json lacks the special tokens {', '.join(missing)}")
    prefix_id, middle_id, suffix_id = (special[t] for t in FIM_TOKENS)
    shares, leaked = _shares(stage, config), _leaked(stage, config)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    out = stage.out(stage.spec.outs[0])

    with TokenWriter(out, vocab_size, special[END_OF_TEXT], token_byte_lengths(tokenizer)) as writer:

        def flush(rows: list[dict[str, Any]], turn: int) -> None:
            texts: list[str] = []
            plans: list[tuple[dict[str, Any], bool, str]] = []
            for row in rows:
                split = document_split(row, config.val_fraction)
                key = f"{row['id']}:{turn}" if turn else row["id"]  # copies are cut at other places
                fim = split == "train" and row["domain"] == CODE and unit_hash(f"fim:{key}") < config.fim_rate
                texts += fim_pieces(key, row["text"]) if fim else [row["text"]]
                plans.append((row, fim, split))
            encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
            for row, fim, split in plans:
                if fim:
                    prefix, middle, suffix = (next(encoded).ids for _ in range(3))
                    spm = unit_hash(f"spm:{row['id']}") < config.fim_spm
                    if spm:  # the form of Bavarian et al. 2022 (3.1) that shares its marks with the other order
                        ids = [prefix_id, suffix_id, *suffix, middle_id, *prefix, *middle]
                    else:
                        ids = [prefix_id, *prefix, suffix_id, *suffix, middle_id, *middle]
                    counts[row["domain"]]["fim"] += 1
                    counts[row["domain"]]["fim_spm"] += spm
                else:
                    ids = next(encoded).ids
                writer.add(split, row["domain"], ids, len(row["text"].encode("utf-8")))

        batch: list[dict[str, Any]] = []
        largest: Counter[str] = Counter()
        for turn in itertools.count():  # the second copies come after all first ones, never side by side
            packed: set[str] = set()
            for row in stage.progress(_documents(stage), label=f"documents{f', copy {turn + 1}' if turn else ''}"):
                domain, want = row["domain"], copies(_weight(config, row), shares.get(row["domain"], 1.0), row["id"])
                if turn:
                    if want <= turn or row["id"] in packed or not row["text"].strip():
                        continue
                    counts[domain]["copies"] += 1
                else:
                    stage.seen()
                    if not row["text"].strip():
                        stage.reject(row["id"], "empty", "the document has no text")
                        continue
                    if row["id"] in packed:
                        counts[domain]["repeated"] += 1  # two inputs may share a document; it is packed once
                        continue
                    if row["id"] in leaked:
                        counts[domain]["val_overlap"] += 1
                        continue
                    if not want:
                        counts[domain]["left_out_by_cap"] += 1
                        continue
                    largest[domain] = max(largest[domain], want)
                packed.add(row["id"])
                batch.append(row)
                if len(batch) >= config.batch_documents:
                    flush(batch, turn)
                    batch = []
            flush(batch, turn)
            batch = []
            if max(largest.values(), default=0) <= turn + 1:
                break
        meta = writer.close()

    meta["copies"] = dict(sorted(largest.items()))
    (writer.directory / "meta.json").write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n")
    if not meta["domains"]:
        raise ValueError(f"stage {stage.name}: its inputs hold no document to pack")
    for domain, splits in meta["domains"].items():
        both = {k: sum(splits[s][k] for s in SPLITS) for k in ("docs", "tokens", "bytes")}
        stage.print(
            f"{domain}: {both['docs']} documents, {both['tokens']} tokens, {both['bytes'] / both['tokens']:.2f} bytes per token"
        )
        stage.metric(
            **{
                domain: {
                    **{s: splits[s] for s in SPLITS},
                    "bytes_per_token": both["bytes"] / both["tokens"],
                    **{
                        k: counts[domain][k]
                        for k in ("fim", "fim_spm", "left_out_by_cap", "repeated", "copies", "val_overlap")
                    },
                }
            }
        )
    stage.metric(tokens=sum(d[s]["tokens"] for d in meta["domains"].values() for s in SPLITS))
    stage.rows(**{f"{d}_{s}": c[s]["docs"] for d, c in meta["domains"].items() for s in SPLITS})

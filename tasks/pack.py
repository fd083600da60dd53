"""Pack: documents -> memory-mapped token shards, one per domain and split (DESIGN.md section 4).

    python -m tasks pack-pretrain
    python -m tasks pack-midtrain

Every document of the stage's document inputs is tokenized (in batches, on all cores), ended with <|endoftext|> and
appended to its domain. A document is validation text by the hash of its id, so it is that in every corpus it appears in;
one that was made from others (interleaved texts) says its side itself, in `meta`.
Text that looks like a special token stays text. A share of the source code is rearranged for fill-in-the-middle
(GLM-4.5 §2.2), half of it prefix-suffix-middle, half suffix-prefix-middle. `max_mb` caps a domain by keeping a hash-chosen
sample.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from tasks.special_tokens import END_OF_TEXT, FIM_TOKENS
from tasks.stage import Stage, StageConfig
from tasks.tokens import SPLITS, TokenWriter, document_split, token_byte_lengths, unit_hash

TOKENIZER = "data/tokenizer"
CODE = "code"


class Config(StageConfig):
    val_fraction: float = Field(0.05, ge=0, lt=1, description="share of documents held out, by the hash of their id")
    fim_rate: float = Field(0.0, ge=0, le=1, description="share of code documents rearranged for fill-in-the-middle")
    fim_spm: float = Field(0.5, ge=0, le=1, description="share of those in suffix-prefix-middle order; the rest is PSM")
    max_mb: dict[str, float] = Field({}, description="cap per domain in MB of text (10^6 bytes); absent: everything")
    batch_documents: int = Field(256, ge=1, description="documents tokenized at once")


def fim_pieces(document_id: str, text: str) -> tuple[str, str, str]:
    """(prefix, middle, suffix) of a document, cut at two places chosen by its id; joined they are the text."""
    cuts = sorted(int(unit_hash(f"fim:{document_id}:{i}") * (len(text) + 1)) for i in range(2))
    return text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]


def _documents(stage: Stage) -> Iterator[dict[str, Any]]:
    from tasks.documents import read_documents

    for dep in stage.spec.deps:
        if dep.startswith("data/") and dep != TOKENIZER:  # the rest is code
            yield from read_documents(stage.dep(dep), columns=("id", "text", "domain", "meta"))


def _shares(stage: Stage, max_mb: dict[str, float]) -> dict[str, float]:
    """Which share of each capped domain is kept."""
    if not max_mb:
        return {}
    total: Counter[str] = Counter()
    for row in _documents(stage):
        total[row["domain"]] += len(row["text"].encode("utf-8"))
    return {d: min(1.0, mb * 1e6 / total[d]) for d, mb in max_mb.items() if total[d]}


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
    shares = _shares(stage, config.max_mb)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    seen: set[str] = set()
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    out = stage.out(stage.spec.outs[0])

    with TokenWriter(out, vocab_size, special[END_OF_TEXT], token_byte_lengths(tokenizer)) as writer:

        def flush(rows: list[dict[str, Any]]) -> None:
            texts: list[str] = []
            plans: list[tuple[dict[str, Any], bool, str]] = []
            for row in rows:
                split = document_split(row, config.val_fraction)
                fim = split == "train" and row["domain"] == CODE and unit_hash(f"fim:{row['id']}") < config.fim_rate
                texts += fim_pieces(row["id"], row["text"]) if fim else [row["text"]]
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
        for row in stage.progress(_documents(stage), label="documents"):
            stage.seen()
            if not row["text"].strip():
                stage.reject(row["id"], "empty", "the document has no text")
            elif row["id"] in seen:
                counts[row["domain"]]["repeated"] += 1  # two inputs may share a document; it is packed once
            elif unit_hash(f"cap:{row['id']}") >= shares.get(row["domain"], 1.0):
                counts[row["domain"]]["left_out_by_cap"] += 1
            else:
                seen.add(row["id"])
                batch.append(row)
                if len(batch) >= config.batch_documents:
                    flush(batch)
                    batch = []
        if batch:
            flush(batch)
        meta = writer.close()

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
                    **{k: counts[domain][k] for k in ("fim", "fim_spm", "left_out_by_cap", "repeated")},
                }
            }
        )
    stage.metric(tokens=sum(d[s]["tokens"] for d in meta["domains"].values() for s in SPLITS))
    stage.rows(**{f"{d}_{s}": c[s]["docs"] for d, c in meta["domains"].items() for s in SPLITS})

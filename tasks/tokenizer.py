"""Byte-level BPE tokenizer with the GLM special tokens, trained on the corpus.

    python -m tasks tokenizer

The text is cut by the pattern of the GPT-4 family (digits alone or in runs of up to three), mapped byte by byte to
printable characters, and merged by BPE; all 256 bytes are in the vocabulary, so every text and, through `encode_bytes`,
every byte sequence comes back exactly. Special tokens have the highest ids. data/tokenizer loads with
`tokenizers.Tokenizer.from_file` and transformers' AutoTokenizer; it holds the GLM-5 chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import xxhash
from pydantic import Field

from tasks import documents
from tasks.special_tokens import END_OF_TEXT, PAD_TOKEN, SPECIAL_TOKENS, STOP_TOKENS
from tasks.stage import FromCheckpoint, Stage

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Config(FromCheckpoint):
    """init_from: a directory whose tokenizer.json is taken as it is; the settings of training then have no effect."""

    vocab_size: int = Field(2048, description="entries, the special tokens included")
    digits: Literal[1, 3] = Field(1, description="longest run of digits in one token")
    sample_mb: float = Field(10.0, gt=0, description="MB of text to train on, taken by a hash of the document ids")
    max_document_kb: int = Field(64, ge=1, description="longest piece of one document in the sample")
    domain_shares: dict[str, float] = Field(
        default_factory=dict, description="share of the sample per domain; empty: as in the corpus"
    )
    model_max_length: int = Field(4096, ge=1, description="context length recorded for users of the tokenizer")


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    keep = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: chr(b) for b in keep}
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + len(table) - len(keep))
    return table


def train(texts: Iterable[str], vocab_size: int, digits: int) -> Tokenizer:
    """Train on `texts`. The same texts in the same order give the same tokenizer.

    ValueError when `vocab_size` cannot hold the 256 bytes and the special tokens. A sample with too few distinct words gives
    fewer merges, and then a smaller vocabulary.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise ValueError(f"tokenizer.vocab_size must be at least {256 + len(SPECIAL_TOKENS)}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    pattern = Regex(_PATTERN.format(digits="" if digits == 1 else "{1,3}"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(byte_alphabet().values()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    return tokenizer


def encode_bytes(tokenizer: Tokenizer, data: bytes, specials: bool = False) -> list[int]:
    """Token ids of any byte sequence; bytes that are not UTF-8 become single-byte tokens.

    With `specials` false, a special token spelled in the data is encoded as ordinary text.
    """
    alphabet = byte_alphabet()
    ids: list[int] = []
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = not specials
    try:
        while data:
            try:
                ids += tokenizer.encode(data.decode("utf-8"), add_special_tokens=False).ids
                break
            except UnicodeDecodeError as error:
                if error.start:
                    ids += tokenizer.encode(data[: error.start].decode("utf-8"), add_special_tokens=False).ids
                ids += [tokenizer.token_to_id(alphabet[b]) for b in data[error.start : error.end]]
                data = data[error.end :]
    finally:
        tokenizer.encode_special_tokens = before
    return ids


def decode_bytes(tokenizer: Tokenizer, ids: Iterable[int]) -> bytes:
    """The exact bytes that ids stand for. ValueError for an id outside the vocabulary."""
    reverse = {c: b for b, c in byte_alphabet().items()}
    added = set(tokenizer.get_added_tokens_decoder())
    parts = []
    for i in ids:
        token = tokenizer.id_to_token(i)
        if token is None:
            raise ValueError(f"token id {i} is not in the vocabulary of {tokenizer.get_vocab_size()}")
        parts.append(token.encode("utf-8") if i in added else bytes(reverse[c] for c in token))
    return b"".join(parts)


def sample(
    rows: Iterable[dict], budget: int, max_document: int, shares: dict[str, float], seed: int
) -> Iterator[tuple[str, str]]:
    """(domain, text) pieces of about `budget` bytes in all, a pure function of the documents and the seed.

    Documents are taken per domain by a keyed hash of their ids until the domain's part of the budget is used; a share larger
    than what the domain has leaves its rest unused. At most the first `max_document` characters of each.
    """
    by_domain: dict[str, list[tuple[int, int, str]]] = {}
    for number, row in enumerate(rows):
        text = row["text"][:max_document]
        key = xxhash.xxh3_64_intdigest(row["id"].encode(), seed=seed & 0xFFFFFFFF)
        by_domain.setdefault(row["domain"], []).append((key, number, text))
    sizes = {d: sum(len(t.encode()) for _, _, t in items) for d, items in by_domain.items()}
    unknown = set(shares) - set(sizes)
    if unknown:
        raise ValueError(f"tokenizer.domain_shares: no documents of domain {', '.join(sorted(unknown))}")
    weights = shares or sizes
    total = sum(weights.values()) or 1
    for domain in sorted(by_domain):
        left = budget * weights.get(domain, 0) / total
        for _, _, text in sorted(by_domain[domain]):
            if left <= 0:
                break
            left -= len(text.encode())
            yield domain, text


def save(tokenizer: Tokenizer, directory: Path, model_max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja."""
    from tasks.chat import CHAT_TEMPLATE

    names = {"eos_token": END_OF_TEXT, "pad_token": PAD_TOKEN}
    extra = [t for t in SPECIAL_TOKENS if t not in names.values()]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(t)): {
                "content": t,
                "lstrip": False,
                "rstrip": False,
                "single_word": False,
                "normalized": False,
                "special": True,
            }
            for t in SPECIAL_TOKENS
        },
        "additional_special_tokens": extra,
        **names,
    }
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, value in (
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", {"additional_special_tokens": extra, **names}),
    ):
        (directory / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def stop_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids that end a generation: end of text, and the token that opens another party's turn."""
    return [tokenizer.token_to_id(t) for t in STOP_TOKENS]


def bytes_per_token(tokenizer: Tokenizer, pieces: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Mean UTF-8 bytes per token of each domain, over (domain, text) pieces."""
    totals: dict[str, list[int]] = {}
    for domain, text in pieces:
        count = totals.setdefault(domain, [0, 0])
        count[0] += len(text.encode())
        count[1] += len(tokenizer.encode(text, add_special_tokens=False).ids)
    return {d: round(b / max(1, t), 4) for d, (b, t) in sorted(totals.items())}


def adopt(directory: Path) -> Tokenizer:
    """A published tokenizer, for data that is to fit a published checkpoint (tasks/init_from.py).

    ValueError unless it has every special token of the line and all 256 bytes, as GLM's own has.
    """
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"tokenizer.init_from: {directory} has no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    lacking = [t for t in SPECIAL_TOKENS if tokenizer.token_to_id(t) is None]
    if lacking:
        raise ValueError(f"tokenizer.init_from: {path} lacks the special tokens {', '.join(lacking)}")
    if any(tokenizer.token_to_id(c) is None for c in byte_alphabet().values()):
        raise ValueError(f"tokenizer.init_from: {path} is not byte-level: some of the 256 bytes have no token")
    return tokenizer


def run(stage: Stage) -> None:
    config: Config = stage.config
    source = stage.dep("data/decontaminate")
    columns = ["id", "text", "domain"]
    max_document = config.max_document_kb * 1024

    def pieces(budget: float, *item: str) -> list[tuple[str, str]]:
        rows = documents.read_documents(source, columns)
        seed = stage.rng_seed(*item)
        return list(sample(rows, int(budget), max_document, config.domain_shares, seed))

    texts = pieces(config.sample_mb * 1e6, "train")
    if not texts:
        raise ValueError("tokenizer: data/decontaminate has no documents to train on")
    start = config.starts_elsewhere(stage.spec)
    stage.seen(len(texts))
    size = sum(len(t.encode()) for _, t in texts)
    if start:
        stage.print(f"taking the tokenizer of {start}")
        tokenizer = adopt(stage.root / start)
    else:
        stage.print(f"training on {len(texts)} documents, {size / 1e6:.1f} MB")
        tokenizer = train((t for _, t in texts), config.vocab_size, config.digits)
    found = tokenizer.get_vocab_size()
    if not start and found < config.vocab_size:
        stage.print(f"the sample has merges for {found} entries only, not the {config.vocab_size} asked for")
    out = stage.out("data/tokenizer")
    save(tokenizer, out, config.model_max_length)
    held = pieces(min(1e6, size / 4), "measure")
    stage.rows(sample_documents=len(texts))
    stage.metric(
        vocab_size=found,
        merges=found - 256 - len(SPECIAL_TOKENS),
        sample_bytes=size,
        bytes_per_token=bytes_per_token(tokenizer, held),
    )

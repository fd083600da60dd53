"""Token shards: what is written is what is read."""

import numpy as np
import pytest

from tasks.tokens import TokenSet, TokenWriter, split_of, token_byte_lengths, token_dtype


def write(path, documents, vocab=300, eot=299):
    with TokenWriter(path, vocab, eot, np.ones(vocab, np.int32)) as writer:
        for split, domain, ids in documents:
            writer.add(split, domain, ids, text_bytes=len(ids) * 3)
    return TokenSet(path)


def test_round_trip(tmp_path):
    tokens = write(
        tmp_path, [("train", "web", [1, 2, 3]), ("train", "web", []), ("val", "code", [7]), ("train", "web", [9])]
    )
    assert tokens.domains == ["code", "web"] and tokens.tokens("web") == 7 and tokens.tokens("code") == 0
    shard = tokens.shard("web")
    assert len(shard) == 3
    assert [shard.document(i).tolist() for i in range(3)] == [[1, 2, 3, 299], [299], [9, 299]]
    assert shard.window(5, 4).tolist() == [9, 299, 1, 2]
    assert tokens.shard("code", "val").document(0).tolist() == [7, 299]
    assert tokens.meta["domains"]["web"]["train"] == {"docs": 3, "tokens": 7, "bytes": 12}


def test_types_follow_the_vocabulary(tmp_path):
    assert token_dtype(65536).itemsize == 2 and token_dtype(65537).itemsize == 4
    tokens = write(tmp_path, [("train", "web", [154879, 0])], vocab=154880, eot=1)
    assert tokens.shard("web").document(0).tolist() == [154879, 0, 1]


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="meta.json"):
        TokenSet(tmp_path)
    with pytest.raises(ValueError, match="vocabulary of 300"):
        write(tmp_path / "a", [("train", "web", [300])])
    tokens = write(tmp_path / "b", [("train", "web", [1, 2])])
    with pytest.raises(ValueError, match="no domain 'math'; it has web"):
        tokens.shard("math")
    (tmp_path / "b/train/web.bin").write_bytes(b"\0\0")
    with pytest.raises(ValueError, match="holds 1 tokens, but its index ends at 3"):
        tokens.shard("web")


def test_split_is_by_id_and_five_percent():
    sides = [split_of(f"{i:016x}") for i in range(4000)]
    assert 140 < sides.count("val") < 260
    assert split_of("00000000000000ab") == split_of("00000000000000ab")


def test_token_bytes_add_up_to_the_text(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox é 漢字"] * 10, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    lengths = token_byte_lengths(tokenizer)
    for text in ["the quick", "naïve 漢字 🙂 \n\t x", ""]:
        ids = tokenizer.encode(text).ids
        assert sum(lengths[ids]) == len(text.encode())
    assert lengths[tokenizer.token_to_id("<|endoftext|>")] == 0

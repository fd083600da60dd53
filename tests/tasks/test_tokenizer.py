"""Round trips, special tokens, determinism, and loading by transformers."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tasks import documents, tokenizer
from tasks.special_tokens import SPECIAL_TOKENS
from tasks.stage import run_stage_for_test

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's 1234567 o'clock, isn't it?\n\n",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2.5e-3]}\n" * 2,
    "Ünïcödé, 日本語のテキスト, русский текст, עברית 🤖👩‍👩‍👧‍👦 ∑_{i=0}^n x_i",
]


def corpus(rng: random.Random, count: int = 400) -> list[str]:
    letters = "etaoinshrdlucmfw"
    vocabulary = [w for t in TEXTS for w in t.split(" ")] + [str(rng.randrange(10**6)) for _ in range(200)]
    vocabulary += ["".join(rng.choices(letters, k=rng.randrange(2, 9))) for _ in range(600)]
    return [" ".join(rng.choices(vocabulary, k=60)) for _ in range(count)] + TEXTS


@pytest.fixture(scope="module")
def trained():
    return tokenizer.train(corpus(random.Random(0)), 600, 1)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back(trained, text):
    assert trained.decode(trained.encode(text).ids, skip_special_tokens=False) == text


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_every_byte_sequence_comes_back(trained, data, specials):
    ids = tokenizer.encode_bytes(trained, data, specials)
    assert tokenizer.decode_bytes(trained, ids) == data


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from(SPECIAL_TOKENS), st.text(max_size=5, alphabet="a<|>[]é \n7"), st.binary(max_size=4))
    )
)
def test_mixtures_with_special_tokens_come_back(trained, parts):
    data = b"".join(p.encode() if isinstance(p, str) else p for p in parts)
    first = trained.token_to_id(SPECIAL_TOKENS[0])
    plain = tokenizer.encode_bytes(trained, data)
    assert tokenizer.decode_bytes(trained, plain) == data and all(i < first for i in plain)
    assert tokenizer.decode_bytes(trained, tokenizer.encode_bytes(trained, data, specials=True)) == data


def test_special_tokens_are_one_token_each_with_the_highest_ids(trained):
    size = trained.get_vocab_size()
    ids = [trained.token_to_id(t) for t in SPECIAL_TOKENS]
    assert ids == list(range(size - len(SPECIAL_TOKENS), size)) and size == 600
    assert SPECIAL_TOKENS[0] == "<|endoftext|>" and "/nothink" not in SPECIAL_TOKENS
    assert trained.encode("[gMASK]<sop><|user|>a").ids[:3] == [
        trained.token_to_id(t) for t in ("[gMASK]", "<sop>", "<|user|>")
    ]


@pytest.mark.parametrize("digits", [1, 3])
def test_digit_runs(digits):
    t = tokenizer.train(corpus(random.Random(1)) + ["123 123 123 123456"] * 200, 700, digits)
    tokens = t.encode("x 1234567 y").tokens
    longest = max(sum(c.isdigit() for c in token) for token in tokens)
    assert longest <= digits and "".join(tokens).replace("Ġ", " ") == "x 1234567 y"
    if digits == 3:
        assert longest == 3


def test_the_same_texts_give_the_same_tokenizer():
    texts = corpus(random.Random(2))
    assert tokenizer.train(texts, 500, 1).to_str() == tokenizer.train(texts, 500, 1).to_str()


def test_a_vocabulary_too_small_is_an_error():
    with pytest.raises(ValueError, match="vocab_size must be at least"):
        tokenizer.train(["a"], 200, 1)


def test_sample_is_bounded_balanced_and_independent_of_order():
    rows = [{"id": f"{d}{i:04d}", "text": d * 1000, "domain": d} for d in ("code", "web") for i in range(300)]
    chosen = list(tokenizer.sample(rows, 100_000, 500, {"code": 3, "web": 1}, seed=7))
    sizes = {d: sum(len(t) for e, t in chosen if e == d) for d in ("code", "web")}
    assert all(len(t) <= 500 for _, t in chosen)
    assert abs(sizes["code"] - 75_000) <= 2000 and abs(sizes["web"] - 25_000) <= 2000
    assert list(tokenizer.sample(rows[::-1], 100_000, 500, {"code": 3, "web": 1}, seed=7)) == chosen
    with pytest.raises(ValueError, match="no documents of domain math"):
        list(tokenizer.sample(rows, 1000, 500, {"math": 1}, seed=7))


@pytest.fixture(scope="module")
def stage_dir(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("tokenizer")
    rng = random.Random(3)
    rows = [documents.document(t, f"s{i}", ("web", "code")[i % 2]) for i, t in enumerate(corpus(rng))]
    documents.write_documents(tmp / "real", rows)
    config = {"vocab_size": 512, "sample_mb": 0.1}
    run_stage_for_test(tokenizer, config, deps={"data/decontaminate": tmp / "real"}, outs=["data/tokenizer"], tmp=tmp)
    return tmp


def test_transformers_loads_it_with_equal_ids_and_the_chat_template(stage_dir):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    ours = Tokenizer.from_file(str(stage_dir / "data/tokenizer/tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(str(stage_dir / "data/tokenizer"))
    for text in [*TEXTS, "[gMASK]<sop><|user|>12+30<|assistant|><think>", " a  b ,  c . "]:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ids == ours.encode(text).ids and theirs.decode(ids) == text
    assert theirs.eos_token_id == theirs.pad_token_id == ours.token_to_id("<|endoftext|>")
    assert len(theirs) == ours.get_vocab_size() == 512
    messages = [{"role": "user", "content": "12+30?"}]
    assert "<|user|>12+30?<|assistant|>" in theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_metrics_tell_bytes_per_token_of_each_domain(stage_dir):
    metrics = json.loads((stage_dir / "metrics/tokenizer.json").read_text())
    assert metrics["vocab_size"] == 512 and metrics["merges"] == 512 - 256 - len(SPECIAL_TOKENS)
    assert set(metrics["bytes_per_token"]) == {"web", "code"} and all(
        v > 1 for v in metrics["bytes_per_token"].values()
    )


def test_a_published_tokenizer_is_taken_as_it_is(stage_dir, tmp_path):
    """tokenizer.init_from: the same ids as the directory's, its hash in the manifest; one without our tokens is refused."""
    published = tmp_path / "release"
    published.mkdir()
    text = (stage_dir / "data/tokenizer/tokenizer.json").read_text()
    (published / "tokenizer.json").write_text(text)
    config = {"vocab_size": 300, "sample_mb": 0.1, "init_from": str(published)}

    def run(out):
        deps = {"data/decontaminate": stage_dir / "real"}
        return run_stage_for_test(tokenizer, config, deps=deps, outs=["data/tokenizer"], tmp=tmp_path / out)

    stage = run("a")
    found = Tokenizer.from_file(str(tmp_path / "a/data/tokenizer/tokenizer.json"))
    assert found.get_vocab() == Tokenizer.from_str(text).get_vocab() and found.get_vocab_size() == 512
    assert "init_from" in stage.dep_hashes
    broken = json.loads(text)
    broken["added_tokens"] = [t for t in broken["added_tokens"] if t["content"] != "<|assistant|>"]
    broken["model"]["vocab"].pop("<|assistant|>", None)
    (published / "tokenizer.json").write_text(json.dumps(broken))
    with pytest.raises(ValueError, match=r"lacks the special tokens <\|assistant\|>"):
        run("b")
    (published / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        run("c")

"""Pack: every document arrives once, whole, in its domain and split; special-token text stays text; fill-in-the-middle."""

import json
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tasks import pack
from tasks.documents import document, write_documents
from tasks.samplers import BatchSampler
from tasks.special_tokens import SPECIAL_TOKENS
from tasks.stage import run_stage_for_test
from tasks.tokens import TokenSet, split_of

DEPS = ("data/tokenizer", "data/decontaminate")


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["def f(x): return x + 1\n", "the quick brown fox"] * 20, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def documents():
    rows = [document(f"def f{i}(x): return x + {i} # é漢\n" * (i % 7 + 1), f"s{i}", "code") for i in range(60)]
    rows += [document(f"fox {i} says <|user|> and <|endoftext|> to all", f"w{i}", "web") for i in range(40)]
    return rows


def run(tmp_path, tokenizer_dir, rows, **config):
    write_documents(tmp_path / "in", rows)
    return run_stage_for_test(
        pack,
        config,
        deps=dict(zip(DEPS, (tokenizer_dir, tmp_path / "in"))),
        outs=["data/pack/pretrain"],
        name="pack-pretrain",
        tmp=tmp_path,
    )


def test_every_document_arrives_whole(tmp_path, tokenizer_dir):
    rows = documents()
    run(tmp_path, tokenizer_dir, rows, val_fraction=0.2, batch_documents=7)
    tokens = TokenSet(tmp_path / "data/pack/pretrain")
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    assert tokens.vocab_size == tokenizer.get_vocab_size()
    for domain in ("code", "web"):
        for split in ("train", "val"):
            shard = tokens.shard(domain, split)
            want = [r["text"] for r in rows if r["domain"] == domain and split_of(r["id"], 0.2) == split]
            found = [shard.document(i) for i in range(len(shard))]
            assert [tokenizer.decode(ids[:-1], skip_special_tokens=False) for ids in found] == want and want
            assert all(ids[-1] == tokens.eot_id and (ids[:-1] < 300).all() for ids in found), "control tokens from text"
            counted = tokens.meta["domains"][domain][split]
            assert counted["bytes"] == sum(len(t.encode()) for t in want)
            assert counted["bytes"] == sum(int(tokens.token_bytes[ids].sum()) for ids in found)


def test_fill_in_the_middle(tmp_path, tokenizer_dir):
    rows = documents()
    run(tmp_path, tokenizer_dir, rows, val_fraction=0.2, fim_rate=0.5)
    tokens = TokenSet(tmp_path / "data/pack/pretrain")
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    prefix, middle, suffix = (tokenizer.token_to_id(f"<|code_{p}|>") for p in ("prefix", "middle", "suffix"))
    shard = tokens.shard("code", "train")
    want = [r["text"] for r in rows if r["domain"] == "code" and split_of(r["id"], 0.2) == "train"]
    orders = {"psm": 0, "spm": 0}
    middles = []
    for i in range(len(shard)):
        ids = shard.document(i)[:-1].tolist()
        if prefix in ids:
            assert ids[0] == prefix and sorted(t for t in ids if t in (prefix, middle, suffix)) == sorted(
                (prefix, middle, suffix)
            )
            s, m = ids.index(suffix), ids.index(middle)
            if s == 1:  # <prefix> <suffix> suffix <middle> prefix and middle in one piece
                orders["spm"] += 1
            else:
                middles.append(len(tokenizer.decode(ids[m + 1 :])) / len(want[i]))
                orders["psm"] += 1
            ids = ids[1:s] + ids[m + 1 :] + ids[s + 1 : m]
        assert tokenizer.decode(ids) == want[i]
    rearranged = sum(orders.values())
    assert 0.3 < rearranged / len(shard) < 0.7 and min(orders.values()) >= 0.2 * rearranged
    assert min(middles) < 0.2 and max(middles) > 0.5  # spans of every length, cut between characters
    assert prefix not in np.concatenate([tokens.shard("code", "val").tokens, tokens.shard("web").tokens])
    metrics = json.loads((tmp_path / "metrics/pack_pretrain.json").read_text())
    assert metrics["code"]["fim"] == rearranged and abs(metrics["code"]["fim_spm"] - orders["spm"]) <= 1


@pytest.mark.parametrize("spm", [0.0, 1.0])
def test_one_order_of_fill_in_the_middle_alone(tmp_path, tokenizer_dir, spm):
    run(tmp_path, tokenizer_dir, documents(), fim_rate=1.0, fim_spm=spm)
    metrics = json.loads((tmp_path / "metrics/pack_pretrain.json").read_text())["code"]
    assert metrics["fim"] > 0 and metrics["fim_spm"] == spm * metrics["fim"]


def test_two_runs_are_byte_identical(tmp_path, tokenizer_dir):
    for name in "ab":
        (tmp_path / name).mkdir()
        run(tmp_path / name, tokenizer_dir, documents(), fim_rate=0.5)
    a, b = (sorted((tmp_path / n / "data/pack/pretrain").rglob("*.*")) for n in "ab")
    assert [p.name for p in a] == [p.name for p in b] and len(a) > 6
    assert all(x.read_bytes() == y.read_bytes() for x, y in zip(a, b) if x.is_file() and x.name != "manifest.json")


def test_cap_keeps_a_sample_and_says_so(tmp_path, tokenizer_dir):
    run(tmp_path, tokenizer_dir, documents(), max_mb={"code": 0.003})
    metrics = json.loads((tmp_path / "metrics/pack_pretrain.json").read_text())
    code, web = metrics["code"], metrics["web"]
    assert (
        0 < code["left_out_by_cap"] < 60 and code["left_out_by_cap"] + code["train"]["docs"] + code["val"]["docs"] == 60
    )
    assert code["train"]["bytes"] + code["val"]["bytes"] < 6000 and web["left_out_by_cap"] == 0


def test_empty_and_repeated_documents_are_counted(tmp_path, tokenizer_dir):
    rows = documents()
    stage = run(tmp_path, tokenizer_dir, [*rows, rows[3], document(" \n", "blank", "web")])
    assert stage._rejected == 1
    assert json.loads((tmp_path / "metrics/pack_pretrain.json").read_text())["code"]["repeated"] == 1
    assert "blank" not in (tmp_path / "data/pack/pretrain/rejects/part-00000.jsonl").read_text().split('"reason"')[1]


def test_nothing_to_pack_is_an_error(tmp_path, tokenizer_dir):
    with pytest.raises(ValueError, match="hold no document"):
        run(tmp_path, tokenizer_dir, [])


def test_documents_made_of_others_bring_their_split(tmp_path, tokenizer_dir):
    rows = [
        document(f"interleaved {i}", f"l{i}", "long", meta={"split": "val" if i % 2 else "train"}) for i in range(20)
    ]
    run(tmp_path, tokenizer_dir, rows)
    tokens = TokenSet(tmp_path / "data/pack/pretrain")
    assert len(tokens.shard("long", "val")) == len(tokens.shard("long", "train")) == 10
    with pytest.raises(ValueError, match="meta.split is 'test'"):
        run(tmp_path, tokenizer_dir, [document("x", "y", "long", meta={"split": "test"})])


REPEATS = {"web": {"column": "quality_bucket", "steps": [[0, 0.5], [1, 1.0], [2, 2.0]]}}


def bucketed(n=300):
    rows = [
        document(f"fox {i} ran over {i * 7} hills", f"w{i}", "web", quality_bucket=float(i % 3)) for i in range(3 * n)
    ]
    return rows + [document(f"def f{i}(): pass", f"c{i}", "code") for i in range(30)]


def packed_texts(tmp_path, tokenizer_dir, domain, split="train"):
    tokens = TokenSet(tmp_path / "data/pack/pretrain")
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    shard = tokens.shard(domain, split)
    return tokens, [tokenizer.decode(shard.document(i)[:-1]) for i in range(len(shard))]


def test_top_buckets_are_repeated_and_low_ones_thinned(tmp_path, tokenizer_dir):
    rows = bucketed()
    run(tmp_path, tokenizer_dir, rows, val_fraction=0.2, repeats=REPEATS)
    tokens, found = packed_texts(tmp_path, tokenizer_dir, "web")
    counts = Counter(found)
    train = [r for r in rows if r["domain"] == "web" and split_of(r["id"], 0.2) == "train"]
    by_bucket = {b: [counts[r["text"]] for r in train if r["quality_bucket"] == b] for b in (0, 1, 2)}
    assert set(by_bucket[2]) == {2} and set(by_bucket[1]) == {1} and set(by_bucket[0]) == {0, 1}
    assert abs(np.mean(by_bucket[0]) - 0.5) < 0.1
    assert len(found) == sum(counts.values()) == sum(map(sum, by_bucket.values()))
    last = {text: i for i, text in enumerate(found)}
    assert all(last[r["text"]] - found.index(r["text"]) > 100 for r in train if r["quality_bucket"] == 2)
    val = packed_texts(tmp_path, tokenizer_dir, "web", "val")[1]
    assert sorted(val) == sorted(r["text"] for r in rows if r["domain"] == "web" and split_of(r["id"], 0.2) == "val")
    assert tokens.meta["copies"] == {"code": 1, "web": 2}
    metrics = json.loads((tmp_path / "metrics/pack_pretrain.json").read_text())
    assert metrics["web"]["copies"] == len(by_bucket[2]) and metrics["code"]["copies"] == 0


def test_under_a_cap_the_budget_goes_to_the_top_buckets(tmp_path, tokenizer_dir):
    rows = bucketed()
    size = sum(len(r["text"].encode()) for r in rows if r["domain"] == "web")
    plain, weighed = tmp_path / "plain", tmp_path / "weighed"
    run(plain, tokenizer_dir, rows, val_fraction=0.0, max_mb={"web": size * 0.3e-6})
    run(weighed, tokenizer_dir, rows, val_fraction=0.0, max_mb={"web": size * 0.3e-6}, repeats=REPEATS)
    bucket = {r["text"]: r.get("quality_bucket") for r in rows}
    shares = {}
    for folder in (plain, weighed):
        tokens, found = packed_texts(folder, tokenizer_dir, "web")
        assert tokens.meta["domains"]["web"]["train"]["bytes"] == pytest.approx(0.3 * size, rel=0.1)
        shares[folder.name] = [sum(bucket[t] == b for t in found) / len(found) for b in (0, 1, 2)]
    assert shares["plain"] == pytest.approx([1 / 3] * 3, abs=0.07)
    assert shares["weighed"] == pytest.approx([0.5 / 3.5, 1 / 3.5, 2 / 3.5], abs=0.07)


def test_no_document_is_seen_more_often_than_max_epochs(tmp_path, tokenizer_dir):
    """A run that wants as much web as it can get: its passes, times the copies of the top bucket, stay at max_epochs."""
    run(tmp_path, tokenizer_dir, bucketed(), val_fraction=0.0, repeats=REPEATS)
    tokens, found = packed_texts(tmp_path, tokenizer_dir, "web")
    per_epoch = {d: tokens.tokens(d) // 16 for d in ("web", "code")}
    total = int(per_epoch["web"] * 1.5 + per_epoch["code"])
    sampler = BatchSampler(tokens, 16, total, 0, {"web": 0.999, "code": 0.001}, max_epochs=3.0)
    assert sampler.epochs["web"] * tokens.meta["copies"]["web"] == pytest.approx(3.0)
    seen = Counter()
    for r in range(total):
        domain, n = sampler.mixture.row(r)
        seen[domain] += 1
    assert seen["web"] / per_epoch["web"] <= 1.5 * 1.02  # the mixture deals whole rows of 1024
    with pytest.raises(ValueError, match="raise max_epochs"):
        BatchSampler(tokens, 16, per_epoch["web"] * 2, 0, {"web": 1.0}, max_epochs=3.0)


def test_wrong_steps_are_named(tmp_path, tokenizer_dir):
    with pytest.raises(ValueError, match="ascending values"):
        run(tmp_path, tokenizer_dir, bucketed(2), repeats={"web": {"column": "q", "steps": [[2, 1.0], [1, 2.0]]}})


def test_validation_text_that_training_text_holds_is_left_out(tmp_path, tokenizer_dir):
    from tasks.val_overlap import overlaps

    def words(tag, n):
        return " ".join(f"{tag}{i}x" for i in range(n))

    rows = [document(words(f"t{k}", 300), f"s{k}", "web", meta={"split": "train"}) for k in range(4)]
    clean = document(words("v", 300), "clean", "web", meta={"split": "val"})
    copied = document(words("head", 40) + " " + rows[2]["text"], "copied", "web", meta={"split": "val"})
    quoted = document(words("own", 300) + " " + words("t1", 60), "quoted", "web", meta={"split": "val"})
    rows += [clean, copied, quoted]
    found = overlaps(lambda: rows, 0.05)
    # of the 13-word runs of `copied`, 288 of 328 are another's; a quarter of all runs is compared
    assert found[clean["id"]] == 0 and abs(found[copied["id"]] - 288 / 328) < 0.1
    assert abs(found[quoted["id"]] - 48 / 348) < 0.1
    run(tmp_path / "all", tokenizer_dir, rows, val_fraction=0.05)
    run(tmp_path / "cut", tokenizer_dir, rows, val_fraction=0.05, max_val_overlap=0.5)
    texts = {name: packed_texts(tmp_path / name, tokenizer_dir, "web", "val")[1] for name in ("all", "cut")}
    assert sorted(texts["all"]) == sorted(r["text"] for r in (clean, copied, quoted))
    assert sorted(texts["cut"]) == sorted(r["text"] for r in (clean, quoted))
    metrics = json.loads((tmp_path / "cut/metrics/pack_pretrain.json").read_text())
    assert metrics["web"]["val_overlap"] == 1

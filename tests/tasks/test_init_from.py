"""Entering the line from a checkpoint directory: nothing upstream exists, the content is the identity, misfits are refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from model.checkpoint import load_checkpoint, save_checkpoint
from model.config import ModelConfig
from model.transformer import GlmMoeDsa
from tasks import dsa_warmup, init_from, midtrain, pretrain, quantize, reasoning_rl, rl_run, sft, sft_data
from tasks.files import content_hash
from tasks.spec import StageSpec
from tasks.stage import Stage, run_stage_for_test
from tasks.tokens import TokenWriter, token_byte_lengths
from tests.flows.toy import Toy
from tests.model.sizes import spread
from tests.tasks.lm_case import MODEL, stage_config, write_tokens
from tests.tasks.post_training import RUN, LocalEngine, save_random_checkpoint


def published(folder, **changes):
    """A checkpoint as a release has it: bf16 shards with an index, a copy of the embedding in the MTP layer, no manifest."""
    release(spread(GlmMoeDsa(ModelConfig.from_params(MODEL | changes)), 0.05), folder)


def release(model, folder):
    save_checkpoint(model.bfloat16(), folder, max_shard_bytes=30_000)
    name = f"model.layers.{model.cfg.num_hidden_layers}.embed_tokens.weight"
    save_file({name: model.model.embed_tokens.weight.data.clone()}, folder / "model-mtp.safetensors")
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"][name] = "model-mtp.safetensors"
    index.write_text(json.dumps(listed))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    base = tmp_path_factory.mktemp("init")
    write_tokens(base / "pack")
    (base / "tokenizer").mkdir()
    added = {"added_tokens": [{"id": 95, "content": "<|endoftext|>"}, {"id": 94, "content": "<|user|>"}]}
    (base / "tokenizer/tokenizer.json").write_text(json.dumps(added))
    published(base / "release")
    return base


def enter(module, name, tmp, inputs, config, deps=(), absent=None, outs=None):
    """Run a stage whose declared checkpoint does not exist (`absent` dangles)."""
    found = (
        dict(deps) if any(d.startswith("data/pack") for d in deps) else {"data/pack/x": inputs / "pack", **dict(deps)}
    )
    if absent:
        found[absent] = inputs / "nowhere"
    out = outs or "data/" + name.replace("-", "/")
    stage = run_stage_for_test(module, config, {"model": MODEL}, found, [out], name=name, seed=7, tmp=tmp)
    return tmp / out, stage, json.loads((tmp / f"metrics/{name.replace('-', '_')}.json").read_text())


def test_midtraining_starts_from_a_release(tmp_path, inputs, capsys):
    config = stage_config(init_from=str(inputs / "release"), mtp={"depth": 1})
    tokenizer = {"data/tokenizer": inputs / "tokenizer"}
    out, stage, metrics = enter(midtrain, "midtrain-s1", tmp_path, inputs, config, tokenizer, "data/pretrain/reasoning")
    said = capsys.readouterr().out
    assert "init_from:" in said and "1 copies in the MTP layer" in said and "converted" in said
    assert metrics["steps"] == 3 and load_checkpoint(out).cfg.num_nextn_predict_layers == 1
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["deps"]["init_from"] == content_hash(inputs / "release")
    assert "data/pretrain/reasoning" not in manifest["deps"]
    # the same training from the same weights, saved as a stage of the line would
    release = load_checkpoint(stage_converted(tmp_path, inputs))
    save_checkpoint(release, tmp_path / "line/data/pretrain/reasoning", stage_converted(tmp_path, inputs))
    deps = {"data/pretrain/reasoning": tmp_path / "line/data/pretrain/reasoning", **tokenizer}
    same, _, _ = enter(midtrain, "midtrain-s1", tmp_path / "b", inputs, config | {"init_from": None}, deps)
    a, b = (load_file(folder / "model.safetensors") for folder in (out, same))
    assert a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


def stage_converted(tmp, inputs):
    from model.checkpoint_import import convert_checkpoint

    if not (tmp / "converted").exists():
        convert_checkpoint(inputs / "release", tmp / "converted")
    return tmp / "converted"


def test_pretraining_continues_and_the_dsa_stages_start_from_a_directory(tmp_path, inputs):
    config = stage_config(init_from=str(inputs / "release"), mtp={"depth": 1})
    _, _, metrics = enter(
        pretrain, "pretrain-general", tmp_path, inputs, config, {"data/tokenizer": inputs / "tokenizer"}
    )
    assert metrics["steps"] == 3
    shutil.copytree(inputs / "release", tmp_path / "with-tokenizer")
    warm = stage_config(
        init_from="with-tokenizer", seq_len=64, rows=2, recall_rows=8, recall_windows=2, mtp={"depth": 1},
        optimizer={"lr_matrix": 1e-2, "indexer_optimizer": "adamw", "weight_decay": 0.0},
    )  # fmt: skip
    with pytest.raises(ValueError, match="with-tokenizer has no tokenizer.json, and stage dsa_warmup has no other"):
        enter(dsa_warmup, "dsa_warmup", tmp_path, inputs, warm, absent="data/midtrain/s3")


def test_the_content_is_the_identity(tmp_path, inputs):
    release = tmp_path / "release"
    shutil.copytree(inputs / "release", release)
    spec = StageSpec("midtrain-s1", ("data/pack/x", "data/pretrain/reasoning"), ("midtrain",), ("data/midtrain/s1",))
    (tmp_path / "data/pack").mkdir(parents=True)
    (tmp_path / "data/pack/x").symlink_to(inputs / "pack")

    def stage(**changes):
        settings = midtrain.Config.model_validate(stage_config(init_from="release", **changes))
        return Stage(spec, {"midtrain": {"s1": {}}}, settings, tmp_path)

    one = stage().fingerprint
    assert one == stage().fingerprint
    good = content_hash(release)
    assert stage(init_sha256=good).dep_hashes["init_from"] == good
    config = json.loads((release / "config.json").read_text())
    (release / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))
    assert stage().fingerprint != one, "another content is another run"
    with pytest.raises(ValueError, match=f"init_sha256 asks for {good}: the directory has changed"):
        _ = stage(init_sha256=good).dep_hashes
    shutil.rmtree(release)
    with pytest.raises(FileNotFoundError, match="release"):
        _ = stage().dep_hashes


def test_the_declared_dependency_by_name_changes_nothing(tmp_path, inputs):
    """What the profiles say by default: init_from names the upstream output itself."""
    model = spread(GlmMoeDsa(ModelConfig.from_params(MODEL)), 0.05)
    save_checkpoint(model, tmp_path / "up")
    deps = {"data/pretrain/reasoning": tmp_path / "up", "data/tokenizer": inputs / "tokenizer"}
    ends = []
    for i, start in enumerate((None, "data/pretrain/reasoning")):
        config = stage_config(init_from=start, mtp={"depth": 1})
        out, stage, _ = enter(midtrain, "midtrain-s1", tmp_path / str(i), inputs, config, deps)
        assert "init_from" not in stage.dep_hashes and stage.starting is None
        ends.append((out / "model.safetensors").read_bytes())
    assert ends[0] == ends[1]


def test_misfits_are_refused(tmp_path, inputs):
    tokenizer = {"data/tokenizer": inputs / "tokenizer"}
    start = tmp_path / "release"
    shutil.copytree(inputs / "release", start)
    config = stage_config(init_from=str(start), mtp={"depth": 1})
    other = {"added_tokens": [{"id": 94, "content": "<|endoftext|>"}, {"id": 95, "content": "<|user|>"}]}
    (start / "tokenizer.json").write_text(json.dumps(other))
    differ = r"tokenizers of data/tokenizer/tokenizer.json .* differ, first at '<\|user\|>': id 94 and 95"
    with pytest.raises(ValueError, match=differ):
        enter(midtrain, "midtrain-s1", tmp_path / "a", inputs, config, tokenizer, "data/pretrain/reasoning")
    shutil.rmtree(start)
    published(start, vocab_size=64)
    with pytest.raises(ValueError, match="vocabulary is 64 .* the tokens' is 96"):
        enter(midtrain, "midtrain-s1", tmp_path / "b", inputs, config, tokenizer, "data/pretrain/reasoning")
    (start / "model-mtp.safetensors").unlink()
    with pytest.raises(ValueError, match="shards are missing: model-mtp.safetensors"):
        enter(midtrain, "midtrain-s1", tmp_path / "c", inputs, config, tokenizer, "data/pretrain/reasoning")


def test_init_check_prints_what_it_found(inputs, capsys):
    assert init_from.main([str(inputs / "release")]) == 0
    said = capsys.readouterr().out
    assert "2 layers (1 dense) + 1 MTP, vocabulary 96" in said and "layout: published" in said
    assert f"init_sha256: {content_hash(inputs / 'release')}" in said and "tokenizer: none" in said
    with pytest.raises(ValueError, match="usage"):
        init_from.main([])


def test_the_graph_has_no_edge_to_what_is_not_needed(tmp_path):
    """dvc.yaml takes the path from params.yaml, so DVC knows: no upstream stage, and a change of content is a change."""
    from flows import graph

    toy = Toy(tmp_path, {"raw": [], "pretrain": ["raw"], "sft": ["pretrain"]})
    path = toy.root / "dvc.yaml"
    text = path.read_text()
    assert text.count("- data/pretrain\n") == 2
    head, tail = text.rsplit("- data/pretrain\n", 1)
    path.write_text(head + "- ${sft.text}\n" + tail)
    release = tmp_path.parent / "models" / "GLM-5"
    release.mkdir(parents=True)
    (release / "weights").write_text("one")
    toy.set(sft={"text": "data/pretrain"})
    assert set(graph.plan(["sft"], toy.root).nodes) == {"raw", "pretrain", "sft"}
    toy.set(sft={"text": str(release)})
    assert set(graph.plan(["sft"], toy.root).nodes) == {"sft"}
    assert toy.run("-m", "dvc", "repro", "-q", "-s", "sft")[0] == 0
    assert not (toy.root / "data/raw").exists() and (toy.root / "data/sft").is_dir()
    assert graph.plan(["sft"], toy.root).changed == frozenset()
    (release / "weights").write_text("two")
    assert graph.plan(["sft"], toy.root).changed == {"sft"}


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A release with a tokenizer, and SFT data and packed text of that tokenizer."""
    base = tmp_path_factory.mktemp("talker")
    ours = save_random_checkpoint(base / "ours")
    release(load_checkpoint(ours), base / "release")
    shutil.copy(ours / "tokenizer.json", base / "release")
    tokenizer = Tokenizer.from_file(str(ours / "tokenizer.json"))
    config = {"families": {"addition": {"train": 20, "heldout": 4}}, "chat_pairs": 0}
    (base / "acquire/files").mkdir(parents=True)
    deps = {"data/acquire": base / "acquire", "data/tokenizer": ours}
    run_stage_for_test(sft_data, config, None, deps, ["data/sft_data"], tmp=base)
    rng = np.random.default_rng(0)
    lengths = np.asarray(token_byte_lengths(tokenizer), np.int32)
    for pack, sizes in (("pack", lengths), ("other", lengths[::-1].copy())):
        with TokenWriter(base / pack, len(sizes), 0, sizes) as writer:
            for i in range(24):
                writer.add("val" if i % 6 == 0 else "train", "web", rng.integers(20, 250, 60).tolist(), 120)
    return base


def test_sft_starts_from_a_release(tmp_path, talker):
    config = {
        "batch_samples": 8,
        "eval_problems": 2,
        "optimizer": {"lr_matrix": 5e-3},
        "init_from": str(talker / "release"),
    }
    deps = {"data/sft_data": talker / "data/sft_data"}
    out, _, metrics = enter(sft, "sft", tmp_path, talker, config, deps, "data/dsa_adapt")
    assert (
        metrics["steps"] >= 2
        and (out / "tokenizer.json").read_bytes() == (talker / "release/tokenizer.json").read_bytes()
    )
    assert load_checkpoint(out).cfg.num_nextn_predict_layers == 1


def test_rl_starts_from_a_release(tmp_path, talker, monkeypatch):
    monkeypatch.setattr(rl_run, "EngineProcess", LocalEngine)
    config = {**RUN, "steps": 2, "families": {"addition": {}}, "init_from": str(talker / "release")}
    out, stage, _ = enter(reasoning_rl, "reasoning_rl", tmp_path, talker, config, absent="data/sft")
    assert stage.dep_hashes["init_from"] == content_hash(talker / "release") and load_checkpoint(out)


def test_quantization_starts_from_a_release(tmp_path, talker):
    config = {
        "calibration_windows": 2,
        "eval_windows": 2,
        "window": 24,
        "batch": 2,
        "init_from": str(talker / "release"),
    }
    pack = {"data/pack/pretrain": talker / "pack"}
    out, _, metrics = enter(quantize, "quantize", tmp_path, talker, config, pack, "data/distill")
    assert (out / "canonical").is_dir() and np.isfinite(metrics["quality"]["weights"]["loss"])
    with pytest.raises(ValueError, match="data/pack/pretrain was made by another tokenizer than .*of other lengths"):
        enter(
            quantize,
            "quantize",
            tmp_path / "b",
            talker,
            config,
            {"data/pack/pretrain": talker / "other"},
            "data/distill",
        )

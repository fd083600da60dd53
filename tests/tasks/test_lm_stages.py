"""The language-model stages end to end on a micro model: the chain runs, resumes exactly, and refuses what does not fit."""

import json

import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint import load_checkpoint
from tasks import dsa_adapt, dsa_warmup, midtrain, pretrain
from tasks.stage import run_stage_for_test
from tasks.trainer import Trainer
from tests.tasks.lm_case import MODEL, stage_config, write_tokens


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    base = tmp_path_factory.mktemp("lm")
    write_tokens(base / "pack")
    (base / "tokenizer").mkdir()
    added = {"added_tokens": [{"id": 95, "content": "<|endoftext|>"}, {"id": 94, "content": "<|user|>"}]}
    (base / "tokenizer/tokenizer.json").write_text(json.dumps(added))
    return base


def run(module, name, tmp, inputs, config, source=None):
    deps = {"data/pack/x": inputs / "pack"}
    if module is not dsa_warmup and module is not dsa_adapt:
        deps["data/tokenizer"] = inputs / "tokenizer"
    if source:
        deps[source] = tmp / source
    out = "data/" + name.replace("-", "/")
    plot = f"plots/{name}.json"
    run_stage_for_test(module, config, {"model": MODEL}, deps, [out], name=name, seed=7, tmp=tmp, plots=[plot])
    metrics = json.loads((tmp / f"metrics/{name.replace('-', '_')}.json").read_text())
    return tmp / out, metrics, json.loads((tmp / plot).read_text())


def weights(folder):
    return load_file(folder / "model.safetensors")


def changed(a, b):
    return {n for n in a if not torch.equal(a[n], b[n])}


def test_the_chain(tmp_path, inputs):
    first, metrics, curve = run(
        pretrain, "pretrain-general", tmp_path, inputs, stage_config(tokens=30 * 128, save_optimizer=True)
    )
    assert metrics["steps"] == 30 and curve[-1]["step"] == 30 and curve[-1]["lm_loss"] < curve[0]["lm_loss"] - 0.5
    assert metrics["heldout"]["all"]["bits_per_byte"] == curve[-1]["val/all/bits_per_byte"]
    assert metrics["parameters"]["hf"]["total"] > 0 and "mtp_loss_2" in curve[1] and "mtp_loss_2" not in curve[0]
    config = json.loads((first / "config.json").read_text())
    assert config["eos_token_id"] == [95, 94] and config["pad_token_id"] == 95
    assert (first / "optimizer/optimizer.safetensors").is_file() and (first / "tokenizer.json").is_file()

    second, metrics, _ = run(
        pretrain, "pretrain-reasoning", tmp_path, inputs,
        stage_config(load_optimizer=True, mixture={"code": 0.9, "web": 0.1}), "data/pretrain/general",
    )  # fmt: skip
    assert metrics["mixture"] == {"code": 0.9, "web": 0.1}

    third, _, _ = run(
        midtrain, "midtrain-s1", tmp_path, inputs,
        stage_config(seq_len=64, rows=2, schedule={"kind": "linear"}, rope_theta=5e6), "data/pretrain/reasoning",
    )  # fmt: skip
    assert load_checkpoint(third).cfg.rope_theta == 5e6 != load_checkpoint(second).cfg.rope_theta
    moved = changed(weights(second), weights(third))
    assert moved and not any(".indexer." in n for n in moved), "the indexer waits for its own stage"

    warm = stage_config(
        tokens=20 * 128, seq_len=64, rows=2, recall_rows=8, recall_windows=2, index_rows=16,
        optimizer={"lr_matrix": 1e-2, "indexer_optimizer": "adamw", "weight_decay": 0.0},
    )  # fmt: skip
    fourth, metrics, curve = run(dsa_warmup, "dsa_warmup", tmp_path, inputs, warm, "data/midtrain/s1")
    moved = changed(weights(third), weights(fourth))
    assert moved and all(".indexer." in n for n in moved), "the backbone is frozen, its router bias too"
    assert {n.split(".")[2] for n in moved} == {"0", "1", "2"}
    assert curve[-1]["index_kl"] < curve[0]["index_kl"]
    assert set(metrics["recall"]["layer_0"]["8"]) == {"indexer", "oracle", "recent", "ratio"}
    assert (fourth / "tokenizer.json").is_file()

    adapt = stage_config(
        seq_len=64, rows=2, recall_rows=8, recall_windows=2, schedule={"kind": "constant"},
        optimizer={"lr_matrix": 1e-3, "lr_indexer": 1e-3, "indexer_optimizer": "adamw"},
    )  # fmt: skip
    fifth, metrics, curve = run(dsa_adapt, "dsa_adapt", tmp_path, inputs, adapt, "data/dsa_warmup")
    moved = changed(weights(fourth), weights(fifth))
    assert any(".indexer." in n for n in moved) and any("q_b_proj" in n for n in moved)
    assert {"heldout", "heldout_before", "heldout_dense", "recall_ratio"} <= set(metrics)
    assert curve[0]["index_kl"] > 0 and load_checkpoint(fifth).cfg.index_topk == 8


class Killed(BaseException):
    pass


@pytest.mark.parametrize("kill_at", [1, 3, 4])
def test_killed_stage_resumes_to_the_same_bytes(tmp_path, inputs, monkeypatch, kill_at):
    config = stage_config(tokens=5 * 128, loop={"checkpoint_every": 2, "log_every": 1}, save_optimizer=True)
    whole, metrics, curve = run(pretrain, "pretrain-general", tmp_path / "whole", inputs, config)
    one_step = Trainer._one_step

    def dying(trainer):
        if trainer.step == kill_at:
            raise Killed
        return one_step(trainer)

    monkeypatch.setattr(Trainer, "_one_step", dying)
    with pytest.raises(Killed):
        run(pretrain, "pretrain-general", tmp_path / "cut", inputs, config)
    assert not (tmp_path / "cut/data/pretrain/general").exists()
    monkeypatch.setattr(Trainer, "_one_step", one_step)
    again, metrics2, curve2 = run(pretrain, "pretrain-general", tmp_path / "cut", inputs, config)
    assert metrics2 == metrics and curve2 == curve
    for file in sorted(p for p in whole.rglob("*") if p.is_file()):
        assert (again / file.relative_to(whole)).read_bytes() == file.read_bytes(), file.name


def test_clear_errors(tmp_path, inputs):
    with pytest.raises(ValueError, match="model.vocab_size"):
        run_stage_for_test(
            pretrain, stage_config(), {"model": MODEL | {"vocab_size": 100}},
            {"data/pack/x": inputs / "pack", "data/tokenizer": inputs / "tokenizer"},
            ["data/pretrain/general"], name="pretrain-general", tmp=tmp_path,
        )  # fmt: skip
    with pytest.raises(ValueError, match="pretrain.general.optimizer.lr_matrx: unknown key"):
        run(pretrain, "pretrain-general", tmp_path, inputs, stage_config(optimizer={"lr_matrix": 1.0, "lr_matrx": 1.0}))
    with pytest.raises(ValueError, match="no domain 'maths'; it has code, web"):
        run(pretrain, "pretrain-general", tmp_path, inputs, stage_config(mixture={"maths": 1.0}))
    with pytest.raises(ValueError, match="raise max_epochs"):
        run(pretrain, "pretrain-general", tmp_path, inputs, stage_config(max_epochs=0.01))
    run(pretrain, "pretrain-general", tmp_path, inputs, stage_config())
    with pytest.raises(ValueError, match="has no optimizer/optimizer.safetensors"):
        run(
            pretrain, "pretrain-reasoning", tmp_path, inputs, stage_config(load_optimizer=True), "data/pretrain/general"
        )
    with pytest.raises(ValueError, match="above the model's max_position_embeddings of 128"):
        run(midtrain, "midtrain-s1", tmp_path, inputs, stage_config(seq_len=256, rows=1), "data/pretrain/general")

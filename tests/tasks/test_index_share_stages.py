"""IndexShare through the line's own stages: pre-training, indexer warm-up, sparse adaptation on a model with a shared layer."""

import json

import torch
from safetensors.torch import load_file

from model.checkpoint import load_checkpoint
from tasks import dsa_adapt, dsa_warmup, pretrain
from tasks.stage import run_stage_for_test
from tests.tasks.lm_case import MODEL, stage_config, write_tokens

TYPES = ["full", "shared"]


def test_the_dsa_life_cycle_with_a_shared_layer(tmp_path):
    write_tokens(tmp_path / "pack")
    (tmp_path / "tokenizer").mkdir()
    added = {"added_tokens": [{"id": 95, "content": "<|endoftext|>"}, {"id": 94, "content": "<|user|>"}]}
    (tmp_path / "tokenizer/tokenizer.json").write_text(json.dumps(added))
    params = {"model": MODEL | {"indexer_types": TYPES}}

    def run(module, name, config, source=None):
        deps = {"data/pack/x": tmp_path / "pack"}
        deps |= {source: tmp_path / source} if source else {"data/tokenizer": tmp_path / "tokenizer"}
        out = "data/" + name.replace("-", "/")
        run_stage_for_test(
            module, config, params, deps, [out], name=name, seed=7, tmp=tmp_path, plots=[f"plots/{name}.json"]
        )
        metrics = json.loads((tmp_path / f"metrics/{name.replace('-', '_')}.json").read_text())
        return load_file(tmp_path / out / "model.safetensors"), metrics

    def moved(a, b):
        return {n for n in a if not torch.equal(a[n], b[n])}

    base, _ = run(pretrain, "pretrain-general", stage_config(tokens=10 * 128))
    model = load_checkpoint(tmp_path / "data/pretrain/general")
    assert model.cfg.indexer_types == tuple(TYPES) and model.blocks[1].self_attn.indexer is None
    warm = stage_config(
        tokens=20 * 128, seq_len=64, rows=2, recall_rows=8, recall_windows=2, index_rows=16,
        optimizer={"lr_matrix": 1e-2, "indexer_optimizer": "adamw", "weight_decay": 0.0},
    )  # fmt: skip
    warmed, metrics = run(dsa_warmup, "dsa_warmup", warm, "data/pretrain/general")
    assert {n.split(".")[2] for n in moved(base, warmed)} == {"0", "2"}, (
        "layer 1 has no indexer, layer 2 is the MTP layer"
    )
    assert (
        set(metrics["recall"]) == {"layer_0", "layer_1"} and 0 < metrics["recall"]["layer_1"]["8"]["ratio"] <= 1 + 1e-6
    )
    adapt = stage_config(
        seq_len=64, rows=2, recall_rows=8, recall_windows=2, schedule={"kind": "constant"},
        optimizer={"lr_matrix": 1e-3, "lr_indexer": 1e-3, "indexer_optimizer": "adamw"},
    )  # fmt: skip
    adapted, metrics = run(dsa_adapt, "dsa_adapt", adapt, "data/dsa_warmup")
    changed = moved(warmed, adapted)
    assert any(".indexer." in n for n in changed) and any("layers.1.self_attn.q_b_proj" in n for n in changed)
    assert 0 < metrics["recall_ratio"] <= 1 + 1e-6

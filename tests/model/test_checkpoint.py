"""Checkpoints: names, layout, sharding, strictness, byte-identical writing."""

import hashlib
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model.checkpoint import load_checkpoint, load_weights, save_checkpoint
from model.transformer import GlmMoeDsa
from tests.model.sizes import micro, spread


@pytest.fixture(scope="module")
def saved():
    return spread(GlmMoeDsa(micro()))


def same(a, b):
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_round_trip_with_mtp_layer(saved, tmp_path):
    save_checkpoint(saved, tmp_path)
    again = load_checkpoint(tmp_path)
    assert same(saved, again) and again.cfg == saved.cfg
    names = set(load_file(tmp_path / "model.safetensors"))
    mtp = {n for n in names if n.startswith("model.layers.3.")}
    assert {f"model.layers.3.{n}.weight" for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} <= mtp
    ids = torch.arange(30).view(1, 30)
    for x, y in zip(saved(ids, mtp_depth=3).mtp_hidden, again(ids, mtp_depth=3).mtp_hidden, strict=True):
        assert torch.equal(x, y)


def test_experts_lie_unfused_in_the_order_gate_up_down(saved, tmp_path):
    save_checkpoint(saved, tmp_path)
    disk = load_file(tmp_path / "model.safetensors")
    experts = saved.model.layers[1].mlp.experts
    prefix = "model.layers.1.mlp.experts.4"
    assert torch.equal(disk[f"{prefix}.gate_proj.weight"], experts.gate_up_proj[4, :24])
    assert torch.equal(disk[f"{prefix}.up_proj.weight"], experts.gate_up_proj[4, 24:])
    assert torch.equal(disk[f"{prefix}.down_proj.weight"], experts.down_proj[4])
    assert disk["model.layers.1.mlp.gate.e_score_correction_bias"].shape == (6,)


def test_shards_have_an_index_and_load(saved, tmp_path):
    save_checkpoint(saved, tmp_path, max_shard_bytes=60_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as f:
            assert name in f.keys()  # noqa: SIM118 (safe_open is not a mapping)
    assert same(saved, load_checkpoint(tmp_path))


def test_two_saves_are_byte_identical(saved, tmp_path):
    for name in ("a", "b"):
        save_checkpoint(saved, tmp_path / name)
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_low_precision_keeps_the_router_in_fp32(saved, tmp_path):
    save_checkpoint(saved, tmp_path / "fp32")
    half = load_checkpoint(tmp_path / "fp32", dtype=torch.bfloat16)
    assert half.lm_head.weight.dtype == torch.bfloat16
    assert half.model.layers[1].mlp.gate.weight.dtype == torch.float32
    assert half.model.layers[0].self_attn.indexer.weights_proj.weight.dtype == torch.float32
    save_checkpoint(half, tmp_path / "bf16")
    assert json.loads((tmp_path / "bf16/config.json").read_text())["dtype"] == "bfloat16"
    again = load_checkpoint(tmp_path / "bf16", dtype=torch.bfloat16)
    assert same(half, again)
    out = again(torch.arange(40).view(1, 40) % 96, index_loss_rows=4)
    assert torch.isfinite(again.logits(out.hidden_bsh)).all() and torch.isfinite(out.index_loss)


def test_tied_embeddings_are_stored_once(tmp_path):
    model = spread(GlmMoeDsa(micro(tie_word_embeddings=True)))
    save_checkpoint(model, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    again = load_checkpoint(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight and same(model, again)


def test_tokenizer_files_travel(saved, tmp_path):
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok/tokenizer.json").write_text("{}")
    (tmp_path / "tok/notes.txt").write_text("not a tokenizer file")
    save_checkpoint(saved, tmp_path / "ckpt", tokenizer_dir=tmp_path / "tok")
    assert (tmp_path / "ckpt/tokenizer.json").read_text() == "{}" and not (tmp_path / "ckpt/notes.txt").exists()


def test_misfits_are_listed(saved, tmp_path):
    save_checkpoint(saved, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.extra"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].contiguous()
    save_file(tensors, path)
    with pytest.raises(ValueError) as error:
        load_checkpoint(tmp_path)
    for part in ("missing: lm_head.weight, model.norm.weight", "unexpected: model.norm.extra", "(95, 48) in the file"):
        assert part in str(error.value)
    path.unlink()
    with pytest.raises(ValueError, match="model.safetensors is missing"):
        load_weights(saved, tmp_path)
    with pytest.raises(ValueError, match="has no config.json"):
        load_checkpoint(tmp_path / "nowhere")


def test_a_damaged_file_of_a_stage_output_is_named(saved, tmp_path):
    """Outputs carry a manifest with hashes; a flipped bit, a torn file or an edited configuration is found on load."""
    save_checkpoint(saved, tmp_path, max_shard_bytes=60_000)
    files = sorted(p for p in tmp_path.iterdir())
    rows = [
        {"path": p.name, "bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()} for p in files
    ]
    (tmp_path / "manifest.json").write_text(json.dumps({"files": rows}))
    load_checkpoint(tmp_path)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    good = shard.read_bytes()
    flipped = bytearray(good)
    flipped[-5] ^= 1
    for bad, says in ((bytes(flipped), "does not match the hash"), (good[:-8], f"its manifest lists {len(good)}")):
        shard.write_bytes(bad)
        with pytest.raises(ValueError, match=f"{shard.name} .*{says}"):
            load_checkpoint(tmp_path)
    shard.write_bytes(good)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'))
    with pytest.raises(ValueError, match="config.json does not match the hash in its manifest"):
        load_checkpoint(tmp_path)

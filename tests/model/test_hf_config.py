"""What a published config.json may say: older spellings are read, what this model cannot compute is refused by its key."""

import json

import pytest
import torch

from model.checkpoint import load_config
from model.checkpoint_import import import_checkpoint, scan_checkpoint
from model.config import ModelConfig
from model.hf_config import fp8_block
from tests.model.sizes import MICRO, micro
from tests.model.test_checkpoint_import import H, M, write

E = MICRO["n_routed_experts"]
GOOD = micro().to_hf()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling: rope_type 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling: rope_type 'linear'"),
        ({"rope_parameters": {"type": "yarn", "rope_theta": 1e6}}, "rope_parameters: rope_type 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_theta": 10000}, "contradictory: rope_parameters.rope_theta=1e.06, rope_theta=10000"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_parameters.rope_theta must be a number"),
        ({"rope_interleave": False}, "rope_interleave=False"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave=False"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types 'sliding_attention'"),
        ({"indexer_types": ["full"] * 2}, "indexer_types has 2 entries; num_hidden_layers is 3"),
        ({"indexer_types": ["full"] * 8}, "indexer_types has 8 entries"),
        ({"num_experts": E + 2}, "num_experts=8 contradicts n_routed_experts=6"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": [1, 100000]}, "eos_token_id 100000 is no token .*vocab_size is 96"),
        ({"pad_token_id": -1}, "pad_token_id -1"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
        ({"n_group": 6}, "groups need two experts each .*: model.n_group is 6"),
        ({"n_group": 3, "topk_group": 1, "num_experts_per_tok": 3}, "experts of topk_group groups: .*n_group is 3"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(GOOD | change)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": None, "rope_theta": 1_000_000, "rope_scaling": None},
        {"rope_parameters": None, "rope_theta": 1_000_000, "rope_scaling": {"type": "default"}},
        {"num_local_experts": E},
        {"num_experts": E, "n_routed_experts": None},
        {"mlp_layer_types": ["dense", "sparse", "sparse"], "first_k_dense_replace": None},
        {"index_topk_freq": None, "index_skip_topk_offset": None},
        {"indexer_types": ["full"] * 4},
        {"index_topk_pattern": "FFF"},
        {"rms_norm_eps": "1e-5"},
        {"transformers_version": "9", "ep_size": 1, "auto_map": {"AutoConfig": "x"}},
    ],
)
def test_older_and_other_spellings_mean_the_same(change):
    config = GOOD | {"num_nextn_predict_layers": 1} | change
    assert ModelConfig.from_hf(config) == micro(num_nextn_predict_layers=1)


def test_a_pattern_without_a_count_decides_the_dense_layers():
    config = GOOD | {"mlp_layer_types": ["dense", "dense", "sparse"]}
    del config["first_k_dense_replace"]
    assert ModelConfig.from_hf(config).first_k_dense_replace == 2


@pytest.mark.parametrize("found", [{"quant_method": "awq"}, {"quant_method": "fp8", "weight_block_size": 128}, [1]])
def test_other_quantization_is_refused(found):
    with pytest.raises(ValueError, match="quantization_config .* is not supported"):
        fp8_block({"quantization_config": found})


@pytest.mark.parametrize("text", ["{", "[]", b"\xff\xfe\x00"])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"config.json: (not readable as JSON|expected a JSON object)"):
        load_config(tmp_path)


def fuse(tensors):
    for i in (1, 2, 3):
        name = f"model.layers.{i}.mlp.experts"
        pairs = [[tensors.pop(f"{name}.{e}.{p}_proj.weight") for p in ("gate", "up")] for e in range(E)]
        tensors[f"{name}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{name}.down_proj"] = torch.stack([tensors.pop(f"{name}.{e}.down_proj.weight") for e in range(E)])


def test_a_weight_stored_fused_and_apart_is_refused(tmp_path):
    def both(tensors):
        tensors["model.layers.1.mlp.experts.gate_up_proj"] = torch.ones(E, 2 * M, H).bfloat16()

    write(tmp_path / "both", edit=both)
    with pytest.raises(ValueError, match=r"experts.0.gate_proj.weight is stored twice: as .* and as .*gate_up_proj"):
        scan_checkpoint(tmp_path / "both")

    def odd(tensors):
        fuse(tensors)
        name = "model.layers.1.mlp.experts.gate_up_proj"
        tensors[name] = torch.cat([tensors[name], tensors[name][:, :1]], 1)

    write(tmp_path / "odd", edit=odd)
    with pytest.raises(ValueError, match=rf"gate_up_proj: \({E}, {2 * M + 1}, {H}\) in the file"):
        scan_checkpoint(tmp_path / "odd")


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("bf16", "model.layers.0.mlp.up_proj.weight", float("nan")),
        ("bf16", "model.layers.1.mlp.gate.e_score_correction_bias", float("inf")),
        ("fp8", "model.layers.0.mlp.up_proj.weight_scale_inv", float("nan")),
    ],
)
def test_weights_that_are_not_finite_are_named(tmp_path, kind, name, value):
    write(tmp_path / "hf", kind, edit=lambda tensors: tensors[name].view(-1)[3].fill_(value))
    with pytest.raises(ValueError, match=rf"of-00005.safetensors: {name.removesuffix('_scale_inv')} has values"):
        import_checkpoint(tmp_path / "hf")


def test_files_that_are_no_weights_are_named(tmp_path):
    write(tmp_path / "hf")
    for path in (tmp_path / "hf").glob("*.safetensors*"):
        path.unlink()
    (tmp_path / "hf/pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"holds no \*.safetensors file; pytorch_model.bin are pickles"):
        scan_checkpoint(tmp_path / "hf")
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps({"weight_map": ["a"]}))
    with pytest.raises(ValueError, match="not a safetensors index"):
        scan_checkpoint(tmp_path / "hf")


def test_what_is_no_directory_is_named(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        (tmp_path / "file").write_text("x")
        with pytest.raises(ValueError, match=f"{path.name} is not a directory"):
            scan_checkpoint(path)

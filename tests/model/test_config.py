"""Configuration: strict keys, the transformers round trip, and the paper's parameter counts."""

import pytest
import torch
import yaml

from model.config import ModelConfig
from model.transformer import GlmMoeDsa
from tasks.params import ROOT
from tests.model.sizes import MICRO, micro

FULL = {
    "backbone": (742_008_098_048, 39.88e9),
    "hf": (743_911_199_232, 41.78e9),
    "backbone_mtp": (751.96e9, 40.47e9),
    "everything": (753.86e9, None),
}


@pytest.fixture(scope="module")
def full_cfg() -> ModelConfig:
    return ModelConfig.from_params(yaml.safe_load((ROOT / "conf/glm5.yaml").read_text())["model"])


def test_full_scale_counts_of_the_paper(full_cfg):
    counts = full_cfg.count_parameters()
    assert counts["hf"]["total"] == 743_911_199_232
    for rule, (total, active) in FULL.items():
        assert counts[rule]["total"] == pytest.approx(total, rel=1e-5), rule
        if active:
            assert counts[rule]["active"] == pytest.approx(active, rel=2e-4), rule


def test_full_scale_model_on_the_meta_device(full_cfg):
    """Every tensor of the real model, counted, not computed by the same formula."""
    with torch.device("meta"):
        model = GlmMoeDsa(full_cfg)
    counts = full_cfg.count_parameters()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    mtp = sum(n for name, n in sizes.items() if name.startswith("model.layers.78."))
    ends = sizes["model.embed_tokens.weight"] + sizes["lm_head.weight"]
    total = sum(sizes.values())
    assert total - mtp == counts["hf"]["total"] == 743_911_199_232
    assert total == counts["everything"]["total"]
    assert total - mtp - ends == counts["backbone"]["total"]
    assert total - ends == counts["backbone_mtp"]["total"]
    layer = {name: p for name, p in model.model.layers[3].named_parameters()}
    assert sum(p.numel() for n, p in layer.items() if n.startswith("self_attn.") and "indexer" not in n) == 165_022_208
    assert sum(p.numel() for n, p in layer.items() if "indexer" in n) == 9_371_904
    assert sum(p.numel() for n, p in layer.items() if n.startswith("mlp.")) + 256 == 9_702_998_272  # + bias


@pytest.mark.parametrize("profile", ["tiny", "node", "glm5"])
def test_profiles_have_a_valid_model_that_counts_itself(profile):
    cfg = ModelConfig.from_params(yaml.safe_load((ROOT / f"conf/{profile}.yaml").read_text())["model"])
    with torch.device("meta"):
        model = GlmMoeDsa(cfg)
    assert sum(p.numel() for p in model.parameters()) == cfg.count_parameters()["everything"]["total"]


def test_transformers_reads_the_same_config():
    from transformers import GlmMoeDsaConfig

    hf = GlmMoeDsaConfig(**micro().to_hf())
    assert hf.rope_parameters["rope_theta"] == 1_000_000.0
    assert hf.n_routed_experts == MICRO["n_routed_experts"]
    assert hf.mlp_layer_types == ["dense", "sparse", "sparse"]
    assert set(hf.indexer_types) == {"full"}
    assert ModelConfig.from_hf(hf.to_dict()) == micro()


def test_from_hf_round_trip():
    cfg = micro(rope_theta=8e6, tie_word_embeddings=True)
    assert ModelConfig.from_hf(cfg.to_hf()) == cfg


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hiden_size": 3}, "unknown model parameters: hiden_size"),
        ({"hidden_size": "48"}, "hidden_size must be a non-negative integer"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ({"index_head_dim": 4}, "index_head_dim must be at least"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok must not exceed"),
        ({"n_group": 4}, "n_group must divide"),
        ({"num_nextn_predict_layers": -1}, "non-negative"),
    ],
)
def test_bad_configs_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        micro(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type must be"),
        ({"attention_bias": True}, "attention_bias"),
        ({"indexer_types": ["shared", "full", "full"]}, "must begin with 'full'"),
        ({"indexer_types": ["full", "half", "full"]}, "indexer_types has 'half'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"rope_parameters": None}, "no rope_theta"),
    ],
)
def test_foreign_hf_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**micro().to_hf(), **change})

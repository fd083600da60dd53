"""GQA against transformers' attention functions and its own definition; MLA's and GQA's sizes come from the config alone."""

import pytest
import torch

from model.checkpoint import load_checkpoint, save_checkpoint
from model.config import ModelConfig
from model.gqa import GQA
from model.transformer import GlmMoeDsa
from tests.model.sizes import MICRO, micro, same_model, spread

GQA_SIZES = dict(attention="gqa", num_attention_heads=4, num_key_value_heads=2, head_dim=16, qk_rope_head_dim=8)


def ids(batch=2, size=30, seed=0):
    return torch.randint(0, 96, (batch, size), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rope", [8, 16])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_equals_attention_written_out(rope, groups):
    """float64: heads one by one, rope as complex products of neighbouring pairs, softmax over a triangular mask."""
    cfg = micro(**{**GQA_SIZES, "num_key_value_heads": groups, "qk_rope_head_dim": rope})
    gqa = spread(GQA(cfg)).double()
    x = torch.randn(2, 21, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cis = GlmMoeDsa(cfg).rope(torch.arange(21)[None])
    got, loss, masks = gqa(x, cis, attention="dense")
    assert loss is None and masks is None

    def rotate(u):  # [B,S,d]
        pairs = torch.view_as_complex(u[..., :rope].reshape(2, 21, rope // 2, 2).contiguous())
        return torch.cat([torch.view_as_real(pairs * cis.to(torch.complex128)).flatten(-2), u[..., rope:]], -1)

    heads = []
    for h in range(4):
        g = h // (4 // groups)
        q = rotate(x @ gqa.q_proj.weight[16 * h : 16 * h + 16].T)
        k = rotate(x @ gqa.k_proj.weight[16 * g : 16 * g + 16].T)
        logits = (q @ k.transpose(1, 2) / 4).masked_fill(~torch.ones(21, 21, dtype=torch.bool).tril(), float("-inf"))
        heads.append(logits.softmax(-1) @ (x @ gqa.v_proj.weight[16 * g : 16 * g + 16].T))
    expected = torch.cat(heads, -1) @ gqa.o_proj.weight.T
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


def test_equals_transformers_llama_attention():
    """Llama rotates halves instead of neighbouring pairs: the same model after permuting the rows of W_Q and W_K."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    cfg = micro(**{**GQA_SIZES, "qk_rope_head_dim": 16})
    gqa = spread(GQA(cfg))
    hf_cfg = llama.LlamaConfig(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, attn_implementation="sdpa",
    )  # fmt: skip
    theirs = llama.LlamaAttention(hf_cfg, 0).eval()
    halves = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
    with torch.no_grad():
        for name, heads in (("q_proj", 4), ("k_proj", 2)):
            weight = getattr(gqa, name).weight.view(heads, 16, 48)[:, halves].reshape(-1, 48)
            getattr(theirs, name).weight.copy_(weight)
        theirs.v_proj.weight.copy_(gqa.v_proj.weight)
        theirs.o_proj.weight.copy_(gqa.o_proj.weight)
        x = torch.randn(2, 25, 48, generator=torch.Generator().manual_seed(2))
        positions = torch.arange(25)[None]
        expected, _ = theirs(x, llama.LlamaRotaryEmbedding(hf_cfg)(x, positions), None)
        got, _, _ = gqa(x, GlmMoeDsa(cfg).rope(positions))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_a_gqa_model_trains_and_round_trips(tmp_path):
    model = spread(GlmMoeDsa(micro(**GQA_SIZES)))
    out = model(ids(), attention="dense", mtp_depth=2)
    (out.hidden_bsh.square().mean() + out.mtp_hidden[1].square().mean() + out.aux_loss).backward()
    assert all(
        p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters() if p is not model.lm_head.weight
    )
    save_checkpoint(model, tmp_path)
    again = load_checkpoint(tmp_path)
    assert again.cfg == model.cfg
    same_model(again, model, attention="dense")


@pytest.mark.parametrize("kinds", [None, ["swa", "full", "swa"]])
def test_transformers_refuses_what_it_cannot_express(tmp_path, kinds):
    transformers = pytest.importorskip("transformers")
    changes = GQA_SIZES if kinds is None else {"layer_types": kinds}
    save_checkpoint(spread(GlmMoeDsa(micro(**changes))), tmp_path)
    for loader in (transformers.AutoModelForCausalLM, transformers.GlmMoeDsaForCausalLM):
        with pytest.raises(Exception, match=r"arcline_glm|layer_types|num_key_value_heads"):
            loader.from_pretrained(tmp_path)


def test_dsa_is_refused_with_the_key():
    model = GlmMoeDsa(micro(**GQA_SIZES))
    for call in ({}, {"attention": "dense", "index_loss_rows": 4}):
        with pytest.raises(ValueError, match="model.attention 'mla'.*has 'gqa'"):
            model(ids(), **call)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        GQA_SIZES,
        {**GQA_SIZES, "num_key_value_heads": None},
        {"num_attention_heads": 4, "qk_nope_head_dim": 16, "v_head_dim": 24},  # MLA-256's trade: fewer, larger heads
        {"num_attention_heads": 6, "qk_nope_head_dim": 8, "v_head_dim": 16},
        {"layer_types": ["swa", "full", "swa"]},
        {**GQA_SIZES, "layer_types": ["swa", "full", "swa"]},
        {"indexer_types": ["full", "shared", "shared"]},
    ],
)
def test_counted_parameters_are_the_instantiated_ones(changes):
    cfg = ModelConfig.from_params({**MICRO, **changes})
    with torch.device("meta"):
        model = GlmMoeDsa(cfg)
    counts, sizes = cfg.count_parameters(), {n: p.numel() for n, p in model.named_parameters()}
    assert sum(sizes.values()) == counts["everything"]["total"]
    assert sum(n for name, n in sizes.items() if not name.startswith("model.layers.3.")) == counts["hf"]["total"]


def test_head_trade_of_mla_256_at_full_scale():
    """Notes A.4: 96 heads of 192 (nope 128, v 128) against 64 of 256. The model grows by 0.3 % (5 % of what is active), its
    attention by 16 %: values of 256 make W_UV and W_O larger."""
    wide = ModelConfig(num_attention_heads=96, qk_nope_head_dim=128, v_head_dim=128)
    a, b = wide.count_parameters()["everything"], ModelConfig().count_parameters()["everything"]
    assert 0 < b["total"] / a["total"] - 1 < 0.003 and b["active"] / a["active"] - 1 < 0.05
    a, b = (c.attention_parameters(5)["attention"] for c in (wide, ModelConfig()))
    assert b / a == pytest.approx(1.1625, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "mha"}, "model.attention must be one of mla, gqa"),
        ({"attention": "gqa"}, "needs model.head_dim"),
        ({"head_dim": 16}, "model.head_dim belong to model.attention 'gqa'"),
        ({**GQA_SIZES, "num_key_value_heads": 3}, "num_key_value_heads .3. must divide"),
        ({**GQA_SIZES, "qk_rope_head_dim": 18}, "qk_rope_head_dim .18.*exceeds model.head_dim"),
        ({**GQA_SIZES, "indexer_types": ["full", "shared", "full"]}, "model.indexer_types.*model.attention 'mla'"),
        ({"layer_types": ["swa", "full"]}, "layer_types has 2 entries, model.num_hidden_layers is 3"),
        ({"layer_types": ["swa", "full", "ssm"]}, "layer_types has 'ssm'"),
        ({"layer_types": ["swa", "full", "full"], "indexer_types": ["full", "shared", "full"]}, "model.layer_types"),
        ({"layer_types": ["swa", "full", "full"], "sliding_window": 0}, "sliding_window"),
    ],
)
def test_inconsistent_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        micro(**changes)

"""Random odd configurations against transformers: sizes that nothing divides, one row, one head, shared selections, groups.

Both sides break exact ties of index scores (ReLU makes many zeros) by the lower position; the sizes are small enough that
other near ties do not occur at these seeds.
"""

import random

import pytest
import torch

import model.attention
from model.checkpoint import load_checkpoint, save_checkpoint
from model.config import ModelConfig
from model.transformer import GlmMoeDsa
from tests.model.sizes import spread

hf_glm = pytest.importorskip("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa")


def stable_topk(x, k, dim=-1, largest=True, sorted=True):
    k = min(k, x.shape[dim])  # transformers asks for two experts of a group of one
    values, index = x.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), index.narrow(dim, 0, k)))


def draw(seed):
    r = random.Random(seed)
    layers, experts = r.choice([1, 1, 2, 3, 4]), r.choice([1, 2, 4, 6, 7, 12])
    groups = r.choice([g for g in (1, 2, 3) if experts % g == 0 and (g == 1 or experts // g >= 2)])
    open_groups = r.randint(1, groups)
    rope = r.choice([2, 4, 8])
    sizes = {
        "vocab_size": r.choice([17, 97, 131]), "hidden_size": r.choice([13, 24, 40]), "intermediate_size": r.choice([7, 32]),
        "moe_intermediate_size": r.choice([5, 16]), "num_hidden_layers": layers, "first_k_dense_replace": r.randint(0, layers),
        "num_attention_heads": r.choice([1, 2, 3, 5]), "q_lora_rank": r.choice([3, 16, 33]), "kv_lora_rank": r.choice([3, 9, 16]),
        "qk_nope_head_dim": r.choice([1, 6, 12]), "qk_rope_head_dim": rope, "v_head_dim": r.choice([1, 7, 16]),
        "index_n_heads": r.choice([1, 2, 5]), "index_head_dim": rope + r.choice([0, 1, 8]), "index_topk": r.choice([1, 3, 8, 64]),
        "n_routed_experts": experts, "num_experts_per_tok": r.randint(1, min(4, open_groups * (experts // groups))),
        "n_group": groups, "topk_group": open_groups, "norm_topk_prob": r.random() < 0.7, "n_shared_experts": r.choice([1, 2]),
        "routed_scaling_factor": r.choice([1.0, 2.5]), "rope_theta": r.choice([1e4, 1e6]), "rms_norm_eps": r.choice([1e-5, 1e-3]),
        "num_nextn_predict_layers": r.choice([0, 1]), "tie_word_embeddings": r.random() < 0.3, "max_position_embeddings": 512,
    }  # fmt: skip
    if layers > 1 and r.random() < 0.3:
        sizes["indexer_types"] = ["full"] + [r.choice(["full", "shared"]) for _ in range(layers - 1)]
    return sizes, (r.choice([1, 3]), r.choice([1, 1, 2, 5, 17, 40]))


SEEDS = [pytest.param(n, marks=pytest.mark.slow if n >= 16 else ()) for n in range(64)]


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_are_transformers(tmp_path, monkeypatch, seed):
    sizes, shape = draw(seed)
    ours = spread(GlmMoeDsa(ModelConfig.from_params(sizes)), scale=0.3, seed=seed)
    save_checkpoint(ours, tmp_path)
    theirs = hf_glm.GlmMoeDsaForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()
    batch = torch.randint(sizes["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "topk", stable_topk)
        patch.setattr(torch, "topk", stable_topk)
        reference = theirs(batch).logits
    assert reference.std() > 0.3, "weights must be large enough to tell a difference"
    for path in ("masked", "gathered"):
        monkeypatch.setattr(
            model.attention, "attention_path", lambda size, topk, path=path: path if size > topk else "dense"
        )
        out = ours(batch)
        torch.testing.assert_close(ours.logits(out.hidden_bsh).detach(), reference, atol=2e-4, rtol=0)
    out.hidden_bsh.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None)
    again = load_checkpoint(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))


def test_one_token_at_an_odd_place_is_no_view_of_its_source():
    """A single row is contiguous wherever it begins; complex pairs begin at even places, and rotating must not write back."""
    from kernels.mlapo import split_latents
    from kernels.rope import apply_rope, rope_cis

    cis = rope_cis(torch.tensor([[3]]), 4, 1e4)
    for q_lora in (3, 4):
        both = torch.arange(1.0, q_lora + 5 + 4 + 1).view(1, 1, -1).requires_grad_()
        kept = both.detach().clone()
        rope = split_latents(both, torch.ones(q_lora), torch.ones(5), cis, 1e-6)[2]
        assert torch.equal(both.detach(), kept)
        pairs = torch.view_as_complex(kept[..., q_lora + 5 :].clone().view(1, 1, 2, 2)) * cis
        torch.testing.assert_close(rope, torch.view_as_real(pairs).flatten(-2))
        torch.testing.assert_close(apply_rope(both[..., q_lora + 5 :], cis), rope)

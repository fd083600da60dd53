"""Muon Split: who owns what, block by block; update size; equality with a written-out reference; state in logical names."""

import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kernels.newton_schulz import newton_schulz_reference
from model.config import ModelConfig
from model.muon import OptimConfig, build_optimizer, format_ownership, ownership_table, split_blocks

CFG = SimpleNamespace(num_attention_heads=4, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=32)
SHAPES = {
    "model.embed_tokens.weight": (64, 48),
    "model.layers.1.input_layernorm.weight": (48,),
    "model.layers.1.self_attn.q_a_proj.weight": (40, 48),
    "model.layers.1.self_attn.q_b_proj.weight": (128, 40),
    "model.layers.1.self_attn.kv_a_proj_with_mqa.weight": (72, 48),
    "model.layers.1.self_attn.kv_b_proj.weight": (224, 64),
    "model.layers.1.self_attn.indexer.wq_b.weight": (64, 40),
    "model.layers.1.self_attn.indexer.k_norm.bias": (16,),
    "model.layers.1.mlp.gate.weight": (8, 48),
    "model.layers.1.mlp.experts.gate_up_proj": (8, 32, 48),
    "model.layers.1.mlp.experts.down_proj": (8, 48, 16),
    "model.layers.2.eh_proj.weight": (48, 96),
    "lm_head.weight": (64, 48),
}
TABLE = {
    "model.embed_tokens.weight": ("adamw", ""),
    "model.layers.1.input_layernorm.weight": ("adamw", ""),
    "model.layers.1.self_attn.q_a_proj.weight": ("muon", "1 x [40, 48]"),
    "model.layers.1.self_attn.q_b_proj.weight": ("muon", "4 x [32, 40]"),
    "model.layers.1.self_attn.kv_a_proj_with_mqa.weight": ("muon", "1 x [72, 48]"),
    "model.layers.1.self_attn.kv_b_proj.weight": ("muon", "4 x [24, 64] + 4 x [32, 64]"),
    "model.layers.1.self_attn.indexer.wq_b.weight": ("muon", "1 x [64, 40]"),
    "model.layers.1.self_attn.indexer.k_norm.bias": ("adamw", ""),
    "model.layers.1.mlp.gate.weight": ("muon", "1 x [8, 48]"),
    "model.layers.1.mlp.experts.gate_up_proj": ("muon", "16 x [16, 48]"),
    "model.layers.1.mlp.experts.down_proj": ("muon", "8 x [48, 16]"),
    "model.layers.2.eh_proj.weight": ("muon", "1 x [48, 96]"),
    "lm_head.weight": ("adamw", ""),
}


class Toy(nn.Module):
    """Parameters under the model's names, without the model."""

    def __init__(self, seed=0):
        super().__init__()
        self.cfg = CFG
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            module, *path = self, *name.split(".")
            for part in path[:-1]:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(path[-1], nn.Parameter(torch.randn(shape, generator=generator) * 0.02))

    def set_gradients(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            p.grad = torch.randn(p.shape, generator=generator)


def parameters(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_table_is_pinned():
    table = {n: (o, b) for n, _, o, b in ownership_table(Toy(), OptimConfig())}
    assert table == TABLE


# The whole model's table: layers that look alike are one row with their count.
MODEL_TABLE = """
adamw 1 model.embed_tokens.weight
muon 5 self_attn.q_a_proj.weight: 1 x [96, 128]
adamw 5 self_attn.q_a_layernorm.weight
muon 5 self_attn.q_b_proj.weight: 4 x [32, 96]
muon 5 self_attn.kv_a_proj_with_mqa.weight: 1 x [72, 128]
adamw 5 self_attn.kv_a_layernorm.weight
muon 5 self_attn.kv_b_proj.weight: 4 x [24, 64] + 4 x [32, 64]
muon 5 self_attn.o_proj.weight: 1 x [128, 128]
muon 5 self_attn.indexer.wq_b.weight: 1 x [128, 96]
muon 5 self_attn.indexer.wk.weight: 1 x [32, 128]
adamw 5 self_attn.indexer.k_norm.weight
adamw 5 self_attn.indexer.k_norm.bias
muon 5 self_attn.indexer.weights_proj.weight: 1 x [4, 128]
muon 1 mlp.gate_proj.weight: 1 x [256, 128]
muon 1 mlp.up_proj.weight: 1 x [256, 128]
muon 1 mlp.down_proj.weight: 1 x [128, 256]
adamw 5 input_layernorm.weight
adamw 5 post_attention_layernorm.weight
muon 4 mlp.gate.weight: 1 x [8, 128]
muon 4 mlp.experts.gate_up_proj: 16 x [64, 128]
muon 4 mlp.experts.down_proj: 8 x [128, 64]
muon 4 mlp.shared_experts.gate_proj.weight: 1 x [64, 128]
muon 4 mlp.shared_experts.up_proj.weight: 1 x [64, 128]
muon 4 mlp.shared_experts.down_proj.weight: 1 x [128, 64]
adamw 1 enorm.weight
adamw 1 hnorm.weight
muon 1 eh_proj.weight: 1 x [128, 256]
adamw 1 shared_head.norm.weight
adamw 1 model.norm.weight
adamw 1 lm_head.weight
"""


def test_table_of_the_whole_model_is_pinned():
    from model.transformer import GlmMoeDsa

    cfg = ModelConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=4,
        first_k_dense_replace=1, num_attention_heads=4, q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=24,
        qk_rope_head_dim=8, v_head_dim=32, index_n_heads=4, index_head_dim=32, index_topk=64, n_routed_experts=8,
        num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = GlmMoeDsa(cfg)
    rows = Counter()
    for name, _, optimizer, blocks in ownership_table(model, OptimConfig()):
        short = re.sub(r"^model\.layers\.\d+\.", "", name) + (f": {blocks}" if blocks else "")
        rows[optimizer, short] += 1
    assert {f"{o} {n} {s}" for (o, s), n in rows.items()} == set(MODEL_TABLE.strip().splitlines())
    assert sum(rows.values()) == len(list(model.parameters()))


def test_switches_move_the_head_and_the_indexer():
    table = {n: o for n, _, o, _ in ownership_table(Toy(), OptimConfig(lm_head_optimizer="muon"))}
    assert table["lm_head.weight"] == "muon" and table["model.embed_tokens.weight"] == "adamw"
    table = {n: o for n, _, o, _ in ownership_table(Toy(), OptimConfig(indexer_optimizer="adamw"))}
    assert table["model.layers.1.self_attn.indexer.wq_b.weight"] == "adamw"
    assert table["model.layers.1.self_attn.q_b_proj.weight"] == "muon"
    assert all(o == "adamw" for _, _, o, _ in ownership_table(Toy(), OptimConfig(muon="off")))
    whole = {n: b for n, _, _, b in ownership_table(Toy(), OptimConfig(muon="whole"))}
    assert whole["model.layers.1.self_attn.kv_b_proj.weight"] == "1 x [224, 64]"
    with pytest.raises(ValueError, match="lm_head_optimizer"):
        OptimConfig(lm_head_optimizer="sgd")


@pytest.mark.parametrize("train", ["indexer", "backbone"])
def test_freezing(train):
    model = Toy()
    optimizer = build_optimizer(model, OptimConfig(train=train))
    model.set_gradients(0)
    before = parameters(model)
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != (("indexer" in name) == (train == "indexer")), name
        assert p.requires_grad == (("indexer" in name) == (train == "indexer"))
    assert "frozen" in format_ownership(ownership_table(Toy(), OptimConfig(train=train)))


def test_every_block_is_orthogonalised_alone():
    """One step against the definition, head by head and expert by expert, with momentum, Nesterov, decay and scale."""
    cfg = OptimConfig(lr_matrix=0.01)
    model = Toy()
    optimizer = build_optimizer(model, cfg)
    want, momentum = parameters(model), {n: torch.zeros(s) for n, s in SHAPES.items()}
    for step in range(2):
        model.set_gradients(step)
        for name, p in model.named_parameters():
            if TABLE[name][0] != "muon":
                continue
            momentum[name] = 0.95 * momentum[name] + p.grad
            g = p.grad + 0.95 * momentum[name]
            if "q_b_proj" in name:
                blocks = list(g.split(32))
            elif "kv_b_proj" in name:
                blocks = [b for head in g.split(56) for b in head.split([24, 32])]
            elif "gate_up" in name:
                blocks = [b for expert in g for b in expert.split(16)]
            elif g.dim() == 3:
                blocks = list(g)
            else:
                blocks = [g]
            blocks = [0.2 * max(b.shape) ** 0.5 * newton_schulz_reference(b) for b in blocks]
            update = torch.stack(blocks) if "down_proj" in name else torch.cat(blocks).view(g.shape)
            want[name] = want[name] * (1 - 0.01 * 0.1) - 0.01 * update
        optimizer.step()
    for name, p in model.named_parameters():
        if TABLE[name][0] == "muon":
            torch.testing.assert_close(p.detach(), want[name], atol=1e-5, rtol=1e-3, msg=name)


def test_update_rms_is_that_of_adamw():
    """The root mean square of every block's update is 0.2 times the learning rate, whatever the block's shape."""
    model = Toy()
    optimizer = build_optimizer(model, OptimConfig(lr_matrix=1.0, weight_decay=0.0))
    model.set_gradients(3)
    before = parameters(model)
    optimizer.step()
    for name, p in model.named_parameters():
        if TABLE[name][0] == "muon":
            for block in split_blocks(name, p.detach() - before[name], CFG):
                rms = block.square().mean(dim=(1, 2)).sqrt()
                assert 0.15 < rms.min() and rms.max() < 0.23, (name, rms)


def test_adamw_side_equals_torch():
    model, other = Toy(), Toy()
    optimizer = build_optimizer(model, OptimConfig(lr_matrix=1e-2, muon="off", weight_decay=0.1))
    params = dict(other.named_parameters())
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for step in range(4):
        model.set_gradients(step)
        other.set_gradients(step)
        optimizer.set_lr_scale(0.5 + step / 10)
        for group in reference.param_groups:
            group["lr"] = 1e-2 * (0.5 + step / 10)
        optimizer.step()
        reference.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, params[name], atol=1e-6, rtol=1e-5, msg=name)


def test_parameter_without_gradient_is_left_alone():
    model = Toy()
    optimizer = build_optimizer(model, OptimConfig(lr_matrix=0.1, lr_embed=0.1))
    model.set_gradients(0)
    dict(model.named_parameters())["model.layers.2.eh_proj.weight"].grad = None
    model.model.embed_tokens.weight.grad = None
    before = parameters(model)
    optimizer.step()
    after = parameters(model)
    for name in ("model.layers.2.eh_proj.weight", "model.embed_tokens.weight"):
        assert torch.equal(before[name], after[name])
        assert not any(k.startswith(name) for k in optimizer.state_tensors())


def test_state_round_trip_continues_identically():
    a = Toy()
    optimizer_a = build_optimizer(a, OptimConfig(lr_matrix=0.01, lr_embed=0.02))
    for step in range(3):
        a.set_gradients(step)
        optimizer_a.step()
    b = Toy()
    b.load_state_dict(a.state_dict())
    optimizer_b = build_optimizer(b, OptimConfig(lr_matrix=0.01, lr_embed=0.02))
    state = optimizer_a.state_tensors()
    assert "model.layers.1.mlp.experts.gate_up_proj.momentum_buffer" in state
    assert {k.rsplit(".", 1)[1] for k in state if k.startswith("lm_head")} == {"step", "exp_avg", "exp_avg_sq"}
    optimizer_b.load_state_tensors(state)
    for step in range(3, 5):
        for model, optimizer in ((a, optimizer_a), (b, optimizer_b)):
            model.set_gradients(step)
            optimizer.step()
    for name, p in a.named_parameters():
        assert torch.equal(p, dict(b.named_parameters())[name]), name


def test_state_errors_name_the_tensor():
    optimizer = build_optimizer(Toy(), OptimConfig())
    with pytest.raises(ValueError, match="no.such"):
        optimizer.load_state_tensors({"no.such.momentum_buffer": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"lm_head.weight.exp_avg has shape \[1\]"):
        optimizer.load_state_tensors({"lm_head.weight.exp_avg": torch.zeros(1)})
    with pytest.raises(ValueError, match="lm_head.weight is trained by adamw here, whose state is step, exp_avg"):
        optimizer.load_state_tensors({"lm_head.weight.momentum_buffer": torch.zeros(1)})


def test_learning_rates_by_group():
    optimizer = build_optimizer(Toy(), OptimConfig(lr_matrix=1e-2, lr_embed=3e-2, lr_head=2e-2, lr_norm=4e-2))
    optimizer.set_lr_scale(0.5)
    got = {g: optimizer.learning_rate(g) for g in ("matrix", "indexer", "embed", "head", "norm")}
    assert got == {"matrix": 5e-3, "indexer": 5e-3, "embed": 1.5e-2, "head": 1e-2, "norm": 2e-2}

"""The whole network: initialisation, names, determinism, padding, learning."""

import pytest
import torch

from kernels.cross_entropy import linear_cross_entropy
from model.transformer import GlmMoeDsa
from tests.model.sizes import micro, spread


def ids(batch=2, size=30, seed=0):
    return torch.randint(0, 96, (batch, size), generator=torch.Generator().manual_seed(seed))


def test_init_is_seeded_by_name_and_scaled():
    a, b = GlmMoeDsa(micro()).init_weights(1), GlmMoeDsa(micro(num_hidden_layers=4)).init_weights(1)
    c = GlmMoeDsa(micro()).init_weights(2)
    w = "model.layers.1.mlp.experts.gate_up_proj"
    pa, pb, pc = (dict(m.named_parameters()) for m in (a, b, c))
    assert torch.equal(pa[w], pb[w]) and not torch.equal(pa[w], pc[w])
    assert pa[w].std().item() == pytest.approx(0.02, rel=0.05)
    assert pa["model.layers.1.mlp.experts.down_proj"].std().item() == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert pa["model.layers.0.self_attn.o_proj.weight"].std().item() == pytest.approx(0.02 / 6**0.5, rel=0.06)
    assert (pa["model.norm.weight"] == 1).all() and (pa["model.layers.0.self_attn.indexer.k_norm.bias"] == 0).all()


def test_experts_are_stacked_in_memory():
    shapes = {n: tuple(p.shape) for n, p in GlmMoeDsa(micro()).named_parameters()}
    assert shapes["model.layers.1.mlp.experts.gate_up_proj"] == (6, 48, 48)
    assert shapes["model.layers.2.mlp.experts.down_proj"] == (6, 48, 24)
    assert "model.layers.0.mlp.gate_proj.weight" in shapes and "model.layers.3.eh_proj.weight" in shapes


def test_same_input_gives_the_same_bits_and_gradients():
    results = []
    for _ in range(2):
        model = spread(GlmMoeDsa(micro()))
        out = model(ids(), index_loss_rows=6, mtp_depth=2)
        loss = out.hidden_bsh.pow(2).mean() + out.mtp_hidden[1].pow(2).mean() + out.index_loss + out.aux_loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_right_padding_does_not_reach_real_tokens(attention):
    model = spread(GlmMoeDsa(micro()))
    batch = ids(2, 30)
    padded = torch.cat([batch, torch.ones(2, 9, dtype=torch.long)], dim=1)
    mask = torch.arange(39).expand(2, -1) < 30
    with torch.no_grad():
        short = model(batch, attention=attention)
        long = model(padded, attention=attention, token_mask_bs=mask)
    torch.testing.assert_close(long.hidden_bsh[:, :30], short.hidden_bsh, atol=5e-5, rtol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(long.router_counts, short.router_counts))


def test_output_carries_what_was_asked_for():
    model = spread(GlmMoeDsa(micro()))
    out = model(ids())
    assert out.index_loss is None and out.mtp_hidden == [] and len(out.router_counts) == 2
    assert out.aux_loss.item() == pytest.approx(2.0, abs=0.5)  # about 1 per MoE layer near balance
    with torch.no_grad():
        assert model(ids()).aux_loss is None
    torch.testing.assert_close(model.logits(out.hidden_bsh), out.hidden_bsh @ model.lm_head.weight.T)
    with pytest.raises(ValueError, match="'sparse' or 'dense'"):
        model(ids(), attention="flash")


def test_a_sparse_model_learns_a_rule():
    """Copy the token three back: needs attention to a position the indexer must keep selecting."""
    torch.manual_seed(0)
    model = GlmMoeDsa(micro(num_hidden_layers=2, num_nextn_predict_layers=0, index_topk=16)).init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    start = torch.randint(4, 20, (8, 3))
    batch = start.repeat(1, 12)[:, :33]
    first = last = None
    for step in range(40):
        out = model(batch, index_loss_rows=8, rows_seed=step)
        loss = linear_cross_entropy(out.hidden_bsh[:, :-1].flatten(0, 1), model.lm_head.weight, batch[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + out.index_loss).backward()
        optimizer.step()
        model.update_router_bias(out.router_counts, 1e-3)
        first, last = first or loss.item(), loss.item()
    assert last < 0.5 < 3 < first

"""MLA: its three routes agree, causality holds, and the parts handed to decoding recompose the whole."""

import pytest
import torch

import model.attention
from model.attention import MLA
from model.transformer import GlmMoeDsa
from tests.model.sizes import micro, spread


def setup(size=40, **changes):
    cfg = micro(**changes)
    mla = spread(MLA(cfg)).double()
    x = torch.randn(2, size, cfg.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cis = GlmMoeDsa(cfg).rope(torch.arange(size)[None])
    return mla, x.requires_grad_(), cis


def run(mla, x, cis, monkeypatch, path, **kw):
    monkeypatch.setattr(model.attention, "attention_path", lambda size, topk: path)
    out, _, _ = mla(x, cis, **kw)
    params = [p for n, p in sorted(mla.named_parameters()) if "indexer" not in n]
    return out, torch.autograd.grad((out * out.detach().sin()).sum(), [x, *params])


def test_masked_and_gathered_routes_agree_with_gradients(monkeypatch):
    mla, x, cis = setup()
    masked, masked_grads = run(mla, x, cis, monkeypatch, "masked")
    gathered, gathered_grads = run(mla, x, cis, monkeypatch, "gathered")
    torch.testing.assert_close(gathered, masked, rtol=1e-9, atol=1e-10)
    for a, b in zip(masked_grads, gathered_grads):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
    dense, _ = run(mla, x, cis, monkeypatch, "dense")
    torch.testing.assert_close(dense[:, :8], masked[:, :8], rtol=1e-9, atol=1e-10)  # rows with at most topk keys
    assert (dense - masked)[:, 8:].abs().amax() > 1e-2


def test_topk_of_the_whole_sequence_is_dense_attention(monkeypatch):
    mla, x, cis = setup(index_topk=40)
    dense, _ = run(mla, x, cis, monkeypatch, "dense")
    for path in ("masked", "gathered"):
        torch.testing.assert_close(run(mla, x, cis, monkeypatch, path)[0], dense, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("path", ["dense", "masked", "gathered"])
def test_no_route_looks_ahead(monkeypatch, path):
    mla, x, cis = setup(20)
    before, _ = run(mla, x, cis, monkeypatch, path)
    changed = x.detach().clone()
    changed[:, 12:] += 3.0
    after, _ = run(mla, changed.requires_grad_(), cis, monkeypatch, path)
    torch.testing.assert_close(after[:, :12], before[:, :12], rtol=1e-10, atol=1e-10)
    assert (after[:, 12:] - before[:, 12:]).abs().amin(dim=(0, 2)).max() > 0


def test_parts_recompose_in_absorbed_form(monkeypatch):
    """What decoding does: latents cached, W_UK folded into q, W_UV applied after; equal to MHA mode."""
    mla, x, cis = setup(index_topk=64)
    out, _ = run(mla, x, cis, monkeypatch, "dense")
    c_q = mla.project_q_latent(x)
    q_nope, q_rope = mla.project_q(c_q, cis)
    c_kv, k_rope = mla.project_kv_latent(x, cis)
    w_uk, w_uv = mla.absorbed_weights()
    logits = torch.einsum("bshn,hnc,btc->bhst", q_nope, w_uk, c_kv) + torch.einsum("bshr,btr->bhst", q_rope, k_rope)
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    probs = (logits * mla.softmax_scale).masked_fill(~causal, float("-inf")).softmax(-1)
    heads = torch.einsum("bhst,btc,hvc->bshv", probs, c_kv, w_uv)
    torch.testing.assert_close(mla.output(heads), out, rtol=1e-9, atol=1e-10)


def test_positions_are_relative(monkeypatch):
    """RoPE in attention and indexer: shifting all positions changes nothing."""
    cfg = micro()
    net = spread(GlmMoeDsa(cfg))
    ids = torch.randint(0, 96, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        a = net(ids).hidden_bsh
        b = net(ids, positions_bs=torch.arange(30)[None] + 100).hidden_bsh
        c = net(ids, positions_bs=torch.arange(30)[None] * 3).hidden_bsh
    torch.testing.assert_close(a, b, atol=2e-3, rtol=0)
    assert (a - c).abs().amax() > 0.05

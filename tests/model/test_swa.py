"""Sliding-window layers: equal to masked attention over the base's own projections, and linear in length."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model.attention import MLA
from model.block import build_attention
from model.gqa import GQA
from model.transformer import GlmMoeDsa
from tests.model.sizes import micro, spread
from tests.model.test_gqa import GQA_SIZES, ids

BASES = {"mla": {}, "gqa": GQA_SIZES}


def layer(base, window, size=40):
    cfg = micro(**BASES[base], layer_types=["swa", "full", "swa"], sliding_window=window)
    swa = spread(build_attention(cfg, 0)).double()
    x = torch.randn(2, size, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return cfg, swa, x, GlmMoeDsa(cfg).rope(torch.arange(size)[None])


@pytest.mark.parametrize("base", list(BASES))
@pytest.mark.parametrize("window", [1, 7, 16, 40])
def test_equals_the_brute_force_mask(base, window):
    cfg, swa, x, cis = layer(base, window)
    got, loss, masks = swa(x, cis, attention="sparse")
    assert loss is None and masks is None
    q, k, v = swa.project_qkv(x, cis)
    n = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(n, dim=2), v.repeat_interleave(n, dim=2)
    t = torch.arange(40)
    seen = (t <= t[:, None]) & (t > t[:, None] - window)
    logits = torch.einsum("bshd,bthd->bhst", q, k) * swa.softmax_scale
    o = torch.einsum("bhst,bthd->bshd", logits.masked_fill(~seen, float("-inf")).softmax(-1), v)
    torch.testing.assert_close(got, o.flatten(2) @ swa.o_proj.weight.T, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("base", list(BASES))
def test_a_window_of_the_whole_sequence_is_full_attention(base):
    cfg, swa, x, cis = layer(base, 64)
    full = (MLA(cfg) if base == "mla" else GQA(cfg)).double()
    missing, unexpected = full.load_state_dict(swa.state_dict(), strict=False)
    assert not unexpected and all(name.startswith("indexer.") for name in missing)
    torch.testing.assert_close(swa(x, cis)[0], full(x, cis, attention="dense")[0], rtol=1e-9, atol=1e-10)


def test_positions_beyond_all_windows_do_not_matter():
    """Three layers of window 4 see 3 * 3 tokens back: an earlier token changes nothing, one within reach does."""
    model = spread(GlmMoeDsa(micro(layer_types=["swa"] * 3, sliding_window=4)))
    batch = ids(1, 30)
    with torch.no_grad():
        base = model(batch, attention="dense").hidden_bsh[0, -1]
        far, near = batch.clone(), batch.clone()
        far[0, 29 - 10] = (far[0, 29 - 10] + 1) % 96
        near[0, 29 - 9] = (near[0, 29 - 9] + 1) % 96
        # not bit for bit: the earlier token may take other experts, and a product's kernel depends on its rows
        torch.testing.assert_close(model(far, attention="dense").hidden_bsh[0, -1], base, rtol=1e-4, atol=1e-5)
        assert (model(near, attention="dense").hidden_bsh[0, -1] - base).abs().max() > 1e-3


@pytest.mark.parametrize("base", list(BASES))
def test_cost_falls_with_the_window(base):
    def operations(kinds):
        cfg = micro(**BASES[base], layer_types=kinds, sliding_window=16, max_position_embeddings=4096)
        model = GlmMoeDsa(cfg).init_weights(0)
        # torch's counter knows products, not the fused attention of the CPU
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            model(ids(1, 1024), attention="dense")
        found = counter.get_flop_counts()["Global"]
        return sum(v for op, v in found.items() if op not in (torch.ops.aten.mm, torch.ops.aten.addmm))

    # of three layers' attention one remains, and windows cost 1/30 of a full square at this length
    assert operations(["swa", "full", "swa"]) < 0.45 * operations(["full"] * 3)


def test_mixed_layers_select_and_learn_only_where_dsa_is(tmp_path):
    model = spread(GlmMoeDsa(micro(layer_types=["swa", "full", "swa"], sliding_window=8)))
    out = model(ids(), attention="sparse", index_loss_rows=8, mtp_depth=1)
    (out.hidden_bsh.square().mean() + out.index_loss + out.mtp_hidden[0].square().mean()).backward()
    indexers = {n.split(".indexer")[0] for n, _ in model.named_parameters() if ".indexer." in n}
    assert indexers == {"model.layers.1.self_attn", "model.layers.3.self_attn"}
    assert all(p.grad is not None for n, p in model.named_parameters() if n != "lm_head.weight")
    with torch.no_grad():
        dense, sparse = (model(ids(), attention=a).hidden_bsh for a in ("dense", "sparse"))
    assert (dense - sparse).abs().max() > 1e-3
    none = GlmMoeDsa(micro(layer_types=["swa"] * 3, num_nextn_predict_layers=0)).init_weights(0)
    with pytest.raises(ValueError, match="no layer that ran has an indexer"):
        none(ids(), index_loss_rows=4)

"""GDN and SimpleGDN layers: their formulas written out token by token, transformers' module, causality, parameters, training."""

import pytest
import torch
import torch.nn.functional as F

from model.block import build_attention
from model.config import ModelConfig
from model.gdn import fixed_log_decay
from model.muon import OptimConfig, build_optimizer, ownership
from model.transformer import GlmMoeDsa
from tests.model.sizes import MICRO, micro, spread
from tests.model.test_gqa import GQA_SIZES, ids

BASES = {"mla": {}, "gqa": GQA_SIZES}


def layer(base, kind, size=20, **changes):
    cfg = micro(**BASES[base], layer_types=[kind, "full", kind], **changes)
    module = spread(build_attention(cfg, 0)).double()
    x = torch.randn(2, size, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return cfg, module, x, GlmMoeDsa(cfg).rope(torch.arange(size)[None])


def delta_rule(q, k, v, a, b):
    """One head: q, k [S,dk], v [S,dv], a, b [S] -> [S,dv] by the notes' formula."""
    state, outs = torch.zeros(v.shape[1], k.shape[1], dtype=q.dtype), []
    eye = torch.eye(k.shape[1], dtype=q.dtype)
    for t in range(len(q)):
        state = a[t] * state @ (eye - b[t] * torch.outer(k[t], k[t])) + b[t] * torch.outer(v[t], k[t])
        outs.append(state @ q[t])
    return torch.stack(outs)


def unit(u):
    return u / u.square().sum(-1, keepdim=True).add(1e-6).sqrt()


@pytest.mark.parametrize("decay", ["none", "fixed"])
@pytest.mark.parametrize("base", list(BASES))
def test_simple_gdn_is_the_recurrence_over_the_projections(base, decay):
    cfg, module, x, cis = layer(base, "simple_gdn", simple_gdn_decay=decay)
    q, k, v = module.project_qkv(x, cis)
    n, heads = q.shape[2] // k.shape[2], []
    a = fixed_log_decay(q.shape[2]).double().exp() if decay == "fixed" else torch.ones(q.shape[2], dtype=torch.float64)
    for h in range(q.shape[2]):
        g = h // n
        rows = [
            delta_rule(unit(q[i, :, h]), unit(k[i, :, g]), v[i, :, g], a[h].expand(20), torch.ones(20))
            for i in range(2)
        ]
        heads.append(torch.stack(rows))
    expected = torch.cat(heads, -1) @ module.o_proj.weight.T
    torch.testing.assert_close(module(x, cis)[0], expected, rtol=1e-8, atol=1e-9)


def test_fixed_decays_have_time_constants_from_32_to_4096_tokens():
    tau = -1 / fixed_log_decay(8).double()
    assert tau[0].item() == pytest.approx(32, rel=0.02) and tau[-1].item() == pytest.approx(4096, rel=0.01)
    torch.testing.assert_close(tau[1:] / tau[:-1], torch.full((7,), 2.0, dtype=torch.float64), rtol=0.02, atol=0)


@pytest.mark.parametrize("base", list(BASES))
def test_gdn_is_the_formula_of_the_notes(base):
    cfg, module, x, cis = layer(base, "gdn")
    heads, groups, dv = cfg.num_attention_heads, cfg.kv_heads, cfg.value_head_dim

    def conv(u, weight):  # [B,S,n,d]
        flat = u.flatten(-2)
        y = torch.zeros_like(flat)
        for t in range(flat.shape[1]):
            for j in range(4):
                if t - j >= 0:
                    y[:, t] += weight[:, 3 - j] * flat[:, t - j]
        return F.silu(y).view(u.shape)

    q, k, v = module.project_qkv(x, None)
    q, k, v = (conv(u, c.weight) for u, c in ((q, module.q_conv1d), (k, module.k_conv1d), (v, module.v_conv1d)))
    a = torch.exp(-module.A_log.exp() * F.softplus(x @ module.a_proj.weight.T + module.dt_bias))
    b = torch.sigmoid(x @ module.b_proj.weight.T)
    out = []
    for h in range(heads):
        g = h // (heads // groups)
        o = torch.stack(
            [delta_rule(unit(q[i, :, h]), unit(k[i, :, g]), v[i, :, g], a[i, :, h], b[i, :, h]) for i in range(2)]
        )
        o = o / (o.square().mean(-1, keepdim=True) + cfg.rms_norm_eps).sqrt() * module.o_norm.weight
        out.append(o * F.silu(x @ module.g_proj.weight[h * dv : (h + 1) * dv].T))
    expected = torch.cat(out, -1) @ module.o_proj.weight.T
    got, loss, masks = module(x, cis, attention="sparse")
    assert loss is None and masks is None
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9)


def test_gdn_equals_transformers_qwen3_next_layer():
    """Same layer under their names. They scale q by dk^-0.5: the gated norm undoes any scale, up to its epsilon."""
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    from transformers import Qwen3NextConfig

    cfg = micro(**{**GQA_SIZES, "num_key_value_heads": 4}, layer_types=["gdn", "full", "full"], rms_norm_eps=1e-14)
    ours = spread(build_attention(cfg, 0))
    theirs = qwen.Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=48, linear_num_value_heads=4, linear_num_key_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
            linear_conv_kernel_dim=4, rms_norm_eps=1e-14, num_hidden_layers=1, layer_types=["linear_attention"],
        ), 0,
    )  # fmt: skip
    with torch.no_grad():
        parts = [getattr(ours, n).weight.view(4, 16, 48) for n in ("q_proj", "k_proj", "v_proj", "g_proj")]
        theirs.in_proj_qkvz.weight.copy_(torch.cat(parts, dim=1).flatten(0, 1))
        theirs.in_proj_ba.weight.copy_(torch.stack([ours.b_proj.weight, ours.a_proj.weight], dim=1).flatten(0, 1))
        convs = [getattr(ours, n).weight for n in ("q_conv1d", "k_conv1d", "v_conv1d")]
        theirs.conv1d.weight.copy_(torch.cat(convs)[:, None])
        theirs.A_log.copy_(ours.A_log)
        theirs.dt_bias.copy_(ours.dt_bias)
        theirs.norm.weight.copy_(ours.o_norm.weight)
        theirs.out_proj.weight.copy_(ours.o_proj.weight)
        x = torch.randn(2, 90, 48, generator=torch.Generator().manual_seed(4))
        torch.testing.assert_close(ours(x, None)[0], theirs(x), atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ["gdn", "simple_gdn"])
@pytest.mark.parametrize("base", list(BASES))
def test_no_look_ahead_and_counted_parameters(base, kind):
    cfg, module, x, cis = layer(base, kind)
    changed = x.clone()
    changed[:, 12:] += 1
    a, b = module(x, cis)[0], module(changed, cis)[0]
    torch.testing.assert_close(a[:, :12], b[:, :12], rtol=0, atol=1e-12)
    assert (a - b)[:, 12:].abs().amin(dim=(0, 2)).max() > 0
    with torch.device("meta"):
        model = GlmMoeDsa(ModelConfig.from_params({**MICRO, **BASES[base], "layer_types": [kind, "full", kind]}))
    assert sum(p.numel() for p in model.parameters()) == model.cfg.count_parameters()["everything"]["total"]
    if kind == "simple_gdn":
        full = build_attention(micro(**BASES[base]), 0)
        assert set(module.state_dict()) == {n for n in full.state_dict() if not n.startswith("indexer.")}


@pytest.mark.parametrize("kind", ["gdn", "simple_gdn"])
@pytest.mark.parametrize("base", list(BASES))
def test_every_parameter_trains_under_muon_split(base, kind):
    model = GlmMoeDsa(micro(**BASES[base], layer_types=[kind, "full", kind], num_nextn_predict_layers=0)).init_weights(
        3
    )
    rows = {row.name: row for row in ownership(model, OptimConfig())}
    for name, row in rows.items():
        if name.endswith(("A_log", "dt_bias", "conv1d.weight", "o_norm.weight")):
            assert (row.group, row.optimizer) == ("norm", "adamw"), name
    at = "model.layers.0.self_attn"
    if base == "mla":
        assert rows[f"{at}.q_b_proj.weight"].blocks == "3 x [20, 32]"
    else:
        assert rows[f"{at}.q_proj.weight"].blocks == "1 x [64, 48]"
    optimizer = build_optimizer(model, OptimConfig(lr_matrix=0.01))
    convs = [g for g in optimizer.param_groups if any(n.endswith("conv1d.weight") for n in g["names"])]
    assert all(g["weight_decay"] == 0 for g in convs)
    batch, losses = ids(4, 32), []
    for _ in range(25):
        out = model(batch, attention="dense")
        loss = F.cross_entropy(model.logits(out.hidden_bsh[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        if not losses:
            silent = [n for n, p in model.named_parameters() if ".indexer." not in n and not p.grad.abs().max() > 0]
            assert not silent
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1, losses


def test_bf16_keeps_the_recurrence_in_fp32():
    cfg, module, x, cis = layer("mla", "gdn", size=100)
    exact = module(x, cis)[0]
    half = module.to(torch.bfloat16)(x.to(torch.bfloat16), cis)[0]
    assert half.dtype == torch.bfloat16
    assert (half.double() - exact).norm() / exact.norm() < 0.05

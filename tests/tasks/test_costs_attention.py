"""The cost formulas of every kind of attention: parameters against instantiated models, operations against counted ones."""

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kernels import gdn
from model.config import ModelConfig
from model.muon import OptimConfig, build_optimizer
from model.transformer import GlmMoeDsa
from tasks import costs
from tasks.params import compose

GQA = dict(attention="gqa", num_key_value_heads=2, head_dim=32)
CASES = {
    "gqa": GQA,
    "mla-256 trade": dict(num_attention_heads=3, qk_nope_head_dim=32, v_head_dim=40),
    "swa": dict(layer_types=["swa", "full", "swa", "full"], sliding_window=32),
    "gqa swa": GQA | dict(layer_types=["swa", "full", "swa", "full"], sliding_window=32),
    "gdn": dict(layer_types=["gdn", "full", "gdn", "full"]),
    "gqa gdn": GQA | dict(layer_types=["gdn"] * 4),
    "simple_gdn": dict(layer_types=["simple_gdn", "full", "full", "full"]),
    "gqa simple_gdn": GQA | dict(layer_types=["simple_gdn"] * 4),
    "index share": dict(indexer_types=["full", "shared", "full", "shared"]),
    "three MTP layers": dict(num_nextn_predict_layers=3),
}


def config(case):
    return ModelConfig.from_params(compose("tiny")["model"] | CASES[case])


@pytest.mark.parametrize("case", list(CASES))
def test_parameters_by_kind_are_the_models(case):
    cfg = config(case)
    with torch.device("meta"):
        named = dict(GlmMoeDsa(cfg).named_parameters())
    counts = costs.parameters(cfg)
    assert (
        sum(counts.values()) == sum(p.numel() for p in named.values()) == cfg.count_parameters()["everything"]["total"]
    )
    inside = {n: p for n, p in named.items() if ".self_attn." in n}
    indexer = sum(p.numel() for n, p in inside.items() if ".indexer." in n)
    vectors = ("A_log", "dt_bias", "conv1d.weight", "norm.weight")
    matrices = sum(p.numel() for n, p in inside.items() if ".indexer." not in n and not n.endswith(vectors))
    assert counts["indexer"] == indexer and counts["attention"] == matrices


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("case", list(CASES))
def test_operations_of_the_forward_pass_are_the_counted_ones(case, sparse):
    """Products with weights exactly; of the recurrences, the batched products exactly."""
    cfg, length = config(case), 256
    if sparse and cfg.attention == "gqa":
        pytest.skip("DSA is MLA's")
    model = GlmMoeDsa(cfg).init_weights(0)
    ids = torch.randint(0, cfg.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(ids, attention="sparse" if sparse else "dense")
    counted = counter.get_flop_counts()["Global"]
    cost = costs.forward_flops(cfg, length, sparse=sparse)
    expected = cost.attention_projections + cost.mlp
    if sparse:  # of the indexer, its projections are plain products; its scores are batched ones
        selecting = sum(cfg.has_indexer(layer) for layer in range(cfg.num_hidden_layers))
        scores = 2.0 * cfg.index_n_heads * (cfg.index_head_dim + 1) * costs.mean_keys(length)
        assert (cost.indexer > 0) == (selecting > 0)
        expected += cost.indexer - selecting * scores
    assert counted[torch.ops.aten.mm] / length == pytest.approx(expected, rel=1e-12)
    if set(cfg.kinds) <= {"gdn", "simple_gdn"}:
        qk, v, heads = cfg.qk_head_dim, cfg.value_head_dim, cfg.num_attention_heads
        each = heads * costs.CHUNK * (qk + v)  # the triangular system, and the convolutions, are no products
        if "gdn" in cfg.kinds:
            each += 2 * cfg.linear_conv_kernel_dim * (heads * qk + cfg.kv_heads * (qk + v))
        products = cost.attention_core - cfg.num_hidden_layers * each
        # the counter also sees the rest's batched products: none in dense attention over these kinds
        assert counted[torch.ops.aten.bmm] / length == pytest.approx(products, rel=1e-12)


def test_windows_and_recurrences_cost_the_same_at_any_length():
    cfg = config("swa")
    full = dataclasses.replace(cfg, layer_types=None)
    one = costs.attention_flops(cfg, 0, 4096, sparse=False)[1]
    assert one == pytest.approx(2 * cfg.num_attention_heads * (cfg.qk_head_dim + cfg.v_head_dim) * 32, rel=0.01)
    assert costs.attention_flops(cfg, 1, 4096, sparse=False) == costs.attention_flops(full, 1, 4096, sparse=False)
    linear = config("gdn")
    assert costs.attention_flops(linear, 0, 512, sparse=True) == costs.attention_flops(linear, 0, 65536, sparse=True)
    assert costs.CHUNK == gdn.CHUNK


def test_shared_layers_spare_the_indexer():
    cfg = config("index share")
    every = dataclasses.replace(cfg, indexer_types=None)
    a, b = (costs.forward_flops(c, 1024, sparse=True) for c in (cfg, every))
    assert a.indexer == b.indexer / 2 and a.attention_core == b.attention_core


@pytest.mark.parametrize("case", ["gdn", "gqa gdn", "index share"])
def test_optimizer_bytes_are_what_the_optimizer_holds(case):
    cfg = config(case)
    model = GlmMoeDsa(cfg).init_weights(0)
    settings = {"indexer_optimizer": "adamw", "lm_head_optimizer": "adamw"}
    optimizer = build_optimizer(model, OptimConfig(**settings))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    held = sum(t.numel() * 4 for n, t in optimizer.state_tensors().items() if not n.endswith(".step"))
    assert costs.state_bytes(cfg, settings)["optimizer"] == held

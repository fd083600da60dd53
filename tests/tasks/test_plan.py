"""The planner's arithmetic against counted operations, real models and hand-computed cases; and what start-up refuses."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.config import ModelConfig
from model.muon import OptimConfig, build_optimizer
from model.transformer import GlmMoeDsa
from tasks import plan
from tasks.costs import forward_flops, mean_keys, parameters, refuse_too_large, state_bytes
from tasks.params import compose

ALL = frozenset(plan.TECHNIQUES)


def tiny():
    return ModelConfig.from_params(compose("tiny")["model"])


@pytest.mark.parametrize("profile", ["tiny", "node", "glm5"])
def test_parameters_by_kind_add_up_to_the_count(profile):
    cfg = ModelConfig.from_params(compose(profile)["model"])
    assert sum(parameters(cfg).values()) == cfg.count_parameters()["everything"]["total"]


def test_parameters_by_kind_are_the_models():
    model, counts = GlmMoeDsa(tiny()), parameters(tiny())

    def held(*parts):
        return sum(p.numel() for n, p in model.named_parameters() if any(part in n for part in parts))

    assert counts["indexer"] == held(".indexer.")
    assert counts["routed_experts"] == held(".experts.")
    assert counts["shared_experts"] == held("shared_experts")
    assert counts["router"] == held(".gate.weight")
    assert counts["embedding"] == held("embed_tokens") and counts["head"] == held("lm_head")


def test_mean_keys_by_hand():
    assert mean_keys(4) == 2.5  # 1, 2, 3, 4
    assert mean_keys(4, 2) == 1.75  # 1, 2, 2, 2
    assert mean_keys(4, 9) == 2.5


@pytest.mark.parametrize("length, attention", [(64, "dense"), (512, "dense"), (512, "sparse")])
def test_operations_of_projections_and_experts_equal_the_counted_ones(length, attention):
    cfg = tiny()
    model = GlmMoeDsa(cfg).init_weights(0)
    ids = torch.randint(0, cfg.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, attention=attention)
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm] / length
    cost = forward_flops(cfg, length, sparse=attention == "sparse")
    expected = cost.attention_projections + cost.mlp
    if attention == "sparse":  # of the indexer, its projections are plain products; its scores are batched ones
        scores = 2.0 * cfg.index_n_heads * (cfg.index_head_dim + 1) * mean_keys(length) * cfg.num_hidden_layers
        expected += cost.indexer - scores
    assert counted == pytest.approx(expected, rel=1e-12)


def test_selection_costs_less_than_dense_attention_only_at_length():
    cfg = ModelConfig()
    long = 202752
    dense = forward_flops(cfg, long, sparse=False)
    sparse = forward_flops(cfg, long, sparse=True)
    assert sparse.attention_core < dense.attention_core / 20 and sparse.total < 0.3 * dense.total
    assert forward_flops(cfg, 2048, sparse=True) == forward_flops(cfg, 2048, sparse=False)
    # MQA mode reads a wider key: just above index_topk it costs more than it saves
    assert forward_flops(cfg, 4096, sparse=True).total > forward_flops(cfg, 4096, sparse=False).total
    assert forward_flops(cfg, 32768, sparse=True).total < forward_flops(cfg, 32768, sparse=False).total
    # notes B.4: per query and layer at 196,608 keys, dense 65,536 L multiply-adds and the indexer 8,192 L operations
    per_layer = dense.attention_core / cfg.num_hidden_layers / mean_keys(long)
    assert per_layer == 2 * 64 * 512


@pytest.mark.parametrize("train", ["all", "indexer"])
def test_state_bytes_are_what_the_optimizer_holds(train):
    model = GlmMoeDsa(tiny())
    settings = {"indexer_optimizer": "adamw", "lm_head_optimizer": "adamw"}
    optimizer = build_optimizer(model, OptimConfig(train=train, **settings))
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    held = sum(t.numel() * 4 for n, t in optimizer.state_tensors().items() if t.dim() > 0 and t.numel() > 1)
    needed = state_bytes(tiny(), settings, train)
    assert needed["optimizer"] == pytest.approx(
        held, rel=0.01
    )  # norm weights of the indexer are AdamW's under any setting
    assert needed["weights"] == 4 * sum(p.numel() for p in model.parameters())


def test_too_large_a_model_is_refused_with_the_keys():
    with pytest.raises(
        ValueError, match=r"needs at least 9,05.* model.num_hidden_layers \(78\).*n_routed_experts \(256\)"
    ):
        refuse_too_large(ModelConfig(), {}, "all", 24 * 10**9, "pretrain-general")
    refuse_too_large(tiny(), {}, "all", 10**9, "pretrain-general")


def test_bubble_of_1f1b_by_hand():
    layout = plan.Layout(pp=4)
    assert plan.bubble(layout, 8, frozenset()) == 3 / 8
    assert plan.bubble(layout, 8, frozenset({"interleaving"})) == 3 / 16
    assert plan.bubble(layout, 8, frozenset({"deferred_weight_gradient"})) == pytest.approx(1 / 8)


def stage(**changes):
    base = {"name": "pretrain.general", "tokens": 10**9, "seq_len": 4096, "rows": 64, "micro_rows": 1, "optimizer": {}}
    return base | changes


def test_memory_of_one_process_without_techniques_by_hand():
    cfg = tiny()
    cluster, counts = plan.Cluster(gpus=1), parameters(cfg)
    used = plan.memory(cfg, cluster, plan.Layout(), stage(rows=1, seq_len=256), frozenset())
    total = sum(counts.values())
    assert used["weights"] == pytest.approx(2 * total) and used["gradients"] == pytest.approx(4 * total)
    adamw = counts["embedding"] + counts["head"] + counts["norms"]
    assert used["optimizer"] == pytest.approx(8 * (total - adamw) + 12 * adamw)
    assert used["logits"] == 256 * cfg.vocab_size * 6


def test_each_memory_technique_saves_and_offload_does_not_cost_days():
    cfg = ModelConfig.from_params(compose("glm5")["model"])
    cluster, layout = plan.Cluster(gpus=1024, memory_gb=141), plan.Layout(pp=8, ep=32)
    one = next(s for s in plan.stage_sections(compose("glm5")) if s["name"] == "pretrain.general")
    full = plan.step_estimate(cfg, cluster, layout, one, ALL)
    for technique in ("gradient_shards", "activation_offload", "chunked_loss", "flexible_mtp", "recompute"):
        without = plan.step_estimate(cfg, cluster, layout, one, ALL - {technique})
        assert without["bytes_total"] >= full["bytes_total"], technique
    assert plan.step_estimate(cfg, cluster, layout, one, ALL - {"recompute"})["days"] == pytest.approx(
        full["days"] * 3 / 4
    )


def test_layout_search_fits_and_names_the_keys_when_nothing_does(capsys):
    cfg = ModelConfig.from_params(compose("node")["model"])
    cluster = plan.Cluster(gpus=8, memory_gb=141)
    for one in plan.stage_sections(compose("node")):
        layout, cost = plan.search_layout(cfg, cluster, one, ALL)
        assert layout.problem(cluster, cfg, one["rows"]) is None and cost["bytes_total"] < 135e9
    with pytest.raises(ValueError, match=r"pretrain.general: no layout of 8 GPUs.*pretrain.general.seq_len \(4096\)"):
        plan.main(["--profile", "glm5", "--cluster", "gpus=8"])


@pytest.mark.parametrize(
    "layout, rows, message",
    [
        (plan.Layout(tp=3), 8, "does not divide gpus"),
        (plan.Layout(ep=3), 8, "model.n_routed_experts"),
        (plan.Layout(tp=8), 8, "model.num_attention_heads"),
        (plan.Layout(pp=8), 8, "model.num_hidden_layers"),
        (plan.Layout(), 12, "does not divide the stage's rows"),
    ],
)
def test_inconsistent_layouts_are_named(layout, rows, message):
    assert message in layout.problem(plan.Cluster(gpus=8), tiny(), rows)


def test_command_prints_every_stage(capsys):
    from tasks.__main__ import main

    assert main(["plan", "--profile", "glm5", "--cluster", "gpus=2048,memory_gb=141"]) == 0
    printed = capsys.readouterr().out
    assert "743,911,199,232" in printed and all(name in printed for name in (*plan.STAGES, *plan.TECHNIQUES))
    assert main(["plan", "--cluster", "gpus=many"]) == 1
    assert "gpus='many': expected int" in capsys.readouterr().err
    assert main(["plan", "--cluster", "speed=9"]) == 1
    assert main(["plan", "--profile", "no-such"]) == 1

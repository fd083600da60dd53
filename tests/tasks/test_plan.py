"""The planner's arithmetic against counted operations, real models and hand-computed cases; and what start-up refuses."""

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from kernels.cross_entropy import linear_cross_entropy
from model.config import ModelConfig
from model.muon import OptimConfig, build_optimizer
from model.pipeline_place import place
from model.pipeline_stage import Work
from model.transformer import GlmMoeDsa
from tasks import plan
from tasks.costs import forward_flops, kept_numbers, mean_keys, parameters, refuse_too_large, state_bytes
from tasks.parallel import ParallelSettings
from tasks.params import compose
from tasks.pipeline_balance import stage_placement, train_flops
from tasks.pipeline_sim import measure
from tasks.plan_pipeline import stage_parameters
from tasks.settings import LoopSettings

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


def test_gradients_and_optimizer_state_are_spread_over_the_ranks():
    needed = state_bytes(tiny(), {})
    fits_two = needed["weights"] + (needed["gradients"] + needed["optimizer"]) // 2 + 2
    refuse_too_large(tiny(), {}, "all", fits_two, "sft", ranks=2)
    with pytest.raises(ValueError, match="stage sft: training this model in one process needs"):
        refuse_too_large(tiny(), {}, "all", fits_two, "sft")
    with pytest.raises(ValueError, match=r"on 2 ranks needs at least .* on each, the device has 0.0 GB"):
        refuse_too_large(tiny(), {}, "all", fits_two // 2, "sft", ranks=2)


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
    cluster, layout = plan.Cluster(gpus=1024, memory_gb=141), plan.Layout(pp=8, ep=32, vp=4)
    one = next(s for s in plan.stage_sections(compose("glm5")) if s["name"] == "pretrain.general")
    every = ALL - {"deferred_weight_gradient"}  # which trades memory for time, differently beside each of the others
    full = plan.step_estimate(cfg, cluster, layout, one, every)
    for technique in ("gradient_shards", "activation_offload", "chunked_loss", "flexible_mtp", "recompute"):
        without = plan.step_estimate(cfg, cluster, layout, one, every - {technique})
        assert without["bytes_total"] >= full["bytes_total"], technique
    still = ALL - {"activation_offload"}  # without recomputation the copies of whole activations would not be hidden
    plain = plan.step_estimate(cfg, cluster, layout, one, still - {"recompute"})["days"]
    # one more forward pass, but not of the output layers, whose chunked loss does everything in one pass
    assert 1.15 < plan.step_estimate(cfg, cluster, layout, one, still)["days"] / plain < 4 / 3
    # two rolling buffers of whole stages: with two stages per rank they are the whole gradient, and shards come on top
    two = plan.Layout(pp=8, ep=32, vp=2)
    with_it, without = (plan.memory(cfg, cluster, two, one, t) for t in (ALL, ALL - {"gradient_shards"}))
    assert with_it["gradients"] > without["gradients"]


def test_a_step_without_a_pipeline_lasts_as_long_as_its_operations():
    cfg, cluster = tiny(), plan.Cluster(gpus=1)
    for techniques in (frozenset(), frozenset({"recompute"}), ALL):
        one = stage(rows=4, seq_len=128)
        found = plan.step_estimate(cfg, cluster, plan.Layout(), one, techniques)
        seconds = found["flops"] / cluster.flops
        moved = (
            4 * sum(parameters(cfg).values()) / cluster.link * one["tokens"] / (4 * 128)
        )  # gradients, at the end of a step
        assert found["days"] * 86400 == pytest.approx(seconds + moved, rel=1e-6)


def test_operations_of_the_passes_add_up():
    cfg = ModelConfig.from_params(compose("glm5")["model"])
    for one in plan.stage_sections(compose("glm5")):
        if one["name"] == "dsa_warmup":
            continue
        cost = forward_flops(cfg, one["seq_len"], sparse=one["name"] == "dsa_adapt", mtp_depth=one["mtp"]["depth"])
        assert train_flops(cfg, one, frozenset()) == pytest.approx(3 * cost.total)
        again = train_flops(cfg, one, frozenset({"recompute"})) - 3 * cost.total
        head = 2 * cfg.vocab_size * cfg.hidden_size * (1 + one["mtp"]["depth"])
        assert again == pytest.approx(cost.total - head - 4 * cfg.hidden_size**2 * one["mtp"]["depth"], rel=0.01)


@pytest.mark.parametrize("stages", [3, 4, 8, 16])
def test_parameters_of_the_stages_add_up(stages):
    cfg = ModelConfig.from_params(compose("glm5")["model"])
    one = next(s for s in plan.stage_sections(compose("glm5")) if s["name"] == "pretrain.general")
    specs = stage_placement(cfg, one, stages, ALL)
    total = sum((stage_parameters(cfg, s) for s in specs), start=type(stage_parameters(cfg, specs[0]))())
    expected = parameters(cfg)
    assert total.pop("embedding") == 2 * expected.pop("embedding")  # the MTP block's stage has a copy
    assert dict(total) == expected
    assert specs[-1].layers == () and specs[-2].mtp


@pytest.mark.parametrize("attention, experts", [("dense", True), ("dense", False)])
def test_kept_numbers_are_those_of_real_layers(attention, experts, monkeypatch):
    """Long rows of a layer wide enough that what the formula leaves out is small."""
    monkeypatch.setattr("kernels.kept_attention.KEPT_ELEMENTS", 0)  # attention as on a GPU, or of long rows on a CPU
    cfg = ModelConfig.from_params(
        dict(
            vocab_size=256,
            hidden_size=192,
            intermediate_size=512,
            moe_intermediate_size=96,
            num_hidden_layers=3,
            first_k_dense_replace=1 if experts else 3,
            num_attention_heads=6,
            q_lora_rank=96,
            kv_lora_rank=64,
            qk_nope_head_dim=24,
            qk_rope_head_dim=8,
            v_head_dim=32,
            index_n_heads=2,
            index_head_dim=16,
            index_topk=16,
            n_routed_experts=8,
            num_experts_per_tok=3,
            num_nextn_predict_layers=0,
        )
    )
    ids = torch.randint(0, 256, (1, 129), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids_bs": ids[:, :-1].contiguous(), "targets_bs": ids[:, 1:].contiguous()}
    specs = place(3, 3, mtp=False, head_cost=0.0)
    work = Work(
        lambda model, h, _, b, w: (linear_cross_entropy(h[0], model.lm_head.weight, b["targets_bs"][0]), {}), attention
    )
    cost = measure(cfg, specs, work, batch, split=True)[1]
    kept = kept_numbers(cfg, 1, 128, sparse=False)
    joined = (
        (96 + 64 + 8) * 192 / 128
    )  # a joined copy of two weights per micro-batch: little for long rows, and not in the formula
    expected = (kept.activations + joined, kept.deferred + joined, kept.deferred_new)
    for found, number in zip((cost.activations, cost.deferred, cost.deferred_new), expected):
        assert found / 4 / 128 == pytest.approx(number, rel=0.05)


def test_layout_search_fits_and_names_the_keys_when_nothing_does(capsys):
    cfg = ModelConfig.from_params(compose("node")["model"])
    cluster = plan.Cluster(gpus=8, memory_gb=141)
    for one in plan.stage_sections(compose("node")):
        layout, cost = plan.search_layout(cfg, cluster, one, ALL)
        assert layout.problem(cluster, cfg, one["rows"]) is None and cost["bytes_total"] < 135e9
    with pytest.raises(ValueError, match=r"pretrain.general: no layout of 8 GPUs.*pretrain.general.seq_len \(4096\)"):
        plan.main(["--profile", "glm5", "--cluster", "gpus=8"])
    with pytest.raises(ValueError, match=r"the smallest needs at least [\d,]{4,}.\d GB"):
        plan.main(["--profile", "glm5", "--cluster", "gpus=8"])
    with pytest.raises(
        ValueError, match=r"no layout of 7 GPUs divides it: dp = 7 .*rows = 8; change pretrain.general.rows"
    ):
        plan.main(["--profile", "tiny", "--cluster", "gpus=7"])


@pytest.mark.parametrize(
    "cluster, message",
    [
        ("gpus=8,memory_gb=nan", "memory_gb=nan: must be positive and finite"),
        ("gpus=8,tflops=inf", "tflops=inf"),
        ("gpus=8,mfu=1.5", "mfu=1.5: a share of tflops"),
        ("gpus=8,gpus=16", "gpus is given twice: 8 and 16"),
        ("gpus=8,memory_gb=5", "reserve_gb=6 leaves nothing of memory_gb=5"),
        ("gpu=8", "'gpu=8': expected KEY=NUMBER"),
    ],
)
def test_impossible_clusters_are_named(cluster, message):
    with pytest.raises(ValueError, match=message):
        plan.main(["--profile", "tiny", "--cluster", cluster])


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


def test_layouts_are_written_with_the_keys_of_a_stage():
    cluster, every = plan.Cluster(gpus=8), frozenset(plan.TECHNIQUES)
    parallel, loop, problem = plan.as_settings(cluster, plan.Layout(pp=4), 2, every)
    assert parallel == dict(
        processes=8, pipeline=4, virtual=2, deferred_weight_gradient=True, gradient_shards=True, activation_offload=True
    )
    line = f"a: {{parallel: {plan.flow_style(parallel)}, loop: {plan.flow_style(loop)}}}"
    read = yaml.safe_load(line)["a"]
    assert ParallelSettings(**read["parallel"]).pipeline == 4 and LoopSettings(**read["loop"]).recompute == "block"
    assert not problem
    without = frozenset({"flexible_mtp", "recompute"})
    assert plan.as_settings(cluster, plan.Layout(pp=2), 1, every - without)[:2] == (
        parallel | dict(pipeline=2, virtual=1, flexible_mtp=False), {}
    )  # fmt: skip
    assert plan.as_settings(plan.Cluster(gpus=64), plan.Layout(ep=8), 1, every)[0] == {"expert": 8}
    assert "parallel.expert is 2: not together" in plan.as_settings(cluster, plan.Layout(pp=2, ep=2), 2, every)[2]
    assert "tp = 2" in plan.as_settings(cluster, plan.Layout(tp=2), 1, every)[2]


def test_command_prints_every_stage(capsys):
    from tasks.__main__ import main

    assert main(["plan", "--profile", "glm5", "--cluster", "gpus=2048,memory_gb=141"]) == 0
    printed = capsys.readouterr().out
    assert "743,911,199,232" in printed and all(name in printed for name in (*plan.STAGES, *plan.TECHNIQUES))
    assert main(["plan", "--cluster", "gpus=many"]) == 1
    assert "gpus='many': expected int" in capsys.readouterr().err
    assert main(["plan", "--cluster", "speed=9"]) == 1
    assert main(["plan", "--profile", "no-such"]) == 1

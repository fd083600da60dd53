"""What a model costs: parameters by kind, floating-point operations per token, bytes by kind. Formulas only, no torch.

A multiply-add counts as two operations. Attention is counted as a causal mask needs it: half the square. Backward costs
twice the forward pass; recomputing activations adds one more forward pass.

Check it:  python -m pytest tests/tasks/test_plan.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from model.config import ModelConfig

BF16, FP32 = 2, 4
CHUNK = 64  # kernels.gdn.CHUNK; a test compares them


def parameters(cfg: ModelConfig) -> dict[str, int]:
    """Trainable parameters by kind; their sum is `cfg.count_parameters()["everything"]["total"]`."""
    h, layers, mtp = cfg.hidden_size, cfg.num_hidden_layers, cfg.num_nextn_predict_layers
    moe_layers = layers - cfg.first_k_dense_replace + mtp
    every = [cfg.attention_parameters(layer) for layer in range(layers + mtp)]
    attention = {kind: sum(layer[kind] for layer in every) for kind in ("attention", "indexer", "norms")}
    expert = 3 * h * cfg.moe_intermediate_size
    return {
        "embedding": cfg.vocab_size * h,
        "head": 0 if cfg.tie_word_embeddings else cfg.vocab_size * h,
        "attention": attention["attention"],
        "indexer": attention["indexer"],
        "dense_mlp": cfg.first_k_dense_replace * 3 * h * cfg.intermediate_size,
        "routed_experts": moe_layers * cfg.n_routed_experts * expert,
        "shared_experts": moe_layers * cfg.n_shared_experts * expert,
        "router": moe_layers * cfg.n_routed_experts * h,
        "mtp_projection": mtp * 2 * h * h,
        "norms": attention["norms"] + (layers + mtp) * 2 * h + h + mtp * 3 * h,
    }


def mean_keys(length: int, limit: int | None = None) -> float:
    """Keys that a query attends to, averaged over a sequence of `length`: min(t, limit) for t = 1 .. length."""
    limit = length if limit is None else min(limit, length)
    return (limit * (limit + 1) / 2 + (length - limit) * limit) / length


@dataclass(frozen=True)
class Forward:
    """Operations of one forward pass, per token of the main sequence."""

    attention_projections: float
    attention_core: float
    indexer: float
    mlp: float
    head: float
    mtp: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def attention_flops(cfg: ModelConfig, layer: int, length: int, *, sparse: bool) -> tuple[float, float, float]:
    """(projections, core, indexer) of one layer, per token; see `forward_flops`.

    A window counts the keys it holds. The recurrences (gdn, simple_gdn) count the operations of their chunked form, whose
    products are whole squares of a chunk; a layer that shares a selection has no indexer and attends like the others.
    """
    h, q, kv, heads, kind = cfg.hidden_size, cfg.q_lora_rank, cfg.kv_lora_rank, cfg.num_attention_heads, cfg.kind(layer)
    qk, v, groups = cfg.qk_head_dim, cfg.value_head_dim, cfg.kv_heads
    if cfg.attention == "mla":
        matrices = h * q + q * heads * qk + h * (kv + cfg.qk_rope_head_dim) + kv * heads * (cfg.qk_nope_head_dim + v)
    else:
        matrices = h * (heads * qk + groups * (qk + v))
    matrices += heads * v * h
    if kind in ("gdn", "simple_gdn"):
        triangular_system = CHUNK * (qk + v)
        core = heads * (6.0 * qk * v + CHUNK * (4.0 * qk + 2.0 * v) + triangular_system)
        if kind == "gdn":
            matrices += heads * v * h + 2 * heads * h
            core += 2.0 * cfg.linear_conv_kernel_dim * (heads * qk + groups * (qk + v))
        return 2.0 * matrices, core, 0.0
    if kind == "swa":
        return 2.0 * matrices, 2.0 * heads * (qk + v) * mean_keys(length, cfg.sliding_window), 0.0
    if cfg.attention == "gqa" or not sparse or length <= cfg.index_topk:
        return 2.0 * matrices, 2.0 * heads * (qk + v) * mean_keys(length), 0.0
    # the up-projections of key and value are absorbed: the same products, on the query's side
    core = 2.0 * heads * (2 * kv + cfg.qk_rope_head_dim) * mean_keys(length, cfg.index_topk)
    d, n = cfg.index_head_dim, cfg.index_n_heads
    indexer = 2.0 * (q * n * d + h * d + h * n) + 2.0 * n * (d + 1) * mean_keys(length)
    return 2.0 * matrices, core, indexer if cfg.has_indexer(layer) else 0.0


def forward_flops(cfg: ModelConfig, length: int, *, sparse: bool, mtp_depth: int = 0) -> Forward:
    """Operations per token at a sequence length; dense attention in MHA mode, sparse attention in MQA mode over the latent.

    The indexer counts only where it selects (sparse and length > index_topk). `mtp_depth` unrolled steps each run the
    layer and the head.
    """
    h, layers, dense_layers = cfg.hidden_size, cfg.num_hidden_layers, cfg.first_k_dense_replace
    every = [attention_flops(cfg, layer, length, sparse=sparse) for layer in range(layers)]
    projections, core, indexer = (sum(parts) for parts in zip(*every))
    expert = 6.0 * h * cfg.moe_intermediate_size
    moe = (cfg.num_experts_per_tok + cfg.n_shared_experts) * expert + 2.0 * h * cfg.n_routed_experts
    head = 2.0 * cfg.vocab_size * h
    one = sum(attention_flops(cfg, layers, length, sparse=sparse)) + moe + 4.0 * h * h + head
    mtp = mtp_depth * one if cfg.num_nextn_predict_layers else 0.0
    return Forward(
        projections,
        core,
        indexer,
        dense_layers * 6.0 * h * cfg.intermediate_size + (layers - dense_layers) * moe,
        head,
        mtp,
    )


def mlp_flops(cfg: ModelConfig, layer: int) -> float:
    """Operations per token of one layer's feed-forward block; layers from num_hidden_layers on are MTP's."""
    if layer < cfg.first_k_dense_replace:
        return 6.0 * cfg.hidden_size * cfg.intermediate_size
    expert = 6.0 * cfg.hidden_size * cfg.moe_intermediate_size
    return (cfg.num_experts_per_tok + cfg.n_shared_experts) * expert + 2.0 * cfg.hidden_size * cfg.n_routed_experts


@dataclass(frozen=True)
class Kept:
    """Numbers per token that one layer keeps: activations from forward to backward; with deferred weight gradients, deferred
    from backward to the weight gradient, of which deferred_new are not among the activations."""

    activations: float
    deferred: float
    deferred_new: float


def kept_numbers(cfg: ModelConfig, layer: int, length: int, *, sparse: bool) -> Kept:
    """What our kernels save for backward in one layer (a test compares it with the saved tensors of real layers).

    Counted for long sequences: masks, statistics of one number per head and joined copies of weights are left out. Recurrences
    (gdn) count as the attention whose projections they use.
    """
    h, q, kv, heads = cfg.hidden_size, cfg.q_lora_rank, cfg.kv_lora_rank, cfg.num_attention_heads
    qk, v, groups = cfg.qk_head_dim, cfg.value_head_dim, cfg.kv_heads
    if cfg.attention == "mla":
        up = heads * (cfg.qk_nope_head_dim + v)
        inputs, outputs = h + q + kv + heads * v, q + kv + cfg.qk_rope_head_dim + heads * qk + up + h
        core = 2 * heads * (qk + v)
        if (
            sparse and length > cfg.index_topk and cfg.kind(layer) == "full"
        ):  # absorbed queries and latents, the chosen indices
            core = heads * (cfg.qk_nope_head_dim + 2 * kv + cfg.qk_rope_head_dim + v) + 4.5 * cfg.index_topk
        attention = 2 * (q + kv) + core
    else:
        inputs, outputs = h + heads * v, (heads + groups) * qk + groups * v + h
        attention = heads * qk + groups * (qk + v) + heads * v
    if layer < cfg.first_k_dense_replace:
        wide, router = 2 * cfg.intermediate_size, 0
    else:
        wide = 2 * cfg.moe_intermediate_size * (cfg.num_experts_per_tok + cfg.n_shared_experts)
        router = cfg.n_routed_experts
    new = outputs + wide + h + router
    return Kept(4 * h + attention + wide + 4 * router, inputs + h + wide + new, new)


def optimizer_bytes_per_parameter(kind: str, optimizer: Mapping[str, object]) -> int:
    """fp32 state of the stage's optimizer: Muon keeps one momentum, AdamW two moments (tasks.trainer.OptimizerSettings)."""
    adamw = kind in ("embedding", "norms") or optimizer.get("muon") == "off"
    adamw = adamw or (kind == "head" and optimizer.get("lm_head_optimizer", "adamw") == "adamw")
    adamw = adamw or (kind == "indexer" and optimizer.get("indexer_optimizer", "muon") == "adamw")
    return 2 * FP32 if adamw else FP32


def state_bytes(cfg: ModelConfig, optimizer: Mapping[str, object], train: str = "all") -> dict[str, int]:
    """Bytes that one process holds while training: fp32 weights, fp32 gradients and optimizer state, nothing sharded.

    `train` "indexer" (DSA warm-up) gives gradients and state to the indexer alone. A lower bound: activations come on top.
    """
    counts = parameters(cfg)
    trained = {"indexer": counts["indexer"]} if train == "indexer" else counts
    return {
        "weights": FP32 * sum(counts.values()),
        "gradients": FP32 * sum(trained.values()),
        "optimizer": sum(n * optimizer_bytes_per_parameter(kind, optimizer) for kind, n in trained.items()),
    }


def refuse_too_large(
    cfg: ModelConfig, optimizer: Mapping[str, object], train: str, available: int, stage: str, ranks: int = 1
) -> None:
    """ValueError naming the keys when weights, gradients and optimizer state alone exceed a rank's `available` bytes.

    Every rank begins with whole weights; gradients and optimizer state are spread over the ranks.
    """
    needed = {k: n // (1 if k == "weights" else ranks) for k, n in state_bytes(cfg, optimizer, train).items()}
    if sum(needed.values()) <= available:
        return
    kinds = ", ".join(f"{kind} {size / 1e9:,.1f}" for kind, size in needed.items())
    where, each = ("in one process", "") if ranks == 1 else (f"on {ranks} ranks", " on each")
    raise ValueError(
        f"stage {stage}: training this model {where} needs at least {sum(needed.values()) / 1e9:,.1f} GB ({kinds}){each}, the "
        f"device has {available / 1e9:,.1f} GB. Most of it is set by model.num_hidden_layers ({cfg.num_hidden_layers}), "
        f"model.hidden_size ({cfg.hidden_size}) and model.n_routed_experts ({cfg.n_routed_experts}); "
        "`python -m tasks plan --profile NAME --cluster gpus=N` says what would hold it"
    )

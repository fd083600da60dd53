"""What a stage runs on: a cluster, and how its GPUs are shared out between the kinds of parallelism. Arithmetic only.

Check it:  python -m pytest tests/tasks/test_plan.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.config import ModelConfig
from model.pipeline_place import allowed_cuts


@dataclass(frozen=True)
class Cluster:
    """gpus in all, gpus per_node (fast links), memory_gb and peak bf16 tflops of one, and the share of it reached (mfu).

    reserve_gb: context, communication buffers, fragmentation. GB/s per GPU: net_gbs between nodes, fast_gbs inside one, host_gbs
    to the host.
    """

    gpus: int = 8
    per_node: int = 8
    memory_gb: float = 80.0
    tflops: float = 989.0
    mfu: float = 0.35
    reserve_gb: float = 6.0
    net_gbs: float = 50.0
    fast_gbs: float = 450.0
    host_gbs: float = 50.0

    def __post_init__(self) -> None:
        if self.mfu > 1:
            raise ValueError(f"mfu={self.mfu:g}: a share of tflops, at most 1")
        if self.reserve_gb >= self.memory_gb:
            raise ValueError(f"reserve_gb={self.reserve_gb:g} leaves nothing of memory_gb={self.memory_gb:g}")

    @property
    def link(self) -> float:
        """Bytes per second between pipeline and data-parallel neighbours, which are in other nodes if there are any."""
        return (self.net_gbs if self.gpus > self.per_node else self.fast_gbs) * 1e9

    @property
    def flops(self) -> float:
        """Operations per second and GPU that are reached."""
        return self.tflops * 1e12 * self.mfu


@dataclass(frozen=True)
class Layout:
    """Ranks of each kind of parallelism. dp = gpus / (tp * pp * cp); experts are spread over ep of the dp * cp * tp ranks.

    vp: virtual stages per rank where interleaving is used.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vp: int = 2

    def dp(self, cluster: Cluster) -> int:
        return cluster.gpus // (self.tp * self.pp * self.cp)

    def problem(self, cluster: Cluster, cfg: ModelConfig, rows: int) -> str | None:
        """Why this layout does not work, naming the keys; None when it does."""
        model_ranks = self.tp * self.pp * self.cp
        if min(self.tp, self.pp, self.cp, self.ep, self.vp) < 1:
            return "tp, pp, cp, ep and vp must be at least 1"
        if cluster.gpus % model_ranks:
            return f"tp * pp * cp = {model_ranks} does not divide gpus = {cluster.gpus}"
        dp = self.dp(cluster)
        if rows % dp:
            return f"dp = {dp} does not divide the stage's rows = {rows}"
        if (dp * self.cp * self.tp) % self.ep or cfg.n_routed_experts % self.ep:
            return (
                f"ep = {self.ep} must divide both dp * cp * tp = {dp * self.cp * self.tp} and "
                f"model.n_routed_experts = {cfg.n_routed_experts}"
            )
        if cfg.num_attention_heads % self.tp:
            return f"tp = {self.tp} does not divide model.num_attention_heads = {cfg.num_attention_heads}"
        if self.pp > cfg.num_hidden_layers:
            return f"pp = {self.pp} exceeds model.num_hidden_layers = {cfg.num_hidden_layers}"
        return None


def micro_batches(stage: Mapping[str, Any], cluster: Cluster, layout: Layout) -> tuple[int, int]:
    """(micro-batches of a step on one replica, rows of each)."""
    rows = stage["rows"] // layout.dp(cluster)
    micro = min(stage.get("micro_rows") or rows, rows)
    return max(1, rows // micro), micro


def virtual_stages(cfg: ModelConfig, layout: Layout, micros: int, techniques: frozenset[str]) -> int:
    """The layout's vp where interleaving is on and possible: groups of pp micro-batches, enough layers."""
    if "interleaving" not in techniques or layout.pp == 1 or micros % layout.pp:
        return 1
    return max(v for v in range(1, layout.vp + 1) if v == 1 or layout.pp * v <= len(allowed_cuts(cfg)))


def bubble(layout: Layout, micros: int, techniques: frozenset[str]) -> float:
    """Closed form of a rank's idle time relative to its busy time with even stages: (p - 1) / (v m), a third with deferral."""
    virtual = layout.vp if "interleaving" in techniques else 1
    idle = (layout.pp - 1) / (virtual * max(1, micros))
    return idle / 3 if "deferred_weight_gradient" in techniques else idle

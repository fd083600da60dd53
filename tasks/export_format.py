"""What the seven exporters share: the description of a platform, its float tensors, and the lists of modules left float.

python -m tasks.export_format      lists the platforms, their loaders and what can be verified without the chip
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.quant_recipe import FLOAT, W4A8, Canonical, Entry
from tasks.tensor_store import TensorWriter


@dataclass(frozen=True)
class ExportOptions:
    """What a user may choose about an export. `cambricon_experts` is int4 (nibble order unpublished) or int8."""

    shard_bytes: int
    cambricon_experts: str


@dataclass(frozen=True)
class Platform:
    """One target: who loads it, what format it reads, and how far a claim can go without the chip."""

    name: str
    maker: str
    experts: str
    others: str
    loader: str
    version: str
    write: Callable[[Canonical, Path, Path, ExportOptions], Any]
    numerics: bool = True
    notes: str = ""


def put_floats(canonical: Canonical, writer: TensorWriter) -> None:
    """Copy every tensor that stays float, unchanged."""
    for entry in canonical.entries:
        if entry.type == FLOAT:
            writer.put(entry.name, canonical.tensor(entry))


def is_expert(entry: Entry) -> bool:
    """Whether a quantized entry is a routed expert's weight."""
    return entry.type == W4A8


def float_patterns(config: dict) -> list[str]:
    """Modules left float, in compressed-tensors' `ignore` syntax (`re:` marks a regular expression)."""
    return [
        "lm_head",
        r"re:.*self_attn\.kv_b_proj$",
        r"re:.*self_attn\.indexer\.wk$",
        r"re:.*self_attn\.indexer\.weights_proj$",
        r"re:.*mlp\.gate$",
        rf"re:model\.layers\.{config['num_hidden_layers']}\..*",
    ]


def float_modules(config: dict) -> list[str]:
    """The same modules by name, for loaders without regular expressions; the MTP layer by its prefix."""
    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace", 0)
    names = ["lm_head"]
    for layer in range(layers):
        attention = f"model.layers.{layer}.self_attn"
        names += [f"{attention}.kv_b_proj", f"{attention}.indexer.wk", f"{attention}.indexer.weights_proj"]
        if layer >= dense:
            names.append(f"model.layers.{layer}.mlp.gate")
    return [*names, f"model.layers.{layers}"]


if __name__ == "__main__":
    from tasks.export import PLATFORMS

    for platform in PLATFORMS.values():
        print(f"{platform.name:13s} experts {platform.experts}; others {platform.others}\n{'':13s} {platform.loader}")

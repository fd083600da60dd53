"""Which tensor gets which numbers: GLM-5's W4A8 recipe, and the canonical artifact that every export reads.

    python -m tasks.quant_recipe data/quantize/canonical      prints the tensors and bytes of each kind

Recipe (§5 and msmodelslim's glm_5_w4a8): routed experts int4 weights, attention, dense and shared MLP int8 weights, all
with per-token int8 activations; kv_b_proj, the indexer's wk and weights_proj, router, embeddings, norms, head and the
whole MTP layer stay float. A tensor that no rule knows is an error: a new weight must be decided on, not guessed.

The artifact: `canonical/` holds, for every quantized `X.weight`, `X.weight_codes` (int8 [N, K], or int8 [N, K/2] with
two int4 codes, even column in the low nibble) and `X.weight_scale` (fp32 [N, 1], bf16-representable), every float
tensor under its own name, and `quantization.json`: name -> type, rule, shape.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

FLOAT, W8A8, W4A8 = "FLOAT", "W8A8_DYNAMIC", "W4A8_DYNAMIC"

_RULES = [
    (r"model\.embed_tokens\.weight|lm_head\.weight|model\.norm\.weight", FLOAT),
    (r".*\.(input_layernorm|post_attention_layernorm|q_a_layernorm|kv_a_layernorm)\.weight", FLOAT),
    (r".*\.self_attn\.indexer\.(wk|weights_proj|k_norm)\.(weight|bias)", FLOAT),
    (r".*\.self_attn\.kv_b_proj\.weight", FLOAT),
    (r".*\.mlp\.gate\.(weight|e_score_correction_bias)", FLOAT),
    (r".*\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight", W4A8),
    (r".*\.mlp\.(shared_experts\.)?(gate|up|down)_proj\.weight", W8A8),
    (r".*\.self_attn\.(q_a_proj|q_b_proj|q_proj|kv_a_proj_with_mqa|o_proj|indexer\.wq_b)\.weight", W8A8),
]
_COMPILED = [(re.compile(pattern), kind) for pattern, kind in _RULES]

KINDS = {
    "routed experts": r".*\.mlp\.experts\.\d+\.",
    "shared experts": r".*\.mlp\.shared_experts\.",
    "dense MLP": r".*\.mlp\.(gate|up|down)_proj\.",
    "indexer": r".*\.self_attn\.indexer\.",
    "attention": r".*\.self_attn\.",
}


def quant_type(name: str, num_hidden_layers: int) -> str:
    """FLOAT, W8A8_DYNAMIC or W4A8_DYNAMIC for one checkpoint tensor. ValueError for a name the recipe does not know."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer and int(layer.group(1)) >= num_hidden_layers:
        return FLOAT  # the MTP layer
    for pattern, kind in _COMPILED:
        if pattern.fullmatch(name):
            return kind
    raise ValueError(f"the quantization recipe has no rule for tensor {name}")


def kind_of(name: str) -> str:
    """The group a tensor's error is reported under: routed experts, attention, ..."""
    return next((kind for kind, pattern in KINDS.items() if re.match(pattern, name)), "other")


@dataclass(frozen=True)
class Entry:
    """One tensor of the canonical artifact; `rule` names the scale rule of a quantized one."""

    name: str
    type: str
    shape: tuple[int, ...]
    rule: str = ""


class Canonical:
    """Reader of the canonical artifact. Every exporter takes its codes and scales from here and observes nothing again."""

    def __init__(self, folder: Path):
        from tasks.tensor_store import TensorReader

        self.folder = Path(folder)
        description = json.loads((self.folder / "quantization.json").read_text())
        self.entries = [
            Entry(n, t["type"], tuple(t["shape"]), t.get("rule", "")) for n, t in description["tensors"].items()
        ]
        self.config = json.loads((self.folder / "config.json").read_text())
        self._tensors = TensorReader(self.folder)

    def quantized(self) -> list[Entry]:
        """The entries that have codes, in the model's order."""
        return [e for e in self.entries if e.type != FLOAT]

    def codes(self, entry: Entry):
        """(codes int8 [N, K], scale fp32 [N, 1]) of a quantized entry; int4 codes come unpacked."""
        from kernels.int4 import unpack_columns

        stored = self._tensors.get(entry.name + "_codes")
        return (unpack_columns(stored) if entry.type == W4A8 else stored), self._tensors.get(entry.name + "_scale")

    def tensor(self, entry: Entry):
        """A float entry's tensor, in its original dtype."""
        return self._tensors.get(entry.name)

    def dequantized(self, entry: Entry):
        """fp32 [N, K] that a quantized entry stands for."""
        from kernels.int4 import decode_int4

        return decode_int4(*self.codes(entry))


def module_name(weight_name: str) -> str:
    """`a.b.weight` -> `a.b`."""
    return weight_name.removesuffix(".weight")


if __name__ == "__main__":
    counts: dict[str, list[int]] = {}
    for item in Canonical(Path(sys.argv[1])).entries:
        elements = 1
        for size in item.shape:
            elements *= size
        row = counts.setdefault(item.type, [0, 0])
        row[0] += 1
        row[1] += elements
    for kind_name, (tensors, elements) in counts.items():
        print(f"{kind_name:14s} {tensors:6d} tensors {elements:14d} elements")

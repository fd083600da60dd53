"""The decoder's view of a model's weights: fused projections, the absorbed halves of kv_b_proj, optional rounding.

    python -m pytest tests/model/test_decode.py

`DecoderWeights.read(model, "float32")` copies only what fusing needs; everything else is a view of the live parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.fp8 import round_to_fp8
from kernels.mlapo import PreprocessWeights

LATENT_EPS = 1e-6  # q_a/kv_a latent norms and the indexer's LayerNorm (notes A.1, B.2), whatever rms_norm_eps is
DTYPES = ("float32", "bfloat16", "int8", "fp8")


@dataclass
class LayerWeights:
    """One decoder layer. w_in stacks q_a, kv_a_with_mqa, indexer wk and weights_proj: one product reads the hidden state once."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    w_in: torch.Tensor  # [q_lora + kv_lora + rope + d_I + n_I, H]
    in_sizes: list[int]
    q_a_norm: torch.Tensor
    kv_a_norm: torch.Tensor
    w_q: torch.Tensor  # q_b_proj [heads * (nope + rope), q_lora]
    kv_b: torch.Tensor  # [heads * (nope + v), kv_lora]
    w_uk: torch.Tensor  # [heads, nope, kv_lora]
    w_uv: torch.Tensor  # [heads, kv_lora, v]
    w_o: torch.Tensor  # [H, heads * v]
    scale: float
    index_slot: int | None  # place among the layers with an indexer; None: the selection of the one before is shared
    index_wq_b: torch.Tensor | None  # [n_I * d_I, q_lora]
    index_norm_weight: torch.Tensor | None
    index_norm_bias: torch.Tensor | None
    gate_up: torch.Tensor  # dense [2 * intermediate, H], or experts [E, 2 * m, H]
    down: torch.Tensor  # dense [H, intermediate], or experts [E, H, m]
    router: torch.Tensor | None = None  # float32 [E, H]; None in a dense layer
    router_bias: torch.Tensor | None = None
    shared_gate_up: torch.Tensor | None = None
    shared_down: torch.Tensor | None = None

    def preprocess(self, input_eps: float) -> PreprocessWeights:
        """What kernels.mlapo reads, as views."""
        return PreprocessWeights(
            self.input_norm, self.w_in, self.q_a_norm, self.w_q, self.w_uk, self.kv_a_norm, input_eps, LATENT_EPS
        )


@dataclass
class DecoderWeights:
    """Embedding, layers, final norm and head."""

    embed: torch.Tensor
    final_norm: torch.Tensor
    lm_head: torch.Tensor
    layers: list[LayerWeights]

    @property
    def index_layers(self) -> int:
        """Layers with an indexer of their own."""
        return sum(lw.index_slot is not None for lw in self.layers)

    @classmethod
    @torch.no_grad()
    def read(cls, model: torch.nn.Module, dtype: str = "float32") -> DecoderWeights:
        """Collect a model's weights by their checkpoint names. ValueError for an unknown dtype."""
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        cfg = model.cfg
        for field, value in (("attention", cfg.attention != "mla"), ("layer_types", cfg.layer_types is not None)):
            if value:
                raise ValueError(
                    f"the cached decoder runs MLA layers alone, but model.{field} is {getattr(cfg, field)!r}; "
                    "model.state_decode.StateDecoder decodes every kind"
                )
        named = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers()
        )  # the head may be tied

        def vector(name: str) -> torch.Tensor:
            # a no-op for the usual fp32 model: the decoder then reads the live parameter
            return named[name].detach().to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)

        def matrix(name: str) -> torch.Tensor:
            rounded = {"int8": _int8_round, "fp8": round_to_fp8}.get(dtype)
            return rounded(vector(name)) if rounded else vector(name)

        layers = []
        for layer in range(cfg.num_hidden_layers):
            at = f"model.layers.{layer}"
            attn, mlp = f"{at}.self_attn", f"{at}.mlp"
            indexer = f"{attn}.indexer" if cfg.has_indexer(layer) else None
            parts = [matrix(f"{attn}.q_a_proj.weight"), matrix(f"{attn}.kv_a_proj_with_mqa.weight")]
            if indexer is not None:
                parts += [matrix(f"{indexer}.wk.weight"), matrix(f"{indexer}.weights_proj.weight")]
            kv_b = matrix(f"{attn}.kv_b_proj.weight")
            heads = kv_b.view(cfg.num_attention_heads, cfg.qk_nope_head_dim + cfg.v_head_dim, cfg.kv_lora_rank)
            weights = LayerWeights(
                input_norm=vector(f"{at}.input_layernorm.weight"),
                post_norm=vector(f"{at}.post_attention_layernorm.weight"),
                w_in=torch.cat(parts),
                in_sizes=[
                    cfg.q_lora_rank,
                    cfg.kv_lora_rank,
                    cfg.qk_rope_head_dim,
                    cfg.index_head_dim if indexer is not None else 0,
                    cfg.index_n_heads if indexer is not None else 0,
                ],
                q_a_norm=vector(f"{attn}.q_a_layernorm.weight"),
                kv_a_norm=vector(f"{attn}.kv_a_layernorm.weight"),
                w_q=matrix(f"{attn}.q_b_proj.weight"),
                kv_b=kv_b,
                w_uk=heads[:, : cfg.qk_nope_head_dim],
                w_uv=heads[:, cfg.qk_nope_head_dim :].transpose(1, 2),
                w_o=matrix(f"{attn}.o_proj.weight"),
                scale=(cfg.qk_nope_head_dim + cfg.qk_rope_head_dim) ** -0.5,
                index_slot=sum(map(cfg.has_indexer, range(layer))) if indexer is not None else None,
                index_wq_b=matrix(f"{indexer}.wq_b.weight") if indexer is not None else None,
                index_norm_weight=vector(f"{indexer}.k_norm.weight") if indexer is not None else None,
                index_norm_bias=vector(f"{indexer}.k_norm.bias") if indexer is not None else None,
                gate_up=matrix(f"{mlp}.experts.gate_up_proj")
                if layer >= cfg.first_k_dense_replace
                else _gate_up(matrix, mlp),
                down=matrix(
                    f"{mlp}.experts.down_proj" if layer >= cfg.first_k_dense_replace else f"{mlp}.down_proj.weight"
                ),
            )
            if layer >= cfg.first_k_dense_replace:
                # the router decides in fp32 in every mode, as in training
                weights.router = named[f"{mlp}.gate.weight"].detach().float()
                weights.router_bias = named[f"{mlp}.gate.e_score_correction_bias"].detach().float()
                weights.shared_gate_up = _gate_up(matrix, f"{mlp}.shared_experts")
                weights.shared_down = matrix(f"{mlp}.shared_experts.down_proj.weight")
            layers.append(weights)
        return cls(matrix("model.embed_tokens.weight"), vector("model.norm.weight"), matrix("lm_head.weight"), layers)


def _gate_up(matrix, prefix: str) -> torch.Tensor:
    return torch.cat([matrix(f"{prefix}.gate_proj.weight"), matrix(f"{prefix}.up_proj.weight")])


def _int8_round(weight: torch.Tensor) -> torch.Tensor:
    """Symmetric int8 per output row (last dimension is the input), dequantised to the weight's dtype."""
    scale = weight.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127.0
    return (weight / scale).round_().clamp_(-127, 127) * scale

"""Run the model with its linear layers taken over: to watch their inputs (calibration), or to compute them in integers.

    python -m pytest tests/tasks/test_quantize.py

The emulator computes each quantized layer as an accelerator's integer unit does: activations to int8 per token, int4 or
int8 weights, int32 sums, one fp32 rescale. The rest of the network stays in fp32. Experts are run one after the other,
which is slow and plain on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from kernels.int8 import quantized_linear
from kernels.sparse_attention import dense_attention, masked_attention
from model.moe import MoE
from model.transformer import GlmMoeDsa
from tasks.quant_recipe import FLOAT, Canonical, module_name, quant_type

LinearFn = Callable[[str, torch.Tensor], torch.Tensor]  # (module name, x [T, K]) -> y [T, N]


class HookedLinear(nn.Module):
    """A bias-free linear layer whose product is `apply(name, x)`."""

    def __init__(self, name: str, apply: LinearFn):
        super().__init__()
        self.name, self.apply_linear = name, apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.apply_linear(self.name, x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], -1)


class HookedMLP(nn.Module):
    """down(silu(gate x) * up x) with hooked products."""

    def __init__(self, name: str, apply: LinearFn):
        super().__init__()
        self.name, self.apply_linear = name, apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        gate, up = (self.apply_linear(f"{self.name}.{part}_proj", flat) for part in ("gate", "up"))
        return self.apply_linear(f"{self.name}.down_proj", F.silu(gate) * up).view(*x.shape[:-1], -1)


class HookedMoE(MoE):
    """Routed and shared experts with hooked products; routing is the model's own. A MoE to whoever asks, without weights."""

    def __init__(self, moe: MoE, name: str, apply: LinearFn):
        nn.Module.__init__(self)
        self.gate, self.count = moe.gate, moe.cfg.n_routed_experts
        self.experts = [HookedMLP(f"{name}.experts.{e}", apply) for e in range(self.count)]
        self.shared_experts = HookedMLP(f"{name}.shared_experts", apply)

    def forward(self, x_bsh, token_mask_bs=None):
        flat_nh = x_bsh.reshape(-1, x_bsh.shape[-1])
        _, index_nk, weight_nk = self.gate(flat_nh)
        out_nh = torch.zeros_like(flat_nh)
        for e, expert in enumerate(self.experts):
            token, slot = (index_nk == e).nonzero(as_tuple=True)
            if len(token):
                out_nh.index_add_(0, token, expert(flat_nh[token]) * weight_nk[token, slot, None])
        counts_e = torch.bincount(index_nk.flatten(), minlength=self.count)
        return out_nh.view(x_bsh.shape) + self.shared_experts(x_bsh), counts_e, None


class HookedAttention(nn.Module):
    """MLA with DSA over the model's own parts, whose quantizable products are hooked."""

    def __init__(self, attention: nn.Module, name: str, apply: LinearFn):
        super().__init__()
        self.mla = attention
        for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"):
            setattr(attention, part, HookedLinear(f"{name}.{part}", apply))
        if attention.indexer is not None:
            attention.indexer.wq_b = HookedLinear(f"{name}.indexer.wq_b", apply)

    def forward(self, x_bsh, cis_bsr, *, attention="sparse", shared_masks=None, **_):
        mla, masks = self.mla, None
        c_q = mla.project_q_latent(x_bsh)
        q_bshd = torch.cat(mla.project_q(c_q, cis_bsr), dim=-1)
        k_bthd, v_bthv = mla.expand_kv(*mla.project_kv_latent(x_bsh, cis_bsr))
        q, k, v = (t.transpose(1, 2) for t in (q_bshd, k_bthd, v_bthv))
        if attention == "sparse" and x_bsh.shape[1] > mla.topk:
            masks = mla.indexer.select(c_q, x_bsh, cis_bsr) if mla.indexer is not None else shared_masks
            o = masked_attention(q, k, v, masks, mla.softmax_scale)
        else:
            o = dense_attention(q, k, v, mla.softmax_scale)
        return mla.output(o.transpose(1, 2)), None, masks


def hook_linears(model: GlmMoeDsa, apply: LinearFn) -> GlmMoeDsa:
    """Replace, in place, every product the recipe quantizes by `apply(module name, x)`. For scoring only. Returns the model."""
    if model.cfg.attention != "mla" or model.cfg.layer_types is not None:
        raise ValueError(
            "the integer emulator computes full MLA layers only: model.attention 'mla' and no model.layer_types"
        )
    for layer, block in enumerate(model.blocks):
        name = f"model.layers.{layer}"
        block.self_attn = HookedAttention(block.self_attn, f"{name}.self_attn", apply)
        hooked = HookedMoE(block.mlp, f"{name}.mlp", apply) if isinstance(block.mlp, MoE) else None
        block.mlp = hooked or HookedMLP(f"{name}.mlp", apply)
    return model


def integer_model(model: GlmMoeDsa, canonical: Path) -> GlmMoeDsa:
    """`model`, loaded from the dequantized checkpoint, with its quantized layers computed in integers from `canonical`."""
    artifact = Canonical(canonical)
    weights = {module_name(e.name): artifact.codes(e) for e in artifact.quantized()}
    return hook_linears(model, lambda name, x: quantized_linear(x, *weights[name]))


class Calibration:
    """Watches the inputs of every quantized layer: the largest and the mean magnitude per input channel."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.weights = tensors
        self.absmax: dict[str, torch.Tensor] = {}
        self.abssum: dict[str, torch.Tensor] = {}
        self.tokens: dict[str, int] = {}

    def __call__(self, name: str, x_tk: torch.Tensor) -> torch.Tensor:
        magnitude = x_tk.abs()
        absmax, abssum = magnitude.amax(0), magnitude.double().sum(0)
        if name in self.absmax:
            absmax, abssum = torch.maximum(absmax, self.absmax[name]), abssum + self.abssum[name]
        self.absmax[name], self.abssum[name] = absmax, abssum
        self.tokens[name] = self.tokens.get(name, 0) + len(x_tk)
        return x_tk @ self.weights[name].T

    def statistics(self) -> dict[str, torch.Tensor]:
        """`X.absmax` and `X.absmean` fp32 [K] and `X.tokens` int64 [1], for every quantized module X.

        An expert that no token reached has zeros: whoever smooths by these numbers must skip it.
        """
        out: dict[str, torch.Tensor] = {}
        for name, weight in self.weights.items():
            tokens = self.tokens.get(name, 0)
            zero = torch.zeros(weight.shape[1])
            out[f"{name}.absmax"] = self.absmax.get(name, zero).float()
            out[f"{name}.absmean"] = (self.abssum[name] / tokens).float() if tokens else zero
            out[f"{name}.tokens"] = torch.tensor([tokens])
        return out


def quantizable(model: GlmMoeDsa) -> dict[str, torch.Tensor]:
    """Module name -> weight [N, K] of every layer the recipe quantizes, from a loaded model."""
    from model.checkpoint import disk_tensors

    layers = model.cfg.num_hidden_layers
    return {
        module_name(name): tensor.float()
        for name, tensor in disk_tensors(model).items()
        if quant_type(name, layers) != FLOAT
    }

"""Convert layers of a trained model to another kind of attention (notes A.6): full -> swa, simple_gdn or gdn, weights reused.

    model = convert(load_checkpoint(directory), "SFSF", "swa")         # S: converted, F: left as it is
    model = convert(model, ["gdn", "full", "gdn", "full"], calibration_ids=ids)

swa and simple_gdn take the full layer's weights unchanged and add none. gdn reuses W_Q, W_K, W_V and W_O and starts its own
parameters so that the layer behaves at the first step: the convolutions pass the present token through, b = 1/2 and a spread of
fixed decays everywhere, and with calibration ids the output gate and norm give each head the size that its softmax attention
had. A converted MLA layer loses its indexer.

Run its tests: `python -m pytest tests/model/test_convert.py`
"""

import dataclasses
import hashlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from model.config import LAYER_TYPES
from model.gdn import fixed_log_decay
from model.transformer import GlmMoeDsa

GATE_OPEN = 1.2784645  # SiLU of it is 1
RIDGE = 1e-3  # of the mean squared input, in the fit of the output gate


def layer_kinds(model: GlmMoeDsa, pattern: str | Sequence[str], kind: str | None = None) -> tuple[str, ...]:
    """The kinds after conversion. A string has one letter per layer: S becomes `kind`, F stays; a sequence names kinds.

    ValueError when its length, a letter or a kind is wrong, or a layer that is no longer full would have to change.
    """
    now = model.cfg.kinds
    if isinstance(pattern, str):
        if set(pattern) - set("FS"):
            raise ValueError(f"pattern {pattern!r} may hold only F (stays) and S (converted)")
        if kind not in LAYER_TYPES[1:]:
            raise ValueError(
                f"a pattern of letters needs the kind of its S layers, one of {', '.join(LAYER_TYPES[1:])}; got {kind!r}"
            )
        wanted = [kind if letter == "S" else old for letter, old in zip(pattern, now)]
    else:
        wanted = list(pattern)
    if len(pattern) != len(now):
        raise ValueError(f"the pattern has {len(pattern)} layers, the model has model.num_hidden_layers = {len(now)}")
    for layer, (old, new) in enumerate(zip(now, wanted)):
        if old not in ("full", new):
            raise ValueError(f"layer {layer} is {old!r} and cannot become {new!r}: only full layers are converted")
    return tuple(wanted)


@torch.no_grad()
def convert(
    model: GlmMoeDsa,
    pattern: str | Sequence[str],
    kind: str | None = None,
    calibration_ids: torch.Tensor | None = None,
    seed: int = 0,
    **changes: object,
) -> GlmMoeDsa:
    """A new model with converted layers; the given one is not changed, and no memory is shared.

    changes: other configuration fields, such as sliding_window or simple_gdn_decay. calibration_ids int64 [B,S] is read by gdn
    alone. ValueError as in `layer_kinds`, and for a model whose layers share indexers.
    """
    kinds = layer_kinds(model, pattern, kind)
    if model.cfg.indexer_types is not None:
        raise ValueError(
            "a model with shared indexers (model.indexer_types) cannot be converted: layers would lose their selection"
        )
    new = GlmMoeDsa(dataclasses.replace(model.cfg, layer_types=kinds, **changes))
    reference = model.model.embed_tokens.weight
    new.to(device=reference.device, dtype=reference.dtype)
    source = model.state_dict()
    fresh = []
    for name, tensor in new.state_dict(keep_vars=True).items():
        if name in source:
            tensor.data = tensor.data.to(source[name].dtype)
            tensor.copy_(source[name])
        else:
            fresh.append(name)
    changed = [i for i, (old, now) in enumerate(zip(model.cfg.kinds, kinds)) if (old, now) == ("full", "gdn")]
    assert {int(name.split(".")[2]) for name in fresh} == set(changed), fresh
    inputs = _attention_statistics(model, changed, calibration_ids) if changed and calibration_ids is not None else {}
    for layer in changed:
        _start_gdn(new.blocks[layer].self_attn, layer, seed, model.cfg.initializer_range, inputs.get(layer))
    return new


def _start_gdn(gdn, layer: int, seed: int, std: float, statistics: tuple[torch.Tensor, ...] | None) -> None:
    """The first values of a converted layer's own parameters."""
    for conv in (gdn.q_conv1d, gdn.k_conv1d, gdn.v_conv1d):
        conv.weight.zero_()[:, -1] = 1
    gdn.b_proj.weight.zero_()
    gdn.a_proj.weight.zero_()
    gdn.A_log.zero_()
    dt_h = -fixed_log_decay(gdn.heads).double()
    gdn.dt_bias.copy_(dt_h + torch.log(-torch.expm1(-dt_h)))  # softplus(dt_bias) = dt, so a is the fixed decay
    if statistics is None:
        # a gate near zero: the layer is almost silent, and learns its way in
        digest = hashlib.sha256(f"{seed}/convert/{layer}/g_proj".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        gdn.g_proj.weight.copy_(torch.randn(gdn.g_proj.weight.shape, generator=generator) * std)
        gdn.o_norm.weight.fill_(1)
        return
    x_nh, rms_v = statistics
    second = x_nh.T @ x_nh / len(x_nh)
    second += RIDGE * second.diagonal().mean() * torch.eye(len(second), dtype=second.dtype)
    w_h = torch.linalg.solve(second, GATE_OPEN * x_nh.mean(0))  # the linear map closest to a constant, open gate
    gdn.g_proj.weight.copy_(w_h.expand_as(gdn.g_proj.weight))
    gdn.o_norm.weight.copy_(rms_v / F.silu(x_nh @ w_h).square().mean().sqrt())


def _attention_statistics(
    model: GlmMoeDsa, layers: list[int], ids_bs: torch.Tensor
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Per layer: inputs of the attention [N,hidden] and the root mean square of its heads' output per channel [dv], float64."""
    found: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
    handles = []
    for layer in layers:
        attention = model.blocks[layer].self_attn

        def entered(_, args, layer=layer):
            found[layer].append(args[0].detach().double().flatten(0, 1).cpu())

        def leaving(_, args, layer=layer, heads=attention.heads):
            o_nhv = args[0].detach().double().flatten(0, 1).unflatten(-1, (heads, -1))
            found[layer].append(o_nhv.square().mean((0, 1)).sqrt().cpu())

        handles += [attention.register_forward_pre_hook(entered), attention.o_proj.register_forward_pre_hook(leaving)]
    try:
        model(ids_bs, attention="dense")
    finally:
        for handle in handles:
            handle.remove()
    return {layer: (values[0], values[1]) for layer, values in found.items()}

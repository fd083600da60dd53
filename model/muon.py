"""Muon Split with AdamW for the rest: the optimizer of every training stage (GLM-5 §2.1, GLM-4.5 §2.4; design notes C.1-C.3).

Muon owns every matrix; embeddings, norms, biases and short convolutions go to AdamW; the output head goes where
`lm_head_optimizer` says and the indexer where `indexer_optimizer` says. A parameter that packs several matrices is
orthogonalised block by block: W^UQ per head, W^UK and W^UV per head and apart, each expert alone with gate and up apart. The
update is scaled by 0.2 * sqrt(max(rows, cols)) of the block, which gives it the root mean square of an AdamW step, so that one
learning rate and one weight decay serve both.

Check it:  python -m pytest tests/model/test_muon.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernels.newton_schulz import newton_schulz_groups
from model.state_parts import Piece

UPDATE_RMS = 0.2
# Parameters that Muon never takes, whatever their rank: lookup tables, and everything one-dimensional.
EMBEDDINGS = ("embed_tokens.weight",)
HEAD = "lm_head.weight"
# Gated DeltaNet's depthwise convolutions [channels, kernel]: a filter per channel, not a map between spaces.
CONVOLUTIONS = ("conv1d.weight",)


@dataclass(frozen=True)
class OptimConfig:
    """Learning rates are peak values; a schedule multiplies all of them by one factor.

    lr_matrix: Muon. lr_embed, lr_head, lr_norm: AdamW groups (None takes lr_matrix). lr_indexer: the indexer's own
    (None takes lr_matrix). train: 'all', 'indexer' (DSA warm-up) or 'backbone' (RL: indexer frozen). muon: 'split',
    'whole' (no blocks but experts, for comparison) or 'off' (AdamW everywhere).
    """

    lr_matrix: float = 2e-4
    lr_embed: float | None = None
    lr_head: float | None = None
    lr_norm: float | None = None
    lr_indexer: float | None = None
    lm_head_optimizer: str = "adamw"
    indexer_optimizer: str = "muon"
    muon: str = "split"
    train: str = "all"
    momentum: float = 0.95
    nesterov: bool = True
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    ns_dtype: str = "float32"

    def __post_init__(self) -> None:
        choices = {
            "lm_head_optimizer": ("muon", "adamw"),
            "indexer_optimizer": ("muon", "adamw"),
            "muon": ("split", "whole", "off"),
            "train": ("all", "indexer", "backbone"),
            "ns_dtype": ("float32", "bfloat16"),
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"optimizer.{field} is {getattr(self, field)!r}; expected one of {', '.join(allowed)}")


@dataclass(frozen=True)
class Owned:
    """One parameter's place: its group ('matrix', 'indexer', 'embed', 'head', 'norm'), optimizer, and Muon blocks."""

    name: str
    shape: tuple[int, ...]
    group: str
    optimizer: str
    blocks: str


def _is_indexer(name: str) -> bool:
    return ".indexer." in name or name.startswith("indexer.")


def split_blocks(name: str, tensor: Tensor, model_config: Any, muon: str = "split") -> list[Tensor]:
    """Views of a parameter (or its gradient) as batches [B, M, N] of the matrices that Muon orthogonalises one by one.

    q_b_proj [heads * qk_head_dim, q_lora_rank] -> one block per head, rope rows kept with their head.
    kv_b_proj [heads * (nope + v), kv_lora_rank] -> per head, the UK rows and the UV rows as two batches.
    experts.gate_up_proj [E, 2 m, H] -> gate and up of each expert; experts.down_proj [E, H, m] -> each expert.
    Every other matrix is one block, GQA's q_proj, k_proj and v_proj too: the paper splits W^UQ, W^UK and W^UV alone, and its
    GQA baseline is plain Muon (notes A.4, C.2). Layers of all kinds over MLA split alike. Raises ValueError when the shape
    does not fit the configuration.
    """
    if name.endswith("experts.gate_up_proj"):
        experts, rows, hidden = tensor.shape
        return [tensor.view(experts * 2, rows // 2, hidden)]
    if tensor.dim() == 3:
        return [tensor]
    if tensor.dim() != 2:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; Muon takes matrices and stacks of matrices")
    if muon == "split" and name.endswith("self_attn.q_b_proj.weight"):
        heads = model_config.num_attention_heads
        if tensor.size(0) != heads * (model_config.qk_nope_head_dim + model_config.qk_rope_head_dim):
            raise ValueError(f"{name} has {tensor.size(0)} rows, which is not {heads} heads of the configured size")
        return [tensor.view(heads, -1, tensor.size(1))]
    if muon == "split" and name.endswith("self_attn.kv_b_proj.weight"):
        heads, nope, v = model_config.num_attention_heads, model_config.qk_nope_head_dim, model_config.v_head_dim
        if tensor.size(0) != heads * (nope + v):
            raise ValueError(f"{name} has {tensor.size(0)} rows, which is not {heads} heads of {nope} + {v}")
        per_head = tensor.view(heads, nope + v, tensor.size(1))
        return [per_head[:, :nope], per_head[:, nope:]]
    return [tensor.unsqueeze(0)]


def _group_of(name: str, param: Tensor, cfg: OptimConfig) -> tuple[str, str]:
    """(group, optimizer) of one parameter by the rule of GLM-4.5 §2.4 and the two switches."""
    if param.dim() < 2 or name.endswith(CONVOLUTIONS):
        group, optimizer = ("indexer" if _is_indexer(name) else "norm"), "adamw"
    elif name.endswith(EMBEDDINGS):
        group, optimizer = "embed", "adamw"
    elif name == HEAD or name.endswith("." + HEAD):
        group, optimizer = "head", cfg.lm_head_optimizer
    elif _is_indexer(name):
        group, optimizer = "indexer", cfg.indexer_optimizer
    else:
        group, optimizer = "matrix", "muon"
    return group, ("adamw" if cfg.muon == "off" else optimizer)


def ownership(model: nn.Module, cfg: OptimConfig) -> list[Owned]:
    """Who optimises what, in the order of `model.named_parameters()`; frozen parameters are listed as 'frozen'."""
    rows = []
    for name, param in model.named_parameters():
        group, optimizer = _group_of(name, param, cfg)
        frozen = (cfg.train == "indexer") != _is_indexer(name) if cfg.train != "all" else False
        if frozen or not param.requires_grad:
            optimizer = "frozen"
        blocks = ""
        if optimizer == "muon":
            views = split_blocks(name, param.detach(), _config_of(model), cfg.muon)
            blocks = " + ".join(f"{v.size(0)} x [{v.size(1)}, {v.size(2)}]" for v in views)
        rows.append(Owned(name, tuple(param.shape), group, optimizer, blocks))
    return rows


def ownership_table(model: nn.Module, cfg: OptimConfig) -> list[tuple[str, tuple[int, ...], str, str]]:
    """(name, shape, optimizer, blocks) for every parameter."""
    return [(row.name, row.shape, row.optimizer, row.blocks) for row in ownership(model, cfg)]


def format_ownership(rows: Iterable[tuple[str, tuple[int, ...], str, str]]) -> str:
    """The table for start-up: layers that look alike are folded into one line with their count."""
    folded: dict[tuple[str, tuple[int, ...], str, str], int] = {}
    for name, shape, optimizer, blocks in rows:
        key = (re.sub(r"\blayers\.\d+\.", "layers.*.", name), shape, optimizer, blocks)
        folded[key] = folded.get(key, 0) + 1
    lines = [
        f"{optimizer:<7} {count:>3} x {name:<58} {str(list(shape)):<16} {blocks}"
        for (name, shape, optimizer, blocks), count in folded.items()
    ]
    return "\n".join(lines)


def _config_of(model: nn.Module) -> Any:
    config = getattr(model, "cfg", None) or getattr(model, "config", None)
    if config is None:
        raise ValueError(f"{type(model).__name__} carries no configuration (cfg or config): Muon needs the head counts")
    return config


SLOTS = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}  # state per parameter


class MuonSplit(torch.optim.Optimizer):
    """Muon and AdamW parameter groups behind one `step`. Build it with `build_optimizer`.

    Each group has `lr` (in force), `base_lr` (the peak), `kind` ('muon' or 'adamw'), `weight_decay` and `names`.
    Parameters without a gradient are left alone entirely: no decay, no momentum.
    """

    def __init__(self, groups: list[dict[str, Any]], model_config: Any, cfg: OptimConfig) -> None:
        super().__init__(groups, {"lr": 0.0})
        self.model_config = model_config
        self.cfg = cfg
        self.names = {p: n for group in self.param_groups for n, p in zip(group["names"], group["params"], strict=True)}

    def set_lr_scale(self, scale: float) -> None:
        """Sets every group's learning rate to scale times its peak."""
        for group in self.param_groups:
            group["lr"] = group["base_lr"] * scale

    def learning_rate(self, group: str) -> float:
        """The learning rate in force in a group; 0 when the group is empty."""
        return next((g["lr"] for g in self.param_groups if g["group"] == group), 0.0)

    def reset_state(self) -> None:
        """Forgets momentum and second moments (RL resets at weight sync, GLM-5 §4.1)."""
        self.state.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        """One update from the gradients in place. Closures are not supported (ValueError)."""
        if closure is not None:
            raise ValueError("MuonSplit.step takes no closure")
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params and group["kind"] == "adamw":
                self._adamw(group, params)
        self._muon([g for g in self.param_groups if g["kind"] == "muon"])

    def _adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        states = [self.state[p] for p in params]
        steps = [s["step"] for s in states]
        torch._foreach_add_(steps, 1.0)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        grads = [p.grad for p in params]
        means, squares = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        torch._foreach_lerp_(means, grads, 1 - self.cfg.beta1)
        torch._foreach_mul_(squares, self.cfg.beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - self.cfg.beta2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, [(1 - self.cfg.beta2 ** float(t)) ** 0.5 for t in steps])
        torch._foreach_add_(denominators, self.cfg.eps)
        torch._foreach_addcdiv_(
            params, means, denominators, [-group["lr"] / (1 - self.cfg.beta1 ** float(t)) for t in steps]
        )

    def _muon(self, groups: list[dict[str, Any]]) -> None:
        params, lrs, decays = [], [], []
        for group in groups:
            members = [p for p in group["params"] if p.grad is not None]
            params += members
            lrs += [group["lr"]] * len(members)
            decays += [group["weight_decay"]] * len(members)
        if not params:
            return
        for p in params:
            if not self.state[p]:
                self.state[p] = {"momentum_buffer": torch.zeros_like(p)}
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        grads = [p.grad for p in params]
        torch._foreach_mul_(buffers, self.cfg.momentum)
        torch._foreach_add_(buffers, grads)
        directions = torch._foreach_add(grads, buffers, alpha=self.cfg.momentum) if self.cfg.nesterov else buffers

        sources, targets, scales = [], [], []
        for p, direction, lr in zip(params, directions, lrs, strict=True):
            name = self.names[p]
            for source, target in zip(
                split_blocks(name, direction, self.model_config, self.cfg.muon),
                split_blocks(name, p, self.model_config, self.cfg.muon),
                strict=True,
            ):
                sources.append(source)
                targets.append(target)
                scales.append(-lr * UPDATE_RMS * max(source.shape[-2:]) ** 0.5)
        # float64 weights, which only checks have, keep their type: all that differs between layouts is then 1e-15
        exact = bool(sources) and sources[0].dtype == torch.float64
        updates = newton_schulz_groups(sources, dtype=None if exact else getattr(torch, self.cfg.ns_dtype))
        torch._foreach_mul_(params, [1 - lr * decay for lr, decay in zip(lrs, decays, strict=True)])
        for target, update, scale in zip(targets, updates, scales, strict=True):
            target.add_(update, alpha=scale)

    def state_tensors(self) -> dict[str, Tensor]:
        """Optimizer state under logical names: '<parameter name>.<slot>', unsharded, sorted by name."""
        tensors = {f"{self.names[p]}.{slot}": value for p, state in self.state.items() for slot, value in state.items()}
        return dict(sorted(tensors.items()))

    def owned_state(self) -> list[Piece]:
        """The state as a checkpoint takes it (model/state_parts.py): one process owns all."""
        return [Piece.whole(name, tensor) for name, tensor in self.state_tensors().items()]

    def check_slot(self, name: str, slot: str) -> None:
        """ValueError when a parameter's state has a slot that its update does not know: another optimizer wrote it."""
        kind = next(group["kind"] for group in self.param_groups if name in group["names"])
        if slot not in SLOTS[kind]:
            raise ValueError(
                f"optimizer state {name}.{slot}: {name} is trained by {kind} here, whose state is {', '.join(SLOTS[kind])}; "
                "the state is another optimizer's: start without it, or with the settings it was written under"
            )

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores `state_tensors`. Raises ValueError naming unknown parameters, wrong shapes or another optimizer's slots."""
        by_name = {n: p for p, n in self.names.items()}
        fresh: dict[Tensor, dict[str, Tensor]] = {}
        for key in sorted(tensors):
            name, slot = key.rsplit(".", 1)
            if name not in by_name:
                raise ValueError(f"optimizer state names {name!r}, which this optimizer does not own")
            self.check_slot(name, slot)
            p, value = by_name[name], tensors[key]
            if slot != "step" and value.shape != p.shape:
                raise ValueError(f"optimizer state {key} has shape {list(value.shape)}, expected {list(p.shape)}")
            device = torch.device("cpu") if slot == "step" else p.device
            fresh.setdefault(p, {})[slot] = value.to(device, copy=True)
        self.state.clear()
        self.state.update(fresh)


def build_optimizer(model: nn.Module, cfg: OptimConfig) -> MuonSplit:
    """The optimizer of `model` under `cfg`; sets requires_grad=False on parameters that `cfg.train` freezes.

    Norms and biases get no weight decay. Raises ValueError when nothing is left to train.
    """
    lrs = {
        "matrix": cfg.lr_matrix,
        "embed": cfg.lr_embed,
        "head": cfg.lr_head,
        "norm": cfg.lr_norm,
        "indexer": cfg.lr_indexer,
    }
    params = dict(model.named_parameters())
    groups: dict[tuple[str, str, float], dict[str, Any]] = {}
    for row in ownership(model, cfg):
        param = params[row.name]
        if row.optimizer == "frozen":
            param.requires_grad_(False)
            continue
        decay = cfg.weight_decay if param.dim() >= 2 and row.group != "norm" else 0.0
        lr = cfg.lr_matrix if lrs[row.group] is None else lrs[row.group]
        group = groups.setdefault(
            (row.group, row.optimizer, decay),
            {
                "params": [], "names": [], "kind": row.optimizer, "group": row.group,
                "weight_decay": decay, "lr": lr, "base_lr": lr,
            },
        )  # fmt: skip
        group["params"].append(param)
        group["names"].append(row.name)
    if not groups:
        raise ValueError(f"optimizer.train is {cfg.train!r} and leaves no parameter of {type(model).__name__} to train")
    return MuonSplit(list(groups.values()), _config_of(model), cfg)

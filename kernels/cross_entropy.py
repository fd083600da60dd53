"""Output head and cross entropy in one pass over chunks of rows; [N, V] logits never exist at once.

For mean and sum the backward runs inside the forward (the gradient is linear in the one scalar that arrives later).
Per-row losses and log-probabilities recompute their logits in the backward instead.

Run its tests: `python -m pytest tests/kernels/test_cross_entropy.py`
"""

import torch
import torch.nn.functional as F

from kernels.paths import choose

CHUNK_ELEMENTS = 1 << 20  # logits per chunk: 4 MB in fp32, about one core's share of the last-level cache
CHUNK_ROWS = (
    256  # at least: with fewer rows the weight's gradient is read and written too often (measured at vocabulary 32768)
)


def _rows_per_chunk(vocab: int, chunk: int | None) -> int:
    return chunk or max(CHUNK_ROWS, CHUNK_ELEMENTS // vocab)


def _check(hidden_nh, weight_vh, targets_n):
    if hidden_nh.dim() != 2 or weight_vh.dim() != 2 or hidden_nh.shape[1] != weight_vh.shape[1]:
        raise ValueError(f"hidden {tuple(hidden_nh.shape)} and weight {tuple(weight_vh.shape)} must be [N,H] and [V,H]")
    if targets_n.shape != hidden_nh.shape[:1]:
        raise ValueError(f"targets {tuple(targets_n.shape)} must be [N] with N = {hidden_nh.shape[0]}")


def _logits(h_ch, weight_vh):
    """At least fp32: bf16 sums over a vocabulary lose the loss's third digit."""
    logits = h_ch @ weight_vh.T
    return logits if logits.dtype == torch.float64 else logits.float()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_nh, weight_vh, targets_n, ignore_index, mean, chunk, triton):
        n = hidden_nh.shape[0]
        need_h, need_w = ctx.needs_input_grad[:2]
        acc = torch.promote_types(hidden_nh.dtype, torch.float32)
        dhidden = torch.empty_like(hidden_nh) if need_h else None
        dweight = torch.zeros(weight_vh.shape, dtype=acc, device=weight_vh.device) if need_w else None
        valid_n = targets_n != ignore_index
        safe_n1 = torch.where(valid_n, targets_n, 0).unsqueeze(1)
        loss_sum = torch.zeros((), dtype=torch.float64, device=hidden_nh.device)
        chunk = min(chunk, max(n, 1))
        logits_cv = torch.empty(chunk, weight_vh.shape[0], dtype=hidden_nh.dtype, device=hidden_nh.device)
        probs_cv = torch.empty(logits_cv.shape, dtype=acc, device=hidden_nh.device)
        for a in range(0, n, chunk):
            h, target, keep = hidden_nh[a : a + chunk], safe_n1[a : a + chunk], valid_n[a : a + chunk]
            logits, probs = logits_cv[: len(h)], probs_cv[: len(h)]
            torch.mm(h, weight_vh.T, out=logits)
            if triton:
                from kernels.triton_cross_entropy import softmax_rows_

                chosen_n = softmax_rows_(logits, target.squeeze(1), keep.float() if need_h or need_w else None)
                loss_sum -= torch.where(keep, chosen_n, 0).double().sum()
                if need_h:
                    torch.mm(logits, weight_vh, out=dhidden[a : a + chunk])
                if need_w:
                    dweight.addmm_(logits.T.to(acc), h.to(acc))
                continue
            # One fused pass over each row. log p of the target from its logit: log(sum exp) = the largest logit - log of the
            # largest probability, which is no less than 1 / V; the log of the target's own probability may be -inf.
            logits = logits.to(acc)
            chosen_c, top_c = logits.gather(1, target).squeeze(1), logits.amax(1)
            grad = torch.softmax(logits, 1, out=probs)
            logp_c = chosen_c - (top_c - grad.amax(1).log_())
            loss_sum -= torch.where(keep, logp_c, 0).double().sum()
            if not (need_h or need_w):
                continue
            grad.scatter_add_(1, target, grad.new_full((), -1.0).expand_as(target))
            if not keep.all():
                grad.mul_(keep.unsqueeze(1))
            grad = grad.to(hidden_nh.dtype)
            if need_h:
                torch.mm(grad, weight_vh, out=dhidden[a : a + chunk])
            if need_w:
                dweight.addmm_(grad.T.to(acc), h.to(acc))
        count = valid_n.sum().clamp(min=1) if mean else 1
        ctx.scale = 1.0 / float(count)
        ctx.save_for_backward(dhidden, dweight)
        ctx.weight_dtype = weight_vh.dtype
        return (loss_sum / count).to(acc)

    @staticmethod
    def backward(ctx, dloss):
        dhidden, dweight = ctx.saved_tensors
        scale = dloss * ctx.scale
        return (
            None if dhidden is None else dhidden * scale.to(dhidden.dtype),
            None if dweight is None else (dweight * scale).to(ctx.weight_dtype),
            None,
            None,
            None,
            None,
            None,
        )


class _LinearLogProbs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature)[target] per row; rows with a negative target give 0."""

    @staticmethod
    def forward(ctx, hidden_nh, weight_vh, targets_n, temperature, chunk, triton):
        n = hidden_nh.shape[0]
        acc = torch.promote_types(hidden_nh.dtype, torch.float32)
        logp_n = torch.empty(n, dtype=acc, device=hidden_nh.device)
        lse_n1 = torch.empty(n, 1, dtype=acc, device=hidden_nh.device)
        valid_n = targets_n >= 0
        safe_n1 = targets_n.clamp(min=0).unsqueeze(1)
        for a in range(0, n, chunk):
            if triton:
                from kernels.triton_cross_entropy import softmax_rows_

                logits = hidden_nh[a : a + chunk] @ weight_vh.T
                logp_n[a : a + chunk] = softmax_rows_(logits, safe_n1[a : a + chunk, 0], temperature=temperature)
                continue
            logits = _logits(hidden_nh[a : a + chunk], weight_vh)
            if temperature != 1.0:
                logits.div_(temperature)
            lse = logits.logsumexp(1, keepdim=True)
            lse_n1[a : a + chunk] = lse
            logp_n[a : a + chunk] = (logits.gather(1, safe_n1[a : a + chunk]) - lse).squeeze(1)
        ctx.save_for_backward(hidden_nh, weight_vh, safe_n1, valid_n, lse_n1)
        ctx.temperature, ctx.chunk, ctx.triton = temperature, chunk, triton
        return torch.where(valid_n, logp_n, 0)

    @staticmethod
    def backward(ctx, dlogp_n):
        hidden_nh, weight_vh, safe_n1, valid_n, lse_n1 = ctx.saved_tensors
        n, chunk, acc = hidden_nh.shape[0], ctx.chunk, lse_n1.dtype
        need_h, need_w = ctx.needs_input_grad[:2]
        dhidden = torch.zeros_like(hidden_nh) if need_h else None
        dweight = torch.zeros(weight_vh.shape, dtype=acc, device=weight_vh.device) if need_w else None
        scale_n1 = (torch.where(valid_n, dlogp_n, 0) / ctx.temperature).unsqueeze(1)
        for a in range(0, n, chunk):
            scale = scale_n1[a : a + chunk]
            h, target = hidden_nh[a : a + chunk], safe_n1[a : a + chunk]
            if ctx.triton:
                from kernels.triton_cross_entropy import softmax_rows_

                grad = h @ weight_vh.T
                # d logp: the negative of what the kernel gives for -logp; its factor 1 / temperature is in `scale` already
                softmax_rows_(grad, target[:, 0], -scale[:, 0].float() * ctx.temperature, ctx.temperature)
                if need_h:
                    torch.mm(grad, weight_vh, out=dhidden[a : a + chunk])
                if need_w:
                    dweight.addmm_(grad.T.to(acc), h.to(acc))
                continue
            logits = _logits(h, weight_vh)
            if ctx.temperature != 1.0:
                logits.div_(ctx.temperature)
            grad = logits.sub_(lse_n1[a : a + chunk]).exp_().mul_(-scale)
            grad.scatter_add_(1, target, scale)
            if need_h:
                torch.mm(grad.to(hidden_nh.dtype), weight_vh, out=dhidden[a : a + chunk])
            if need_w:
                dweight.addmm_(grad.T, h.to(acc))
        return dhidden, None if dweight is None else dweight.to(weight_vh.dtype), None, None, None, None


def linear_cross_entropy(
    hidden_nh: torch.Tensor,
    weight_vh: torch.Tensor,
    targets_n: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk: int | None = None,
) -> torch.Tensor:
    """Cross entropy (nats) of softmax(hidden @ weight.T) against targets int64 [N].

    hidden [N,H], weight [V,H]; reduction mean (over targets != ignore_index; 0 when there are none), sum, or none ([N], 0 where
    ignored). `chunk` is rows per chunk. Statistics are fp32 (fp64 for fp64 input). The path is kernels.paths' choice for
    "linear_cross_entropy"; its reference makes all logits at once.
    """
    _check(hidden_nh, weight_vh, targets_n)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be mean, sum or none, got {reduction!r}")
    path = choose("linear_cross_entropy", hidden_nh.device, hidden_nh.dtype)
    if path == "reference":
        logits = _logits(hidden_nh, weight_vh)
        if reduction == "mean" and not (targets_n != ignore_index).any():
            return logits.sum() * 0.0
        return F.cross_entropy(logits, targets_n, ignore_index=ignore_index, reduction=reduction)
    triton = path == "triton"
    chunk = _rows_per_chunk(weight_vh.shape[0], chunk)
    if reduction == "none":
        safe_n = torch.where(targets_n == ignore_index, -1, targets_n)
        return -_LinearLogProbs.apply(hidden_nh, weight_vh, safe_n, 1.0, chunk, triton)
    return _LinearCrossEntropy.apply(hidden_nh, weight_vh, targets_n, ignore_index, reduction == "mean", chunk, triton)


def linear_logprobs(
    hidden_nh: torch.Tensor,
    weight_vh: torch.Tensor,
    targets_n: torch.Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> torch.Tensor:
    """log softmax(hidden @ weight.T / temperature) at targets int64 [N] -> [N], differentiable; negative targets give 0."""
    _check(hidden_nh, weight_vh, targets_n)
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    path = choose("linear_cross_entropy", hidden_nh.device, hidden_nh.dtype)
    if path == "reference":
        logp_nv = (_logits(hidden_nh, weight_vh) / temperature).log_softmax(1)
        return torch.where(targets_n >= 0, logp_nv.gather(1, targets_n.clamp(min=0).unsqueeze(1)).squeeze(1), 0)
    rows = _rows_per_chunk(weight_vh.shape[0], chunk)
    return _LinearLogProbs.apply(hidden_nh, weight_vh, targets_n, float(temperature), rows, path == "triton")


@torch.no_grad()
def linear_logprobs_entropy(
    hidden_nh: torch.Tensor,
    weight_vh: torch.Tensor,
    targets_n: torch.Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As linear_logprobs without gradient, plus the entropy (nats) of each row's distribution: (logp [N], entropy [N])."""
    _check(hidden_nh, weight_vh, targets_n)
    chunk = _rows_per_chunk(weight_vh.shape[0], chunk)
    logp, entropy = [], []
    for a in range(0, hidden_nh.shape[0], chunk):
        target = targets_n[a : a + chunk]
        logq = (_logits(hidden_nh[a : a + chunk], weight_vh) / temperature).log_softmax(1)
        picked = logq.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
        logp.append(torch.where(target >= 0, picked, 0))
        entropy.append(-(logq.exp() * logq).sum(1))
    if not logp:
        empty = hidden_nh.new_zeros(0)
        return empty, empty.clone()
    return torch.cat(logp), torch.cat(entropy)

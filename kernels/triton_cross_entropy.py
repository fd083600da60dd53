"""Triton softmax rows for the chunked loss: a chunk's logits in, log-probabilities of the targets out, gradient in place.

Two passes over each row: a running maximum and sum, then the gradient over the logits themselves. The projections around it are
plain matrix products, which the vendor's library does best. Statistics are fp32 whatever the logits are.

Run its tests: `python -m pytest tests/kernels/test_triton_cross_entropy.py`
"""

import torch
import triton
import triton.language as tl

from kernels.triton_common import block


@triton.jit
def _rows_kernel(logits, targets, scale, logp, vocab, inverse_temperature, GRAD: tl.constexpr, B: tl.constexpr):
    """One row: logp = z[target] - logsumexp(z) with z = logits / temperature; with GRAD, logits become the gradient of
    scale * -logp with respect to them: scale * (softmax(z) - onehot) / temperature."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    # finite: a first block of -inf alone must not give inf - inf
    top, total = tl.full([], -3.0e38, tl.float32), tl.full([], 0.0, tl.float32)
    for start in range(0, vocab, B):
        at = start + tl.arange(0, B)
        z = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32) * inverse_temperature
        higher = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)
        top = higher
    lse = top + tl.log(total)
    target = tl.load(targets + row)
    tl.store(logp + row, tl.load(logits + target).to(tl.float32) * inverse_temperature - lse)
    if GRAD:
        factor = tl.load(scale + row) * inverse_temperature
        for start in range(0, vocab, B):
            at = start + tl.arange(0, B)
            z = tl.load(logits + at, mask=at < vocab, other=0.0).to(tl.float32) * inverse_temperature
            p = tl.exp(z - lse) - tl.where(at == target, 1.0, 0.0)
            tl.store(logits + at, p * factor, at < vocab)


def softmax_rows_(
    logits_cv: torch.Tensor,
    targets_c: torch.Tensor,
    scale_c: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Log-probabilities fp32 [C] of targets int64 [C] (all in range) under softmax(logits [C, V] / temperature).

    With scale_c fp32 [C] the logits are overwritten by scale * (softmax - onehot) / temperature, rounded to their dtype: the
    gradient of -scale * logp. Raises ValueError for logits that are not contiguous rows.
    """
    if not logits_cv.is_contiguous():
        raise ValueError(f"softmax_rows_ overwrites contiguous rows; got strides {logits_cv.stride()}")
    rows, vocab = logits_cv.shape
    logp_c = torch.empty(rows, dtype=torch.float32, device=logits_cv.device)
    if rows:
        _rows_kernel[(rows,)](
            logits_cv, targets_c, logp_c if scale_c is None else scale_c, logp_c, vocab, 1.0 / temperature,
            GRAD=scale_c is not None, B=block(vocab, 16, 4096),
        )  # fmt: skip
    return logp_c

"""Triton softmax rows inside the chunked loss: loss, log-probabilities and gradients against float64 autograd."""

import torch
import torch.nn.functional as F

from tests.kernels.triton_case import triton_checks


def _case(device, dtype, n=37, v=150, h=24):
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(n, h, generator=g), torch.randn(v, h, generator=g)
    weight[3] *= 20  # logits of several hundred: the running maximum has to move
    targets = torch.randint(0, v, (n,), generator=g)
    targets[::5] = -100
    return hidden.to(device, dtype), weight.to(device, dtype), targets.to(device)


def _close(mine, exact, tolerance):
    for a, b in zip(mine, exact):
        assert a.grad.dtype == a.dtype
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=tolerance, atol=tolerance * b.grad.abs().max().item())


def _loss_against_float64(device, dtype, tolerance, reduction):
    from kernels import paths
    from kernels.cross_entropy import linear_cross_entropy

    hidden, weight, targets = _case(device, dtype)
    mine = [t.clone().requires_grad_() for t in (hidden, weight)]
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    with paths.force(linear_cross_entropy="triton"):
        got = linear_cross_entropy(*mine, targets, reduction=reduction, chunk=16)
    expected = F.cross_entropy(exact[0] @ exact[1].T, targets, ignore_index=-100, reduction=reduction)
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())
    (got.sum() * 3).backward()
    (expected.sum() * 3).backward()
    _close(mine, exact, tolerance)


def check_mean_fp32(device):
    _loss_against_float64(device, torch.float32, 1e-5, "mean")


def check_sum_bf16(device):
    _loss_against_float64(device, torch.bfloat16, 2e-2, "sum")


def check_rows_fp32(device):
    _loss_against_float64(device, torch.float32, 1e-5, "none")


def check_log_probabilities_with_a_temperature(device):
    from kernels import paths
    from kernels.cross_entropy import linear_logprobs

    hidden, weight, targets = _case(device, torch.float32)
    mine = [t.clone().requires_grad_() for t in (hidden, weight)]
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    with paths.force(linear_cross_entropy="triton"):
        got = linear_logprobs(*mine, targets, temperature=0.7, chunk=16)
        logp = (exact[0] @ exact[1].T / 0.7).log_softmax(1)
        expected = torch.where(targets >= 0, logp.gather(1, targets.clamp(min=0)[:, None])[:, 0], 0.0)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)
        up = torch.randn(len(targets), generator=torch.Generator().manual_seed(1)).to(device)
        got.backward(up)
        expected.backward(up.double())
        _close(mine, exact, 1e-5)


def check_several_blocks_of_one_row_and_infinities(device):
    from kernels.triton_cross_entropy import softmax_rows_

    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(2)).to(device)
    logits[1, :4999] = float("-inf")
    logits[2, 100] = 1e4
    targets = torch.tensor([4999, 4999, 7], device=device)
    expected = logits.double().log_softmax(1)
    got = softmax_rows_(logits, targets, torch.tensor([1.0, 2.0, 0.5], device=device))
    torch.testing.assert_close(got.double(), expected[range(3), targets], rtol=1e-6, atol=1e-5)
    gradient = (expected.exp() - F.one_hot(targets, 5000)) * torch.tensor([[1.0], [2.0], [0.5]], device=device)
    torch.testing.assert_close(logits.double(), gradient, rtol=1e-4, atol=1e-6)


def launches(dtype):
    from kernels.triton_cross_entropy import softmax_rows_

    for scale in (None, torch.ones(8)):
        softmax_rows_(torch.zeros(8, 154880, dtype=dtype), torch.zeros(8, dtype=torch.long), scale)


test_triton = triton_checks(__name__)

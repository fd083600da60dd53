"""Gated DeltaNet: the chunked form against the recurrence, the recurrence against the formula and transformers' own."""

import pytest
import torch

from kernels.gdn import causal_conv_silu, chunked_gdn, l2_normalise, recurrent_gdn, segment_sums


def inputs(size, decay="mild", dtype=torch.float64, batch=2, heads=3, dk=6, dv=5, seed=0):
    """q, k, v, log a, b as leaves; "strong" decays span exp(-1e-3) to exp(-300) within a chunk."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    q, k = l2_normalise(draw(batch, size, heads, dk)), l2_normalise(draw(batch, size, heads, dk))
    spread = {"mild": 0.5, "strong": 3.0}.get(decay)
    log_a = None if decay == "none" else -(draw(batch, size, heads) * spread - 1).exp()
    leaves = [q, k, draw(batch, size, heads, dv), log_a, draw(batch, size, heads).sigmoid()]
    return [None if x is None else x.to(dtype).requires_grad_() for x in leaves]


def gradients(outputs, leaves):
    loss = sum(
        (o * torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(7))).sum() for o in outputs
    )
    return torch.autograd.grad(loss, [x for x in leaves if x is not None])


def test_recurrence_is_the_formula_of_the_notes():
    q, k, v, log_a, b = inputs(9, batch=1, heads=1)
    o, state = recurrent_gdn(q, k, v, log_a, b)
    s = torch.zeros(5, 6, dtype=torch.float64)
    for t in range(9):
        kt, bt = k[0, t, 0], b[0, t, 0]
        s = log_a[0, t, 0].exp() * s @ (torch.eye(6, dtype=torch.float64) - bt * torch.outer(kt, kt))
        s = s + bt * torch.outer(v[0, t, 0], kt)
        torch.testing.assert_close(o[0, t, 0], s @ q[0, t, 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state[0, 0], s.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", ["none", "mild", "strong"])
@pytest.mark.parametrize(("size", "chunk"), [(1, 8), (8, 8), (9, 8), (40, 16), (37, 64), (65, 64), (23, 1)])
def test_chunks_equal_the_recurrence_in_float64_with_gradients(size, chunk, decay):
    leaves = inputs(size, decay)
    expected, got = recurrent_gdn(*leaves), chunked_gdn(*leaves, chunk=chunk)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    for a, b in zip(gradients(got, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("decay", ["none", "mild", "strong"])
def test_chunks_equal_the_recurrence_in_fp32(decay):
    leaves = inputs(300, decay, torch.float32, heads=4, dk=32, dv=32)
    expected, got = recurrent_gdn(*leaves), chunked_gdn(*leaves)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    for a, b in zip(gradients(got, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_state_carries_a_sequence_over_a_cut():
    leaves = inputs(50)
    whole, last = chunked_gdn(*leaves, chunk=16)
    first, state = chunked_gdn(*(x[:, :21] for x in leaves), chunk=16)
    second, end = recurrent_gdn(*(x[:, 21:] for x in leaves), state_bhkv=state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(end, last, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_equals_transformers_gated_delta_rule(name):
    """Their version scales q by dk^-0.5 and normalises q and k itself."""
    theirs = getattr(pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next"), name)
    q, k, v, log_a, b = (x.detach() for x in inputs(150, dtype=torch.float32, heads=4, dk=16, dv=8, seed=3))
    expected, state = theirs(q * 3, k * 2, v, g=log_a, beta=b, output_final_state=True, use_qk_l2norm_in_kernel=True)
    got, last = chunked_gdn(q * 16**-0.5, k, v, log_a, b)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(last, state, rtol=0, atol=1e-5)


def test_gradients_numerically():
    leaves = inputs(7, batch=1, heads=2, dk=3, dv=2)
    assert torch.autograd.gradcheck(lambda *x: chunked_gdn(*x, chunk=4), leaves)


def test_strong_decay_keeps_small_decays_behind_it():
    """One reset to nothing, then decays of a thousandth in the same chunk: running sums of logarithms would lose them."""
    q, k, v, log_a, b = (x.detach() for x in inputs(64, dtype=torch.float32, dk=16, dv=16))
    log_a = torch.full_like(log_a, -1e-3)
    log_a[:, 20] = -1e5
    expected, _ = recurrent_gdn(*(x.double() for x in (q, k, v, log_a, b)))
    got, _ = chunked_gdn(q, k, v, log_a, b)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
    sums = segment_sums(log_a[0, :, 0])
    assert sums[-1, 20].item() == pytest.approx(-1e-3 * 43, rel=1e-5) and sums[3, 7] == -torch.inf


def test_perfect_recall_of_orthogonal_keys():
    """b = 1 and no decay: what was written under a key is read back exactly, and writing again replaces it."""
    k = torch.eye(4, dtype=torch.float64)[None, [0, 1, 2, 1, 3], None]
    v = torch.randn(1, 5, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, state = chunked_gdn(k, k, v, None, torch.ones(1, 5, 1, dtype=torch.float64), chunk=2)
    torch.testing.assert_close(state[0, 0], v[0, [0, 3, 2, 4], 0], rtol=1e-12, atol=1e-12)


def test_convolution_equals_conv1d_and_is_causal():
    x = torch.randn(2, 11, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.nn.functional.conv1d(x.transpose(1, 2), w[:, None], groups=6, padding=3)[..., :11]
    torch.testing.assert_close(
        causal_conv_silu(x, w), torch.nn.functional.silu(y).transpose(1, 2), rtol=1e-12, atol=1e-12
    )
    changed = x.clone()
    changed[:, 7:] += 1
    assert torch.equal(causal_conv_silu(changed, w)[:, :7], causal_conv_silu(x, w)[:, :7])

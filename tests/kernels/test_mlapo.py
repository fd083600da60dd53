"""MLA pre-processing: the fused CPU form against the thirteen steps, its training pieces against autograd in float64."""

import pytest
import torch
import torch.nn.functional as F

from kernels import paths
from kernels.mlapo import PreprocessWeights, expand_heads, mla_preprocess, rotate_columns, split_latents
from kernels.rope import rope_cis


def weights(dtype, hid=20, q=12, latent=10, nope=6, rope=4, heads=3, extra=5, seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (torch.randn(*shape, generator=g) * 0.3).to(dtype)

    return PreprocessWeights(
        input_norm=1 + normal(hid),
        w_in=normal(q + latent + rope + extra, hid),
        q_norm=1 + normal(q),
        w_q=normal(heads * (nope + rope), q),
        w_uk=normal(heads, nope, latent),
        kv_norm=1 + normal(latent),
        input_eps=1e-5,
        latent_eps=1e-6,
    )


def rotated(x, positions, theta):
    """RoPE by its definition, pair by pair, in float64."""
    out = x.double().clone()
    dim = x.shape[-1]
    for j in range(dim // 2):
        angle = positions.double() * theta ** (-2 * j / dim)
        cos, sin = angle.cos(), angle.sin()
        cos, sin = (t.view(-1, *[1] * (x.dim() - 2)) for t in (cos, sin))
        a, b = x[..., 2 * j].double(), x[..., 2 * j + 1].double()
        out[..., 2 * j], out[..., 2 * j + 1] = a * cos - b * sin, a * sin + b * cos
    return out


def by_definition(x, w, positions, cache, slots):
    x, w = x.double(), PreprocessWeights(**{k: v.double() if torch.is_tensor(v) else v for k, v in vars(w).items()})
    q_lora, latent, nope, rope, heads = w.sizes

    def norm(t, gain, eps):
        return t / (t.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain

    y = norm(x, w.input_norm, w.input_eps) @ w.w_in.T
    q_lat = norm(y[:, :q_lora], w.q_norm, w.latent_eps)
    q = (q_lat @ w.w_q.T).view(-1, heads, nope + rope)
    absorbed = torch.stack([q[:, h, :nope] @ w.w_uk[h] for h in range(heads)], 1)
    queries = torch.cat([absorbed, rotated(q[..., nope:], positions, 1e4)], -1)
    latents = norm(y[:, q_lora : q_lora + latent], w.kv_norm, w.latent_eps)
    keys = rotated(y[:, q_lora + latent : q_lora + latent + rope], positions, 1e4)
    cache = cache.double()
    for n, slot in enumerate(slots.tolist()):
        cache[slot] = torch.cat([latents[n], keys[n]])
    return queries, q_lat, y[:, q_lora + latent + rope :], cache


@pytest.mark.parametrize("path", ["reference", "cpu"])
@pytest.mark.parametrize("sizes", [{}, dict(latent=9, rope=2, nope=5)])  # odd latents: pairs at odd addresses
def test_decoding_form_by_definition(path, sizes):
    w = weights(torch.float32, **sizes)
    _, latent, _, rope, _ = w.sizes
    g = torch.Generator().manual_seed(1)
    x, positions = torch.randn(7, 20, generator=g), torch.randint(0, 200, (7,), generator=g)
    cache, slots = torch.randn(30, latent + rope, generator=g), torch.randperm(30, generator=g)[:7]
    expected = by_definition(x, w, positions, cache, slots)
    with paths.force(mla_preprocess=path):
        got = mla_preprocess(x, w, rope_cis(positions, rope, 1e4), cache, slots)
    for a, b in zip((*got, cache), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_a_cache_of_another_width_is_refused():
    w = weights(torch.float32)
    with pytest.raises(ValueError, match=r"\(30, 13\).*10 \+ 4"):
        mla_preprocess(torch.zeros(1, 20), w, torch.ones(1, 2) + 0j, torch.zeros(30, 13), torch.zeros(1).long())


@pytest.mark.parametrize("path", ["reference", "cpu"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_training_form_with_gradients(dtype, tolerance, path):
    """Both products, norms, rotations and the per-head expansion against plain float64 formulas differentiated by autograd."""
    w, g = weights(torch.float64, extra=0), torch.Generator().manual_seed(2)
    q_lora, latent, nope, rope, heads = w.sizes
    positions = torch.arange(5).repeat(2)
    w_kv = torch.randn(heads * (nope + 8), latent, generator=g, dtype=torch.float64)
    x = torch.randn(2, 5, 20, generator=g, dtype=torch.float64)
    leaves = [x, w.w_in, w.q_norm, w.kv_norm, w.w_q, w_kv]

    def ours(x, w_in, q_norm, kv_norm, w_q, w_kv):
        cis = rope_cis(positions.view(2, 5), rope, 1e4)
        c_q, c_kv, k_rope = split_latents(F.linear(x, w_in), q_norm, kv_norm, cis, 1e-6)
        q = rotate_columns(F.linear(c_q, w_q).unflatten(-1, (heads, nope + rope)), cis, nope)
        return c_q, q, *expand_heads(F.linear(c_kv, w_kv).unflatten(-1, (heads, nope + 8)), k_rope, nope)

    def plain(x, w_in, q_norm, kv_norm, w_q, w_kv):
        def norm(t, gain):
            return t / (t.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain

        def turn(t):
            return turn_pairs(t.flatten(0, 1), positions).view_as(t)

        y = x @ w_in.T
        c_q, c_kv = norm(y[..., :q_lora], q_norm), norm(y[..., q_lora : q_lora + latent], kv_norm)
        q = (c_q @ w_q.T).view(2, 5, heads, nope + rope)
        kv = (c_kv @ w_kv.T).view(2, 5, heads, nope + 8)
        key = turn(y[..., q_lora + latent :])[:, :, None].expand(-1, -1, heads, -1)
        return (
            c_q,
            torch.cat([q[..., :nope], turn(q[..., nope:])], -1),
            torch.cat([kv[..., :nope], key], -1),
            kv[..., nope:],
        )

    mine = [t.detach().to(dtype).requires_grad_() for t in leaves]
    exact = [t.detach().clone().requires_grad_() for t in leaves]
    with paths.force(mla_training=path):
        got, expected = ours(*mine), plain(*exact)
    ups = [torch.randn(e.shape, generator=g, dtype=torch.float64) for e in expected]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=max(tolerance, 1e-6))  # angles are fp32
    grads = torch.autograd.grad(got, mine, [u.to(dtype) for u in ups])
    for a, b in zip(grads, torch.autograd.grad(expected, exact, ups), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=max(tolerance, 1e-5) * b.abs().max().item())


def turn_pairs(x, positions):
    """As `rotated`, differentiable: a product with each position's rotation matrix."""
    dim = x.shape[-1]
    matrix = torch.zeros(len(positions), dim, dim, dtype=torch.float64)
    for j in range(dim // 2):
        angle = positions.double() * 1e4 ** (-2 * j / dim)
        a, b = 2 * j, 2 * j + 1
        matrix[:, a, a], matrix[:, a, b], matrix[:, b, a], matrix[:, b, b] = (
            angle.cos(),
            -angle.sin(),
            angle.sin(),
            angle.cos(),
        )
    return torch.einsum("nab,n...b->n...a", matrix, x)

"""The three Triton launches of MLA pre-processing against its definition in float64."""

import torch

from tests.kernels.triton_case import triton_checks


def _against_float64(device, dtype, tolerance, **sizes):
    from kernels import paths
    from kernels.mlapo import PreprocessWeights, mla_preprocess
    from kernels.rope import rope_cis
    from tests.kernels.test_mlapo import by_definition, weights

    w = weights(dtype, **sizes)
    _, latent, _, rope, _ = w.sizes
    g = torch.Generator().manual_seed(1)
    x, positions = torch.randn(19, len(w.input_norm), generator=g).to(dtype), torch.randint(0, 200, (19,), generator=g)
    cache, slots = torch.randn(30, latent + rope, generator=g).to(dtype), torch.randperm(30, generator=g)[:19]
    expected = by_definition(x, w, positions, cache, slots)
    w = PreprocessWeights(**{k: v.to(device) if torch.is_tensor(v) else v for k, v in vars(w).items()})
    cache = cache.to(device)
    with paths.force(mla_preprocess="triton"):
        got = mla_preprocess(x.to(device), w, rope_cis(positions, rope, 1e4).to(device), cache, slots.to(device))
    for a, b in zip((*got, cache), expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.cpu().double(), b, rtol=tolerance, atol=tolerance * b.abs().max().item())


def check_fp32(device):
    _against_float64(device, torch.float32, 1e-5)


def check_more_than_one_block_of_every_side(device):
    _against_float64(device, torch.float32, 1e-5, hid=70, q=66, latent=68, nope=18, rope=36, heads=2)


def check_bf16(device):
    _against_float64(device, torch.bfloat16, 2e-2)


def launches(dtype):
    from kernels.rope import rope_cis
    from kernels.triton_mlapo import mla_preprocess
    from tests.kernels.test_mlapo import weights

    # GLM-5's head sizes and latents on a narrow input in bf16; small sizes in fp32, whose products unroll into scalar code
    full = dict(hid=256, q=2048, latent=512, nope=192, rope=64, heads=2, extra=160)
    w = weights(dtype, **(full if dtype == torch.bfloat16 else {}))
    _, latent, _, rope, _ = w.sizes
    cache, cis = torch.zeros(16, latent + rope, dtype=dtype), rope_cis(torch.arange(16), rope, 1e6)
    mla_preprocess(torch.zeros(16, len(w.input_norm), dtype=dtype), w, cis, cache, torch.arange(16))


test_triton = triton_checks(__name__)

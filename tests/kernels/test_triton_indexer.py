"""The Triton indexer: scores and their gradients against float64 autograd, selection against a sort that breaks ties by index."""

import torch

from tests.kernels.triton_case import triton_checks


def _case(device, dtype, b=2, s=35, n=3, d=24, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(x, generator=g).to(device, dtype) for x in ((b, s, n, d), (b, s, d), (b, s, n))]


def _formula(q, k, w):
    return (torch.relu(torch.einsum("bqnd,btd->bqnt", q, k)) * w[..., None]).sum(2)


def _against_float64(device, dtype, tolerance):
    from kernels.triton_indexer import index_scores

    q, k, w = _case(device, dtype)
    k = k[:, :33]  # neither side a multiple of a block
    exact = [t.double().requires_grad_() for t in (q, k, w)]
    mine = [t.clone().requires_grad_() for t in (q, k, w)]
    got, expected = index_scores(*mine), _formula(*exact)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    up = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(device)
    got.backward(up)
    expected.backward(up.double())
    for a, b in zip(mine, exact):
        assert a.grad.dtype == dtype
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=tolerance, atol=tolerance * b.grad.abs().max().item())


def check_scores_and_gradients_fp32(device):
    _against_float64(device, torch.float32, 1e-5)


def check_scores_and_gradients_bf16(device):
    _against_float64(device, torch.bfloat16, 1e-2)


SIZE = 19


def _best(row, limit, k):
    return sorted(sorted(range(limit), key=lambda i: (-row[i], i))[:k])


def _selection_equals_sort(device, topk, chunk_elements, round_):
    from kernels import triton_indexer

    triton_indexer.SCORE_ELEMENTS, triton_indexer.LEAST_ROWS = chunk_elements, 8
    q, k, w = _case(device, torch.float32, s=SIZE, d=16)
    if round_:  # small integers: ties everywhere, zeros of both signs among them
        q, k, w = q.round(), k.round(), w.round()
    index = triton_indexer.select_index(q, k, w, topk)
    scores = _formula(q, k, w).tolist() if round_ else triton_indexer.index_scores(q, k, w).tolist()
    assert index.shape == (2, SIZE, min(topk, SIZE))
    for b in range(2):
        for t in range(SIZE):
            best = _best(scores[b][t], t + 1, topk)
            assert index[b, t].tolist() == best + [0] * (min(topk, SIZE) - len(best)), (b, t)


def check_selection_with_ties_in_two_chunks(device):
    _selection_equals_sort(device, 7, 1, True)  # chunks of 8 rows


def check_selection_without_ties(device):
    _selection_equals_sort(device, 12, 1 << 24, False)


def check_topk_beyond_the_length_selects_all_earlier_keys(device):
    _selection_equals_sort(device, 64, 1 << 24, True)


def check_the_public_functions_take_the_triton_path(device):
    from kernels import indexer, paths

    # small integers: both paths compute the scores exactly, and ties go to the lower index
    q, k, w = (t.round() for t in _case(device, torch.float32, b=1, s=SIZE, d=16))
    with paths.force(index_scores="triton", select_keys="triton", select_index="triton"):
        masks = indexer.select_keys(q, k, w, 5, row_chunk=8)
        index, valid = indexer.select_index(q, k, w, 5)
        indexer.index_scores(q, k, w)
    with paths.force(select_keys="cpu", select_index="cpu"):
        expected = indexer.select_keys(q, k, w, 5, row_chunk=8)
        index_cpu, valid_cpu = indexer.select_index(q, k, w, 5)
    assert len(masks) == len(expected) == 3 and all(torch.equal(a, b) for a, b in zip(masks, expected))
    assert torch.equal(index, index_cpu) and torch.equal(valid, valid_cpu)
    assert f"select_index {device}/float32: cpu" in paths.report()


def launches(dtype):
    from kernels.triton_indexer import index_scores, select_index

    q, k, w = _case("cpu", dtype, b=1, s=64, n=32, d=128)  # GLM-5's indexer
    index_scores(*(t.requires_grad_() for t in (q, k, w))).sum().backward()
    select_index(q.detach(), k.detach(), w.detach(), 8)


test_triton = triton_checks(__name__)

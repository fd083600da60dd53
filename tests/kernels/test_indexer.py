"""Index scores, selection in chunks, and the KL loss, against direct formulas."""

import pytest
import torch

from kernels import paths
from kernels.indexer import attention_mass, index_kl, index_scores, select_index, select_keys


def case(b=2, s=30, n=3, d=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) for shape in ((b, s, n, d), (b, s, d), (b, s, n)))


def test_scores_by_formula_with_and_without_gradient():
    q, k, w = case()
    expected = (torch.relu(torch.einsum("bqnd,btd->bqnt", q, k)) * w[..., None]).sum(2)
    torch.testing.assert_close(index_scores(q, k, w), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(index_scores(q.requires_grad_(), k, w), expected, atol=1e-5, rtol=1e-5)
    half = index_scores(q.detach().bfloat16(), k.bfloat16(), w)
    assert half.dtype == torch.float32


@pytest.mark.parametrize("chunk", [4, 7, 30, 64])
@pytest.mark.parametrize("topk", [1, 5, 30])
def test_selection_is_causal_complete_and_the_best(chunk, topk):
    q, k, w = case()
    q = q.round()  # many exact ties, zeros among them
    k = k.round()
    w = w.round()
    masks = select_keys(q, k, w, topk, row_chunk=chunk)
    scores = index_scores(q, k, w)
    start = 0
    for mask in masks:
        assert mask.shape[2] == start + mask.shape[1]
        for b in range(2):
            for r in range(mask.shape[1]):
                t = start + r
                row = scores[b, t].tolist()
                best = sorted(sorted(range(t + 1), key=lambda i: (-row[i], i))[:topk])
                assert mask[b, r].nonzero().flatten().tolist() == best
        start += mask.shape[1]
    assert start == 30


@pytest.mark.parametrize("path", ["reference", "cpu"])
@pytest.mark.parametrize("topk", [1, 5, 30, 64])
def test_selection_by_index_is_the_same_selection(topk, path):
    q, k, w = (t.round() for t in case())
    with paths.force(select_index=path, select_keys="cpu"):
        selected = select_index(q, k, w, topk, row_chunk=7)
        masks = select_keys(q, k, w, topk, row_chunk=8)
    whole = torch.cat([torch.nn.functional.pad(m, (0, 30 - m.shape[2])) for m in masks], dim=1)
    assert selected.index.shape == (2, 30, min(topk, 30))
    assert selected.valid.sum(-1).tolist() == [[min(t + 1, topk) for t in range(30)]] * 2
    assert (selected.index[~selected.valid] == 0).all()
    for b in range(2):
        for t in range(30):
            assert selected.index[b, t][selected.valid[b, t]].tolist() == whole[b, t].nonzero().flatten().tolist()
    rows = torch.tensor([[0, 29, 7, 7], [3, 1, 0, 28]])
    assert torch.equal(selected.allowed(rows, 30), whole[torch.arange(2)[:, None], rows])


@pytest.mark.parametrize("topk", [1, 5, 30])
def test_reference_paths_agree(topk):
    q, k, w = (t.round() for t in case())
    with paths.force(select_keys="reference", index_scores="reference"):
        masks, scores = select_keys(q, k, w, topk, row_chunk=8), index_scores(q, k, w)
    torch.testing.assert_close(scores, index_scores(q, k, w))
    assert all(torch.equal(a, b) for a, b in zip(masks, select_keys(q, k, w, topk, row_chunk=8), strict=True))


def test_kl_by_formula():
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 4, 9, generator=g, dtype=torch.float64, requires_grad=True)
    allowed = torch.rand(2, 4, 9, generator=g) < 0.6
    allowed[..., 0] = True
    target = torch.rand(2, 4, 9, generator=g, dtype=torch.float64) * allowed
    target[0, 0, 0] = 0.0  # a selected key without attention mass contributes nothing
    got = index_kl(scores, target, allowed)
    for b in range(2):
        for r in range(4):
            keys = allowed[b, r].nonzero().flatten()
            p = target[b, r, keys] / target[b, r, keys].sum()
            q = scores[b, r, keys].log_softmax(0)
            expected = sum(pi * (pi.log() - qi) for pi, qi in zip(p, q) if pi > 0)
            torch.testing.assert_close(got[b, r], torch.as_tensor(expected), rtol=1e-9, atol=1e-9)
    (grad,) = torch.autograd.grad(got.sum(), scores)
    assert (grad[~allowed] == 0).all() and torch.isfinite(grad).all()
    torch.testing.assert_close(grad.sum(-1), torch.zeros(2, 4, dtype=torch.float64), atol=1e-12, rtol=0)


def test_attention_mass_sums_heads():
    q, k, _ = case(s=6)
    keys = k[:, :, None].expand(-1, -1, 3, -1)
    allowed = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, -1, -1)
    logits = (torch.einsum("brhd,bthd->bhrt", q, keys) * 0.3).masked_fill(~allowed[:, None], float("-inf"))
    torch.testing.assert_close(attention_mass(q, keys, allowed, 0.3), logits.softmax(-1).sum(1))

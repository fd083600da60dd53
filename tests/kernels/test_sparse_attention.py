"""Masked and gathered attention against softmax over an explicit set of keys."""

import pytest
import torch

import kernels.kept_attention as kept_module
import kernels.sparse_attention as module
from kernels.indexer import select_keys
from kernels.sparse_attention import (
    attention_path,
    dense_attention,
    gathered_attention,
    masked_attention,
    masks_to_index,
)


def selection(b=2, s=29, topk=6, chunk=8):
    g = torch.Generator().manual_seed(3)
    return select_keys(
        torch.randn(b, s, 2, 4, generator=g),
        torch.randn(b, s, 4, generator=g),
        torch.randn(b, s, 2, generator=g),
        topk,
        chunk,
    )


def full(masks):
    size = masks[-1].shape[2]
    return torch.cat([torch.nn.functional.pad(m, (0, size - m.shape[2])) for m in masks], dim=1)


def reference(q, k, v, mask, scale):
    logits = (torch.einsum("bhsd,bhtd->bhst", q, k) * scale).masked_fill(~mask[:, None], float("-inf"))
    return logits.softmax(-1) @ v


def doubles(*shapes, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("kept", [0, 1 << 20])  # 0: SDPA; else the form that keeps its probabilities
@pytest.mark.parametrize("group", [1, 3 * 8 * 29 * 2, 1 << 20])  # sequences of one product: 1, 2, all
@pytest.mark.parametrize("keys", [29, 33])  # more keys than any row may see: their gradient is zero
def test_masked_equals_reference_with_gradients(monkeypatch, kept, group, keys):
    monkeypatch.setattr(kept_module, "KEPT_ELEMENTS", kept)
    monkeypatch.setattr(kept_module, "GROUP_ELEMENTS", group)
    masks = selection(b=3)
    q, k, v = doubles((3, 3, 29, 5), (3, 3, keys, 5), (3, 3, keys, 7))
    a = masked_attention(q, k, v, masks, 0.4)
    b = reference(q, k, v, torch.nn.functional.pad(full(masks), (0, keys - 29)), 0.4)
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    up = torch.randn_like(a)
    for g, r in zip(torch.autograd.grad(a, (q, k, v), up), torch.autograd.grad(b, (q, k, v), up)):
        torch.testing.assert_close(g, r, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("path", ["cpu", "reference"])
@pytest.mark.parametrize("elements", [1, 1 << 19])
@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_gathered_equals_reference_with_gradients(monkeypatch, elements, kept, path):
    monkeypatch.setattr(module, "GATHER_ELEMENTS", elements)  # 1: many chunks of 4 rows
    monkeypatch.setattr(module, "KEPT_ELEMENTS", kept)  # 0: probabilities computed again in the backward
    monkeypatch.setenv("ARCLINE_KERNELS", f"gathered_attention={path}")
    masks = selection()
    q, kv = doubles((2, 29, 3, 9), (2, 29, 9))
    index, valid = masks_to_index(masks, 6)
    a = gathered_attention(q, kv, index, valid, 5, 0.4)
    heads = kv[:, None].expand(-1, 3, -1, -1)
    b = reference(q.transpose(1, 2), heads, heads[..., :5], full(masks), 0.4).transpose(1, 2)
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    up = torch.randn_like(a)
    for g, r in zip(torch.autograd.grad(a, (q, kv), up), torch.autograd.grad(b, (q, kv), up)):
        torch.testing.assert_close(g, r, rtol=1e-9, atol=1e-11)


def test_masks_to_index_lists_each_rows_keys():
    masks = selection()
    index, valid = masks_to_index(masks, 6)
    whole = full(masks)
    assert index.shape == (2, 29, 6) and valid.sum(-1).tolist() == [[min(t + 1, 6) for t in range(29)]] * 2
    for b in range(2):
        for t in range(29):
            assert index[b, t][valid[b, t]].tolist() == whole[b, t].nonzero().flatten().tolist()


def test_path_is_explicit_and_dense_is_causal():
    assert [attention_path(s, 64) for s in (64, 65, 64 * module.GATHER_RATIO, 64 * module.GATHER_RATIO + 1)] == [
        "dense",
        "masked",
        "masked",
        "gathered",
    ]
    q, k, v = doubles((1, 2, 9, 4), (1, 2, 9, 4), (1, 2, 9, 4))
    causal = torch.ones(1, 9, 9, dtype=torch.bool).tril()
    torch.testing.assert_close(dense_attention(q, k, v, 0.5), reference(q, k, v, causal, 0.5))


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_dense_equals_reference_with_gradients(monkeypatch, kept):
    monkeypatch.setattr(kept_module, "KEPT_ELEMENTS", kept)
    q, k, v = doubles((2, 2, 150, 4), (2, 2, 150, 4), (2, 2, 150, 6))  # three chunks of rows, the last one short
    a = dense_attention(q, k, v, 0.5)
    b = reference(q, k, v, torch.ones(1, 150, 150, dtype=torch.bool).tril(), 0.5)
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    up = torch.randn_like(a)
    for g, r in zip(torch.autograd.grad(a, (q, k, v), up), torch.autograd.grad(b, (q, k, v), up)):
        torch.testing.assert_close(g, r, rtol=1e-9, atol=1e-11)


def test_large_scores_and_unselected_keys_give_finite_exact_probabilities():
    """A row whose unselected scores are huge: the added -1e38 must leave nothing of them."""
    q, k, v = (t.float().detach().requires_grad_() for t in doubles((1, 1, 8, 4), (1, 1, 8, 4), (1, 1, 8, 4)))
    with torch.no_grad():
        q.mul_(1e3)
        k.mul_(1e3)
    mask = torch.eye(8, dtype=torch.bool)[None]
    out = masked_attention(q, k, v, [mask], 1.0)
    torch.testing.assert_close(out, v, rtol=0, atol=0)
    gq, gk, gv = torch.autograd.grad(out.sum(), (q, k, v))
    assert not gq.any() and not gk.any() and torch.equal(gv, torch.ones_like(v))

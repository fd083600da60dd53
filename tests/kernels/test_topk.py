"""Deterministic top-k against a sort that breaks ties by index."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.topk import topk_lower_index, topk_mask


def by_sorting(row, k):
    return sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[:k])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.5, -3.0, float("-inf")]), min_size=9, max_size=9), max_size=4),
    st.integers(1, 12),
)
def test_ties_go_to_the_lower_index(rows, k):
    scores = torch.tensor(rows, dtype=torch.float32).view(-1, 9)
    index = topk_lower_index(scores, k)
    assert index.tolist() == [by_sorting(row, min(k, 9)) for row in rows]
    assert torch.equal(torch.zeros_like(scores, dtype=torch.bool).scatter_(1, index, True), topk_mask(scores, k))


def test_equals_torch_where_nothing_ties():
    scores = torch.randn(3, 5, 400, generator=torch.Generator().manual_seed(0))
    expected = scores.topk(37, dim=-1).indices.sort(-1).values
    assert torch.equal(topk_lower_index(scores, 37), expected)


def test_a_row_does_not_depend_on_its_batch():
    scores = torch.randint(0, 5, (64, 200), generator=torch.Generator().manual_seed(0)).float()
    whole = topk_lower_index(scores, 50)
    for i in (0, 13, 63):
        assert torch.equal(topk_lower_index(scores[i], 50), whole[i])


def test_padding_with_minus_infinity_does_not_change_the_choice():
    """A decode cache is wider than the sequence: entries past its end must not matter."""
    scores = torch.randint(0, 4, (6, 40), generator=torch.Generator().manual_seed(1)).float()
    padded = torch.nn.functional.pad(scores, (0, 25), value=float("-inf"))
    assert torch.equal(topk_lower_index(padded, 17), topk_lower_index(scores, 17))
    with pytest.raises(ValueError, match="positive"):
        topk_mask(scores, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size, k", [(768, 64), (1000, 3), (2048, 256), (3001, 64)])
def test_long_rows_where_a_first_cut_leaves_few_candidates(size, k, dtype):
    """Rows of every kind in one matrix: distinct, tied around the k-th value, all equal, mostly -inf, the best at either end."""
    g = torch.Generator().manual_seed(size)
    rows = [
        torch.randn(size, generator=g),
        torch.randn(size, generator=g).relu(),
        torch.randint(0, 3, (size,), generator=g).float(),
        torch.zeros(size),
        torch.full((size,), float("-inf")).index_fill_(0, torch.randperm(size, generator=g)[: k // 2], 1.0),
        torch.arange(size).float(),
        -torch.arange(size).float(),
        -torch.randn(size, generator=g).relu(),  # the best are zeros of both signs
    ]
    scores = torch.stack(rows).to(dtype)
    expected = [by_sorting(row, k) for row in scores.tolist()]
    assert topk_lower_index(scores, k).tolist() == expected
    mask = topk_mask(scores.view(2, 4, size), k)
    assert [row.nonzero().flatten().tolist() for row in mask.view(8, size)] == expected

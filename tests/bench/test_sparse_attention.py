"""Sparse attention's promises on one thread: memory linear in the length, time that follows the arithmetic: `make bench`."""

import pytest
import torch

from tests.bench.sparse_attention import SHAPES, memory, times


@pytest.mark.bench
@pytest.mark.parametrize("backward", [False, True])
def test_memory_is_linear_in_the_length(backward):
    torch.set_num_threads(1)
    found = memory(SHAPES["tiny"], backward=backward)
    assert found["exponent"] <= 1.15, found
    assert found["extra"][16384] < 16384**2 * 4, "less than one head's [S,S] in fp32"


@pytest.mark.bench
def test_sparse_overtakes_dense_attention():
    torch.set_num_threads(1)
    short, long = times(SHAPES["tiny"], (2048, 8192), topks=(256,))
    assert long["absorbed/sparse256"] > 1.5 and long["expanded/sparse256"] > 1
    assert long["expanded/sparse256"] > 1.3 * short["expanded/sparse256"], "the advantage grows with the length"

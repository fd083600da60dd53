"""The chunked loss against the plain one: at most a tenth of its extra memory, at most 0.8 of its time, the right value."""

import pytest

from tests.bench import chunked_loss


@pytest.mark.bench
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunked_loss(dtype):
    table = chunked_loss.main(["--dtype", dtype])
    plain, chunked = table["plain"], table["chunked"]
    assert abs(chunked["loss"] - plain["loss"]) < 1e-3 * plain["loss"]
    assert chunked["megabytes"] <= chunked_loss.MAX_MEMORY * plain["megabytes"]
    assert chunked["seconds"] <= chunked_loss.MAX_TIME * plain["seconds"]

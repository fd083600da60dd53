"""Schedules at their corners, and across stage borders."""

import pytest

from tasks.schedules import BatchSize, LearningRate


def test_cosine_with_warmup():
    lr = LearningRate("cosine", total_tokens=1000, warmup_tokens=100, end=0.2)
    assert lr.factor(0) == 0 and lr.factor(50) == pytest.approx(0.5)
    assert lr.factor(100) == 1 and lr.factor(550) == pytest.approx(0.6)
    assert lr.factor(1000) == pytest.approx(0.2) and lr.factor(5000) == pytest.approx(0.2)


def test_linear_and_constant():
    assert LearningRate("linear", 100, start=1.0, end=0.25).factor(50) == pytest.approx(0.625)
    assert LearningRate("constant", 100, start=0.5).factor(99) == 0.5


def test_one_curve_over_two_stages():
    whole = LearningRate("cosine", total_tokens=27, warmup_tokens=2)
    second = LearningRate("cosine", total_tokens=27, warmup_tokens=2, offset_tokens=18)
    assert [second.factor(t) for t in range(9)] == [whole.factor(18 + t) for t in range(9)]


def test_errors():
    with pytest.raises(ValueError, match="triangle"):
        LearningRate("triangle", 10)
    with pytest.raises(ValueError, match="warm-up of 20"):
        LearningRate("linear", 10, warmup_tokens=20)
    with pytest.raises(ValueError, match="less than one step"):
        BatchSize(seq_len=256, rows=8, tokens=100)
    with pytest.raises(ValueError, match="multiples of 3"):
        BatchSize(seq_len=2, rows=8, tokens=100, multiple=3)


def test_constant_batch():
    batch = BatchSize(seq_len=256, rows=8, tokens=600_000)
    assert batch.steps == 293 and batch.rows_at(292) == 8 and batch.first_row(10) == 80
    assert batch.tokens_before(3) == 3 * 2048


def test_batch_warm_up():
    """The paper's 16M -> 64M tokens over the first 500B, at a scale of one to a million."""
    batch = BatchSize(seq_len=1, rows=64, start_rows=16, ramp_tokens=500_00, tokens=100_000, multiple=4)
    sizes = [batch.rows_at(s) for s in range(batch.steps)]
    assert sizes[0] == 16 and sizes[-1] == 64 and sizes == sorted(sizes) and all(s % 4 == 0 for s in sizes)
    assert [batch.first_row(s) for s in range(batch.steps)] == [sum(sizes[:s]) for s in range(batch.steps)]
    assert 0 <= sum(sizes) - 100_000 < 64
    middle = next(s for s in range(batch.steps) if batch.tokens_before(s) >= 25_000)
    assert abs(batch.rows_at(middle) - 40) <= 4
    later = BatchSize(seq_len=1, rows=64, start_rows=16, ramp_tokens=500_00, tokens=10_000, offset_tokens=60_000)
    assert later.rows_at(0) == 64

"""Schedules at their corners, and across stage borders."""

import pytest

from tasks.params import compose
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


def test_the_full_scale_profile_follows_the_papers_schedules():
    """Notes C.4 and A.2, in absolute numbers: rates over both phases and the mid-training contexts, batches, router bias, MTP."""
    params = compose("glm5")
    peak, curves = {}, {}
    for group in ("pretrain", "midtrain"):
        for name, stage in params[group].items():
            if not isinstance(stage, dict) or "schedule" not in stage:
                continue
            s = stage["schedule"]
            curve = LearningRate(
                s["kind"], s["total_tokens"], s.get("warmup_tokens", 0), 1.0, s["end"], s["offset_tokens"]
            )
            curves[name], peak[name] = curve, stage["optimizer"]["lr_matrix"]
            assert stage["optimizer"].get("weight_decay", 0.1) == 0.1 and stage["loop"].get("grad_clip", 1.0) == 1.0
    rate = lambda name, tokens: peak[name] * curves[name].factor(int(tokens))  # noqa: E731
    general, reasoning = params["pretrain"]["general"], params["pretrain"]["reasoning"]
    assert rate("general", 0) == 0 and rate("general", general["schedule"]["warmup_tokens"]) == pytest.approx(2e-4)
    assert rate("general", general["tokens"]) == pytest.approx(rate("reasoning", 0)), "one cosine over both phases"
    assert rate("reasoning", reasoning["tokens"]) == pytest.approx(4e-5) == pytest.approx(rate("s1", 0))
    for one, two in (("s1", "s2"), ("s2", "s3")):
        assert rate(one, params["midtrain"][one]["tokens"]) == pytest.approx(rate(two, 0))
    assert rate("s3", params["midtrain"]["s3"]["tokens"]) == pytest.approx(1e-5)

    keys = ("seq_len", "rows", "tokens", "start_rows", "ramp_tokens")
    batch = BatchSize(*(general[k] for k in keys[:3]), **{k: general[k] for k in keys[3:]})
    at = lambda tokens: next(s for s in range(batch.steps) if batch.tokens_before(s) >= tokens)  # noqa: E731
    assert batch.rows_at(0) * 4096 == 2**24 and batch.rows_at(at(5e11)) * 4096 == 2**26, "16M to 64M over 500B tokens"
    assert batch.rows_at(at(2.5e11)) * 4096 == pytest.approx(2.5 * 2**24, rel=1e-3)
    sizes = [params["midtrain"][s]["rows"] * params["midtrain"][s]["seq_len"] for s in ("s1", "s2", "s3")]
    assert sizes == pytest.approx([2**26] * 3, rel=0.005)
    assert [params["midtrain"][s]["seq_len"] for s in ("s1", "s2", "s3")] == [32768, 131072, 202752]

    assert general["loop"]["router_bias_rate"] == 1e-3 and general["loop"]["router_bias_tokens"] == 15e12
    assert reasoning["loop"]["router_bias_rate"] == 0 and general["balance_coef"] == reasoning["balance_coef"] == 1e-4
    assert (general["mtp"]["weight"], general["mtp"]["late_weight"], general["mtp"]["late_tokens"]) == (0.3, 0.1, 15e12)
    warm, adapt = params["dsa_warmup"], params["dsa_adapt"]
    assert warm["rows"] * warm["seq_len"] * 1000 == warm["tokens"] and warm["optimizer"]["lr_indexer"] == 5e-3
    assert warm["schedule"]["end"] * 5e-3 == pytest.approx(2e-4)
    assert (
        adapt["tokens"] == 20e9 and adapt["schedule"]["kind"] == "constant" and adapt["optimizer"]["lr_matrix"] == 1e-5
    )

"""Held-out loss against a plain computation; the indexer's recall at its limits."""

import math

import pytest
import torch
import torch.nn.functional as F

from tasks.heldout import flat_heldout, heldout_loss, indexer_recall, max_attention_logits
from tests.tasks.lm_case import micro_model, random_ids, write_tokens


def test_loss_and_bits_per_byte(tmp_path):
    tokens, model = write_tokens(tmp_path), micro_model()
    found = heldout_loss(model, tokens, seq_len=32, windows=4, rows_per_forward=3)
    assert set(found) == {"code", "web", "all"}
    shard = tokens.shard("code", "val")
    assert len(shard.tokens) > 33
    nats = count = 0
    available = (len(shard.tokens) - 1) // 32
    for i in range(min(4, available)):
        ids = torch.as_tensor(shard.window(i * available // min(4, available) * 32, 33))[None]
        with torch.no_grad():
            logits = model.logits(model(ids[:, :-1], attention="dense").hidden_bsh)
        nats += float(F.cross_entropy(logits[0], ids[0, 1:], reduction="sum"))
        count += 32
    assert found["code"]["tokens"] == count and found["code"]["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert found["code"]["bits_per_byte"] == pytest.approx(nats / math.log(2) / (2 * count), rel=1e-5)
    assert found["all"]["tokens"] == found["code"]["tokens"] + found["web"]["tokens"]
    assert flat_heldout(found)["val/all/loss"] == found["all"]["loss"]


def test_recall_is_between_nothing_and_the_oracle():
    model = micro_model()
    with torch.no_grad():  # sharper attention, so that keys differ
        for block in model.blocks:
            block.self_attn.q_b_proj.weight.mul_(40)
    layers = indexer_recall(model, random_ids(2, 64), [4, 8, 64 - 1], rows=20)
    assert len(layers) == 2
    for layer in layers:
        for k in ("4", "8"):
            assert 0 < layer[k]["indexer"] <= layer[k]["oracle"] + 1e-6 <= 1 + 2e-6
            assert layer[k]["recent"] <= layer[k]["oracle"] + 1e-6
        assert layer["8"]["oracle"] > layer["4"]["oracle"]
        # Row 63 is the only one with more than 63 keys; it loses at most its weakest key.
        assert layer["63"]["oracle"] > 0.98


def test_recall_of_a_perfect_indexer_is_the_oracles(monkeypatch):
    """Scores that rank as the attention does must give ratio one: the target itself, fed back as scores."""
    import tasks.heldout as heldout

    model, masses = micro_model(), []
    original = heldout.attention_mass
    monkeypatch.setattr(heldout, "attention_mass", lambda *a: masses.append(original(*a)) or masses[-1].clone())
    for block in model.blocks:
        block.self_attn.indexer.scores = lambda *a: masses[-1].clone()
    for layer in indexer_recall(model, random_ids(1, 48), [8], rows=10):
        assert layer["8"]["ratio"] == pytest.approx(1, abs=1e-5)


def test_recall_needs_long_sequences():
    with pytest.raises(ValueError, match="recall at 64 needs sequences longer than 32"):
        indexer_recall(micro_model(), random_ids(1, 32), [64])


def test_largest_attention_logit_follows_the_queries():
    model, ids = micro_model(), random_ids(2, 24)
    before = max_attention_logits(model, ids)
    with torch.no_grad():
        for block in model.blocks[1:]:
            block.self_attn.q_b_proj.weight.mul_(10)
    after = max_attention_logits(model, ids)
    assert len(before) == 2 and before[0] > 0
    assert after == pytest.approx([before[0], 10 * before[1]], rel=1e-4)

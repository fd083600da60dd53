"""Held-out loss, needles and the evaluate stage, against cases computed by hand and a model that can only copy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model.checkpoint import save_checkpoint
from model.config import ModelConfig
from model.transformer import GlmMoeDsa
from tasks import evaluate, needle
from tasks.needle import build_cases, score_cases
from tasks.quant_artifact import write_artifact
from tasks.stage import run_stage_for_test
from tasks.tokens import TokenSet, TokenWriter, token_byte_lengths
from tests.tasks.tiny_tokenizer import build

VOCAB = 512


@pytest.fixture(scope="module")
def tokenizer():
    return build(vocab_size=VOCAB)


@pytest.fixture(scope="module")
def pack(tmp_path_factory, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    rng = np.random.default_rng(0)
    words = "river stone garden letter yellow window promise market".split()
    lengths = np.zeros(VOCAB, np.int32)
    lengths[: tokenizer.get_vocab_size()] = token_byte_lengths(tokenizer)
    with TokenWriter(folder, VOCAB, 0, lengths) as writer:
        for domain in ("code", "web"):
            for _ in range(8):
                text = " ".join(rng.choice(words, 120))
                writer.add("val", domain, tokenizer.encode(text).ids, len(text))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer) -> Path:
    root = tmp_path_factory.mktemp("checkpoint")
    tokenizer.save(str(root / "tokenizer.json"))
    config = ModelConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        first_k_dense_replace=1, num_attention_heads=2, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=16, index_n_heads=2, index_head_dim=16, index_topk=32, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, max_position_embeddings=1024, num_nextn_predict_layers=1,
    )  # fmt: skip
    save_checkpoint(GlmMoeDsa(config).init_weights(3), root / "model", root)
    return root / "model"


class Copier:
    """Predicts what followed the last earlier occurrence of the last `order` tokens: retrieval and nothing else.

    `hidden` is the one-hot prediction, `lm_head` the identity.
    """

    def __init__(self, order: int = 4):
        self.order = order
        self.lm_head = SimpleNamespace(weight=torch.eye(VOCAB))

    def __call__(self, ids_bs):
        hidden = torch.zeros(*ids_bs.shape, VOCAB)
        for b, row in enumerate(ids_bs.tolist()):
            seen = {}
            for t in range(len(row)):
                key = tuple(row[max(0, t + 1 - self.order) : t + 1])
                if key in seen:
                    hidden[b, t, seen[key]] = 10.0
                if t + 1 < len(row):
                    seen[key] = row[t + 1]
        return SimpleNamespace(hidden_bsh=hidden)

    def logits(self, hidden):
        return hidden


def test_cases_have_their_length_depth_and_answer(pack, tokenizer):
    tokens = TokenSet(pack)
    cases = build_cases(tokens, tokenizer, [128, 256], [0.0, 0.5, 1.0], 2, seed=1, distractors=2)
    assert len(cases) == 12
    assert cases == build_cases(tokens, tokenizer, [128, 256], [0.0, 0.5, 1.0], 2, seed=1, distractors=2)
    assert cases != build_cases(tokens, tokenizer, [128, 256], [0.0, 0.5, 1.0], 2, seed=2, distractors=2)
    for case in cases:
        assert len(case.ids) == len(case.control_ids) == case.length
        text, control = (tokenizer.decode(list(i)) for i in (case.ids, case.control_ids))
        answer = tokenizer.decode(list(case.answer)).strip(" .")
        assert len(answer) == 4 and answer.isdigit()
        assert text.count(answer) == 2 and control.count(answer) == 1
        assert text.count("The secret number of") == 4 and control.count("The secret number of") == 3
        place = text.index(answer) / text.rindex("The secret number of")
        assert abs(place - case.depth) < 0.35
    with pytest.raises(ValueError, match="leaves no text"):
        build_cases(tokens, tokenizer, [30], [0.5], 1, seed=0)


def test_a_copying_model_finds_every_needle_and_no_control(pack, tokenizer):
    cases = build_cases(TokenSet(pack), tokenizer, [128, 200], [0.1, 0.9], 3, seed=0)
    rows = score_cases(Copier(), cases, batch_tokens=256)
    for length in ("128", "200"):
        assert rows[length]["found"] == 1.0 and rows[length]["found_at"] == {"0.1": 1.0, "0.9": 1.0}
        assert rows[length]["logprob"] > -0.1
        assert rows[length]["control_logprob"] < -2.0
    blind = score_cases(Copier(order=10**6), cases)
    assert blind["128"]["found"] == 0.0


CONFIG = {
    "windows": 2,
    "window": 48,
    "batch": 2,
    "needle_lengths": [96, 128, 4096],
    "needle_per_cell": 1,
    "families": {"addition": None},
    "problems": 2,
}


def test_stage_measures_a_checkpoint_the_same_way_twice(pack, checkpoint, tmp_path):
    results = []
    for run in ("a", "b"):
        run_stage_for_test(
            evaluate,
            CONFIG,
            name="evaluate@sft",
            deps={"data/pack/pretrain": pack, "data/sft": checkpoint, "tasks/needle.py": Path(needle.__file__)},
            outs=["data/evaluate/sft"],
            tmp=tmp_path / run,
        )
        results.append((tmp_path / run / "data/evaluate/sft/results.json").read_bytes())
    assert results[0] == results[1]
    result = json.loads(results[0])
    assert result["text"]["all"]["loss"] == pytest.approx(math.log(VOCAB), abs=0.2)  # an untrained model
    assert set(result["needle"]) == {"96", "128"}  # 4096 is beyond the model's positions
    assert set(result["tasks"]["addition"]) == {"sampled", "greedy"}
    assert json.loads((tmp_path / "a/metrics/evaluate_sft.json").read_text()) == result


def test_base_solves_no_tasks_and_quantized_reads_the_artifact(pack, checkpoint, tmp_path):
    run_stage_for_test(
        evaluate,
        CONFIG,
        name="evaluate@base",
        deps={"data/pack/pretrain": pack, "data/pretrain/reasoning": checkpoint},
        outs=["data/evaluate/base"],
        tmp=tmp_path,
    )
    base = json.loads((tmp_path / "data/evaluate/base/results.json").read_text())
    assert "tasks" not in base
    quantized = tmp_path / "quantized"
    write_artifact(checkpoint, quantized / "canonical", quantized / "dequantized", None, rule="ssz", ssz_steps=10)
    run_stage_for_test(
        evaluate,
        CONFIG | {"task_variants": []},
        name="evaluate@quantized",
        deps={"data/pack/pretrain": pack, "data/quantize": quantized},
        outs=["data/evaluate/quantized"],
        tmp=tmp_path,
    )
    got = json.loads((tmp_path / "data/evaluate/quantized/results.json").read_text())
    assert got["text"]["all"]["loss"] != base["text"]["all"]["loss"]
    assert got["text"]["all"]["loss"] == pytest.approx(base["text"]["all"]["loss"], abs=0.05)
    with pytest.raises(ValueError, match="needs one checkpoint"):
        run_stage_for_test(
            evaluate,
            CONFIG,
            name="evaluate@base",
            deps={"data/pack/pretrain": pack},
            outs=["data/evaluate/base"],
            tmp=tmp_path / "none",
        )

"""DSA from dense attention to RL: who learns what in each stage, and that leaving at any point changes nothing.

dense -> warm-up (the indexer alone) -> sparse adaptation (disjoint losses) -> RL (the indexer frozen). The slow test runs
the three stages in processes that exit at both boundaries and are killed in the middle of each stage, and compares every
step with one process that kept the model in memory: loss, gradients, optimizer state, counters, weights, data order.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from model.muon import build_optimizer
from tasks.objectives import IndexerWarmup, LanguageModeling
from tasks.rl import PolicyConfig, policy_logprobs
from tasks.settings import OptimizerSettings
from tasks.tokens import TokenWriter, token_byte_lengths
from tests.flows.toy import REPO
from tests.tasks.dsa_child import STAGES
from tests.tasks.lm_case import micro_model, random_ids
from tests.tasks.post_training import save_random_checkpoint

ORDER = list(STAGES)


def data(size=40, rows=2):
    ids = random_ids(rows, size + 1)
    return {"input_ids_bs": ids[:, :-1], "targets_bs": ids[:, 1:]}


def is_indexer(name):
    return ".indexer." in name


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_warm_up_owns_the_indexer_and_nothing_else():
    model = micro_model()
    optimizer = build_optimizer(
        model, OptimizerSettings(lr_matrix=1e-2, indexer_optimizer="adamw").to_config("indexer")
    )
    before = {n: v.clone() for n, v in model.state_dict().items()}
    for step in range(3):
        loss, _ = IndexerWarmup(16)(model, data(), step)
        loss.backward()
        assert all(is_indexer(n) for n in gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {n for n in before if is_indexer(n)}
    assert all(is_indexer(n) for n in optimizer.state_tensors()), "no state for what is frozen"
    assert {n.rsplit(".", 1)[0] for n in optimizer.state_tensors()} == {n for n in before if is_indexer(n)}
    moved = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    assert moved == {n for n in before if is_indexer(n)}


def test_warm_up_sends_the_backbone_no_gradient_even_when_it_could_take_one():
    """The freeze is not what keeps the backbone still: with every parameter open, the loss does not reach it."""
    model = micro_model()
    assert all(p.requires_grad for p in model.parameters())
    loss, _ = IndexerWarmup("all")(model, data(), 0)
    loss.backward()
    found = gradients(model)
    assert found and all(is_indexer(n) for n in found)
    assert {n for n, g in found.items() if g.abs().max() > 0} >= {
        n for n in found if "wq_b" in n or "weights_proj" in n
    }


@pytest.mark.parametrize("depth", [0, 2])
def test_adaptation_splits_the_gradients_exactly(depth):
    """d L_LM / d indexer = 0 and d L_I / d backbone = 0, and the joint gradient is the two side by side, to the bit."""

    def grads(index_rows, index_coef, only_index=False):
        model = micro_model()
        goal = LanguageModeling(attention="sparse", mtp_depth=depth, index_rows=index_rows, index_coef=index_coef)
        if only_index:
            out = model(data()["input_ids_bs"], attention="sparse", index_loss_rows=index_rows, mtp_depth=depth)
            out.index_loss.backward()
        else:
            goal(model, data(), 0)[0].backward()
        return gradients(model)

    both, language, index = grads("all", 1.0), grads(None, 1.0), grads("all", 1.0, only_index=True)
    assert not any(is_indexer(n) for n in language), "the language-model loss does not reach the indexer"
    assert index and all(is_indexer(n) for n in index), "the indexer's loss does not reach the backbone"
    assert both.keys() == language.keys() | index.keys()
    for name, grad in both.items():
        assert torch.equal(grad, (index if is_indexer(name) else language)[name]), name
    halved = grads("all", 0.5)
    assert all(torch.equal(g, both[n]) for n, g in halved.items() if not is_indexer(n)), (
        "the coefficient is the indexer's"
    )


def test_rl_leaves_the_indexer_alone():
    model = micro_model()
    optimizer = PolicyConfig().optimizer(model)
    ids = data()["input_ids_bs"]
    logp = policy_logprobs(model, ids, torch.ones(ids.shape[0], ids.shape[1] - 1))
    (-logp.mean()).backward()
    assert gradients(model) and not any(is_indexer(n) for n in gradients(model))
    optimizer.set_lr_scale(1.0)
    optimizer.step()
    assert optimizer.state_tensors() and not any(is_indexer(n) for n in optimizer.state_tensors())


# ---- exits and kills


def child(root, records, *args):
    command = [sys.executable, "-m", "tests.tasks.dsa_child", str(root), str(records), *args]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def prepared(root):
    """A mid-trained checkpoint and packed text of its tokenizer."""
    start = save_random_checkpoint(root / "data/midtrain/s3")
    lengths = np.asarray(token_byte_lengths(Tokenizer.from_file(str(start / "tokenizer.json"))), np.int32)
    lengths = np.concatenate([lengths, np.zeros(512 - len(lengths), np.int32)])
    rng = np.random.default_rng(0)
    with TokenWriter(root / "data/pack/midtrain", 512, 0, lengths) as writer:
        for i in range(60):
            ids = np.tile(rng.integers(20, 60, 5), 40)[: int(rng.integers(40, 190))]
            writer.add("val" if i % 6 == 0 else "train", ("code", "web")[i // 2 % 2], ids.tolist(), 2 * len(ids))
    return root


def steps(path):
    """(stage, step) -> record; a step that was done again after a kill must have been done the same way."""
    found = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        key = (row["stage"], row["step"])
        assert found.setdefault(key, row) == row, f"{key} came out differently the second time"
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_leaving_and_coming_back_changes_nothing(tmp_path):
    whole, cut = prepared(tmp_path / "whole"), prepared(tmp_path / "cut")
    code, said = child(whole, tmp_path / "whole.jsonl", "--keep-in-memory", *ORDER)
    assert code == 0, said
    reference = steps(tmp_path / "whole.jsonl")
    lasts = {stage: max(n for s, n in reference if s == stage) for stage in ORDER}
    for stage in ORDER:
        die = f"{stage}:{3}"
        code, said = child(cut, tmp_path / "cut.jsonl", "--die", die, stage)
        assert code == -9, said
        assert not (cut / f"data/{stage}").exists(), "a killed stage has no output"
        code, said = child(cut, tmp_path / "cut.jsonl", stage)
        assert code == 0 and "resumed at step 2" in said, said
    found = steps(tmp_path / "cut.jsonl")
    assert found.keys() == reference.keys() and min(lasts.values()) >= 3
    for key, row in reference.items():
        assert found[key] == row, key
    assert any(row["gradients"] for (stage, _), row in reference.items() if stage == "reasoning_rl")
    for stage in ORDER:
        for file in ("model.safetensors", "config.json"):
            assert (whole / f"data/{stage}/{file}").read_bytes() == (cut / f"data/{stage}/{file}").read_bytes()

    # who moved where
    path = {s: load_file(cut / f"data/{s}/model.safetensors") for s in ("midtrain/s3", *ORDER)}
    moved = lambda a, b: {n for n in path[a] if not torch.equal(path[a][n], path[b][n])}  # noqa: E731
    assert moved("midtrain/s3", "dsa_warmup") == {n for n in path["dsa_warmup"] if is_indexer(n)}
    assert {n for n in moved("dsa_warmup", "dsa_adapt") if is_indexer(n)} and any(
        not is_indexer(n) for n in moved("dsa_warmup", "dsa_adapt")
    )
    trained = moved("dsa_adapt", "reasoning_rl")
    assert trained and not any(is_indexer(n) or "e_score" in n for n in trained)
    for (stage, _), row in reference.items():
        if stage == "dsa_warmup":
            assert all(map(is_indexer, row["gradients"])) and all(map(is_indexer, row["trained"]))
        elif stage == "reasoning_rl":
            assert not any(map(is_indexer, row["gradients"]))

    audit = json.loads((cut / "metrics/dsa_warmup.json").read_text())["audit"]
    indexers = sum(is_indexer(n) for n in path["dsa_warmup"])
    assert audit == {"trained_tensors": indexers, "frozen_tensors_changed": 0}
    for stage in ("dsa_warmup", "dsa_adapt"):
        metrics = json.loads((cut / f"metrics/{stage}.json").read_text())
        assert set(metrics["recall"]) == set(metrics["recall_before"]) == {"layer_0", "layer_1"}
        assert all(0 < layer["16"]["ratio"] <= 1 for layer in metrics["recall"].values())

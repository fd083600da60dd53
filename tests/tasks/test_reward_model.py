"""Corrupted responses, the reward head's files, and the small parts of agentic RL and distillation."""

import random

import numpy as np
import pytest
import torch

from model.checkpoint import load_checkpoint
from model.reward import HEAD_FILE, RewardModel
from tasks import agentic_rl, distill
from tasks.problems import build, build_all, samples
from tasks.reward_model import CORRUPTIONS, corrupt, objective, pair_batch, preference_pair
from tasks.rl import pad
from tasks.rl_eval import load_tokenizer
from tasks.rollouts import Sample
from tasks.sft_set import CHAT
from tests.tasks.post_training import RUN, save_random_checkpoint


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_random_checkpoint(tmp_path_factory.mktemp("start"))


def test_corruptions_break_the_rules_and_never_return_the_text():
    for seed, problem in enumerate(samples(build("rules"), "train", 0, 60)):
        text = problem.solution[-1]["content"]
        broken = corrupt(text, random.Random(seed))
        assert broken != text and broken == corrupt(text, random.Random(seed))
        assert problem.verify(broken) <= problem.verify(text) == 1.0
        chosen, rejected = preference_pair(problem, random.Random(seed))
        assert chosen[:-1] == rejected[:-1] and chosen[-1]["content"] == text != rejected[-1]["content"]
    assert corrupt("a", random.Random(0)) != "a"
    assert CORRUPTIONS["repeat"](["x", "y"], random.Random(0)) in (["x", "x", "y"], ["x", "y", "y"])


def test_reward_model_reads_the_last_token_and_survives_the_disk(start, tmp_path):
    model = RewardModel(load_checkpoint(start))
    torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(0))
    rows = [[3, 4, 5], [3, 4, 5, 6, 7]]
    together = model(pad(rows, torch.long), torch.tensor([3, 5]))
    alone = torch.cat([model(torch.tensor([row]), torch.tensor([len(row)])) for row in rows])
    assert torch.allclose(together, alone, atol=1e-6)
    model.save(tmp_path / "rm", tokenizer_dir=start)
    again = RewardModel.load(tmp_path / "rm")
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
    assert torch.allclose(again(torch.tensor([rows[0]]), torch.tensor([3])), alone[:1], atol=1e-6)
    assert (alone[0] - alone[1]).abs() > 1e-4
    assert (tmp_path / "rm/tokenizer.json").is_file() and (tmp_path / "rm" / HEAD_FILE).is_file()
    with pytest.raises(ValueError, match="not a reward model"):
        RewardModel.load(start)


def test_pair_batch_and_objective(start):
    tokenizer, families = load_tokenizer(start), build_all(["rules"])
    batch = pair_batch(tokenizer, families, "train", 0, 4, seed=1)
    assert batch["input_ids_bs"].shape[0] == 8 and len(batch["lengths_b"]) == 8
    loss, logs = objective(RewardModel(load_checkpoint(start)), batch, 0)
    assert float(loss) == pytest.approx(np.log(2)) and logs["accuracy"] == 0.0  # a head of zeros orders nothing


def _sample(versions):
    return Sample("f", "k", [1, 2], 1, [0, 1], [0.0, -0.5], versions, "completed", "", 1, 1.0)


def test_staleness_bound_and_resume_form():
    groups = [[_sample([3]), _sample([1, 3])], [_sample([2]), _sample([0])]]
    groups, stale = agentic_rl.drop_stale(groups, version=4, tau=2)
    assert stale == 2 and [[s.status for s in g] for g in groups] == [["completed", "failed"], ["completed", "failed"]]
    assert agentic_rl.unpack(agentic_rl.pack(groups)) == groups


def test_distillation_prompts_and_loss():
    families = build_all(["addition", "rules"])
    chats = [distill.ChatPrompt(str(i), (1, 2, i)) for i in range(2)]
    teachers = {"sft": [CHAT], "reasoning_rl": ["addition"], "general_rl": ["rules"]}
    base = {**RUN, "families": {"addition": {}, "rules": {}}, "policy": {}}
    config = distill.Config.model_validate({**base, "teachers": teachers, "prompts": 6})
    first, second = (distill.step_prompts(config, families, chats, step) for step in (0, 1))
    assert [(t, p.family) for t, p in first[:3]] == [
        ("sft", CHAT),
        ("reasoning_rl", "addition"),
        ("general_rl", "rules"),
    ]
    assert not {p.key for _, p in first if p.family == "addition"} & {
        p.key for _, p in second if p.family == "addition"
    }
    with pytest.raises(ValueError, match="products"):
        distill.Config.model_validate({**base, "teachers": {"sft": ["products"]}})

    student = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss = distill.Distillation(config, denominator=1)
    value, _ = loss(student, student.detach(), torch.tensor([[-0.5, -9.0]]), torch.ones(1, 2))
    value.backward()
    # advantages 0.5 and -5 (clamped from -7); gradient of the sequence mean is -A / 2
    assert loss.advantage_sum == pytest.approx(-4.5)
    assert student.grad.tolist() == [[-0.25, 2.5]]

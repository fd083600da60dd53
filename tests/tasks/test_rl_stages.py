"""The RL stages whole, on a random policy with a reward that text decides: they learn, resume exactly, and chain."""

import json

import pytest

from tasks import agentic_rl, distill, general_rl, reasoning_rl, reward_model, rl_run, sft_data
from tasks.problems import Problem
from tasks.stage import run_stage_for_test
from tests.tasks.post_training import RUN, LocalEngine, save_random_checkpoint

OPTIM = {"lr_matrix": 5e-3, "weight_decay": 0.0}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_random_checkpoint(tmp_path_factory.mktemp("start"))


@pytest.fixture(autouse=True)
def reward_by_length(monkeypatch):
    # a random policy solves nothing; what it gets paid for here is an even number of characters
    monkeypatch.setattr(Problem, "verify", lambda self, text: float(len(text) % 2 == 0))


def run(module, start, tmp, deps, families, **options):
    name = module.__name__.rpartition(".")[2]
    config = {**RUN, "families": families, **options}
    outs = [f"data/{name}"]
    stage = run_stage_for_test(module, config, {"threads": 1}, {d: start for d in deps}, outs, tmp=tmp, plots=())
    metrics = json.loads((tmp / f"metrics/{name}.json").read_text())
    return stage, metrics, (tmp / outs[0] / "model.safetensors").read_bytes()


CASES = {
    "reasoning": (reasoning_rl, ["data/sft"], {"addition": {}, "quantities": {}}, {}),
    "agentic": (agentic_rl, ["data/reasoning_rl"], {"calculator": {}}, {"lag": 1, "updates_per_sync": 2}),
}


@pytest.mark.parametrize("engine", ["local", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_interrupted_run_ends_with_the_same_weights(case, engine, start, tmp_path, monkeypatch):
    if engine == "local":
        monkeypatch.setattr(rl_run, "EngineProcess", LocalEngine)
    module, deps, families, options = CASES[case]
    _, metrics, whole = run(module, start, tmp_path / "whole", deps, families, **options)
    assert whole != (start / "model.safetensors").read_bytes()
    assert set(metrics["accuracy_before"]) == set(families) and "own_gain" in metrics

    end_step, calls = rl_run.PolicyRun.end_step, []

    def dies(self, step, logs):
        if step == 3 and not calls:
            calls.append(step)
            raise KeyboardInterrupt
        end_step(self, step, logs)

    monkeypatch.setattr(rl_run.PolicyRun, "end_step", dies)
    with pytest.raises(KeyboardInterrupt):
        run(module, start, tmp_path / "cut", deps, families, **options)
    _, again, resumed = run(module, start, tmp_path / "cut", deps, families, **options)
    assert resumed == whole and again == metrics


@pytest.mark.slow
def test_general_rl_distill_and_the_reward_model_chain(start, tmp_path):
    run_stage_for_test(
        reward_model,
        {"families": {"rules": {}}, "steps": 6, "pairs": 8, "heldout_pairs": 16, "optimizer": OPTIM},
        {"threads": 1},
        {"data/sft": start},
        ["data/reward_model"],
        tmp=tmp_path,
    )
    judged = json.loads((tmp_path / "metrics/reward_model.json").read_text())
    assert 0 <= judged["heldout_accuracy"] <= 1 and (tmp_path / "data/reward_model/value_head.safetensors").is_file()
    deps = {"data/agentic_rl": start, "data/reward_model": tmp_path / "data/reward_model"}
    config = {**RUN, "families": {"rules": {}}}
    run_stage_for_test(general_rl, config, {"threads": 1}, deps, ["data/general_rl"], tmp=tmp_path)

    acquired = tmp_path / "acquired/files/chatterbot_corpus/data/english"
    acquired.mkdir(parents=True)
    (acquired / "a.yml").write_text("conversations:\n" + "".join(f"- - hello {i}\n  - hi {i}\n" for i in range(30)))
    run_stage_for_test(
        sft_data,
        {"families": {"addition": {"train": 8, "heldout": 2}}, "chat_pairs": 20},
        None,
        {"data/acquire": tmp_path / "acquired", "data/tokenizer": start},
        ["data/sft_data"],
        tmp=tmp_path,
    )
    deps = {"data/general_rl": tmp_path / "data/general_rl", "data/sft": start, "data/reasoning_rl": start}
    deps["data/sft_data"] = tmp_path / "data/sft_data"
    teachers = {"sft": ["chat"], "reasoning_rl": ["addition"], "general_rl": ["rules"]}
    config = {**RUN, "families": {"addition": {}, "rules": {}}, "teachers": teachers, "group_size": 1, "prompts": 12}
    run_stage_for_test(
        distill, config, {"threads": 1}, deps, ["data/distill"], tmp=tmp_path, plots=("plots/distill.json",)
    )
    points = json.loads((tmp_path / "plots/distill.json").read_text())
    assert len(points) == 4 and all("reverse_kl" in point for point in points)

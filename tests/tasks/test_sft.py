"""SFT data and batches: what is written is what the template renders, and the loss sees exactly the masked-in tokens."""

import json

import numpy as np
import pytest
import torch

from model.checkpoint import load_checkpoint
from tasks import chat, sft, sft_data
from tasks.heldout import heldout_loss
from tasks.problems import build, sample
from tasks.sft_data import conversations
from tasks.sft_set import SftSet
from tasks.stage import run_stage_for_test
from tasks.tokens import TokenSet, TokenWriter
from tests.tasks.lm_case import micro_model
from tests.tasks.post_training import save_random_checkpoint

YAML = "conversations:\n- - Hello\n  - Hi there\n- - Bye\n- - How are you?\n  - Fine\n  - Good\n  - Yes\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("sft")
    start = save_random_checkpoint(tmp / "start")
    folder = tmp / "acquire/files/chatterbot/chatterbot_corpus/data/english"
    folder.mkdir(parents=True)
    (folder / "a.yml").write_text(YAML)
    config = {
        "families": {"addition": {"train": 20, "heldout": 4}, "calculator": {"train": 12, "heldout": 4}},
        "chat_pairs": 10,
        "heldout_problems": 20,
        "rl_problems": 20,
    }
    deps = {"data/acquire": tmp / "acquire", "data/tokenizer": start}
    for run in ("one", "two"):
        run_stage_for_test(sft_data, config, None, deps, ["data/sft_data"], tmp=tmp / run)
    return tmp, start


def test_equal_inputs_give_equal_bytes(made):
    tmp, _ = made
    files = sorted(p for p in (tmp / "one/data/sft_data").rglob("*") if p.is_file())
    assert len(files) >= 10
    for path in files:
        twin = tmp / "two/data/sft_data" / path.relative_to(tmp / "one/data/sft_data")
        assert path.read_bytes() == twin.read_bytes()


def test_samples_are_the_rendered_problems(made):
    from tokenizers import Tokenizer

    tmp, start = made
    tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    data = SftSet(tmp / "one/data/sft_data", "train")
    assert json.loads((tmp / "one/metrics/sft_data.json").read_text())["train"]["samples"] == len(data)
    found = {tuple(ids.tolist()): mask.tolist() for name, ids, mask in (data[i] for i in range(len(data)))}
    for index in range(12):
        problem = sample(build("calculator"), "train", index)
        ids, mask = chat.render_tokens(tokenizer, [*problem.messages, *problem.solution], close=True)
        assert found[tuple(ids)] == mask
    assert {data[i][0] for i in range(len(data))} >= {"addition", "calculator"}


def test_conversations(made, tmp_path):
    tmp, _ = made
    found = list(conversations(tmp / "acquire/files", "**/*.yml", 80))
    assert [turns for _, turns in found] == [["Hello", "Hi there"], ["How are you?", "Fine", "Good", "Yes"]]
    assert [len(turns) for _, turns in conversations(tmp / "acquire/files", "**/*.yml", 10)] == [2]
    (tmp_path / "b.yml").write_text("- 1")
    with pytest.raises(ValueError, match="b.yml: expected a YAML mapping"):
        list(conversations(tmp_path, "*.yml", 80))


def test_batches_cover_an_epoch_once_and_predict_only_trained_tokens(made):
    data = SftSet(made[0] / "one/data/sft_data", "train")
    seen = []
    for step in range(len(data) // 4):
        for batch in sft.sft_batches(data, 4, 200, 7, step):
            inputs, targets = batch["input_ids_bs"], batch["targets_bs"]
            assert inputs.numel() <= 200 or len(inputs) == 1
            for row, want in zip(inputs, targets):
                seen.append(int((want >= 0).sum()))
                inner = (want[:-1] >= 0) & (row[1:] != 0)  # the last target is no input, what follows it is padding
                assert inner.any() and torch.equal(row[1:][inner], want[:-1][inner])
    trained = sorted(int(data[i][2].sum()) for i in range(len(data)))
    assert len(seen) == len(data) // 4 * 4 and set(seen) <= set(trained)
    first, again = (sft.sft_batches(data, 4, 200, 7, 3)[0]["input_ids_bs"] for _ in range(2))
    assert torch.equal(first, again)
    other = sft.sft_batches(data, 4, 200, 8, 3)[0]["input_ids_bs"]
    assert first.shape != other.shape or not torch.equal(first, other)


def test_stage_learns_and_reports(made, tmp_path):
    tmp, start = made
    config = {
        "batch_samples": 8,
        "epochs": 3.0,
        "eval_problems": 2,
        "optimizer": {"lr_matrix": 5e-3, "weight_decay": 0.0},
    }
    deps = {"data/sft_data": tmp / "one/data/sft_data", "data/dsa_adapt": start}
    run_stage_for_test(sft, config, {"threads": 1}, deps, ["data/sft"], tmp=tmp_path, plots=("plots/sft.json",))
    points = json.loads((tmp_path / "plots/sft.json").read_text())
    losses = [point["loss"] for point in points if "loss" in point]
    assert losses[-1] < losses[0] - 0.5
    metrics = json.loads((tmp_path / "metrics/sft.json").read_text())
    assert set(metrics["accuracy"]["greedy"]) == {"addition", "calculator"}
    assert (tmp_path / "data/sft/tokenizer.json").is_file()
    assert np.isfinite(metrics["heldout"]["loss/addition"])


def test_replay_keeps_the_text_it_replays(made, tmp_path):
    """The loss on replayed text ends far below that of a run without replay."""
    tmp, start = made
    rng = np.random.default_rng(0)
    with TokenWriter(tmp_path / "pack", 512, 0, np.full(512, 2, np.int32)) as writer:
        for i in range(24):
            ids = np.tile(rng.integers(20, 40, 4), 12).tolist()
            writer.add("val" if i % 6 == 0 else "train", "web", ids, 2 * len(ids))
    deps = {
        "data/sft_data": tmp / "one/data/sft_data",
        "data/dsa_adapt": start,
        "data/pack/midtrain": tmp_path / "pack",
    }
    losses = {}
    for rows in (0, 2):
        config = {
            "batch_samples": 8,
            "epochs": 8.0,
            "eval_problems": 0,
            "optimizer": {"lr_matrix": 5e-3, "weight_decay": 0.0},
            "replay": {"rows": rows, "seq_len": 32, "every": 2},
        }
        out = tmp_path / str(rows)
        run_stage_for_test(sft, config, {"threads": 1}, deps, ["data/sft"], tmp=out, plots=("plots/sft.json",))
        loss = heldout_loss(load_checkpoint(out / "data/sft"), TokenSet(tmp_path / "pack"), 32, 4, "sparse")
        losses[rows] = loss["web"]["loss"]
    assert losses[2] < losses[0] - 1


def test_planted_leaks_are_left_out_and_named(tmp_path):
    """Held-out problems and passages of an evaluation set inside conversations; everything else goes through."""
    from tasks.problem_gate import question

    start = save_random_checkpoint(tmp_path / "start")
    folder = tmp_path / "acquire/files/chatterbot/chatterbot_corpus/data/english"
    folder.mkdir(parents=True)
    held, trained = (question(sample(build("addition"), split, 3)) for split in ("heldout", "train"))
    passage = "the seventh lantern keeper counted nineteen grey herons before the bridge of glass fell silent"
    (tmp_path / "gold").mkdir()
    (tmp_path / "gold/set.jsonl").write_text(json.dumps({"question": passage}) + "\n")
    turns = [
        ("Hello", "Hi there"),
        (held, "No idea"),
        (f"Please, {held} Thanks", "No"),
        (trained, "Yes"),
        ("Tell me", passage),
    ]
    (folder / "a.yml").write_text(
        "conversations:\n" + "".join(f"- - {json.dumps(a)}\n  - {json.dumps(b)}\n" for a, b in turns)
    )
    config = {"families": {"addition": {"train": 20, "heldout": 4}}, "chat_pairs": 10, "chat_max_chars": 200}
    config |= {"optional_items": ["gold"], "rl_problems": 20}
    deps = {"data/acquire": tmp_path / "acquire", "data/tokenizer": start}
    run_stage_for_test(sft_data, config, None, deps, ["data/sft_data"], tmp=tmp_path)
    leaks = [json.loads(line) for line in (tmp_path / "data/sft_data/leaks.jsonl").read_text().splitlines()]
    found = {leak["text"]: leak["items"] for leak in leaks}
    assert found == {
        f"{held}\nNo idea": ["problems/addition:3"],
        f"Please, {held} Thanks\nNo": ["problems/addition:3"],
        f"Tell me\n{passage}": ["gold/set.jsonl:1"],
    }
    gate = json.loads((tmp_path / "metrics/sft_data.json").read_text())["gate"]
    assert gate["leaks"] == {"chat": 3, "problems": 0, "rl": 0}
    assert gate["searched"]["chat"] == 5 and gate["searched"]["problems"] == 20 and gate["searched"]["rl"] >= 100


def test_held_out_samples_without_a_trained_token_have_no_loss():
    ids = np.arange(10)
    rows = [("silent", ids, np.zeros(10, int)), ("spoken", ids, np.ones(10, int)), ("spoken", ids, np.zeros(10, int))]
    losses = sft.heldout_losses(micro_model(), rows, 64)
    assert losses.keys() == {"loss/spoken"} and 0 < losses["loss/spoken"] < 20


def test_samples_beyond_the_models_context_are_refused(made, tmp_path):
    deps = {"data/sft_data": made[0] / "one/data/sft_data", "data/dsa_adapt": tmp_path / "short"}
    save_random_checkpoint(tmp_path / "short")
    config = json.loads((tmp_path / "short/config.json").read_text()) | {"max_position_embeddings": 16}
    (tmp_path / "short/config.json").write_text(json.dumps(config))
    settings = {"batch_samples": 8, "eval_problems": 2, "optimizer": {"lr_matrix": 5e-3}}
    with pytest.raises(ValueError, match=r"stage sft: the longest sample has \d+ tokens, above .* of 16"):
        run_stage_for_test(sft, settings, None, deps, ["data/sft"], tmp=tmp_path)

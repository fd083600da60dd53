"""Resume checkpoints: damage of every kind is found and the one before used; kills and failures leave a whole one."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tasks import resume
from tasks.resume import ResumeStore, check_checkpoint, read_checkpoint
from tests.flows.toy import REPO
from tests.tasks.test_trainer import STEPS, Killed, make


def files(step):
    generator = torch.Generator().manual_seed(step)
    weights = {"a": torch.randn(40, 30, generator=generator), "half": torch.randn(7, generator=generator).bfloat16()}
    return {"model": weights, "optimizer": {"a.step": torch.tensor(float(step))}}


def store(path, lines=None, **changes):
    path.mkdir(exist_ok=True)
    return ResumeStore(path, **{"keep_last": 2, "say": (lines if lines is not None else []).append} | changes)


def equal(one, two):
    return one.keys() == two.keys() and all(
        one[f].keys() == two[f].keys() and all(torch.equal(v, two[f][k]) for k, v in one[f].items()) for f in one
    )


@pytest.mark.parametrize("background", [False, True])
def test_the_newest_two_are_kept_and_come_back(tmp_path, background):
    one = store(tmp_path, background=background)
    assert one.load() is None
    for step in (4, 8, 12):
        one.save(step, files(step), {"step": step, "tokens": 3.5})
    one.wait()
    assert one.steps() == [8, 12]
    found = one.load()
    assert found.step == 12 and equal(found.files, files(12)) and found.state == {"step": 12, "tokens": 3.5}
    assert one.load(at_most=11).step == 8 and one.load(at_most=7) is None
    one.save(12, files(3), {"step": 12}, best=True)
    assert equal(one.load_best().files, files(3)) and one.steps() == [8, 12]
    one.drop_after(8)
    assert one.steps() == [8]


def damage(folder, kind):
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    if kind == "flipped bit":
        data[len(data) // 2] ^= 4
        weights.write_bytes(data)
    elif kind == "torn":
        weights.write_bytes(data[: len(data) // 2])
    elif kind == "zeroed tail":  # right length, last blocks never reached the disk
        weights.write_bytes(bytes(data[:-64]) + bytes(64))
    elif kind == "missing":
        weights.unlink()
    elif kind == "no manifest":
        (folder / "manifest.json").unlink()
    elif kind == "torn manifest":
        text = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(text[: len(text) // 2])
    elif kind == "edited manifest":
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"]["model.safetensors"]["xxh3_128"] = "0" * 32
        (folder / "manifest.json").write_text(json.dumps(manifest))
    elif kind == "flipped counter":
        state = folder / "trainer.json"
        state.write_text(state.read_text().replace('"step": 12', '"step": 13'))


NAMED = {
    "flipped bit": "model.safetensors does not match its hash",
    "torn": "model.safetensors has .* bytes, .* were written",
    "zeroed tail": "model.safetensors does not match its hash",
    "missing": "model.safetensors is missing",
    "no manifest": "has no manifest.json",
    "torn manifest": "manifest.json is not readable",
    "edited manifest": "manifest.json does not match its own checksum",
    "flipped counter": "trainer.json does not match its hash",
}


@pytest.mark.parametrize("kind", NAMED)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, kind):
    lines = []
    one = store(tmp_path, lines)
    for step in (8, 12):
        one.save(step, files(step), {"step": step})
    damage(tmp_path / "step-00000012", kind)
    with pytest.raises(ValueError, match=NAMED[kind]):
        check_checkpoint(tmp_path / "step-00000012")
    found = one.load()
    assert found.step == 8 and equal(found.files, files(8))
    assert len(lines) == 1 and "warning: checkpoint set aside as damaged: step-00000012" in lines[0]
    assert one.steps() == [8] and (tmp_path / "damaged-step-00000012").is_dir()


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_to_the_same_end(tmp_path):
    whole = make(tmp_path / "whole")
    whole.run()
    with pytest.raises(Killed):
        make(tmp_path / "cut", kill_at=10).run()
    damage(tmp_path / "cut" / "step-00000008", "flipped bit")
    again = make(tmp_path / "cut")
    again.run()
    assert any("set aside as damaged: step-00000008/model.safetensors" in line for line in again.stage.lines)
    assert f"resumed at step 4 of {STEPS}" in again.stage.lines
    assert all(torch.equal(v, again.model.state_dict()[k]) for k, v in whole.model.state_dict().items())


def test_background_writes_are_of_the_moment_they_were_asked_for(tmp_path):
    one, tensors = store(tmp_path, background=True), files(4)
    counters = {"tokens": [1]}
    one.save(4, tensors, {"step": 4, **counters})
    tensors["model"]["a"].zero_()  # the optimizer goes on in place
    counters["tokens"].append(2)
    found = one.load()
    assert equal(found.files, files(4)) and found.state["tokens"] == [1]


def test_background_training_equals_plain(tmp_path):
    plain, threaded = make(tmp_path / "a"), make(tmp_path / "b", async_save=True)
    plain.run()
    threaded.run()
    for name in ("model.safetensors", "optimizer.safetensors", "trainer.json", "manifest.json"):
        last = f"step-{STEPS:08d}/{name}"
        assert (tmp_path / "a" / last).read_bytes() == (tmp_path / "b" / last).read_bytes()


def test_an_error_of_the_writer_surfaces_in_the_loop(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(resume, "write_part", full)
    trainer = make(tmp_path / "a", async_save=True)
    with pytest.raises(OSError, match="a checkpoint could not be written: .*No space left"):
        trainer.run()
    assert trainer.step < STEPS, "at the next steps, not at the end"


def test_shared_memory_is_written_twice(tmp_path):
    weight = torch.randn(4, 4)
    weights = {"head": weight, "embed": weight, "view": weight[1:]}
    store(tmp_path).save(1, {"model": weights, "optimizer": {}}, {"step": 1})
    found = read_checkpoint(tmp_path / "step-00000001").files
    assert torch.equal(found["model"]["head"], weight) and torch.equal(found["model"]["embed"], weight)
    assert found["optimizer"] == {}


CHILD = """
import sys, torch
from pathlib import Path
from tasks.resume import ResumeStore
one = ResumeStore(Path(sys.argv[1]), 2, print, background=sys.argv[2] == "True")
weights = {"w": torch.zeros(1 << 20)}
for step in range(1, 10000):
    weights["w"].fill_(step)
    one.save(step, {"model": weights, "optimizer": {"w.m": weights["w"]}}, {"step": step})
    print(step, flush=True)
"""


@pytest.mark.parametrize(
    ("background", "rounds"),
    [(True, range(1, 2)), *(pytest.param(b, range(5), marks=pytest.mark.slow) for b in (False, True))],
)
def test_kill_9_in_the_middle_of_writing_leaves_a_whole_checkpoint(tmp_path, background, rounds):
    """Another process writes without a pause and is killed at growing delays; what is left is whole and consistent."""
    for round_ in rounds:
        folder = tmp_path / f"{round_}"
        folder.mkdir()
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder), str(background)], cwd=REPO, stdout=subprocess.PIPE, text=True
        )
        try:
            for _ in range(4):
                written = int(child.stdout.readline())
            time.sleep(0.007 * round_)
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
        lines = []
        found = store(folder, lines).load()
        assert not lines, "a kill leaves no damaged checkpoint under a final name"
        assert found.step >= written - 1
        assert (found.files["model"]["w"] == found.step).all()
        assert torch.equal(found.files["optimizer"]["w.m"], found.files["model"]["w"])

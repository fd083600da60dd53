"""A training stage killed with SIGKILL at a random moment, rerun, ends with the bytes of an uninterrupted run."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tasks.lm_case import MODEL, stage_config, write_tokens

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import json, sys
from pathlib import Path
import torch
from tasks import pretrain
from tasks.stage import run_stage_for_test
torch.set_num_threads(1)
config, model, pack, tokenizer, tmp = json.loads(sys.argv[1])
run_stage_for_test(
    pretrain, config, {"model": model}, {"data/pack/x": Path(pack), "data/tokenizer": Path(tokenizer)},
    ["data/pretrain/general"], name="pretrain-general", tmp=Path(tmp), plots=["plots/pretrain_general.json"],
)
"""


def start(base: Path, name: str) -> subprocess.Popen:
    (base / name).mkdir(exist_ok=True)
    config = stage_config(tokens=60 * 128, loop={"checkpoint_every": 7, "log_every": 3}, save_optimizer=True)
    arguments = json.dumps([config, MODEL, str(base / "pack"), str(base / "tokenizer"), str(base / name)])
    return subprocess.Popen([sys.executable, "-c", CODE, arguments], cwd=ROOT, stdout=subprocess.DEVNULL)


def content(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for part in ("data/pretrain", "metrics", "plots")
        for p in sorted((folder / part).rglob("*"))
        if p.is_file()
    }


@pytest.mark.slow
def test_kill_9_at_random_moments(tmp_path):
    write_tokens(tmp_path / "pack")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_text(json.dumps({"added_tokens": []}))
    assert start(tmp_path, "whole").wait() == 0
    scratch, rng, kills = tmp_path / "cut/work/pretrain-general", random.Random(0), 0
    for _ in range(3):
        seen = max((p.name for p in scratch.glob("*/step-*")), default="")
        process = start(tmp_path, "cut")
        # Kill some way into the loop: after the next checkpoint and a random while more.
        while process.poll() is None and max((p.name for p in scratch.glob("*/step-*")), default="") <= seen:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        made = tmp_path / "cut/data/pretrain/general"  # the last kill may come after the output, which is then whole
        assert not made.exists() or (made / "manifest.json").is_file()
    assert kills >= 1, "the run ended before it could be killed"
    assert start(tmp_path, "cut").wait() == 0
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert not scratch.exists(), "scratch is removed on success"

"""A workspace with one small pre-training stage, run as `python -m tasks` runs it: real processes, any number of ranks."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from tests.tasks.lm_case import MODEL, stage_config, write_tokens

ROOT = Path(__file__).resolve().parents[2]
STAGE = "pretrain-general"
OUT = "data/pretrain/general"


def workspace(base: Path, **config) -> Path:
    """Packages, data, dvc.yaml and params.yaml under `base`; `config` changes the stage's section."""
    for package in ("tasks", "model", "kernels"):
        shutil.copytree(ROOT / package, base / package, ignore=shutil.ignore_patterns("__pycache__"))
    (base / ".dvc").mkdir()
    (base / ".dvc/config").write_text("[core]\n no_scm = true\n")
    write_tokens(base / "data/pack/pretrain")
    (base / "data/tokenizer").mkdir()
    (base / "data/tokenizer/tokenizer.json").write_text(json.dumps({"added_tokens": []}))
    stage = {
        "cmd": f"python -m tasks {STAGE}",
        "deps": ["data/pack/pretrain", "data/tokenizer"],
        "params": ["pretrain.general", "model", "seed", "threads"],
        "outs": [OUT],
        "metrics": ["metrics/pretrain_general.json"],
        "plots": ["plots/pretrain_general.json"],
    }
    (base / "dvc.yaml").write_text(yaml.safe_dump({"stages": {STAGE: stage}}))
    params = {"profile": "tiny", "seed": 0, "threads": 1, "model": MODEL}
    (base / "params.yaml").write_text(yaml.safe_dump(params | {"pretrain": {"general": stage_config(**config)}}))
    return base


def spread_over(base: Path, **parallel) -> None:
    """Write the stage's `parallel` section."""
    params = yaml.safe_load((base / "params.yaml").read_text())
    params["pretrain"]["general"]["parallel"] = parallel
    (base / "params.yaml").write_text(yaml.safe_dump(params))


def start(base: Path, *command: str, **variables: str) -> subprocess.Popen:
    """`python -m tasks pretrain-general` in the workspace, or another python command line."""
    return subprocess.Popen(
        [sys.executable, *(command or ("-m", "tasks", STAGE))],
        cwd=base,
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, limit: float = 400) -> str:
    """Its output, once it has ended well; everything it started is killed when it does not end."""
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        raise
    assert process.returncode == 0, output
    return output


def wait_for_ranks(process: subprocess.Popen, base: Path, after: str = "", count: int = 1) -> list[psutil.Process]:
    """The processes of the other ranks, once a checkpoint newer than `after` is there."""
    scratch = base / "work" / STAGE
    while process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        newest = max((p.name for p in scratch.glob("*/step-*")), default="")
        if newest > max(after, "step-00000000") and len(children) >= count:
            return children
        time.sleep(0.01)
    raise AssertionError(f"it ended before its ranks were seen:\n{process.stdout.read()}")


def ended(processes: list[psutil.Process], limit: float = 10) -> bool:
    """Whether all of them are gone (a zombie is)."""
    deadline = time.monotonic() + limit
    alive = list(processes)
    while alive and time.monotonic() < deadline:
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.02)
    return not alive

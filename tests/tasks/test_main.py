"""The command line of the stages: what it lists, what a dry run shows, and errors without a traceback."""

import json
import os
import subprocess
import sys

from model.checkpoint import save_checkpoint
from tasks.params import ROOT
from tests.tasks.lm_case import micro_model


def tasks(*args: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tasks", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **env})


def test_list_names_every_stage_with_its_phase():
    lines = [line.split() for line in tasks("--list").stdout.splitlines()]
    assert ["curate", "acquire"] in lines and ["evaluate", "evaluate@quantized"] in lines


def test_a_dry_run_shows_config_inputs_and_reasons():
    shown = json.loads(tasks("pretrain-general", "--dry-run").stdout)
    assert shown["config"]["seq_len"] == 256 and "data/pack/pretrain" in shown["inputs"]
    assert shown["outputs"][0] == "data/pretrain/general"
    assert isinstance(shown["stale"], list)


def test_an_error_is_one_message():
    result = tasks("nosuch")
    assert result.returncode == 1
    assert result.stderr.startswith("error: dvc.yaml has no stage 'nosuch'") and "Traceback" not in result.stderr
    assert "Traceback" in tasks("nosuch", ARCLINE_TRACEBACK="1").stderr


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m tasks --list | head -n 1"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr == ""


def test_init_check_tells_what_a_directory_holds_or_lacks(tmp_path):
    save_checkpoint(micro_model(), tmp_path / "good")
    found = tasks("init-check", str(tmp_path / "good"))
    assert found.returncode == 0 and "layout: this project's own" in found.stdout and "init_sha256: " in found.stdout
    (tmp_path / "good/model.safetensors").unlink()
    result = tasks("init-check", str(tmp_path / "good"))
    assert (
        result.returncode == 1 and "holds no *.safetensors file" in result.stderr and "Traceback" not in result.stderr
    )

"""Contradictory settings of the training stages are refused at start-up by their keys, before a model is made."""

import json

import pytest

from tasks import dsa_adapt, dsa_warmup, pretrain
from tasks.lm_run import check_keep_best
from tasks.params import ROOT, compose
from tasks.settings import GuardSettings, LoopSettings, OptimizerSettings
from tasks.spec import StageSpec, validate_config
from tasks.stage import run_stage_for_test
from tests.tasks.lm_case import MODEL, stage_config, write_tokens


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    base = tmp_path_factory.mktemp("lm")
    write_tokens(base / "pack", documents=12)
    (base / "tokenizer").mkdir()
    added = {"added_tokens": [{"id": 95, "content": "<|endoftext|>"}, {"id": 94, "content": "<|user|>"}]}
    (base / "tokenizer/tokenizer.json").write_text(json.dumps(added))
    return base


def start(inputs, tmp_path, model=None, **changes):
    deps = {"data/pack/x": inputs / "pack", "data/tokenizer": inputs / "tokenizer"}
    params = {"model": MODEL | (model or {})}
    run_stage_for_test(
        pretrain, stage_config(**changes), params, deps, ["data/out"], name="pretrain-general", tmp=tmp_path
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixture": {"code": 1.5, "web": -0.5}}, "mixture.web"),
        ({"mixture": {"code": 0.0, "web": 0.0}}, "mixture gives no domain a share"),
        ({"mixture": {"code": float("nan")}}, "mixture.code"),
        ({"max_epochs": float("inf")}, "max_epochs"),
        ({"optimizer": {"lr_matrix": float("inf")}}, "optimizer.lr_matrix"),
        ({"optimizer": {"lr_matrix": 1e-2, "lr_embed": -1.0}}, "optimizer.lr_embed"),
        ({"start_rows": 8, "ramp_tokens": 256}, r"start_rows \(8\) exceeds rows \(4\)"),
        ({"start_rows": 2}, r"needs both start_rows \(2\) .* ramp_tokens \(0\)"),
        ({"ramp_tokens": 256}, r"needs both start_rows \(None\) .* ramp_tokens \(256\)"),
        ({"mtp": {"depth": 32}}, r"mtp.depth \(32\) looks beyond seq_len \(32\)"),
        ({"mtp": {"late_weight": 0.1}}, r"mtp.late_weight \(0.1\) .* mtp.late_tokens \(0\)"),
        ({"mtp": {"late_tokens": 9}}, r"mtp.late_weight \(None\) .* mtp.late_tokens \(9\)"),
        ({"schedule": {"total_tokens": 100, "offset_tokens": 100}}, r"schedule.offset_tokens \(100\) leaves nothing"),
        ({"schedule": {"offset_tokens": 100}}, "offset_tokens needs schedule.total_tokens"),
        ({"loop": {"guard": {"window": 4, "history": 32}}}, "guard.history is 32 and guard.window 4"),
        ({"loop": {"keep_best": "val/x"}}, "loop.keep_best is 'val/x'; the evaluation has val/code/bits_per_byte"),
        ({"heldout": {"seq_len": 4096}}, "pretrain.general.heldout.seq_len is 4096, above .* 128"),
        ({"seq_len": 129}, "pretrain.general.seq_len is 129, above .* 128"),
        ({"model": {"num_nextn_predict_layers": 0}}, "pretrain.general.mtp.depth is 2, but the model has no MTP layer"),
        ({"model": {"vocab_size": 95}}, "vocabulary is 95 .*model.vocab_size.* tokens' is 96"),
        ({"parallel": {"engine": "deepspeed"}}, "parallel.engine is deepspeed, .* parallel.processes is 1"),
    ],
)
def test_contradictions_are_named_before_anything_is_written(tmp_path, inputs, changes, message):
    with pytest.raises(ValueError, match=message):
        start(inputs, tmp_path, **changes)
    assert not list(tmp_path.glob("work/*/*/step-*")), "no training run was begun"


def test_names_of_held_out_numbers():
    for name in (None, "val/all/loss", "val/web/bits_per_byte", "val/max_attention_logit"):
        check_keep_best(name, ["web"], "x")
    assert LoopSettings(keep_best="val/all/loss").keep_best and GuardSettings(window=5, history=5).window == 5
    assert OptimizerSettings(lr_matrix=0.1, lr_embed=0.0).lr_embed == 0.0, "a rate of 0 leaves the embedding as it is"


@pytest.mark.parametrize("profile", sorted(p.stem for p in (ROOT / "conf").glob("*.yaml") if p.stem != "corpus"))
def test_the_profiles_are_consistent(profile):
    params = compose(profile)
    for module, names in (
        (pretrain, ("pretrain-general", "pretrain-reasoning")),
        (dsa_warmup, ("dsa_warmup",)),
        (dsa_adapt, ("dsa_adapt",)),
    ):
        for name in names:
            validate_config(StageSpec(name, (), (name.split("-")[0],), ()), params, module.Config)

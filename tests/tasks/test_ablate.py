"""The ablation stages end to end at micro size: every number is there, a killed stage goes on, variants see equal tokens."""

import json

import numpy as np
import pytest
import torch

from model.checkpoint import save_checkpoint
from tasks import ablate_attention, ablate_efficient, ablate_mtp, ablate_run
from tasks.ablate_mtp import held_out_prompts, with_fresh_mtp
from tasks.stage import Stage, run_stage_for_test
from tasks.trainer import Trainer
from tests.tasks.lm_case import MODEL, micro_model, stage_config, write_tokens

OPTIMIZER = {"lr_matrix": 1e-2, "lr_embed": 3e-2}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    base = tmp_path_factory.mktemp("ablate")
    write_tokens(base / "pack", documents=240)
    save_checkpoint(micro_model(), base / "checkpoint")
    return base


def config(**changes) -> dict:
    own = {"tokens": 2 * 4 * 32, "seeds": 2, "loop": {"checkpoint_every": 1, "log_every": 1}, "heldout": {"windows": 1}}
    return stage_config(**(own | changes))


def run(module, name, tmp, inputs, section, checkpoint=False):
    deps = {"data/pack/x": inputs / "pack"} | ({"data/base": inputs / "checkpoint"} if checkpoint else {})
    run_stage_for_test(
        module,
        section,
        {"model": MODEL},
        deps,
        [f"data/{name}"],
        name=name,
        seed=3,
        tmp=tmp,
        plots=[f"plots/{name}.json"],
    )
    metrics = json.loads((tmp / f"metrics/{name}.json").read_text())
    written = json.loads((tmp / f"data/{name}/results.json").read_text())
    assert written == metrics
    return metrics, json.loads((tmp / f"plots/{name}.json").read_text())


MTP = {
    "draft_tokens": 4,
    "prompts": 3,
    "prompt_tokens": 12,
    "new_tokens": 10,
    "freeze_backbone": True,
    "mtp": {"every": 1},
}


def test_mtp(tmp_path, inputs):
    found, plots = run(ablate_mtp, "ablate_mtp", tmp_path, inputs, config(**MTP), checkpoint=True)
    variants = found["variants"]
    assert list(variants) == sorted(ablate_mtp.VARIANTS)
    assert variants["separate"]["draft_parameters"] == 3 * variants["shared"]["draft_parameters"] > 0
    assert variants["one_layer"]["draft_parameters"] == variants["shared"]["draft_parameters"]
    assert set(variants["shared"]["acceptance"]) == {"depth_caches", "one_cache"}
    assert set(variants["separate"]["acceptance"]) == {"depth_caches"}
    numbers = variants["shared"]["acceptance"]["depth_caches"]["sampled"]
    assert set(numbers) == {"length", "rate_1", "rate_2", "rate_3", "rate_4"} and len(numbers["length"]["seeds"]) == 2
    assert 1 <= numbers["length"]["mean"] <= 5
    assert {"shared/s0/mtp_loss_3", "shared/s1/mtp_loss_3", "one_layer/s0/mtp_loss_1"} <= set(plots[-1])
    assert "one_layer/s0/mtp_loss_2" not in plots[-1]
    # a frozen backbone: the held-out loss is the base's in every variant and seed
    assert len({v for r in variants.values() for v in r["heldout"]["seeds"]}) == 1


def test_a_frozen_backbone_needs_the_mtp_loss_at_every_step(tmp_path, inputs):
    with pytest.raises(ValueError, match="ablate_mtp.mtp.every must be 1"):
        run(ablate_mtp, "ablate_mtp", tmp_path, inputs, config(**(MTP | {"mtp": {"every": 2}})), checkpoint=True)


def test_fresh_mtp_layers_keep_the_backbone():
    base = micro_model()
    model = with_fresh_mtp(base, 3, seed=5)
    old, new = base.state_dict(), model.state_dict()
    same = {n for n in old if torch.equal(old[n], new[n])}
    assert {n for n in old if not n.startswith("model.layers.2.")} <= same
    assert not torch.equal(old["model.layers.2.eh_proj.weight"], new["model.layers.2.eh_proj.weight"])
    assert len(model.mtp_layers) == 3 and model.cfg.index_topk == model.cfg.max_position_embeddings


def test_prompts_are_held_out_text(inputs):
    from tasks.tokens import TokenSet

    tokens = TokenSet(inputs / "pack")
    prompts = held_out_prompts(tokens, 4, 12, 0)
    for index, prompt in enumerate(prompts):
        text = tokens.shard(tokens.domains[index % 2], "val").tokens[:].tolist()
        assert any(text[i : i + 12] == prompt for i in range(len(text)))


ATTENTION = {
    "variants": {
        "gqa": {
            "model": {"attention": "gqa", "num_key_value_heads": 1, "head_dim": 8, "qk_rope_head_dim": 4},
            "optimizer": {"muon": "whole"},
        },
        "mla": {"optimizer": {"muon": "whole"}},
        "mla_split": {},
    },
    "regime": {
        "settings": {"many_heads": {"model": {"num_attention_heads": 4}, "optimizer": {"lr_matrix": 5e-2}}},
        "recipe": {"rows": 2, "tokens": 128},
    },
    "logit_window": 16,
    "choice_questions": 0,
}


def test_attention(tmp_path, inputs):
    found, plots = run(ablate_attention, "ablate_attention", tmp_path, inputs, config(**ATTENTION))
    variants = found["variants"]
    assert set(variants) == {"gqa", "mla", "mla_split"}
    assert variants["gqa"]["cache_per_token"]["mean"] == 16 and variants["mla"]["cache_per_token"]["mean"] == 20
    assert variants["mla"]["bits_per_byte"] != variants["mla_split"]["bits_per_byte"], (
        "the optimizer's switch reaches it"
    )
    assert variants["mla"]["parameters"] == variants["mla_split"]["parameters"]
    regime = found["regime"]["many_heads"]
    assert regime["is_regime"] in (True, False) and len(regime["whole"]["max_attention_logit"]["seeds"]) == 2
    assert {"gqa/s0/lm_loss", "regime/many_heads/split/s1/max_attention_logit"} <= {k for row in plots for k in row}
    first = {v: next(row[f"{v}/s0/lm_loss"] for row in plots if f"{v}/s0/lm_loss" in row) for v in ("mla", "mla_split")}
    assert first["mla"] == first["mla_split"], "equal weights and equal tokens at the first step"


def test_the_verdict_on_a_regime():
    assert ablate_attention.is_regime([40, 50, 60], [10, 12, 20], growth=2.0, floor=20)
    assert not ablate_attention.is_regime([40, 50, 39], [10, 12, 20], growth=2.0, floor=20), "one seed is below twice"
    assert not ablate_attention.is_regime([18, 50, 60], [1, 1, 1], growth=2.0, floor=20), "one seed is below the floor"


EFFICIENT = {
    "seeds": 1,
    "model": {"num_hidden_layers": 4},
    "base": {"tokens": 256},
    "warmup": {"optimizer": {"lr_matrix": 1e-2, "indexer_optimizer": "adamw"}},
    "adapt": {"optimizer": {"lr_matrix": 1e-3}},
    "index_topk": 8,
    "sliding_window": 8,
    "index_rows": 8,
    "probes": {"lengths": [24, 48], "per_cell": 2, "facts": 2, "keys": 4, "values": 2, "labels": 2},
    "beam": {"beam": 2, "step": 1, "length": 24, "measure": "gain"},
}


@pytest.mark.parametrize("start", ["scratch", "checkpoint"])
def test_efficient(tmp_path, inputs, start):
    section = config(**EFFICIENT)
    if start == "checkpoint":
        section["model"] = {}
    found, plots = run(ablate_efficient, "ablate_efficient", tmp_path, inputs, section, checkpoint=True)
    layers = 4 if start == "scratch" else 2
    beam = found["beam"][0]
    assert len(beam["pattern"]) == layers and beam["pattern"].count("S") == layers // 2 == beam["interleaved"].count(
        "S"
    )
    assert set(found["untrained"]) == {"full", "swa_interleave", "swa_pattern"}
    assert set(found["trained"]) == {"full", "swa_interleave", "swa_pattern", "gdn", "simple_gdn"}
    assert set(found["dsa"]) == {"base", "base_continued", "warmup_only", "full_dsa"}
    # a converted layer has no indexer; SimpleGDN has nothing else new, GDN has
    windows, gdn, simple = (
        found["trained"][k]["added_parameters"]["mean"] for k in ("swa_interleave", "gdn", "simple_gdn")
    )
    assert windows == simple < gdn and found["trained"]["full"]["added_parameters"]["mean"] == 0
    cell = found["trained"]["gdn"]["probes"]["multi_key"]["48"]
    assert set(cell) == {"exact", "choice", "gain"}
    # windows as long as the sequence change nothing; these are shorter, so some number moves
    assert found["untrained"]["full"]["bits_per_byte"] != found["untrained"]["swa_interleave"]["bits_per_byte"]
    # the warm-up trains the indexer alone: dense loss is the base's
    assert found["dsa"]["base"] == found["untrained"]["full"]
    assert "trained/gdn/s0/lm_loss" in plots[-1]


class Killed(Exception):
    pass


def test_a_killed_ablation_goes_on_with_the_variant_it_was_in(tmp_path, inputs, monkeypatch):
    section = config(**ATTENTION)
    section["regime"] = {}
    whole, plots = run(ablate_attention, "ablate_attention", tmp_path / "a", inputs, section)
    steps, original = [], Trainer._one_step

    def dies(self, *args, **kwargs):
        steps.append(self.stage.name)
        if len(steps) == 6:  # the second step of the third run
            raise Killed
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "_one_step", dies)
    with pytest.raises(Killed):
        run(ablate_attention, "ablate_attention", tmp_path / "b", inputs, section)
    assert steps == ["gqa/s0"] * 2 + ["gqa/s1"] * 2 + ["mla/s0"] * 2
    steps.clear()
    monkeypatch.setattr(
        Trainer, "_one_step", lambda self, *a, **k: (steps.append(self.stage.name), original(self, *a, **k))[1]
    )
    again, plots_again = run(ablate_attention, "ablate_attention", tmp_path / "b", inputs, section)
    assert steps == ["mla/s0"] + ["mla/s1"] * 2 + ["mla_split/s0"] * 2 + ["mla_split/s1"] * 2
    assert again == whole and plots_again == plots


def test_over_seeds():
    found = ablate_run.over_seeds([{"a": 1.0, "b": {"c": 2}, "d": "x"}, {"a": 3.0, "b": {"c": 2}, "d": "x"}])
    assert found == {
        "a": {"mean": 2.0, "sd": pytest.approx(2**0.5), "seeds": [1.0, 3.0]},
        "b": {"c": {"mean": 2.0, "sd": 0.0, "seeds": [2, 2]}},
        "d": "x",
    }
    assert ablate_run.spread_of([4.0]) == {"mean": 4.0, "sd": 0.0, "seeds": [4.0]}


def test_nested_runs(tmp_path, monkeypatch):
    """A variant's MLflow run names the stage's as its parent; without a record there is none."""
    from types import SimpleNamespace

    from tasks import tracking

    made = []
    monkeypatch.setattr(tracking, "open_record", lambda spool, name, params, tags: made.append((name, params, tags)))
    stage = SimpleNamespace(_record=SimpleNamespace(id="s-1"), name="ablate_mtp", root=tmp_path)
    Stage.child(stage, "shared/s0", {"layers": 1})
    assert made == [
        (
            "ablate_mtp/shared/s0",
            {"layers": "1"},
            {"stage": "ablate_mtp", "variant": "shared/s0", "mlflow.parentRunId": "s-1"},
        )
    ]
    stage._record = None
    assert Stage.child(stage, "shared/s0", {}) is None


def test_recall_rows_take_their_share(inputs):
    from types import SimpleNamespace

    from tasks import ablate_probes
    from tasks.tokens import TokenSet

    tokens = TokenSet(inputs / "pack")
    symbols, _ = ablate_probes.prepare(
        tokens, ablate_probes.ProbeSettings(lengths=[24], per_cell=1, facts=2, keys=4, values=2, labels=2), 0
    )
    for share, expected in ((0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)):
        settings = SimpleNamespace(recall=ablate_probes.RecallSettings(share=share), seq_len=32, rows=8)
        rows = ablate_probes.recall_rows(tokens, symbols, settings, 0)
        assert sum(bool(rows(3, at)) for at in range(8)) == expected
    one, other = rows(0, 1), rows(1, 1)
    assert not np.array_equal(one["input_ids_bs"], other["input_ids_bs"])
    assert torch.equal(rows(0, 1)["input_ids_bs"], one["input_ids_bs"])

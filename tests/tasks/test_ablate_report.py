"""The ablations' page: every table and curve is there with the stages' numbers, whichever ablations have been run."""

import json
import xml.etree.ElementTree as ET

import pytest

from tasks import ablate_report
from tasks.report_ablate import cell, curves
from tasks.stage import run_stage_for_test


def spread(*values):
    mean = sum(values) / len(values)
    return {"mean": mean, "sd": 0.1 if len(values) > 1 else 0.0, "seeds": list(values)}


def mtp():
    modes = {"greedy": {"length": spread(2.5, 2.7), **{f"rate_{k}": spread(0.9 - k / 10) for k in (1, 2)}}}
    variant = {"draft_parameters": 12345, "layers": 1, "depth": 3, "acceptance": {"depth_caches": modes}}
    return {"draft_tokens": 2, "variants": {"shared": variant}}


def attention():
    one = {
        "parameters": spread(1000), "cache_per_token": spread(36), "bits_per_byte": {"all": spread(2.1234, 2.2)},
        "choice": spread(0.5), "max_attention_logit": spread(12.3, 14.5),
    }  # fmt: skip
    split = one | {"max_attention_logit": spread(12.3, 29.0)}
    regime = {"hot": {"whole": one, "split": split, "is_regime": False}}
    return {"variants": {"mla": one, "mla_split": one}, "regime": regime}


def efficient():
    lengths = [64, 128]
    probes = {
        t: {str(n): {"exact": spread(0.25), "gain": spread(1.5)} for n in lengths}
        for t in ("needle", "multi_key", "icl")
    }
    row = {"probes": probes, "bits_per_byte": spread(3.0)}
    beam = {"pattern": "FSSF", "interleaved": "FSFS", "scored": 6}
    parts = {p: {"full": row} for p in ("untrained", "trained", "dsa")}
    return {"lengths": lengths, "beam": [beam], "sliding_window": 32, "index_topk": 16, **parts}


def points(variant):
    return [{"step": s, f"{variant}/s0/lm_loss": 5.0 - s, f"{variant}/s1/lm_loss": 6.0 - s} for s in (1, 2)]


def build(tmp_path, found):
    metrics, plots = tmp_path / "m", tmp_path / "p"
    metrics.mkdir()
    plots.mkdir()
    for name, value in found.items():
        (metrics / f"{name}.json").write_text(json.dumps(value))
        (plots / f"{name}.json").write_text(json.dumps(points({"ablate_mtp": "shared"}.get(name, "mla"))))
    deps = {"data/ablate_metrics": metrics, "data/ablate_plots": plots}
    run_stage_for_test(ablate_report, {}, {}, deps, ["data/ablate_report"], name="ablate_report", tmp=tmp_path)
    return (tmp_path / "data/ablate_report/report.html").read_text()


def test_the_page(tmp_path):
    html = build(tmp_path, {"ablate_mtp": mtp(), "ablate_attention": attention(), "ablate_efficient": efficient()})
    for text in (
        "12,345", "2.600<small class='in'>± 0.100</small>", "0.80", "2.1617", "12.3, 14.5", "past the bounds", "<td>0.50</td>",
        "FSSF", "0.25 / 0.25", "1.50 / 1.50", "Table 6", "MLA + Muon Split", "Training loss",
    ):  # fmt: skip
        assert text in html, text
    assert "<script" not in html and "http" not in html.replace("http://www.w3.org/2000/svg", "")
    for svg in html.split("<svg")[1:]:
        ET.fromstring("<svg" + svg.split("</svg>")[0] + "</svg>")


def test_only_what_has_been_run(tmp_path):
    html = build(tmp_path, {"ablate_mtp": mtp()})
    assert 'id="mtp"' in html and 'id="attention"' not in html and 'id="efficient"' not in html


def test_nothing_has_been_run(tmp_path):
    with pytest.raises(ValueError, match="no ablation has been run"):
        build(tmp_path, {"something": {}})


def test_curves_take_the_mean_of_a_variants_own_seeds():
    """`mla` must not swallow the points of `mla_split` or of `regime/mla`."""
    plots = [
        {
            "step": 1,
            "mla/s0/lm_loss": 1.0,
            "mla/s1/lm_loss": 3.0,
            "mla_split/s0/lm_loss": 9.0,
            "regime/mla/s0/lm_loss": 7.0,
        }
    ]
    svg = curves(plots, ["mla"], "lm_loss", "t", "y")
    assert ": 2 at 1" in svg and ": 9 at" not in svg and ": 7 at" not in svg
    assert curves(plots, ["gqa"], "lm_loss", "t", "y") == ""


def test_one_seed_has_no_deviation():
    assert cell(spread(2.0), 1) == "2.0" and "±" in cell(spread(2.0, 3.0), 1)

"""The W4A8 artifact, its dequantized twin in transformers, the integer emulator, and the quantize stage."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kernels.int4 import decode_int4, quantize_int4
from kernels.int8 import quantized_linear
from model.checkpoint import load_checkpoint
from tasks import quantize
from tasks.quant_artifact import write_artifact
from tasks.quant_emulate import Calibration, hook_linears, integer_model, quantizable
from tasks.quant_recipe import Canonical, kind_of, quant_type
from tasks.stage import run_stage_for_test
from tasks.tensor_store import TensorReader, TensorWriter, natural_key
from tasks.tokens import TokenWriter
from tests.tasks.quant_fixtures import CONFIG, shapes, write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "float")


@pytest.fixture(scope="module")
def artifact(checkpoint, tmp_path_factory):
    root = tmp_path_factory.mktemp("artifact")
    result = write_artifact(
        checkpoint, root / "canonical", root / "dequantized", root / "rtn", rule="ssz", ssz_steps=50
    )
    return root, result


@pytest.fixture(scope="module")
def pack(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    rng = np.random.default_rng(0)
    with TokenWriter(folder, CONFIG["vocab_size"], 0, np.full(CONFIG["vocab_size"], 3)) as writer:
        for domain in ("web", "code"):
            for split in ("train", "val"):
                for _ in range(6):
                    ids = rng.integers(1, CONFIG["vocab_size"], 70)
                    writer.add(split, domain, ids.tolist(), 3 * len(ids))
    return folder


def some_ids(rows: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(0, CONFIG["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(9))


def test_recipe_decides_every_tensor_of_the_layout():
    kinds = {name: quant_type(name, CONFIG["num_hidden_layers"]) for name in shapes()}
    assert kinds["model.layers.1.mlp.experts.0.down_proj.weight"] == "W4A8_DYNAMIC"
    for name in ("self_attn.q_a_proj", "self_attn.indexer.wq_b", "self_attn.o_proj", "mlp.shared_experts.up_proj"):
        assert kinds[f"model.layers.1.{name}.weight"] == "W8A8_DYNAMIC"
    for name in ("self_attn.kv_b_proj", "self_attn.indexer.wk", "self_attn.indexer.weights_proj", "mlp.gate"):
        assert kinds[f"model.layers.1.{name}.weight"] == "FLOAT"
    assert {k for n, k in kinds.items() if n.startswith("model.layers.2.")} == {"FLOAT"}  # the MTP layer
    assert sum(k == "W4A8_DYNAMIC" for k in kinds.values()) == 12
    with pytest.raises(ValueError, match="no rule for tensor model.layers.0.self_attn.sink"):
        quant_type("model.layers.0.self_attn.sink", 2)
    assert kind_of("model.layers.1.mlp.experts.0.down_proj.weight") == "routed experts"
    assert kind_of("model.layers.0.mlp.down_proj.weight") == "dense MLP"


def test_artifact_holds_codes_scales_and_untouched_floats(checkpoint, artifact):
    root, result = artifact
    source, canonical = load_file(str(checkpoint / "model.safetensors")), Canonical(root / "canonical")
    twin, rtn = TensorReader(root / "dequantized"), TensorReader(root / "rtn")
    assert set(twin.names()) == set(source)
    for entry in canonical.entries:
        if entry.type == "FLOAT":
            assert torch.equal(canonical.tensor(entry), source[entry.name])
            assert torch.equal(twin.get(entry.name), source[entry.name])
            continue
        codes, scale = canonical.codes(entry)
        low, high = (-8, 7) if entry.type == "W4A8_DYNAMIC" else (-128, 127)
        assert codes.min() >= low and codes.max() <= high and tuple(codes.shape) == entry.shape
        assert torch.equal(scale.bfloat16().float(), scale)
        assert torch.equal(twin.get(entry.name), decode_int4(codes, scale))
        if entry.type == "W4A8_DYNAMIC":
            assert torch.equal(codes, quantize_int4(source[entry.name])[0])
            assert torch.equal(rtn.get(entry.name), decode_int4(*quantize_int4(source[entry.name], "absmax/7")))
    expert = result.errors["routed experts"].row()
    assert expert["tensors"] == 12 and 0.02 < expert["gain"] < 0.6
    assert expert["relative_mse"] < expert["relative_mse_rtn"]
    assert result.errors["attention"].row()["relative_mse"] < 1e-3
    assert result.errors["attention"].row()["gain"] == 0


def test_transformers_loads_the_dequantized_twin_with_our_logits(artifact):
    transformers = pytest.importorskip("transformers")
    root, _ = artifact
    reference = transformers.GlmMoeDsaForCausalLM.from_pretrained(
        root / "dequantized", dtype=torch.float32, attn_implementation="eager"
    )
    ids = some_ids(length=CONFIG["index_topk"])  # every key is selected, so a tie cannot decide
    with torch.no_grad():
        expected = reference(ids).logits
        ours = load_checkpoint(root / "dequantized")
        got = ours.logits(ours(ids).hidden_bsh)
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()


def test_hooked_model_is_the_model_when_the_hook_is_a_float_product(checkpoint):
    model, hooked = load_checkpoint(checkpoint), load_checkpoint(checkpoint)
    weights = quantizable(hooked)
    seen = set()

    def apply(name, x):
        seen.add(name)
        return x @ weights[name].T

    hook_linears(hooked, apply)
    ids = some_ids()  # longer than index_topk: the sparse path too
    with torch.inference_mode():
        expected, got = model(ids).hidden_bsh, hooked(ids).hidden_bsh
    assert torch.allclose(got, expected, atol=1e-4 * float(expected.abs().max()))
    assert seen == set(weights)


def test_integer_model_uses_integers_everywhere_and_stays_close(checkpoint, artifact):
    root, _ = artifact
    canonical = Canonical(root / "canonical")
    integer = integer_model(load_checkpoint(root / "dequantized"), root / "canonical")
    ids = some_ids(length=CONFIG["index_topk"])
    twin = load_checkpoint(root / "dequantized")
    with torch.inference_mode():
        expected, got = twin(ids).hidden_bsh, integer(ids).hidden_bsh
    error_bs = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    # 8-bit activations: near, not the float product in disguise. Median, since a token may flip to another expert.
    assert 1e-3 < float(error_bs.median()) < 0.05, error_bs
    entry = next(e for e in canonical.quantized() if e.name == "model.layers.0.self_attn.q_a_proj.weight")
    x = torch.randn(3, entry.shape[1], generator=torch.Generator().manual_seed(0))
    assert torch.equal(integer.model.layers[0].self_attn.mla.q_a_proj(x), quantized_linear(x, *canonical.codes(entry)))


def test_calibration_statistics(checkpoint):
    ids = some_ids(3)
    seen: dict[str, torch.Tensor] = {}
    model = load_checkpoint(checkpoint)
    weights = quantizable(model)
    watch = Calibration(weights)

    def apply(name, x):
        seen[name] = torch.cat([seen[name], x]) if name in seen else x
        return watch(name, x)

    hook_linears(model, apply)
    with torch.inference_mode():
        model(ids[:2])
        model(ids[2:])
        statistics = watch.statistics()
    for name, x in seen.items():
        assert torch.equal(statistics[f"{name}.absmax"], x.abs().amax(0))
        assert torch.allclose(statistics[f"{name}.absmean"], x.abs().mean(0), rtol=1e-5)
        assert int(statistics[f"{name}.tokens"]) == len(x)
    assert {n.rsplit(".", 1)[0] for n in statistics} == set(weights)


def test_compare_by_hand(checkpoint, artifact):
    root, _ = artifact
    reference, other = load_checkpoint(checkpoint), load_checkpoint(root / "dequantized")
    ids = some_ids(3, 12)
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    rows = quantize.compare(reference, {"same": reference, "other": other}, ids, targets, batch=2)
    assert rows["same"]["kl"] == 0 and rows["same"]["loss_delta"] == 0 and rows["float"]["tokens"] == 33
    with torch.inference_mode():
        p, q = (m.logits(m(ids).hidden_bsh[:, :-1]).double().log_softmax(-1) for m in (reference, other))
    kl = (p.exp() * (p - q)).sum(-1).mean()
    loss = -q.gather(2, ids[:, 1:, None]).mean()
    assert rows["other"]["kl"] == pytest.approx(float(kl), rel=1e-4)
    assert rows["other"]["loss"] == pytest.approx(float(loss), rel=1e-5)


def test_stage_is_deterministic_and_measures_the_cost(checkpoint, pack, tmp_path):
    config = {"calibration_windows": 2, "eval_windows": 2, "window": 24, "batch": 2}
    files = []
    for run in ("a", "b"):
        stage = run_stage_for_test(
            quantize,
            config,
            deps={"data/distill": checkpoint, "data/pack/pretrain": pack},
            outs=["data/quantize"],
            tmp=tmp_path / run,
        )
        manifest = json.loads((tmp_path / run / "data/quantize/manifest.json").read_text())
        files.append([(f["path"], f["sha256"]) for f in manifest["files"]])
    assert files[0] == files[1]
    metrics = json.loads((tmp_path / "a" / "metrics/quantize.json").read_text())
    assert set(metrics["quality"]) == {"float", "weights", "weights_rtn", "weights_and_activations"}
    assert metrics["quality"]["weights"]["kl"] > 0 and metrics["size"]["ratio"] > 1
    assert manifest["rows"] == {"float": manifest["rows"]["float"], "w4a8_dynamic": 12, "w8a8_dynamic": 16}
    statistics = load_file(str(tmp_path / "a/data/quantize/calibration/activations.safetensors"))
    assert (statistics["model.layers.0.self_attn.o_proj.absmax"] > 0).all()
    assert not (stage.root / "work" / "quantize").exists()


def test_tensor_store_shards_and_refuses_doubles(tmp_path):
    with TensorWriter(tmp_path / "w", "model", shard_bytes=100) as writer:
        for index in (2, 10, 1):
            writer.put(f"model.layers.{index}.weight", torch.full((20,), float(index)))
        with pytest.raises(ValueError, match="written twice"):
            writer.put("model.layers.2.weight", torch.zeros(1))
    reader = TensorReader(tmp_path / "w")
    assert reader.names() == [f"model.layers.{i}.weight" for i in (1, 2, 10)]
    assert torch.equal(reader.get("model.layers.10.weight"), torch.full((20,), 10.0))
    index = json.loads((tmp_path / "w/model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(["a.10.b", "a.9.b", "a.b"], key=natural_key) == ["a.9.b", "a.10.b", "a.b"]
    with pytest.raises(ValueError, match="expected a checkpoint directory"):
        TensorReader(tmp_path)

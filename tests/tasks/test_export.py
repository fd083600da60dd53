"""The seven exports: read back by independent readers, by compressed-tensors itself, and broken on purpose."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks import export
from tasks.export_format import ExportOptions
from tasks.export_verify import Files, decode_e4m3, verify
from tasks.quant_artifact import write_artifact
from tasks.quant_recipe import W4A8, Canonical, quant_type
from tasks.stage import run_stage_for_test
from tests.tasks.quant_fixtures import CONFIG, shapes, write_checkpoint

OPTIONS = ExportOptions(shard_bytes=1 << 30, cambricon_experts="int4")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("quantize")
    write_artifact(
        write_checkpoint(root / "float"), root / "canonical", root / "dequantized", None, rule="ssz", ssz_steps=50
    )
    seen = {
        n.removesuffix(".weight") + ".absmax": torch.rand(s[1]) + 0.5
        for n, s in shapes().items()
        if quant_type(n, CONFIG["num_hidden_layers"]) == "W8A8_DYNAMIC"
    }
    (root / "calibration").mkdir()
    save_file(seen, str(root / "calibration" / "activations.safetensors"))
    return root


def one_export(quantized: Path, tmp_path: Path, platform: str, options: ExportOptions = OPTIONS) -> Path:
    export.export_platform(export.PLATFORMS[platform], quantized, tmp_path / platform, options)
    return tmp_path / platform


def rewrite(folder: Path, change) -> None:
    """Apply `change(tensors)` to the only safetensors file of an export."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(str(file))
    change(tensors)
    save_file(tensors, str(file))


EXPERT = "model.layers.1.mlp.experts.2.up_proj"


@pytest.mark.parametrize("platform", list(export.PLATFORMS))
def test_every_platform_reads_back(quantized, tmp_path, platform):
    folder = one_export(quantized, tmp_path, platform)
    manifest = json.loads((folder / "export_manifest.json").read_text())
    assert manifest["verified"]["format"] and manifest["verified"]["device"] is False
    assert manifest["verified"]["numerics"] is (platform != "cambricon")
    assert manifest["checks"]["int4_tensors"] == 4 * 3  # one MoE layer; the MTP layer stays float
    assert manifest["loader"]["source"] and manifest["loader"]["version"]
    assert (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()


@pytest.mark.parametrize("platform,key", [
    ("ascend", "weight"), ("metax", "weight_packed"), ("hygon", "weight"), ("cambricon", "qweight"),
])  # fmt: skip
def test_a_swapped_nibble_is_found(quantized, tmp_path, platform, key):
    folder = one_export(quantized, tmp_path, platform)

    def swap(tensors):
        packed = tensors[f"{EXPERT}.{key}"].view(torch.uint8)
        tensors[f"{EXPERT}.{key}"] = ((packed << 4) | (packed >> 4)).view(tensors[f"{EXPERT}.{key}"].dtype)

    rewrite(folder, swap)
    with pytest.raises(ValueError, match="reads as code|scale_bias"):
        verify(quantized / "canonical", folder, platform)


@pytest.mark.parametrize("platform,key", [
    ("ascend", "weight_scale"), ("metax", "weight_scale"), ("hygon", "weight_scale"), ("kunlunxin", "weight_scale"),
    ("cambricon", "per_channel_scale"), ("enflame", "out_scales"), ("moorethreads", "weight_scale_inv"),
])  # fmt: skip
def test_a_wrong_scale_is_found(quantized, tmp_path, platform, key):
    folder = one_export(quantized, tmp_path, platform)
    module = "model.layers.0.self_attn.o_proj"
    rewrite(folder, lambda t: t[f"{module}.{key}"].mul_(1.25))
    with pytest.raises(ValueError, match="scale|farther"):
        verify(quantized / "canonical", folder, platform)


def test_packing_along_the_wrong_axis_is_found(quantized, tmp_path):
    from kernels.int4 import pack_columns, pack_rows, unpack_columns, unpack_rows

    hygon = one_export(quantized, tmp_path, "hygon")
    rewrite(hygon, lambda t: t.update({f"{EXPERT}.weight": pack_rows(
        unpack_columns(t[f"{EXPERT}.weight"], high_first=True)).reshape(t[f"{EXPERT}.weight"].shape)}))  # fmt: skip
    with pytest.raises(ValueError, match="reads as code"):
        verify(quantized / "canonical", hygon, "hygon")
    ascend = one_export(quantized, tmp_path, "ascend")
    rewrite(ascend, lambda t: t.update({f"{EXPERT}.weight": pack_columns(unpack_rows(t[f"{EXPERT}.weight"]))}))
    with pytest.raises(ValueError, match="the loader expects I8"):
        verify(quantized / "canonical", ascend, "ascend")


def test_missing_and_stray_tensors_are_found(quantized, tmp_path):
    folder = one_export(quantized, tmp_path, "kunlunxin")
    rewrite(folder, lambda t: t.update(extra=torch.zeros(1)))
    with pytest.raises(ValueError, match="no loader asks for: extra"):
        verify(quantized / "canonical", folder, "kunlunxin")
    rewrite(folder, lambda t: (t.pop("extra"), t.pop(f"{EXPERT}.weight")))
    with pytest.raises(ValueError, match="does not hold"):
        verify(quantized / "canonical", folder, "kunlunxin")


def test_compressed_tensors_reads_metax_and_kunlunxin(quantized, tmp_path):
    ct = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    canonical = Canonical(quantized / "canonical")
    for platform in ("metax", "kunlunxin"):
        folder = one_export(quantized, tmp_path, platform)
        raw = json.loads((folder / "config.json").read_text())["quantization_config"]
        parsed = QuantizationConfig.model_validate(raw)
        tensors = load_file(str(folder / "model.safetensors"))
        for entry in canonical.quantized():
            module = entry.name.removesuffix(".weight")
            scheme = next(
                g for g in parsed.config_groups.values() if any(_targets(t, module) for t in g.targets)
            )  # the first group that claims the module, as the library resolves it
            assert not any(_targets(t, module) for t in parsed.ignore), module
            expected_bits = 4 if entry.type == W4A8 and platform == "metax" else 8
            assert scheme.weights.num_bits == expected_bits, module
            compressor = BaseCompressor.get_value_from_registry(scheme.format)
            state = {k.removeprefix(module + "."): v for k, v in tensors.items() if k.startswith(module + ".")}
            if "weight_shape" in state:
                state["weight_shape"] = torch.Size(state["weight_shape"].tolist())
            got = compressor.decompress(state, scheme)["weight"]
            assert torch.equal(got.float(), canonical.dequantized(entry)), (ct.__version__, module)
        left_float = [
            e.name.removesuffix(".weight") for e in canonical.entries if e.type == "FLOAT" and len(e.shape) == 2
        ]
        for module in left_float:
            if module != "model.embed_tokens":
                assert any(_targets(t, module) for t in parsed.ignore), module


def _targets(target: str, module: str) -> bool:
    import re

    if target == "Linear":
        return True
    return re.match(target.removeprefix("re:"), module) is not None if target.startswith("re:") else target == module


def test_ascend_layout_by_hand(quantized, tmp_path):
    folder = one_export(quantized, tmp_path, "ascend")
    tensors = load_file(str(folder / "quant_model_weights-00001-of-00001.safetensors"))
    canonical = Canonical(quantized / "canonical")
    down = next(e for e in canonical.quantized() if e.name == "model.layers.1.mlp.experts.3.down_proj.weight")
    codes, scale = canonical.codes(down)
    stored = tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert stored.shape == (24, 32) and (stored[5] & 15).tolist() == (codes[10] & 15).tolist()
    bias = tensors["model.layers.1.mlp.experts.3.down_proj.scale_bias"]
    assert bias.shape == (48, 16)
    assert torch.allclose(bias[7, 4], 8 * codes[7, 8:10].float().sum() * scale[7, 0])
    assert torch.allclose(bias.sum(1), 8 * (codes.float() * scale).sum(1), atol=1e-4)
    description = json.loads((folder / "quant_model_description.json").read_text())
    assert (
        description[down.name] == "W4A8_DYNAMIC" and description["model.layers.0.self_attn.kv_b_proj.weight"] == "FLOAT"
    )
    assert set(tensors) == {k for k, v in description.items() if v in ("FLOAT", "W8A8_DYNAMIC", "W4A8_DYNAMIC")} - {
        "model_quant_type"
    }


def test_hygon_scale_is_a_sixteenth_and_even_columns_are_high(quantized, tmp_path):
    tensors = load_file(str(one_export(quantized, tmp_path, "hygon") / "model.safetensors"))
    canonical = Canonical(quantized / "canonical")
    entry = next(e for e in canonical.quantized() if e.name == f"{EXPERT}.weight")
    codes, scale = canonical.codes(entry)
    assert torch.equal(tensors[f"{EXPERT}.weight_scale"] * 16, scale)
    assert torch.equal(tensors[f"{EXPERT}.weight"] >> 4, codes[:, 0::2])
    # what the kernel does: nibble in the top half of a byte is 16 q, times s / 16
    high = (tensors[f"{EXPERT}.weight"] & -16).float() * tensors[f"{EXPERT}.weight_scale"]
    assert torch.equal(high, codes[:, 0::2].float() * scale)


def test_cambricon_int8_fallback_claims_numerics(quantized, tmp_path):
    folder = one_export(quantized, tmp_path, "cambricon", ExportOptions(1 << 30, "int8"))
    manifest = json.loads((folder / "export_manifest.json").read_text())
    assert manifest["verified"]["numerics"] and not manifest["experimental"]
    assert json.loads((folder / "quantize_config.json").read_text())["expert_weight_precision"] == "int8"


def test_e4m3_decoder_agrees_with_torch():
    bits = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(bits).view(torch.float8_e4m3fn).float().numpy()
    finite = np.isfinite(expected)
    assert finite.sum() == 254 and np.array_equal(decode_e4m3(bits)[finite], expected[finite])


def test_shards_and_odd_shapes(quantized, tmp_path):
    folder = one_export(quantized, tmp_path, "ascend", ExportOptions(20_000, "int4"))
    index = json.loads((folder / "quant_model_weights.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert set(index["weight_map"]) == set(Files(folder)._where)
    with pytest.raises(ValueError, match="does not divide"):
        from tasks.export_ascend import scale_bias

        scale_bias(torch.zeros(2, 24, dtype=torch.int8), torch.ones(2, 1), 16)


def test_stage_writes_the_same_bytes_twice(quantized, tmp_path):
    hashes = []
    for run in ("a", "b"):
        stage = run_stage_for_test(
            export, {}, deps={"data/quantize": quantized}, outs=["data/export"], tmp=tmp_path / run
        )
        manifest = json.loads((tmp_path / run / "data/export/manifest.json").read_text())
        hashes.append([(f["path"], f["sha256"]) for f in manifest["files"]])
        assert stage._metrics["ascend"] == {"mib": stage._metrics["ascend"]["mib"], "format": 1, "numerics": 1, "device": 0,
                                            "codes": stage._metrics["ascend"]["codes"]}  # fmt: skip
    assert hashes[0] == hashes[1]
    with pytest.raises(ValueError, match="unknown nvidia"):
        run_stage_for_test(
            export,
            {"platforms": ["nvidia"]},
            deps={"data/quantize": quantized},
            outs=["data/export"],
            tmp=tmp_path / "c",
        )

"""Kunlunxin: compressed-tensors `int-quantized` W8A8 in every quantized layer (the public loader has no int4 MoE path).

    dvc repro export      writes data/export/kunlunxin; read by vLLM-Kunlun

An int4 code is also an int8 code, so experts keep their codes and scales: the numbers equal the canonical artifact's.
"""

from __future__ import annotations

from pathlib import Path

from tasks.export_format import ExportOptions, Platform, float_patterns, put_floats
from tasks.export_metax import group, quantization_config
from tasks.quant_recipe import Canonical, module_name
from tasks.tensor_store import TensorWriter, copy_side_files


def write(canonical: Canonical, calibration: Path, folder: Path, options: ExportOptions) -> None:
    """Write the compressed-tensors directory: `weight` int8 [N, K] and `weight_scale` fp32 [N, 1] everywhere."""
    with TensorWriter(folder, "model", options.shard_bytes) as writer:
        put_floats(canonical, writer)
        for entry in canonical.quantized():
            codes, scale = canonical.codes(entry)
            writer.put(f"{module_name(entry.name)}.weight", codes)
            writer.put(f"{module_name(entry.name)}.weight_scale", scale)
    config = quantization_config(
        [group(["Linear"], 8, "int-quantized")], "int-quantized", float_patterns(canonical.config)
    )
    copy_side_files(canonical.folder, folder, config_update={"quantization_config": config})


PLATFORM = Platform(
    name="kunlunxin",
    maker="Kunlunxin",
    experts="INT8 per channel (int4 codes widened)",
    others="INT8 per channel",
    loader="baidu/vLLM-Kunlun compressed-tensors W8A8-INT8 (GlmMoeDsa registered)",
    version="documented W8A8-INT8 tutorial; compressed-tensors 0.20",
    write=write,
)

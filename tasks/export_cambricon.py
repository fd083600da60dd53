"""Cambricon MLU: the SmoothQuant layout of vllm-mlu (`quantize_config.json`, per-token activations).

    dvc repro export      writes data/export/cambricon

vllm-mlu publishes the shapes of int4 experts but not their nibble order. `cambricon_experts: int4` therefore writes an
experimental file (even column in the low nibble) whose numbers cannot be claimed; `int8`, the fallback, widens the
codes, which is exact. `smooth` is all ones: smoothing is folded into the weights before quantization.
"""

from __future__ import annotations

import json
from pathlib import Path

from tasks.export_format import ExportOptions, Platform, float_modules, is_expert, put_floats
from tasks.files import atomic_write
from tasks.quant_recipe import Canonical, module_name
from tasks.tensor_store import TensorWriter, copy_side_files


def write(canonical: Canonical, calibration: Path, folder: Path, options: ExportOptions) -> None:
    """Write `qweight`, `per_channel_scale` fp32 [N] and `smooth` fp32 [K] for every quantized layer."""
    import torch

    from kernels.int4 import pack_columns

    with TensorWriter(folder, "model", options.shard_bytes) as writer:
        put_floats(canonical, writer)
        for entry in canonical.quantized():
            codes, scale = canonical.codes(entry)
            module = module_name(entry.name)
            packed = is_expert(entry) and options.cambricon_experts == "int4"
            writer.put(f"{module}.qweight", pack_columns(codes) if packed else codes)
            writer.put(f"{module}.per_channel_scale", scale.reshape(-1))
            writer.put(f"{module}.smooth", torch.ones(codes.shape[1], dtype=torch.float32))
    config = {
        "quant_mode": "SmoothQuant",
        "input_quant_method": "per_token",
        "group_size": 1,
        "weight_precision": "int8",
        "activation_precision": "int8",
        "only_expert_per_group": False,
        "expert_weight_precision": options.cambricon_experts,
        "expert_activation_precision": "int8",
        "modules_to_not_convert": float_modules(canonical.config),
    }
    atomic_write(folder / "quantize_config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    copy_side_files(canonical.folder, folder)


PLATFORM = Platform(
    name="cambricon",
    maker="Cambricon",
    experts="INT4 per channel, or INT8 (int4 codes widened)",
    others="INT8 per channel",
    loader="Cambricon/vllm-mlu vllm_mlu/model_executor/layers/quantization/smoothquant.py",
    version="vllm-mlu 8fa99fd9c81ee334ef7c3c57c41e382e3a8b7d6d",
    write=write,
    notes="The public config class has no list of float modules: such a list is written, and a loader must honour it.",
)

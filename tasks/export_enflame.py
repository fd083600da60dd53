"""Enflame GCU: the `w8a8` layout of vllm-gcu.

    dvc repro export      writes data/export/enflame

Tensors by the names the loader registers: `weight` int8 [N, K], `out_scales` fp32 [N], `in_scales` [K]. Linear layers
quantize activations STATICALLY by `in_scales`, and `out_scales` is the product of both scales, so calibration maxima
(taken while quantizing) are needed; experts are per token, with `in_scales` of ones. Int4 expert codes are widened.
"""

from __future__ import annotations

import json
from pathlib import Path

from tasks.export_format import ExportOptions, Platform, float_patterns, is_expert, put_floats
from tasks.files import atomic_write
from tasks.quant_recipe import Canonical, module_name
from tasks.tensor_store import TensorReader, TensorWriter, copy_side_files


def static_scale(absmax_k):
    """bf16-rounded per-tensor activation scale max|x| / 127, fp32 scalar tensor; 1 when nothing was seen."""
    import torch

    from kernels.int4 import round_to_bf16

    scale = round_to_bf16(absmax_k.amax() / 127)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def write(canonical: Canonical, calibration: Path, folder: Path, options: ExportOptions) -> None:
    """Write the w8a8 directory; `calibration` holds `X.absmax` fp32 [K] of every quantized linear layer's input."""
    import torch

    seen = TensorReader(calibration)
    with TensorWriter(folder, "model", options.shard_bytes) as writer:
        put_floats(canonical, writer)
        for entry in canonical.quantized():
            codes, scale = canonical.codes(entry)
            module = module_name(entry.name)
            in_scale = torch.ones(()) if is_expert(entry) else static_scale(seen.get(f"{module}.absmax"))
            writer.put(f"{module}.weight", codes)
            writer.put(f"{module}.out_scales", scale.reshape(-1) * in_scale)
            writer.put(f"{module}.in_scales", in_scale.expand(codes.shape[1]).to(torch.bfloat16))
    config = {"quant_method": "w8a8", "group_size": -1, "ignore": float_patterns(canonical.config)}
    atomic_write(folder / "quantize_config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    copy_side_files(canonical.folder, folder, config_update={"quantization_config": config})


PLATFORM = Platform(
    name="enflame",
    maker="Enflame",
    experts="INT8 per channel (int4 codes widened)",
    others="INT8 per channel, static activations",
    loader="EnflameTechnology/vllm-gcu vllm_gcu/kernels/quantization/w8a8.py",
    version="vllm-gcu 12cfb4d62f466f4ad89313bcc2242d2d7b8d9af7",
    write=write,
    notes="vllm-gcu's `w4a8` has FP8 activations, so INT8 x INT4 has no path there. Later loaders invert in_scales on "
    "load; max|x|/127 is what both readings of the source agree on when the kernel divides (earlier) or multiplies (later).",
)

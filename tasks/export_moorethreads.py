"""Moore Threads: FP8 (e4m3) in 128 x 128 blocks, the format vllm-musa's GLM cookbook serves.

    dvc repro export      writes data/export/moorethreads

No integer MoE path is published, so the canonical weights are decoded and rounded once more, to FP8. That adds an error
of its own, which the export measures and records (`fp8_relative_mse`).
"""

from __future__ import annotations

from pathlib import Path

from tasks.export_format import ExportOptions, Platform, float_modules, put_floats
from tasks.quant_recipe import Canonical, module_name
from tasks.tensor_store import TensorWriter, copy_side_files


def write(canonical: Canonical, calibration: Path, folder: Path, options: ExportOptions) -> None:
    """Write `weight` float8_e4m3fn [N, K] and `weight_scale_inv` fp32 [ceil(N/128), ceil(K/128)]."""
    from kernels.fp8 import BLOCK, quantize_fp8_blocks

    with TensorWriter(folder, "model", options.shard_bytes) as writer:
        put_floats(canonical, writer)
        for entry in canonical.quantized():
            values, scale = quantize_fp8_blocks(canonical.dequantized(entry))
            writer.put(f"{module_name(entry.name)}.weight", values)
            writer.put(f"{module_name(entry.name)}.weight_scale_inv", scale)
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": float_modules(canonical.config),
    }
    copy_side_files(canonical.folder, folder, config_update={"quantization_config": config})


PLATFORM = Platform(
    name="moorethreads",
    maker="Moore Threads",
    experts="FP8 e4m3, 128x128 blocks",
    others="FP8 e4m3, 128x128 blocks",
    loader="MooreThreads/vllm-musa docs/cookbook/glm/glm-5.3-fp8.md (vLLM's fp8 block-quantized loader)",
    version="vllm-musa 50e75f0d0ad3d69f1bb30852514bc77c734de2bc",
    write=write,
)

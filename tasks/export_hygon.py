"""Hygon DCU: the `slimquant_w4a8` layout.

    dvc repro export      writes data/export/hygon; serve with `--quantization slimquant_w4a8`

Experts hold two codes per byte along the INPUT dimension with the even column in the HIGH nibble. The kernel shifts a
nibble into the top of a byte, which multiplies it by 16, so the stored scale is s / 16.
"""

from __future__ import annotations

from pathlib import Path

from tasks.export_format import ExportOptions, Platform, float_modules, is_expert, put_floats
from tasks.quant_recipe import Canonical, module_name
from tasks.tensor_store import TensorWriter, copy_side_files


def write(canonical: Canonical, calibration: Path, folder: Path, options: ExportOptions) -> None:
    """Write the slimquant directory. ValueError when an expert's K is odd."""
    from kernels.int4 import pack_columns

    with TensorWriter(folder, "model", options.shard_bytes) as writer:
        put_floats(canonical, writer)
        for entry in canonical.quantized():
            codes, scale = canonical.codes(entry)
            if is_expert(entry):
                codes, scale = pack_columns(codes, high_first=True), scale / 16
            writer.put(f"{module_name(entry.name)}.weight", codes)
            writer.put(f"{module_name(entry.name)}.weight_scale", scale)
    config = {
        "quant_method": "slimquant_w4a8",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": float_modules(canonical.config),
    }
    copy_side_files(canonical.folder, folder, config_update={"quantization_config": config})


PLATFORM = Platform(
    name="hygon",
    maker="Hygon",
    experts="INT4 per channel",
    others="INT8 per channel",
    loader="HYGON-AI/vllm-plugin-das vllm_hcu/model_executor/layers/quantization/slimquant_w4a8.py",
    version="vllm-plugin-das 13272b6f579803279c82be1126c2f05d229c0429",
    write=write,
    notes="The plugin's linear method quantizes every LinearBase; modules_to_not_convert is what SGLang's variant reads.",
)

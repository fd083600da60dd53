"""MetaX: compressed-tensors, experts `pack-quantized` (int4 in int32 words), everything else `int-quantized` W8A8.

dvc repro export      writes data/export/metax; read by vLLM-metax's CompressedTensorsW4A8Int4MoEMethod
"""

from __future__ import annotations

from pathlib import Path

from tasks.export_format import ExportOptions, Platform, float_patterns, is_expert, put_floats
from tasks.quant_recipe import Canonical, module_name
from tasks.tensor_store import TensorWriter, copy_side_files

_EXPERTS = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"


def _weights(bits: int) -> dict:
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "group_size": None,
        "dynamic": False,
    }


_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def group(targets: list[str], bits: int, layout: str) -> dict:
    """One config group: per-channel weights of `bits`, per-token int8 activations, stored as `layout`."""
    return {"targets": targets, "weights": _weights(bits), "input_activations": _ACTIVATIONS, "format": layout}


def quantization_config(groups: list[dict], layout: str, ignore: list[str]) -> dict:
    """A compressed-tensors `quantization_config` for config.json."""
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": g for i, g in enumerate(groups)},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def write(canonical: Canonical, calibration: Path, folder: Path, options: ExportOptions) -> None:
    """Write the compressed-tensors directory. ValueError when an expert's K does not divide by 8."""
    import torch

    from kernels.int4 import pack_int32

    with TensorWriter(folder, "model", options.shard_bytes) as writer:
        put_floats(canonical, writer)
        for entry in canonical.quantized():
            codes, scale = canonical.codes(entry)
            module = module_name(entry.name)
            if is_expert(entry):
                writer.put(f"{module}.weight_packed", pack_int32(codes))
                writer.put(f"{module}.weight_shape", torch.tensor(codes.shape, dtype=torch.int64))
            else:
                writer.put(f"{module}.weight", codes)
            writer.put(f"{module}.weight_scale", scale)
    others = [r"re:.*self_attn\..*", r"re:.*mlp\.(shared_experts\.)?(gate|up|down)_proj$"]
    groups = [group([_EXPERTS], 4, "pack-quantized"), group(others, 8, "int-quantized")]
    config = quantization_config(groups, "mixed-precision", float_patterns(canonical.config))
    copy_side_files(canonical.folder, folder, config_update={"quantization_config": config})


PLATFORM = Platform(
    name="metax",
    maker="MetaX",
    experts="INT4 per channel",
    others="INT8 per channel",
    loader="MetaX-MACA/vLLM-metax vllm_metax/quant_config/compressed_tensors_moe/compressed_tensors_moe_w4a8_int4.py",
    version="vLLM-metax 84ad2dee1e57a64821f9a3342e8c9b1db199f6c1; compressed-tensors 0.20",
    write=write,
)

"""Huawei Ascend: the ModelSlim layout, the one W4A8 layout that both vLLM-Ascend and SGLang's NPU backend read.

    dvc repro export      writes data/export/ascend; serve with `vllm serve DIR --quantization ascend`

int4 pairs lie along OUTPUT rows (low nibble = even row). The matrix unit takes unsigned activations offset by 8, so each
row carries `scale_bias` = 8 * sum_k q s, for down_proj split in 16 chunks of K so that tensor parallel ranks up to 16
can each sum their own.
"""

from __future__ import annotations

import json
from pathlib import Path

from tasks.export_format import ExportOptions, Platform, is_expert, put_floats
from tasks.files import atomic_write
from tasks.quant_recipe import FLOAT, Canonical, module_name
from tasks.tensor_store import TensorWriter, copy_side_files

CHUNKS = 16


def scale_bias(codes_nk, scale_n1, chunks: int):
    """8 * sum over each of `chunks` equal parts of K of (q s): fp32 [N, chunks].

    Summed as integers, so the result does not depend on the order. ValueError when K does not divide by `chunks`.
    """
    import torch

    rows, columns = codes_nk.shape
    if columns % chunks:
        raise ValueError(f"scale_bias splits K into {chunks} chunks; K = {columns} does not divide")
    sums = codes_nk.to(torch.int32).reshape(rows, chunks, columns // chunks).sum(dim=2)
    return 8.0 * sums.to(torch.float32) * scale_n1


def write(canonical: Canonical, calibration: Path, folder: Path, options: ExportOptions) -> None:
    """Write the ModelSlim directory. ValueError when a shape does not fit the layout (odd N, or K % 16 for down_proj)."""
    import torch

    from kernels.int4 import pack_rows

    description: dict = {}
    with TensorWriter(folder, "quant_model_weights", options.shard_bytes, always_number=True) as writer:
        put_floats(canonical, writer)
        for entry in canonical.quantized():
            codes, scale = canonical.codes(entry)
            module = module_name(entry.name)
            tensors = {"weight": codes, "weight_scale": scale, "weight_offset": torch.zeros_like(scale)}
            if is_expert(entry):
                tensors["weight"] = pack_rows(codes)
                tensors["scale_bias"] = scale_bias(codes, scale, CHUNKS if module.endswith("down_proj") else 1)
            for suffix, tensor in tensors.items():
                writer.put(f"{module}.{suffix}", tensor)
                description[f"{module}.{suffix}"] = entry.type
    description |= {entry.name: FLOAT for entry in canonical.entries if entry.type == FLOAT}
    description = dict(sorted(description.items())) | {
        "version": "1.0.0",
        "model_quant_type": "W8A8_DYNAMIC",
        "group_size": 0,
        "metadata": {},
        "is_rot_used": False,
    }
    atomic_write(folder / "quant_model_description.json", json.dumps(description, indent=2) + "\n")
    copy_side_files(canonical.folder, folder)


PLATFORM = Platform(
    name="ascend",
    maker="Huawei",
    experts="INT4 per channel",
    others="INT8 per channel",
    loader="vllm-project/vllm-ascend vllm_ascend/quantization/methods/w4a8.py (W4A8_DYNAMIC, moe); layout of msmodelslim",
    version="vllm-ascend 01697b3e288014fab8af94fe7bf85a3636e43ee6; msmodelslim 26.1.0",
    write=write,
)

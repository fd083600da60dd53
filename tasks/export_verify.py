"""Independent readers of the seven export formats: numpy only, sharing no code with the packers they check.

    python -m tasks.export_verify data/quantize/canonical data/export/hygon hygon

Each reader decodes a platform's files the way its loader's source does and gives back integer codes and scales, which
must equal the canonical ones exactly (FP8: within half a unit in the last place). What this proves is the format and the
numbers; that a chip runs it is proven by a chip only, so `device` stays false.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_NUMPY = {
    "F32": "<f4",
    "I8": "i1",
    "U8": "u1",
    "I32": "<i4",
    "I64": "<i8",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
}


@dataclass(frozen=True)
class Raw:
    """A stored tensor: safetensors dtype tag and the raw array (bf16 as uint16, fp8 as uint8)."""

    dtype: str
    array: np.ndarray

    def float32(self) -> np.ndarray:
        """Values of a float tensor as fp32."""
        if self.dtype == "BF16":
            return (self.array.astype(np.uint32) << 16).view(np.float32)
        if self.dtype == "F8_E4M3":
            return decode_e4m3(self.array)
        return self.array.astype(np.float32)


def decode_e4m3(bits: np.ndarray) -> np.ndarray:
    """fp32 values of float8_e4m3fn bytes: sign, 4 exponent bits of bias 7, 3 mantissa bits, no infinity."""
    exponent, mantissa = ((bits >> 3) & 15).astype(np.int32), (bits & 7).astype(np.float32)
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * np.exp2(exponent - 7.0))
    return np.where(bits >> 7, -magnitude, magnitude).astype(np.float32)


class Files:
    """All safetensors of a directory, memory-mapped. Remembers which tensors were read, so that strays are found."""

    def __init__(self, folder: Path):
        self.read: set[str] = set()
        self._where: dict[str, tuple[Path, int, dict]] = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            with open(path, "rb") as handle:
                size = int.from_bytes(handle.read(8), "little")
                header = json.loads(handle.read(size))
            for name, info in header.items():
                if name != "__metadata__":
                    if name in self._where:
                        raise ValueError(f"{folder}: tensor {name} is stored twice")
                    self._where[name] = (path, 8 + size, info)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def strays(self) -> list[str]:
        """Stored tensors that no reader asked for."""
        return sorted(set(self._where) - self.read)

    def get(self, name: str, dtype: str = "", shape: tuple[int, ...] | None = None) -> Raw:
        """One tensor; ValueError when it is absent or has another dtype or shape than the loader allocates."""
        if name not in self._where:
            raise ValueError(f"the loader expects tensor {name}, which the export does not hold")
        path, base, info = self._where[name]
        if dtype and info["dtype"] != dtype or shape is not None and tuple(info["shape"]) != tuple(shape):
            raise ValueError(f"{name}: {info['dtype']} {info['shape']}, the loader expects {dtype} {list(shape or ())}")
        self.read.add(name)
        start, stop = info["data_offsets"]
        data = np.memmap(path, np.uint8, "r", base + start, (stop - start,)) if stop > start else np.zeros(0, np.uint8)
        return Raw(info["dtype"], data.view(_NUMPY[info["dtype"]]).reshape(info["shape"]))


def _signed(nibble: np.ndarray) -> np.ndarray:
    """Two's complement value of unsigned 4-bit numbers."""
    nibble = nibble.astype(np.int16)
    return np.where(nibble > 7, nibble - 16, nibble).astype(np.int8)


def _interleave(first: np.ndarray, second: np.ndarray, axis: int) -> np.ndarray:
    shape = list(first.shape)
    shape[axis] *= 2
    out = np.empty(shape, np.int8)
    index = [slice(None)] * 2
    for start, part in enumerate((first, second)):
        index[axis] = slice(start, None, 2)
        out[tuple(index)] = part
    return out


# A reader: (files, module, N, K, is_expert, context) -> (codes int8 [N, K], scale fp32 [N]).
def read_ascend(files: Files, module: str, n: int, k: int, expert: bool, context: dict):
    scale = files.get(f"{module}.weight_scale", "F32", (n, 1)).array.reshape(n)
    if np.any(files.get(f"{module}.weight_offset", "F32", (n, 1)).array):
        raise ValueError(f"{module}: symmetric weights need weight_offset 0")
    kind = context["description"].get(f"{module}.weight")
    if kind != ("W4A8_DYNAMIC" if expert else "W8A8_DYNAMIC"):
        raise ValueError(f"{module}: quant_model_description.json says {kind}")
    if not expert:
        return files.get(f"{module}.weight", "I8", (n, k)).array, scale
    packed = files.get(f"{module}.weight", "I8", (n // 2, k)).array.view(np.uint8)
    codes = _interleave(_signed(packed & 15), _signed(packed >> 4), axis=0)
    chunks = 16 if module.endswith("down_proj") else 1
    bias = files.get(f"{module}.scale_bias", "F32", (n, chunks)).array
    for c in range(chunks):
        part = codes[:, c * k // chunks : (c + 1) * k // chunks].astype(np.int64).sum(axis=1)
        expected = np.float32(8) * part.astype(np.float32) * scale
        if not np.array_equal(bias[:, c], expected):
            raise ValueError(f"{module}.scale_bias: chunk {c} is not 8 * sum(q s)")
    return codes, scale


def read_metax(files: Files, module: str, n: int, k: int, expert: bool, context: dict):
    scale = files.get(f"{module}.weight_scale", "F32", (n, 1)).array.reshape(n)
    if not expert:
        return files.get(f"{module}.weight", "I8", (n, k)).array, scale
    if files.get(f"{module}.weight_shape", "I64", (2,)).array.tolist() != [n, k]:
        raise ValueError(f"{module}.weight_shape does not say [{n}, {k}]")
    words = files.get(f"{module}.weight_packed", "I32", (n, k // 8)).array.view(np.uint32)
    codes = np.empty((n, k), np.int8)
    for position in range(8):
        codes[:, position::8] = ((words // 16**position) % 16).astype(np.int8) - 8
    return codes, scale


def read_kunlunxin(files: Files, module: str, n: int, k: int, expert: bool, context: dict):
    scale = files.get(f"{module}.weight_scale", "F32", (n, 1)).array.reshape(n)
    return files.get(f"{module}.weight", "I8", (n, k)).array, scale


def read_hygon(files: Files, module: str, n: int, k: int, expert: bool, context: dict):
    scale = files.get(f"{module}.weight_scale", "F32", (n, 1)).array.reshape(n)
    if not expert:
        return files.get(f"{module}.weight", "I8", (n, k)).array, scale
    packed = files.get(f"{module}.weight", "I8", (n, k // 2)).array.view(np.uint8)
    return _interleave(_signed(packed >> 4), _signed(packed & 15), axis=1), scale * np.float32(16)


def read_cambricon(files: Files, module: str, n: int, k: int, expert: bool, context: dict):
    scale = files.get(f"{module}.per_channel_scale", "F32", (n,)).array
    if not np.all(files.get(f"{module}.smooth", "F32", (k,)).array == 1):
        raise ValueError(f"{module}.smooth must be ones: smoothing is folded before quantization")
    if expert and context["quantize_config"]["expert_weight_precision"] == "int4":
        packed = files.get(f"{module}.qweight", "I8", (n, k // 2)).array.view(np.uint8)
        return _interleave(_signed(packed & 15), _signed(packed >> 4), axis=1), scale
    return files.get(f"{module}.qweight", "I8", (n, k)).array, scale


def read_enflame(files: Files, module: str, n: int, k: int, expert: bool, context: dict):
    out_scales = files.get(f"{module}.out_scales", "F32", (n,)).array
    in_scales = files.get(f"{module}.in_scales", "BF16", (k,)).float32()
    if np.any(in_scales != in_scales[0]) or in_scales[0] <= 0 or expert and in_scales[0] != 1:
        raise ValueError(f"{module}.in_scales must be one positive per-tensor scale, and 1 for experts")
    # out = w_scale * in_scale rounded once: the quotient is within one ulp of the bf16 w_scale, so rounding restores it.
    quotient = (out_scales.astype(np.float64) / in_scales[0]).astype(np.float32)
    rounded = ((quotient.view(np.uint32).astype(np.uint64) + 0x8000) >> 16 << 16).astype(np.uint32).view(np.float32)
    return files.get(f"{module}.weight", "I8", (n, k)).array, rounded


def read_moorethreads(files: Files, module: str, n: int, k: int, expert: bool, context: dict):
    """fp32 weight instead of codes, and the largest error FP8 rounding may have at each element instead of scales."""
    values = files.get(f"{module}.weight", "F8_E4M3", (n, k)).float32()
    grid = files.get(f"{module}.weight_scale_inv", "F32", (-(-n // 128), -(-k // 128))).array
    scale = grid[np.arange(n)[:, None] // 128, np.arange(k)[None, :] // 128]
    weight = values * scale
    return weight, np.maximum(np.abs(weight) * 2.0**-4, scale * 2.0**-10) * (1 + 1e-5)


READERS: dict[str, Callable] = {
    "ascend": read_ascend,
    "metax": read_metax,
    "hygon": read_hygon,
    "kunlunxin": read_kunlunxin,
    "cambricon": read_cambricon,
    "enflame": read_enflame,
    "moorethreads": read_moorethreads,
}


def _canonical(files: Files, name: str, info: dict) -> tuple[np.ndarray, np.ndarray, bool]:
    n, k = info["shape"]
    expert = info["type"] == "W4A8_DYNAMIC"
    scale = files.get(f"{name}_scale", "F32", (n, 1)).array.reshape(n)
    if not expert:
        return files.get(f"{name}_codes", "I8", (n, k)).array, scale, expert
    packed = files.get(f"{name}_codes", "I8", (n, k // 2)).array.view(np.uint8)
    return _interleave(_signed(packed & 15), _signed(packed >> 4), axis=1), scale, expert


def verify(canonical: Path, folder: Path, platform: str) -> dict:
    """Compare one export with the canonical artifact, tensor by tensor.

    Returns counts of what was equal (and `fp8_relative_mse` for fp8). ValueError names the first tensor that differs,
    is missing, or has no place in the format.
    """
    description = json.loads((Path(canonical) / "quantization.json").read_text())["tensors"]
    ours, theirs = Files(canonical), Files(folder)
    context = {}
    for key, name in (("description", "quant_model_description.json"), ("quantize_config", "quantize_config.json")):
        if (Path(folder) / name).is_file():
            context[key] = json.loads((Path(folder) / name).read_text())
    counts = {"float_tensors": 0, "int4_tensors": 0, "int8_tensors": 0, "codes": 0}
    error = power = 0.0
    for name, info in description.items():
        if info["type"] == "FLOAT":
            expected, got = ours.get(name), theirs.get(name)
            if expected.dtype != got.dtype or not np.array_equal(expected.array, got.array):
                raise ValueError(f"{platform}: float tensor {name} differs from the canonical one")
            counts["float_tensors"] += 1
            continue
        codes, scale, expert = _canonical(ours, name, info)
        got_codes, got_scale = READERS[platform](theirs, name.removesuffix(".weight"), *info["shape"], expert, context)
        if platform == "moorethreads":
            weight = codes.astype(np.float32) * scale[:, None]
            if np.any(np.abs(got_codes - weight) > got_scale):
                raise ValueError(f"{platform}: {name} is farther from the canonical weight than FP8 rounding explains")
            error += float(np.square(got_codes - weight, dtype=np.float64).sum())
            power += float(np.square(weight, dtype=np.float64).sum())
        elif not np.array_equal(got_codes, codes):
            row, column = np.argwhere(got_codes != codes)[0]
            raise ValueError(
                f"{platform}: {name}[{row}, {column}] reads as code {got_codes[row, column]}, "
                f"the canonical artifact has {codes[row, column]}"
            )
        elif not np.array_equal(got_scale, scale):
            raise ValueError(f"{platform}: scales of {name} differ from the canonical ones")
        counts["int4_tensors" if expert else "int8_tensors"] += 1
        counts["codes"] += codes.size
    if theirs.strays():
        raise ValueError(f"{platform}: tensors no loader asks for: {', '.join(theirs.strays()[:5])}")
    return counts | ({"fp8_relative_mse": error / max(power, 1e-300)} if platform == "moorethreads" else {})


if __name__ == "__main__":
    print(json.dumps(verify(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]), indent=1))

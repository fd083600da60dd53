"""From a float checkpoint to the canonical W4A8 artifact, its dequantized twin, and the error of every tensor.

    python -m tasks.quant_artifact data/distill OUT      writes OUT/canonical and OUT/dequantized, prints errors by kind

Round-to-nearest (absmax/7) runs beside SSZ on every expert matrix, so that what SSZ gains is measured, not assumed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tasks.files import atomic_write
from tasks.quant_recipe import FLOAT, W4A8, kind_of, quant_type
from tasks.tensor_store import TensorReader, TensorWriter, copy_side_files

BASELINE = "absmax/7"


@dataclass
class ErrorSums:
    """Squared error and power over the tensors of one kind, for the chosen rule and for round-to-nearest."""

    power: float = 0.0
    error: float = 0.0
    baseline: float = 0.0
    tensors: int = 0
    bits: int = 16

    def row(self) -> dict:
        """Relative mean squared errors; `gain` is the share of round-to-nearest's error that the rule removes."""
        power = max(self.power, 1e-300)
        return {
            "bits": self.bits,
            "tensors": self.tensors,
            "relative_mse": self.error / power,
            "relative_mse_rtn": self.baseline / power,
            "gain": 1 - self.error / self.baseline if self.baseline else 0.0,
        }


@dataclass
class Artifact:
    """What `write_artifact` did: errors by kind and bytes before and after."""

    errors: dict[str, ErrorSums] = field(default_factory=dict)
    float_bytes: int = 0
    stored_bytes: int = 0
    counts: dict[str, int] = field(default_factory=dict)


def write_artifact(
    source: Path,
    canonical: Path,
    dequantized: Path,
    rtn: Path | None,
    *,
    rule: str,
    ssz_steps: int,
    shard_bytes: int = 4 << 30,
) -> Artifact:
    """Quantize checkpoint directory `source`, one tensor at a time.

    Writes `canonical` (see tasks/quant_recipe.py), `dequantized` (a checkpoint directory of the same names and dtypes
    whose quantized weights hold codes * scale, for any loader of float checkpoints) and, where asked, `rtn`, the same
    with round-to-nearest experts. ValueError for a tensor the recipe does not know.
    """
    from contextlib import ExitStack

    from kernels.int4 import decode_int4, pack_columns, quantize_int4
    from kernels.int8 import SCALE_RULE, quantize_int8

    config = json.loads((Path(source) / "config.json").read_text())
    reader = TensorReader(source, "model*.safetensors")
    artifact, tensors = Artifact(), {}
    with ExitStack() as stack:
        store = stack.enter_context(TensorWriter(canonical, "model", shard_bytes))
        twins = [stack.enter_context(TensorWriter(dequantized, "model", shard_bytes))]
        if rtn is not None:
            twins.append(stack.enter_context(TensorWriter(rtn, "model", shard_bytes)))
        for name, tensor in reader:
            kind = quant_type(name, config["num_hidden_layers"])
            artifact.counts[kind] = artifact.counts.get(kind, 0) + 1
            artifact.float_bytes += tensor.numel() * 2  # compared with the bf16 a float model would be served in
            tensors[name] = {"type": kind, "shape": list(tensor.shape)}
            if kind == FLOAT:
                artifact.stored_bytes += tensor.numel() * 2
                for writer in (store, *twins):
                    writer.put(name, tensor)
                continue
            weight = tensor.float()
            if kind == W4A8:
                codes, scale = quantize_int4(weight, rule, steps=ssz_steps)
                base = decode_int4(*quantize_int4(weight, BASELINE))
                stored, tensors[name]["rule"] = pack_columns(codes), rule
            else:
                codes, scale = quantize_int8(weight)
                base = decode_int4(codes, scale)
                stored, tensors[name]["rule"] = codes, SCALE_RULE
            value = decode_int4(codes, scale)
            sums = artifact.errors.setdefault(kind_of(name), ErrorSums(bits=4 if kind == W4A8 else 8))
            sums.power += float(weight.double().square().sum())
            sums.error += float((value - weight).double().square().sum())
            sums.baseline += float((base - weight).double().square().sum())
            sums.tensors += 1
            store.put(f"{name}_codes", stored)
            store.put(f"{name}_scale", scale)
            artifact.stored_bytes += stored.numel() + 4 * scale.numel()
            for writer, twin in zip(twins, (value, base)):
                writer.put(name, twin.to(tensor.dtype))
    description = {"format": "arcline-w4a8/1", "activations": "int8 per token, dynamic", "tensors": tensors}
    atomic_write(canonical / "quantization.json", json.dumps(description, indent=1) + "\n")
    for folder in (canonical, dequantized, rtn):
        if folder is not None:
            copy_side_files(source, folder)
    return artifact


if __name__ == "__main__":
    target = Path(sys.argv[2])
    result = write_artifact(
        Path(sys.argv[1]), target / "canonical", target / "dequantized", None, rule="ssz", ssz_steps=50
    )
    for label, entry in result.errors.items():
        print(f"{label:15s} {json.dumps(entry.row())}")

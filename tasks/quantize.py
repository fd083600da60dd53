"""Quantize: W4A8 post-training quantization of the final checkpoint into the canonical artifact (§5 of the paper).

    dvc repro quantize      or      python -m tasks quantize

Writes data/quantize/canonical (integer codes and scales, tasks/quant_recipe.py), data/quantize/dequantized (the same
numbers as a float checkpoint, for any loader), data/quantize/calibration (input statistics of every quantized layer) and
errors.json. Measures what quantization costs on held-out text: against the float model, against round-to-nearest, and
with activations quantized too (the integer emulator).
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field

from tasks.files import atomic_write
from tasks.init_from import starting_checkpoint
from tasks.quant_artifact import write_artifact
from tasks.stage import FromCheckpoint, Stage


class Config(FromCheckpoint):
    """Parameters of quantization."""

    STARTS_FROM = "data/distill"

    rule: str = Field("ssz", description="scale rule of the int4 experts: ssz, absmax/7 or absmax/7.5")
    ssz_steps: int = Field(50, ge=1, description="most iterations of SSZ per matrix")
    calibration_windows: int = Field(8, ge=1, description="training windows per domain whose activations are watched")
    eval_windows: int = Field(6, ge=1, description="held-out windows per domain for loss and KL")
    window: int = Field(256, ge=2, description="tokens per window")
    batch: int = Field(4, ge=1, description="windows per forward pass")
    shard_gib: float = Field(4.0, gt=0, description="size limit of one safetensors file, GiB")


def windows(folder: Path, split: str, per_domain: int, length: int):
    """Evenly spread windows of every domain: (ids, targets) int64 [n, length], -100 where there is no target."""
    import numpy as np
    import torch

    from tasks.samplers import validation_windows
    from tasks.tokens import TokenSet

    tokens = TokenSet(folder)
    pairs = [validation_windows(tokens.shard(d, split), length, per_domain) for d in tokens.domains]
    ids, targets = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    if not len(ids):
        raise ValueError(f"{folder}: the {split} split has no text to measure on")
    return torch.from_numpy(ids), torch.from_numpy(targets)


def compare(reference, models: dict, ids_bs, targets_bs, batch: int) -> dict[str, dict[str, float]]:
    """Loss (nats per token) of each model and KL(reference || model) on held-out windows; also the reference's own loss.

    Returns {label: {loss, loss_delta, kl, logits_relative_error}}, with the reference under "float".
    """
    import torch

    sums = {label: [0.0, 0.0, 0.0] for label in models}
    base = power = tokens = 0.0
    with torch.inference_mode():
        for start in range(0, len(ids_bs), batch):
            x, y = ids_bs[start : start + batch], targets_bs[start : start + batch]
            keep = y != -100
            y = y[keep]
            tokens += len(y)
            logits_f = reference.logits(reference(x).hidden_bsh[keep])
            logp_f = logits_f.log_softmax(-1)
            base -= float(logp_f.gather(1, y[:, None]).double().sum())
            power += float(logits_f.double().square().sum())
            for label, model in models.items():
                logits = model.logits(model(x).hidden_bsh[keep])
                logp = logits.log_softmax(-1)
                sums[label][0] -= float(logp.gather(1, y[:, None]).double().sum())
                sums[label][1] += float((logp_f.exp() * (logp_f - logp)).double().sum())
                sums[label][2] += float((logits - logits_f).double().square().sum())
    rows = {"float": {"loss": base / tokens, "tokens": int(tokens)}}
    for label, (loss, kl, error) in sums.items():
        rows[label] = {
            "loss": loss / tokens,
            "loss_delta": (loss - base) / tokens,
            "kl": kl / tokens,
            "logits_relative_error": (error / power) ** 0.5,
        }
    return rows


def calibrate(checkpoint: Path, ids_bs, batch: int) -> dict:
    """Input statistics of every quantized layer over the given windows (see Calibration.statistics)."""
    import torch

    from model.checkpoint import load_checkpoint
    from tasks.quant_emulate import Calibration, hook_linears, quantizable

    model = load_checkpoint(checkpoint)
    watch = Calibration(quantizable(model))
    hook_linears(model, watch)
    with torch.inference_mode():
        for start in range(0, len(ids_bs), batch):
            model(ids_bs[start : start + batch])
        return watch.statistics()


def run(stage: Stage) -> None:
    """Quantize data/distill. ValueError for a tensor without a rule in the recipe, or a checkpoint that is none."""
    from model.checkpoint import load_checkpoint
    from tasks.quant_emulate import integer_model
    from tasks.tensor_store import TensorWriter

    config: Config = stage.config
    out, source, pack = stage.out("data/quantize"), starting_checkpoint(stage), stage.dep("data/pack/pretrain")
    rtn = stage.scratch / "rtn"
    artifact = write_artifact(
        source,
        out / "canonical",
        out / "dequantized",
        rtn,
        rule=config.rule,
        ssz_steps=config.ssz_steps,
        shard_bytes=int(config.shard_gib * 2**30),
    )
    errors = {kind: sums.row() for kind, sums in sorted(artifact.errors.items())}
    for kind, row in errors.items():
        stage.print(
            f"{kind}: {row['tensors']} tensors at {row['bits']} bits, relative MSE {row['relative_mse']:.3e} "
            f"(round to nearest {row['relative_mse_rtn']:.3e})"
        )
    ids, _ = windows(pack, "train", config.calibration_windows, config.window)
    stage.print(f"calibration on {ids.numel()} tokens")
    statistics = calibrate(source, ids, config.batch)
    with TensorWriter(out / "calibration", "activations") as writer:
        for name, tensor in statistics.items():
            writer.put(name, tensor)

    ids, targets = windows(pack, "val", config.eval_windows, config.window)
    models = {
        "weights": load_checkpoint(out / "dequantized"),
        "weights_rtn": load_checkpoint(rtn),
        "weights_and_activations": integer_model(load_checkpoint(out / "dequantized"), out / "canonical"),
    }
    stage.print(f"held-out comparison on {ids.numel()} tokens")
    quality = compare(load_checkpoint(source), models, ids, targets, config.batch)
    for label, row in quality.items():
        stage.print(f"{label}: " + ", ".join(f"{k} {v:.5g}" for k, v in row.items()))
    size = {
        "bf16_mib": round(artifact.float_bytes / 2**20, 4),
        "w4a8_mib": round(artifact.stored_bytes / 2**20, 4),
        "ratio": artifact.float_bytes / artifact.stored_bytes,
    }
    unseen = sum(1 for name, t in statistics.items() if name.endswith(".tokens") and not int(t))
    result = {"rule": config.rule, "errors": errors, "quality": quality, "size": size, "layers_without_tokens": unseen}
    atomic_write(out / "errors.json", json.dumps(result, indent=1, sort_keys=True) + "\n")
    stage.metric(error=errors, quality=quality, size=size, layers_without_tokens=unseen)
    stage.rows(**{kind.lower(): count for kind, count in sorted(artifact.counts.items())})

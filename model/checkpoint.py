"""Checkpoints as Hugging Face directories (model_type glm_moe_dsa): safetensors and JSON, laid out as transformers does.

In memory the routed experts are stacked; on disk they are separate (mlp.experts.N.gate_proj.weight ...). The MTP layer is
stored as model.layers.{num_hidden_layers}.*, which transformers ignores.

Run its tests: `python -m pytest tests/model/test_checkpoint.py`
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from model.config import ModelConfig
from model.hf_config import read_config
from model.transformer import GlmMoeDsa

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
MAX_SHARD_BYTES = 5 * 10**9
# transformers keeps these in fp32 whatever the model's dtype: the router decides in fp32.
FP32_SUFFIXES = (
    "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias",
    "indexer.weights_proj.weight",
    "A_log",
    "dt_bias",
)


def disk_tensors(model: GlmMoeDsa) -> dict[str, torch.Tensor]:
    """The model's tensors under their on-disk names; experts unfused as views."""
    return unfused(model.state_dict(), model.cfg)


def unfused(state: Mapping[str, torch.Tensor], cfg: ModelConfig, first_expert: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of a model's state under their on-disk names; its stacks of experts begin with number `first_expert`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        prefix, _, last = name.rpartition(".")
        if name == "lm_head.weight" and cfg.tie_word_embeddings:
            continue
        if prefix.endswith("mlp.experts"):
            for place in range(tensor.shape[0]):
                e = first_expert + place
                if last == "gate_up_proj":
                    gate, up = tensor[place].chunk(2)
                    tensors[f"{prefix}.{e}.gate_proj.weight"], tensors[f"{prefix}.{e}.up_proj.weight"] = gate, up
                else:
                    tensors[f"{prefix}.{e}.down_proj.weight"] = tensor[place]
        else:
            tensors[name] = tensor
    return tensors


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def shard_names(tensors: Mapping[str, torch.Tensor], limit: int) -> list[list[str]]:
    """The names of every file, such that none is larger than `limit` bytes unless one tensor is."""
    shards, size = [[]], 0
    for name in sorted(tensors):
        bytes_ = tensors[name].numel() * tensors[name].element_size()
        if shards[-1] and size + bytes_ > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += bytes_
    return shards


def write_configs(cfg: ModelConfig, dtype: torch.dtype, directory: Path) -> None:
    """config.json and generation_config.json of a checkpoint whose matrices are of `dtype`."""
    _write_json(directory / "config.json", {**cfg.to_hf(), "dtype": str(dtype).removeprefix("torch.")})
    generation = {"eos_token_id": list(cfg.eos_token_ids) or None, "pad_token_id": cfg.pad_token_id}
    _write_json(
        directory / "generation_config.json",
        {"do_sample": True, "temperature": 1.0, **{k: v for k, v in generation.items() if v is not None}},
    )


def copy_tokenizer(source: Path, directory: Path) -> None:
    """The tokenizer's files that `source` has."""
    for filename in TOKENIZER_FILES:
        if (source / filename).exists():
            shutil.copyfile(source / filename, directory / filename)


def save_checkpoint(
    model: GlmMoeDsa,
    directory: Path | str,
    tokenizer_dir: Path | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config.json, generation_config.json, model.safetensors (sharded above max_shard_bytes), tokenizer."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = disk_tensors(model)
    write_configs(model.cfg, model.model.embed_tokens.weight.dtype, directory)
    shards = shard_names(tensors, max_shard_bytes)
    weight_map = {}
    for i, names in enumerate(shards, 1):
        filename = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file({n: tensors[n].contiguous().clone() for n in names}, directory / filename, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, filename))
    if len(shards) > 1:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(directory / "model.safetensors.index.json", index)
    if tokenizer_dir is not None:
        copy_tokenizer(Path(tokenizer_dir), directory)


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [directory / name for name in names]
    return [directory / "model.safetensors"]


def load_config(directory: Path | str) -> ModelConfig:
    """The ModelConfig of a checkpoint directory. ValueError when it is not one."""
    path = Path(directory) / "config.json"
    raw = read_config(path)
    try:
        return ModelConfig.from_hf(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def verify_files(directory: Path | str, files: list[Path]) -> None:
    """ValueError naming the first of `files` that is not what the directory's manifest.json lists (SHA-256).

    Directories without a manifest (published ones) have nothing to be checked against.
    """
    manifest = Path(directory) / "manifest.json"
    if not manifest.is_file():
        return
    listed = {row["path"]: row for row in json.loads(manifest.read_text(encoding="utf-8")).get("files", [])}

    def check(path: Path) -> str | None:
        row = listed.get(path.name)
        if row is None or not path.is_file():
            return None  # written after the manifest, or missing: the caller says so
        if path.stat().st_size != row["bytes"]:
            return f"{path} has {path.stat().st_size} bytes, its manifest lists {row['bytes']}"
        with open(path, "rb") as handle:
            if hashlib.file_digest(handle, "sha256").hexdigest() != row["sha256"]:
                return f"{path} does not match the hash in its manifest: it was damaged or changed after it was written"
        return None

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the interpreter's lock
        problem = next((p for p in pool.map(check, files) if p), None)
    if problem:
        raise ValueError(problem)


def check_finite(name: str, tensor: torch.Tensor, where: object) -> None:
    """ValueError when a stored weight has NaN or infinite values: training would only find out at its first loss."""
    if not torch.isfinite(tensor.sum(dtype=torch.float64)):
        raise ValueError(f"{where}: {name} has values that are not finite")


@torch.no_grad()
def load_weights(model: GlmMoeDsa, directory: Path | str) -> None:
    """Fill a model's tensors in place from a checkpoint. ValueError lists missing, unexpected or wrongly shaped names, or
    names the file that is not what the directory's manifest lists.

    A checkpoint without an MTP layer (as transformers saves one) fits only a model with num_nextn_predict_layers 0.
    """
    targets = disk_tensors(model)
    missing, unexpected, wrong = set(targets), [], []
    files = _files(Path(directory))
    verify_files(directory, [*files, Path(directory) / "config.json"])
    for path in files:
        if not path.exists():
            raise ValueError(f"checkpoint file {path.name} is missing in {path.parent}")
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                if name not in targets:
                    unexpected.append(name)
                    continue
                tensor = file.get_tensor(name)
                if tensor.shape != targets[name].shape:
                    wrong.append(
                        f"{name}: {tuple(tensor.shape)} in the file, {tuple(targets[name].shape)} in the model"
                    )
                    continue
                check_finite(name, tensor, path)
                targets[name].copy_(tensor)
                missing.discard(name)
    problems = [f"missing: {', '.join(sorted(missing))}"] if missing else []
    problems += [f"unexpected: {', '.join(unexpected)}"] if unexpected else []
    problems += [f"wrong shape: {'; '.join(wrong)}"] if wrong else []
    if problems:
        raise ValueError(f"checkpoint {directory} does not fit the model. " + ". ".join(problems))


def load_checkpoint(directory: Path | str, dtype: torch.dtype = torch.float32) -> GlmMoeDsa:
    """The model of a checkpoint directory, in `dtype` (router and indexer head weights stay fp32). Strict, see load_weights.

    transformers drops the MTP layer when it re-saves a model but keeps num_nextn_predict_layers: set that to 0 there.
    """
    model = build_empty(load_config(directory), dtype)
    load_weights(model, directory)
    return model


def build_empty(cfg: ModelConfig, dtype: torch.dtype) -> GlmMoeDsa:
    """A model whose tensors are allocated in `dtype` (router and indexer head weights fp32) and not yet filled."""
    with torch.device("meta"):
        model = GlmMoeDsa(cfg)
    model.to(dtype)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(FP32_SUFFIXES):
            tensor.data = tensor.data.float()
    model.to_empty(device="cpu")
    if cfg.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model

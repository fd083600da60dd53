"""Checkpoints as published: GLM-5's Hugging Face directories in fp32, bf16 or FP8 blocks, and what transformers saves.

    scan = scan_checkpoint(directory)        # headers only: every name, shape, dtype and file accounted for, or a ValueError
    model = import_checkpoint(directory)     # fp32 for training, one tensor in memory at a time beside the model
    convert_checkpoint(directory, out)       # the same in this project's own layout (model/checkpoint.py), shard by shard

What published directories have beyond ours: shards with an index; FP8 (e4m3) matrices with `*.weight_scale_inv` per 128 x 128
block (DeepSeek-V3, GLM-5-FP8); copies of the embedding and the head inside the MTP layer (GLM-4.5; GLM-5 has none);
routed experts fused into one tensor per layer; indexer weights in layers that share another layer's selection
(`indexer_types`); no MTP tensors although the configuration counts an MTP layer (transformers drops them on saving).
Each is recognised and counted; any other name is an error, so is a missing one.

Run its tests: `python -m pytest tests/model/test_checkpoint_import.py`        look: `python -m tasks init-check DIR`
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kernels.fp8 import dequantize_fp8_blocks
from model.checkpoint import (
    FP32_SUFFIXES,
    MAX_SHARD_BYTES,
    build_empty,
    check_finite,
    copy_tokenizer,
    disk_tensors,
    write_configs,
)
from model.config import ModelConfig
from model.hf_config import fp8_block, read_config
from model.transformer import GlmMoeDsa

FP8, SCALE = "F8_E4M3", "_scale_inv"
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SCALES = ("F32", "BF16", "F8_E8M0")
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """One tensor on disk: its file, shape and safetensors dtype."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Scan:
    """A directory read through its headers. `sources`: our name -> (stored name, row of a fused expert tensor or None)."""

    directory: Path
    cfg: ModelConfig
    stored: dict[str, Stored]
    block: int = 128
    sources: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    duplicates: dict[str, str] = field(default_factory=dict)  # a stored copy -> the stored name it must equal
    counts: Counter = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """What the matrices are stored in; FP8 blocks stand for bf16."""
        kinds = {self.stored[name].dtype for name, _ in self.sources.values()}
        return torch.bfloat16 if FP8 in kinds or "BF16" in kinds else torch.float16 if "F16" in kinds else torch.float32

    @property
    def is_own_layout(self) -> bool:
        """Whether model.checkpoint.load_checkpoint reads the directory as it is."""
        same = all(ours == name and row is None for ours, (name, row) in self.sources.items())
        return same and len(self.sources) == len(self.stored) and self.counts["fp8"] == 0 and not self.notes

    def report(self) -> str:
        """What was found, for a person."""
        sizes = self.cfg.count_parameters()
        kinds = Counter(s.dtype for s in self.stored.values())
        lines = [
            f"{self.directory}: {len({s.file for s in self.stored.values()})} files, {len(self.stored)} tensors ("
            + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
            + ")",
            f"{self.cfg.num_hidden_layers} layers ({self.cfg.first_k_dense_replace} dense) + "
            f"{self.cfg.num_nextn_predict_layers} MTP, vocabulary {self.cfg.vocab_size}, "
            f"{sizes['everything']['total']:,} parameters with embeddings and MTP",
            ", ".join(f"{n} {what}" for what, n in sorted(self.counts.items())),
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _headers(directory: Path) -> tuple[dict[str, Stored], list[str]]:
    """Every tensor's header, checked against the index; and notes on files that no index names."""
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is not a directory: a checkpoint is one, with config.json and *.safetensors files"
        )
    index = directory / INDEX
    mapped: dict[str, str] | None = None
    if index.is_file():
        try:
            mapped = {name: Path(file).as_posix() for name, file in read_config(index)["weight_map"].items()}
        except (KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index}: not a safetensors index: {error!r}") from None
    files = sorted({directory / name for name in mapped.values()} if mapped else directory.glob("*.safetensors"))
    if not files:
        pickled = sorted(p.name for p in directory.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        hint = f"; {_some(pickled)} are pickles, which are never loaded: save them as safetensors" if pickled else ""
        raise ValueError(f"{directory} holds no *.safetensors file{hint}")
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ValueError(f"{directory}: {len(missing)} of {len(files)} shards are missing: {_some(missing)}")
    stored: dict[str, Stored] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (safe_open is no mapping)
                    part = handle.get_slice(name)
                    if name in stored:
                        raise ValueError(f"{name} is stored twice: in {stored[name].file.name} and in {path.name}")
                    stored[name] = Stored(path, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: not a whole safetensors file: {error}") from None
    notes = []
    if mapped is not None:
        wrong = sorted(n for n, file in mapped.items() if n not in stored or stored[n].file.name != file)
        extra = sorted(set(stored) - set(mapped))
        if wrong or extra:
            raise ValueError(
                f"{index}: names {len(wrong)} tensors that are not in the file it names ({_some(wrong)}), and misses "
                f"{len(extra)} that files hold ({_some(extra)})"
            )
        others = sorted({p.name for p in directory.glob("*.safetensors")} - {p.name for p in files})
        if others:
            notes.append(f"{len(others)} safetensors files are not in the index and not read: {_some(others)}")
    return stored, notes


def _some(names: list[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "none") + more


def _config(directory: Path, stored: dict[str, Stored], notes: list[str]) -> tuple[ModelConfig, int]:
    """(model configuration, FP8 block size) of config.json; without MTP when no tensor of the MTP layers is there."""
    path = directory / "config.json"
    raw = read_config(path)
    try:
        block, cfg = fp8_block(raw), ModelConfig.from_hf(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    layers = cfg.num_nextn_predict_layers
    mtp = [n for n in stored if (m := re.match(r"model\.layers\.(\d+)\.", n)) and int(m[1]) >= cfg.num_hidden_layers]
    if layers and not mtp:
        cfg = dataclasses.replace(cfg, num_nextn_predict_layers=0)
        notes.append(
            f"config.json counts {layers} MTP layer(s), the files hold none (transformers drops them on saving): the model "
            "has no MTP; train with mtp.depth 0"
        )
    return cfg, block


def expected_tensors(cfg: ModelConfig) -> dict[str, Tensor]:
    """Name -> tensor without memory (its shape) of our layout for a configuration."""
    with torch.device("meta"):
        return disk_tensors(GlmMoeDsa(cfg))


def scan_checkpoint(directory: Path | str) -> Scan:
    """Account for every tensor of a directory through its headers. ValueError says all that does not fit, by name.

    Errors: missing shards, an index that does not match, missing or unknown names, wrong shapes, FP8 without a scale or a
    scale without FP8, matrices of more than one float type.
    """
    directory = Path(directory)
    stored, notes = _headers(directory)
    cfg, block = _config(directory, stored, notes)
    scan = Scan(directory, cfg, stored, block, notes=notes)
    expected = expected_tensors(cfg)
    unknown, problems = [], []
    for name in stored:
        if not _place(scan, name, expected):
            unknown.append(name)
    missing = sorted(set(expected) - set(scan.sources))
    for ours, (name, row) in scan.sources.items():
        shape = stored[name].shape
        found = shape if row is None else _row_shape(ours, shape)
        if found != tuple(expected[ours].shape):
            problems.append(f"{name}: {shape} in the file, {tuple(expected[ours].shape)} expected for {ours}")
        problems += _dtype_problems(scan, name)
    problems += _mixed(scan, expected)
    for what, names in (("missing", missing), ("unknown", sorted(unknown))):
        if names:
            problems.insert(0, f"{len(names)} {what}: {_some(names)}")
    if problems:
        raise ValueError(f"checkpoint {directory} does not fit its config.json. " + ". ".join(dict.fromkeys(problems)))
    scan.counts["weights"] = len(scan.sources)
    return scan


def _place(scan: Scan, name: str, expected: dict[str, Tensor]) -> bool:
    """Find a stored name's place. False when it has none."""
    if name in expected:
        _claim(scan, name, name, None)
        return True
    if name.endswith(SCALE) and name.removesuffix(SCALE) in scan.stored:
        scan.counts["fp8 scales"] += 1
        return True
    fused = re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)", name)
    if fused and scan.stored[name].shape[:1] == (scan.cfg.n_routed_experts,):
        parts = ("gate_proj", "up_proj") if fused[2] == "gate_up_proj" else ("down_proj",)
        for e in range(scan.cfg.n_routed_experts):
            for part in parts:
                ours = f"{fused[1]}.{e}.{part}.weight"
                if ours not in expected:
                    return False
                _claim(scan, ours, name, e)
        scan.counts["fused expert tensors"] += 1
        return True
    copy = re.fullmatch(r"model\.layers\.(\d+)\.(embed_tokens|shared_head\.head)\.weight", name)
    if copy and 0 <= int(copy[1]) - scan.cfg.num_hidden_layers < scan.cfg.num_nextn_predict_layers:
        head = copy[2] != "embed_tokens" and not scan.cfg.tie_word_embeddings
        scan.duplicates[name] = "lm_head.weight" if head else "model.embed_tokens.weight"
        scan.counts["copies in the MTP layer"] += 1
        return True
    if name == "lm_head.weight" and scan.cfg.tie_word_embeddings:
        scan.duplicates[name] = "model.embed_tokens.weight"
        scan.counts["copies of tied weights"] += 1
        return True
    shared = re.match(r"model\.layers\.(\d+)\.self_attn\.indexer\.", name)
    if shared and int(shared[1]) < scan.cfg.num_hidden_layers and not scan.cfg.has_indexer(int(shared[1])):
        scan.counts["indexer tensors of sharing layers, not used"] += 1
        return True
    if re.fullmatch(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", name):
        scan.counts["rotary tables, computed here"] += 1
        return True
    return False


def _claim(scan: Scan, ours: str, name: str, row: int | None) -> None:
    """Take a stored tensor (or its row) for one of ours; ValueError when another holds the same weight already."""
    if ours in scan.sources:
        raise ValueError(f"{scan.directory}: {ours} is stored twice: as {scan.sources[ours][0]} and as {name}")
    scan.sources[ours] = (name, row)


def _row_shape(ours: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one expert's part in a fused tensor [E, 2m, H] or [E, H, m]."""
    if len(shape) != 3 or (shape[1] % 2 and not ours.endswith("down_proj.weight")):
        return shape
    return (shape[1], shape[2]) if ours.endswith("down_proj.weight") else (shape[1] // 2, shape[2])


def _dtype_problems(scan: Scan, name: str) -> list[str]:
    kind, scale = scan.stored[name].dtype, scan.stored.get(name + SCALE)
    if kind == FP8:
        if scale is None:
            return [f"{name} is FP8 and has no {name + SCALE}"]
        shape = scan.stored[name].shape
        blocks = (*shape[:-2], *(-(-n // scan.block) for n in shape[-2:]))
        if scale.shape != blocks or scale.dtype not in SCALES:
            return [
                f"{name + SCALE}: {scale.dtype} {scale.shape} in the file, {blocks} expected for blocks of {scan.block}"
            ]
        scan.counts["fp8"] += 1
    elif scale is not None:
        return [f"{name + SCALE} scales {name}, which is {kind}, not FP8"]
    elif kind not in FLOATS:
        return [f"{name} is {kind}; expected one of {', '.join([*FLOATS, FP8])}"]
    return []


def _mixed(scan: Scan, expected: dict[str, Tensor]) -> list[str]:
    """Matrices must be of one float type; the router, the indexer's head weights and vectors may be fp32 beside it."""
    kinds: dict[str, str] = {}
    for ours, (name, _) in scan.sources.items():
        kind = scan.stored[name].dtype
        if kind != FP8 and not ours.endswith(FP32_SUFFIXES) and expected[ours].dim() > 1:
            kinds.setdefault(kind, name)
    if len(kinds) > 1:
        return ["matrices of mixed types: " + ", ".join(f"{n} is {k}" for k, n in sorted(kinds.items()))]
    return []


class _Reader:
    """Tensors of a scan under our names, one at a time; keeps the open file and a fused tensor for the next request."""

    def __init__(self, scan: Scan) -> None:
        self.scan = scan
        self._path: Path | None = None
        self._handle = None
        self._last: tuple[str, Tensor] | None = None

    def stored(self, name: str) -> Tensor:
        path = self.scan.stored[name].file
        if path != self._path:
            self._handle, self._path = safe_open(path, framework="pt").__enter__(), path
        return self._handle.get_tensor(name)

    def get(self, ours: str) -> Tensor:
        name, row = self.scan.sources[ours]
        if self._last is None or self._last[0] != name:
            tensor = self.stored(name)
            if self.scan.stored[name].dtype == FP8:
                tensor = self._dequantize(tensor, self.stored(name + SCALE).float())
            self._last = (name, tensor)
        tensor = self._last[1]
        if row is None:
            return tensor
        if ours.endswith("down_proj.weight"):
            return tensor[row]
        return tensor[row].chunk(2)[0 if ours.endswith("gate_proj.weight") else 1]

    def _dequantize(self, values: Tensor, scale: Tensor) -> Tensor:
        if values.dim() == 2:
            return dequantize_fp8_blocks(values, scale, self.scan.block)
        return torch.stack([dequantize_fp8_blocks(v, s, self.scan.block) for v, s in zip(values, scale, strict=True)])

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in the order of files, so that each is read once. ValueError names one that is not finite."""
        place = {ours: (self.scan.stored[name].file, name) for ours, (name, _) in self.scan.sources.items()}
        for ours in sorted(self.scan.sources, key=lambda n: (*place[n], n)):
            tensor = self.get(ours)
            check_finite(ours, tensor, place[ours][0])
            yield ours, tensor

    def check_duplicates(self) -> None:
        """ValueError when a copy of the embedding or head (MTP layer, tied weights) is no copy: this model shares them."""
        for copy, name in self.scan.duplicates.items():
            if not torch.equal(self.stored(copy), self.stored(name)):
                why = "config.json says tie_word_embeddings" if copy == "lm_head.weight" else "the MTP layer shares it"
                raise ValueError(f"{copy} differs from {name}, but {why}: it cannot be imported")


@torch.no_grad()
def import_checkpoint(directory: Path | str, dtype: torch.dtype = torch.float32) -> GlmMoeDsa:
    """The model of a published directory in `dtype`; errors as `scan_checkpoint`, and copies that are no copies."""
    scan = scan_checkpoint(directory)
    reader = _Reader(scan)
    reader.check_duplicates()
    model = build_empty(scan.cfg, dtype)
    targets = disk_tensors(model)
    for ours, tensor in reader:
        targets[ours].copy_(tensor)
    return model


def convert_checkpoint(
    directory: Path | str, out: Path | str, dtype: torch.dtype | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Scan:
    """Write a published directory in our own layout, holding at most one shard in memory; returns the scan.

    dtype: of the matrices, None keeps theirs (bf16 for FP8). The router and the indexer's head weights become fp32. The
    tokenizer's files are copied.
    """
    out, scan = Path(out), scan_checkpoint(directory)
    reader = _Reader(scan)
    reader.check_duplicates()
    out.mkdir(parents=True, exist_ok=True)
    kind = dtype or scan.dtype
    pending: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    size = total = 0

    def flush() -> None:
        nonlocal size
        if pending:
            shards.append(sorted(pending))
            save_file(pending, out / f"part-{len(shards):05d}.safetensors", metadata={"format": "pt"})
            pending.clear()
            size = 0

    for ours, tensor in reader:
        value = tensor.to(torch.float32 if ours.endswith(FP32_SUFFIXES) else kind).contiguous().clone()
        if size + value.nbytes > max_shard_bytes:
            flush()
        pending[ours] = value
        size += value.nbytes
        total += value.nbytes
    flush()
    weight_map = {}
    for i, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        (out / f"part-{i:05d}.safetensors").rename(out / file)
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    write_configs(scan.cfg, kind, out)
    copy_tokenizer(Path(directory), out)
    return scan

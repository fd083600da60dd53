"""A stage's output written by all ranks: one Hugging Face checkpoint in shards, of which no rank holds or sends the whole.

    save_output(layout, model, ranks, folder, tokenizer, optimizer)        # all ranks

Each rank writes the tensors that it owns into shards of its own (its experts; its layers; of what all hold, whole tensors
shared out by size), the writer then the index, the configuration and the tokenizer. Optimizer state goes into one file per
rank. A model that fits into one shard is joined on the writer instead and is the file that one process writes.

Check it:  python -m pytest tests/tasks/test_spread_output.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from model.checkpoint import (
    MAX_SHARD_BYTES,
    copy_tokenizer,
    disk_tensors,
    save_checkpoint,
    shard_names,
    unfused,
    write_configs,
)
from model.expert_parallel import local_experts
from model.state_parts import Piece
from model.transformer import GlmMoeDsa
from tasks.parallel import Parallel, current
from tasks.resume_files import Stored, complete, part_files, part_name, read_headers, write_part

INDEX = "model.safetensors.index.json"
OPTIMIZER = "optimizer"


def output_bytes(layout: Any, model: GlmMoeDsa, ranks: Parallel) -> int:
    """Size of the whole model's weights. All ranks call it."""
    return round(ranks.sum_(float(sum(piece.nbytes for piece in layout.owned_weights(model)))))


def output_tensors(layout: Any, model: GlmMoeDsa) -> dict[str, Tensor]:
    """What this rank writes of the model, under on-disk names: its own layers or experts, its share of what others hold, too."""
    state, ranks = model.state_dict(), current()
    if (parts := layout.parts) is not None:
        own = {n: t for n, t in state.items() if parts.speaker[n] == parts.grid.place}
        return _share(unfused(own, model.cfg), parts.grid.replica, parts.grid.data)
    both = {n: t for n, t in state.items() if not layout.owns_part(n)}
    found = _share(unfused(both, model.cfg), ranks.rank, ranks.world)
    if layout.experts is not None:
        own = {n: t for n, t in state.items() if layout.owns_part(n)}
        first, _ = local_experts(model.cfg.n_routed_experts, layout.experts)
        found |= _share(unfused(own, model.cfg, first), *layout.holders)
    return found


def _share(tensors: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
    """A rank's share of tensors that all hold: the largest first, each to who has least so far."""
    loads, found = [0] * world, {}
    for name in sorted(tensors, key=lambda n: (-tensors[n].nbytes, n)):
        owner = min(range(world), key=lambda r: (loads[r], r))
        loads[owner] += tensors[name].nbytes
        if owner == rank:
            found[name] = tensors[name]
    return found


def _all_names(model: GlmMoeDsa) -> set[str]:
    with torch.device("meta"):
        return set(disk_tensors(GlmMoeDsa(model.cfg)))


def on_all(ranks: Parallel, act: Callable[[], Any]) -> list[Any]:
    """Every rank acts; their JSON-able results. OSError on all ranks when one failed."""
    result, error = None, None
    try:
        result = act()
    except Exception as caught:  # noqa: BLE001 (raised below, on all ranks)
        error = caught
    found = ranks.exchange([result, None if error is None else str(error)])
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text is not None]
    if failed:
        raise OSError(f"the output could not be written: {failed[0]}") from error
    return [value for value, _ in found]


@torch.no_grad()
def write_output(
    layout: Any,
    model: GlmMoeDsa,
    ranks: Parallel,
    folder: Path,
    tokenizer: Path | None = None,
    optimizer: Any = None,
    limit: int = MAX_SHARD_BYTES,
) -> None:
    """Write the checkpoint into `folder` of the writer, which all ranks must see. All ranks call it; other ranks' `folder`,
    `tokenizer` do not count. optimizer: an engine whose state goes with it, or None. OSError on all ranks when one fails.
    """
    folder = Path(ranks.first(str(folder)))
    tensors = output_tensors(layout, model)
    shards = [names for names in shard_names(tensors, limit) if names]
    counts = ranks.exchange(len(shards))
    first, total = sum(counts[: ranks.rank]), sum(counts)

    def write_own() -> int:
        if not folder.is_dir():
            raise OSError(f"{folder} is not seen here: the ranks need one file system to write one checkpoint")
        for number, names in enumerate(shards, first + 1):
            shard = {n: tensors[n].to("cpu", memory_format=torch.contiguous_format, copy=True) for n in names}
            save_file(shard, folder / f"model-{number:05d}-of-{total:05d}.safetensors", metadata={"format": "pt"})
        if optimizer is not None:
            (folder / OPTIMIZER).mkdir(exist_ok=True)
            write_part(folder / OPTIMIZER / part_name(OPTIMIZER, ranks.rank, ranks.world), optimizer.owned_state())
        return sum(tensor.nbytes for tensor in tensors.values())

    def write_rest() -> None:
        if not ranks.is_writer:
            return
        index = read_headers(folder)["model"]
        complete({"model": index})
        if wrong := sorted(_all_names(model) ^ index.keys()):
            raise ValueError(f"written by no rank, or no part of the model: {', '.join(wrong[:5])}")
        weight_map = {name: row["parts"][0][0] for name, row in sorted(index.items())}
        text = json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}, indent=2, sort_keys=True)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")
        write_configs(model.cfg, model.model.embed_tokens.weight.dtype, folder)
        if tokenizer is not None:
            copy_tokenizer(Path(tokenizer), folder)
        if optimizer is not None:
            complete(read_headers(folder / OPTIMIZER))

    sizes = on_all(ranks, write_own)
    on_all(ranks, write_rest)


def save_output(
    layout: Any,
    model: GlmMoeDsa,
    ranks: Parallel,
    folder: Path,
    tokenizer: Path | None = None,
    optimizer: Any = None,
    limit: int = MAX_SHARD_BYTES,
) -> GlmMoeDsa | None:
    """`write_output` where several ranks hold a model of more than `limit` bytes; else one process's file, by the writer.

    All ranks call it, after training: sequences are no longer spread. The whole model where it was joined, else None.
    """
    layout.whole_sequences(model)
    if ranks.world > 1 and output_bytes(layout, model, ranks) > limit:
        write_output(layout, model, ranks, folder, tokenizer, optimizer, limit)
        return None
    state = optimizer.state_tensors() if optimizer is not None else {}
    model = layout.whole_model(model)
    if not ranks.is_writer:
        return model
    save_checkpoint(model, folder, tokenizer, limit)
    if optimizer is not None:
        (folder / OPTIMIZER).mkdir()
        write_part(folder / OPTIMIZER / part_name(OPTIMIZER, 0, 1), [Piece.whole(*item) for item in state.items()])
    return model


def saved_optimizer(folder: Path) -> Mapping[str, Tensor] | None:
    """The optimizer state that a stage's output holds, read when asked for; None without any."""
    if not part_files(folder / OPTIMIZER, OPTIMIZER):
        return None
    return Stored(folder / OPTIMIZER, read_headers(folder / OPTIMIZER)[OPTIMIZER])

"""A whole model of which each pipeline rank keeps its own stages' tensors; and the whole again where one is needed.

    parts = Parts(model, place(...), Grid.create(pipeline=2), control)      # the other stages' tensors are freed
    pipe = Pipeline(cfg, schedule, parts.specs, parts.grid, device, local=parts.local())
    with parts.lent():                                                      # all ranks; on rank 0 `model` is whole inside
        ...
    parts.pieces(model.state_dict()), parts.load(source)                    # to and from a checkpoint of logical tensors

What a rank does not keep stays in the model as an empty tensor (torch's meta device), so that names, shapes and optimizer
groups are those of one process on every rank. Of a tensor that several ranks keep the first rank's copy is sent. All of it
travels through host memory.

Check it:  python -m pytest tests/tasks/test_pipeline_engine.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.pipeline import Grid
from model.pipeline_place import StageSpec, stage_names
from model.pipeline_stage import RankModel
from model.state_parts import Chosen, Piece, as_source, gather_pieces, load_into, share_out
from model.transformer import GlmMoeDsa


class Parts:
    """See the module's docstring. control: a group of all ranks on gloo (None: one process)."""

    def __init__(self, model: GlmMoeDsa, specs: Sequence[StageSpec], grid: Grid, control: Any = None) -> None:
        self.model, self.specs, self.grid, self.control = model, list(specs), grid, control
        self.rank = grid.global_rank(grid.place)
        self.device = next(model.parameters()).device
        places = {
            name: [s.index % grid.pipeline for s in specs if stage_names(model.cfg, s, name)]
            for name in model.state_dict()
        }
        # The first place that keeps a tensor speaks for it: in sums over ranks, and when wholes are put together.
        self.speaker = {name: min(found) for name, found in places.items()}
        self.kept = {name for name, found in places.items() if grid.place in found}
        # name -> table of its module, key, empty tensor
        self.absent: dict[str, tuple[dict[str, Any], str, Tensor]] = {}
        self.joined = False
        self._release()

    def local(self) -> RankModel:
        """This rank's stages: the modules of the model."""
        return RankModel(self.model.cfg, self.specs[self.grid.place :: self.grid.pipeline], whole=self.model)

    def speaks(self, key: str) -> bool:
        """Whether ranks of this place give a tensor of the model, or of the optimizer ('<parameter>.<slot>'), to wholes."""
        return self.speaker[key if key in self.speaker else key.rsplit(".", 1)[0]] == self.grid.place

    def _tables(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        for prefix, module in self.model.named_modules():
            for table in (module._parameters, module._buffers):
                for key in table:
                    yield f"{prefix}.{key}".lstrip("."), table, key

    def _release(self) -> None:
        """Free what other ranks keep. A tensor that is tied to one of ours stays."""
        ours = {id(table[key]) for name, table, key in self._tables() if name in self.kept}
        for name, table, key in self._tables():
            tensor = table[key]
            if name not in self.speaker or name in self.kept or id(tensor) in ours:
                continue
            empty = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            table[key] = empty
            self.absent[name] = (table, key, empty)

    # ---- wholes

    def takes(self, key: str) -> bool:
        """Whether this rank reads a tensor of a whole model or optimizer state; what is no part of either, too (to refuse it)."""
        return key not in self.absent and key.rsplit(".", 1)[0] not in self.absent

    def pieces(self, tensors: Mapping[str, Tensor]) -> list[Piece]:
        """What this rank writes of model or optimizer tensors: its replica's share of those that its place speaks for."""
        own = {name: t for name, t in tensors.items() if not t.is_meta and self.speaks(name)}
        return share_out(own, self.grid.replica, self.grid.data)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All ranks' tensors by name in host memory of rank 0; {} elsewhere. All ranks call it."""
        return gather_pieces(self.pieces(tensors), self.control)

    def load(self, source: Mapping[str, Tensor]) -> None:
        """Fill this rank's stages from a whole model's tensors; of a source only they are read. ValueError as `load_into`'s."""
        own = {name: t for name, t in self.model.state_dict().items() if not t.is_meta}
        load_into(own, Chosen(as_source(source), self.takes))

    def _value(self, name: str, tensor: Tensor) -> Tensor:
        like = self.absent[name][2]
        value = tensor.to(self.device)
        return nn.Parameter(value, requires_grad=like.requires_grad) if isinstance(like, nn.Parameter) else value

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """While open, the model is whole on rank 0. All ranks enter it."""
        found = {} if self.joined else self.whole(self.model.state_dict())
        for name, (table, key, _) in self.absent.items() if self.rank == 0 else ():
            table[key] = self._value(name, found.pop(name))
        del found
        try:
            yield
        finally:
            for table, key, empty in self.absent.values():
                table[key] = empty

    def join(self) -> None:
        """Make the model whole on every rank, for good. All ranks call it."""
        if self.joined:
            return
        state = self.model.state_dict()
        found = self.whole(state)
        for name in sorted(state):
            value = found.pop(name, None)
            if value is None:
                value = torch.empty(state[name].shape, dtype=state[name].dtype)
            dist.broadcast(value, src=0, group=self.control)
            if name in self.absent:
                table, key, _ = self.absent[name]
                table[key] = self._value(name, value)
        if self.model.cfg.tie_word_embeddings:
            self.model.lm_head.weight = self.model.model.embed_tokens.weight
        self.absent, self.joined = {}, True

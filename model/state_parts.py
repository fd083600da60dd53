"""State that lies in parts on several ranks: what each writes to a checkpoint, and how each reads only what it needs.

A logical tensor has a name, a shape and a dtype as one process knows it ('model.norm.weight', 'model.norm.weight.exp_avg').
A rank owns Pieces of it; the pieces of all ranks cover every element once, and nothing is sent to write them. What is
loaded comes from a Source, which reads a Region from wherever it was stored, by however many ranks.

What a checkpoint asks of an engine (tasks/parallel_engine.py and the like), and of a layout for the weights:

    engine.owned_state() -> [Piece]               what this rank writes of '<parameter>.<slot>'; local, sends nothing
    engine.load_state_tensors(source)             reads the regions that this rank needs; a dict of whole tensors does, too
    layout.owned_weights(model) -> [Piece]        the same for the weights; replicated ones are spread over ranks by size
    layout.load_weights(model, source)
    engine.state_tensors() -> {name: Tensor}      whole, on the first rank (`gather_pieces`): for small models and tests

A rank that holds whole tensors returns `Piece.whole(name, tensor)` for those it speaks for.

Check it:  python -m pytest tests/model/test_state_parts.py
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Region:
    """Elements of a tensor in C order: `count` runs of `length` elements, `stride` apart, the first at `start`."""

    start: int
    length: int
    stride: int
    count: int

    @classmethod
    def range(cls, first: int, last: int) -> Region:
        """Elements first..last."""
        return cls(first, last - first, last - first, 1)

    @classmethod
    def of(cls, view: Tensor, base: Tensor) -> Region:
        """Where the elements of a view lie in the contiguous tensor it was taken from. ValueError for other strides."""
        start = view.storage_offset() - base.storage_offset()
        if view.is_contiguous():
            return cls.range(start, start + view.numel())
        if not view[0].is_contiguous():
            raise ValueError(f"a view of shape {list(view.shape)} with strides {view.stride()} is no run of blocks")
        return cls(start, view[0].numel(), view.stride(0), view.size(0))

    @property
    def numel(self) -> int:
        return self.length * self.count

    def shifted(self, by: int) -> Region:
        return replace(self, start=self.start + by)

    def runs(self) -> Iterator[tuple[int, int]]:
        """[first, last) of every run, ascending."""
        for i in range(self.count):
            first = self.start + i * self.stride
            yield first, first + self.length

    def view(self, tensor: Tensor) -> Tensor:
        """These elements of a contiguous tensor, as a view [count, length]."""
        assert tensor.is_contiguous()
        return tensor.as_strided((self.count, self.length), (self.stride, 1), tensor.storage_offset() + self.start)


@dataclass(frozen=True)
class Piece:
    """What one rank writes of a logical tensor of `shape`. values: any shape, in the region's order; None region: all of it."""

    name: str
    shape: tuple[int, ...]
    values: Tensor
    region: Region | None = None

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Piece:
        return cls(name, tuple(tensor.shape), tensor)

    @classmethod
    def part(cls, name: str, shape: Iterable[int], values: Tensor, region: Region) -> Piece:
        """A part; one that turns out to be all of the tensor is whole."""
        shape = tuple(shape)
        if region.count == 1 and region.numel == torch.Size(shape).numel():
            return cls(name, shape, values.reshape(shape))
        return cls(name, shape, values, region)

    @property
    def nbytes(self) -> int:
        return self.values.numel() * self.values.element_size()


def share_out(tensors: Mapping[str, Tensor], rank: int, world: int) -> list[Piece]:
    """Rank's share of tensors that `world` ranks all hold: together in order, cut into runs of equally many bytes.

    A piece is a view, so that nothing is copied where tensors are contiguous.
    """
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    low, high = total * rank // world, total * (rank + 1) // world
    pieces, at = [], 0
    for name, tensor in tensors.items():
        tensor, size, count = tensor.detach(), tensor.element_size(), tensor.numel()
        first, last = (min(count, max(0, -((at - edge) // size))) for edge in (low, high))
        at += count * size
        if count == 0 and rank == 0:
            pieces.append(Piece.whole(name, tensor))
        elif first < last:
            values = tensor.reshape(-1)[first:last]
            pieces.append(Piece.part(name, tensor.shape, values, Region.range(first, last)))
    return pieces


class Source(Mapping[str, Tensor]):
    """Logical tensors that are read when asked for; as a mapping it gives them whole."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor. KeyError when there is none of this name."""

    @abstractmethod
    def read(self, name: str, region: Region | None = None) -> Tensor:
        """A fresh tensor in host memory: whole and in its shape, or a region's elements, flat."""

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return any(name == one for one in self)


class InMemory(Source):
    """Whole tensors as a source."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, region: Region | None = None) -> Tensor:
        tensor = self.tensors[name].detach()
        if region is not None:
            tensor = region.view(tensor.contiguous()).reshape(-1)
        return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


class Chosen(Source):
    """The tensors of a source whose names `keep` wants."""

    def __init__(self, source: Source, keep: Callable[[str], bool]) -> None:
        self.source, self.keep = source, keep

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.source if self.keep(name))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.keep(name) and name in self.source

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def read(self, name: str, region: Region | None = None) -> Tensor:
        return self.source.read(name, region)


def as_source(tensors: Mapping[str, Tensor]) -> Source:
    """A source as it is; whole tensors as one."""
    return tensors if isinstance(tensors, Source) else InMemory(tensors)


@torch.no_grad()
def load_into(tensors: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Fill tensors in place from a source that must have these names and shapes and no others. ValueError lists the rest."""
    source = as_source(source)
    known = set(source)
    problems = [f"missing: {', '.join(sorted(tensors.keys() - known))}"] if tensors.keys() - known else []
    problems += [f"unexpected: {', '.join(sorted(known - tensors.keys()))}"] if known - tensors.keys() else []
    problems += [
        f"{name} has shape {list(source.shape(name))}, expected {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in known and source.shape(name) != tuple(tensor.shape)
    ]
    if problems:
        raise ValueError("the checkpoint does not fit the model. " + "; ".join(problems))
    for name, tensor in tensors.items():
        tensor.copy_(source.read(name))


def gather_pieces(pieces: Iterable[Piece], group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """The whole tensors of which all ranks of a (gloo) group give their pieces, on its first rank; {} elsewhere. Collective.

    Takes as much memory there as the tensors do together: for small models, and to compare with.
    """
    pieces = list(pieces)
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group or dist.group.WORLD)
    rows = [
        [p.name, list(p.shape), str(p.values.dtype)[6:], p.region and list(vars(p.region).values())] for p in pieces
    ]
    text = torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)
    if rank:
        dist.send(torch.tensor([text.numel()]), dst=ranks[0], group=group)
        dist.send(text, dst=ranks[0], group=group)
        for piece in pieces:
            if piece.values.numel():
                dist.send(piece.values.detach().to("cpu").contiguous(), dst=ranks[0], group=group)
        return {}
    found: dict[str, Tensor] = {}

    def put(name: str, shape: list[int], dtype: torch.dtype, region: Region | None, values: Tensor) -> None:
        if region is None:
            found[name] = values.detach().to("cpu", copy=True).reshape(shape)
            return
        whole = found.setdefault(name, torch.empty(shape, dtype=dtype))
        view = region.view(whole)
        view.copy_(values.reshape(view.shape))

    for piece in pieces:
        put(piece.name, list(piece.shape), piece.values.dtype, piece.region, piece.values)
    for other in ranks[1:]:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, src=other, group=group)
        text = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(text, src=other, group=group)
        for name, shape, dtype, region in json.loads(text.numpy().tobytes()):
            region = Region(*region) if region else None
            values = torch.empty(region.numel if region else torch.Size(shape).numel(), dtype=getattr(torch, dtype))
            if values.numel():
                dist.recv(values, src=other, group=group)
            put(name, shape, getattr(torch, dtype), region, values)
    return dict(sorted(found.items()))

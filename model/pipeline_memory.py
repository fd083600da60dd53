"""What a pipeline rank holds between operations, counted in bytes, and moved to the host and back.

A `Ledger` counts storages, each once however many tensors view it; a `Held` is the set of tensors that one forward pass saved
for its backward pass, kept here instead of in the autograd graph so that it can be counted, offloaded and reloaded.

Check it:  python -m pytest tests/model/test_pipeline.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import torch
from torch import Tensor


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Ledger:
    """Bytes on the device by kind: now, at the peak of their sum (`peak`), each one's own most; and bytes on the host."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self.most: Counter[str] = Counter()
        self.host = self.host_peak = 0
        self._count: Counter[int] = Counter()
        self._sizes: dict[int, tuple[str, int]] = {}

    @property
    def total(self) -> int:
        return sum(self.now.values())

    @property
    def peak_total(self) -> int:
        return sum(self.peak.values())

    def add(self, kind: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = storage_of(tensor)
            self._count[storage] += 1
            if self._count[storage] == 1:
                size = tensor.untyped_storage().nbytes()
                self._sizes[storage] = (kind, size)
                self.now[kind] += size
        self._note(kind)

    def _note(self, kind: str) -> None:
        self.most[kind] = max(self.most[kind], self.now[kind])
        if self.total > self.peak_total:
            self.peak = dict(self.now)

    def uncounted(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the storages that are not in the ledger."""
        new = {storage_of(t): t.untyped_storage().nbytes() for t in tensors}
        return sum(size for storage, size in new.items() if storage not in self._sizes)

    def drop(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = storage_of(tensor)
            self._count[storage] -= 1
            assert self._count[storage] >= 0, "a tensor left the ledger twice"
            if not self._count[storage]:
                kind, size = self._sizes.pop(storage)
                del self._count[storage]
                self.now[kind] -= size

    def add_bytes(self, kind: str, size: int) -> None:
        """For buffers that are allocated and freed as a whole."""
        self.now[kind] += size
        self._note(kind)

    def move(self, to_host: int) -> None:
        """Bytes that went to the host (negative: came back)."""
        self.host += to_host
        self.host_peak = max(self.host_peak, self.host)


class Held:
    """The tensors that a forward pass saved. Use it as a context around the forward pass; `release` when all is done.

    `constants` are storages that live anyway (weights, the batch): they are neither counted nor moved.
    """

    def __init__(self, ledger: Ledger, constants: Collection[int]) -> None:
        self.ledger, self.constants = ledger, constants
        self.tensors: list[Tensor | None] = []
        self.views: list[tuple[int, torch.dtype, torch.Size, tuple[int, ...], int]] = []
        self.host: list[Tensor] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> Held:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def keep(self, tensor: Tensor) -> int:
        """Hold a tensor by hand; `get` returns it."""
        self.tensors.append(tensor.detach())  # without its graph: the graph refers to this object
        self.ledger.add("activations", self.tensors[-1:])
        return len(self.tensors) - 1

    def get(self, index: int) -> Tensor:
        tensor = self.tensors[index]
        assert tensor is not None, "activations are needed while they are on the host"
        return tensor

    def _pack(self, tensor: Tensor) -> Tensor | int:
        return tensor if storage_of(tensor) in self.constants else self.keep(tensor)

    def _unpack(self, packed: Tensor | int) -> Tensor:
        return packed if isinstance(packed, Tensor) else self.get(packed)

    def offload(self, stream: torch.cuda.Stream | None = None) -> None:
        """Copy every storage to the host and let go of it here. On a GPU the copy runs on `stream` from pinned memory."""
        assert not self.host and all(t is not None for t in self.tensors)
        places: dict[int, int] = {}
        for tensor in self.tensors:
            storage = storage_of(tensor)
            if storage not in places:
                places[storage] = len(self.host)
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                self.host.append(self._to_host(whole, stream))
            self.views.append((places[storage], tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()))
        self.ledger.drop(self.tensors)
        self.ledger.move(sum(t.numel() for t in self.host))
        self._device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self.tensors = [None] * len(self.tensors)

    @staticmethod
    def _to_host(whole: Tensor, stream: torch.cuda.Stream | None) -> Tensor:
        if stream is None:
            return whole.to("cpu", copy=True)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            pinned = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
            pinned.copy_(whole, non_blocking=True)
        whole.record_stream(stream)  # its memory is not reused before the copy has ended
        return pinned

    def load(self, stream: torch.cuda.Stream | None = None) -> None:
        """Bring everything back; views of one storage share it again."""
        if stream is None:
            back = [t.to(self._device, copy=True) for t in self.host]
        else:
            with torch.cuda.stream(stream):
                back = [t.to(self._device, non_blocking=True) for t in self.host]
            torch.cuda.current_stream().wait_stream(stream)
            for tensor in back:
                tensor.record_stream(torch.cuda.current_stream())
        self.tensors = []
        for place, dtype, size, stride, offset in self.views:
            empty = torch.empty(0, dtype=dtype, device=self._device)
            self.tensors.append(empty.set_(back[place].untyped_storage(), offset, size, stride))
        self.ledger.add("activations", self.tensors)
        self.ledger.move(-sum(t.numel() for t in self.host))
        self.host, self.views = [], []

    def release(self) -> None:
        self.ledger.drop(t for t in self.tensors if t is not None)
        self.tensors = []

"""Less activation memory: blocks computed again in the backward, and activations that wait for it in host memory.

    with saving(model, recompute="block", offload=True):      # around forward AND backward
        loss = ...; loss.backward()

recompute: "none" keeps everything; "block" keeps a block's input only and runs the block again; "selective" keeps the
attention and runs the feed-forward again, whose cost is linear in the length (the attention's is not) and whose inner
activations are the widest. What a block returns beside its hidden state (router counts, balance loss, indexer loss) comes
from the first run alone: nothing is counted twice. The second run does the same operations on the same numbers, so loss and
gradients are equal bit for bit. Nothing is random here, so no generator state is kept.

Run its tests: `python -m pytest tests/model/test_recompute.py`        measure: `python -m tests.bench.recompute`
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.block import Block

KINDS = ("none", "selective", "block")
LEAST_BYTES = 1 << 14  # smaller tensors stay: a transfer costs more than they do


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


@contextlib.contextmanager
def recomputing(model: nn.Module, kind: str) -> Iterator[None]:
    """While open, blocks of `model` (the MTP layer too) drop activations in the forward and recompute them in the backward.

    ValueError for an unknown kind. The backward must run while it is open where weights are exchanged for copies of another
    type for the time of the forward (tasks.trainer.computing_in): the second run has to see the same weights.
    """
    if kind not in KINDS:
        raise ValueError(f"recompute is {kind!r}; expected one of {', '.join(KINDS)}")
    blocks = [m for m in model.modules() if isinstance(m, Block)] if kind != "none" else []
    modules = blocks if kind == "block" else [block.mlp for block in blocks]
    for module in modules:
        module.forward = _again(module.forward)
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # the class's own again


@dataclass
class _Waiting:
    """A saved tensor in host memory: its copy, its device, and the event after which the copy is whole (None on a CPU)."""

    host: Tensor
    device: torch.device
    done: Any = None


class HostOffload(contextlib.AbstractContextManager):
    """While open, tensors that autograd saves go to host memory and come back for the backward.

    Parameters stay (the model holds them anyway), so do tensors below `least_bytes`. On an accelerator the copies go to pinned
    memory on a stream of their own, beside the computation. On a CPU everything is in host memory already and nothing is
    copied, unless `copy_on_cpu` asks for it (tests). Attributes `moved_bytes` and `kept_bytes` count what was saved.
    """

    def __init__(self, model: nn.Module, least_bytes: int = LEAST_BYTES, copy_on_cpu: bool = False) -> None:
        self.model, self.least_bytes, self.copy_on_cpu = model, least_bytes, copy_on_cpu
        self.moved_bytes = self.kept_bytes = 0

    def __enter__(self) -> HostOffload:
        # Parameters as they are now: while computing in another type, those are copies that no `is_leaf` would tell.
        parameters = [p for m in self.model.modules() for p in m._parameters.values() if p is not None]
        self._resident = {p.untyped_storage().data_ptr() for p in parameters}
        device = parameters[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._hooks.__exit__(*exc)

    def _pack(self, tensor: Tensor) -> Tensor | _Waiting:
        size = tensor.numel() * tensor.element_size()
        resident = tensor.untyped_storage().data_ptr() in self._resident
        if resident or size < self.least_bytes or (tensor.device.type == "cpu" and not self.copy_on_cpu):
            self.kept_bytes += 0 if resident else size
            return tensor
        self.moved_bytes += size
        if self._stream is None:
            return _Waiting(tensor.detach().clone(), tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return _Waiting(host, tensor.device, self._stream.record_event())

    def _unpack(self, saved: Tensor | _Waiting) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.done is not None:
            torch.cuda.current_stream(saved.device).wait_event(saved.done)
        return saved.host.to(saved.device, non_blocking=True)


@contextlib.contextmanager
def saving(model: nn.Module, recompute: str = "none", offload: bool = False) -> Iterator[None]:
    """Both of the above as a training step's settings name them; with both, only the blocks' inputs travel."""
    with recomputing(model, recompute), HostOffload(model) if offload else contextlib.nullcontext():
        yield

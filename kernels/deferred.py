"""Weight gradients put off: backward gives input gradients at once and queues the rest (zero-bubble pipelines, GLM-5 2.4).

    queue = WeightQueue()
    with deferring(queue):
        y = module(x)              # F.linear, swiglu and grouped_experts of this forward know the queue
    dx, = torch.autograd.grad(y, x, dy)
    queue.run()                    # now the weights' .grad

What is not one of these operations (norms, routing biases, weights used through einsum) gets its gradient in backward as ever.

Check it:  python -m pytest tests/kernels/test_deferred.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_active: WeightQueue | None = None


class WeightQueue:
    """Work left by backward passes, in order: the weights, the tensors that it needs, and the function that uses them."""

    def __init__(self) -> None:
        self._work: list[tuple[Sequence[Tensor], Callable[..., Sequence[Tensor]], tuple[Tensor, ...]]] = []

    def put(
        self, weights: Sequence[Tensor], gradients: Callable[..., Sequence[Tensor]], kept: Sequence[Tensor]
    ) -> None:
        """Queue `gradients(*kept)`, one gradient per weight. `kept` is held without its graph."""
        self._work.append((weights, gradients, tuple(t.detach() for t in kept)))

    def kept(self) -> list[Tensor]:
        """Every tensor that the queue keeps alive: inputs, and weights that are no parameters but made of them."""
        made = [w for weights, _, _ in self._work for w in weights if not w.is_leaf]
        return made + [t for _, _, kept in self._work for t in kept]

    def __len__(self) -> int:
        return len(self._work)

    def run(self) -> None:
        """Do all of it: gradients accumulate into .grad of the weights' leaves, as backward would do. Empties the queue."""
        work, self._work = self._work, []
        for i, (weights, gradients, kept) in enumerate(work):
            work[i] = None  # its tensors are free as soon as they are used
            pairs = [(w, g) for w, g in zip(weights, gradients(*kept), strict=True) if w.requires_grad]
            torch.autograd.backward([w for w, _ in pairs], [g for _, g in pairs])


def active_queue() -> WeightQueue | None:
    """The queue of the innermost `deferring`, or None: weight gradients are then computed in backward."""
    return _active


@contextlib.contextmanager
def deferring(queue: WeightQueue | None) -> Iterator[None]:
    """Forward passes inside leave their weight gradients to `queue` (None: nothing changes)."""
    global _active
    before, _active = _active, queue
    try:
        with contextlib.nullcontext() if queue is None else _LinearMode():
            yield
    finally:
        _active = before


def _linear_gradients(x_nh: Tensor, dy_nm: Tensor) -> tuple[Tensor]:
    return (dy_nm.flatten(0, -2).T @ x_nh.flatten(0, -2),)


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_mh, queue):
        ctx.save_for_backward(x, weight_mh)
        # A parameter must be itself later, so that its own .grad grows; what is made of parameters is only saved, and counted.
        ctx.queue, ctx.leaf = queue, weight_mh if weight_mh.is_leaf else None
        return F.linear(x, weight_mh)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        weight = weight if ctx.leaf is None else ctx.leaf
        ctx.queue.put((weight,), _linear_gradients, (x, dy))
        return (dy @ weight.detach() if ctx.needs_input_grad[0] else None), None, None


class _LinearMode(TorchFunctionMode):
    """Takes F.linear without bias and with a trained weight; everything else passes."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and not kwargs and args[2:] in ((), (None,)) and _active is not None:
            x, weight = args[:2]
            if torch.is_grad_enabled() and weight.requires_grad and x.dim() > 1:
                return _DeferredLinear.apply(x, weight, _active)
        return func(*args, **(kwargs or {}))

"""How evenly the routers load their experts: curves per layer, and an alarm for experts that get next to nothing.

    router/layer_7/max_load     the fullest expert against an even split, this step: 1 is perfect balance
    router/layer_7/entropy      of the step's load, as a share of ln E: 1 is perfect balance, 0 is one expert
    router/layer_7/dead_share   share of experts below `dead_share` of their fair load, over the last whole window

Check it:  python -m pytest tests/tasks/test_router_watch.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model.moe import Router

LEAST_FAIR_LOAD = 50  # choices per expert in a window below which an empty expert may be chance


def moe_layers(model: nn.Module) -> list[int]:
    """Numbers of the layers whose router counts a forward returns, in that order; the MTP layer is the last."""
    found = (re.search(r"layers\.(\d+)\.", name) for name, m in model.named_modules() if isinstance(m, Router))
    return [int(match.group(1)) for match in found if match]


class RouterWatch:
    """Fed with every step's counts; `state` goes into the checkpoint, so that a resumed run raises the same alarms.

    A layer's window counts only the steps in which the layer ran: the MTP layer may run at every n-th.
    """

    def __init__(self, layers: Sequence[int], window: int, dead_share: float, say: Callable[[str], None]) -> None:
        self.layers, self.window, self.dead_share, self.say = list(layers), window, dead_share, say
        self.alarms = 0
        self._sums: dict[int, Tensor] = {}
        self._steps: dict[int, int] = {}
        self._dead: dict[int, float] = {}

    def add(self, counts: Sequence[Tensor]) -> dict[str, float]:
        """The step's curves from tokens per expert, int64 [E] per layer (all micro-batches and ranks together)."""
        logs: dict[str, float] = {}
        for i, counts_e in enumerate(counts):
            layer = self.layers[i] if i < len(self.layers) else i
            load_e = counts_e.detach().to("cpu", torch.float64)
            share_e = load_e / load_e.sum().clamp(min=1)
            entropy = -torch.special.xlogy(share_e, share_e).sum() / math.log(max(2, len(share_e)))
            self._window(layer, load_e)
            logs[f"router/layer_{layer}/max_load"] = float(share_e.max()) * len(share_e)
            logs[f"router/layer_{layer}/entropy"] = float(entropy)
            if layer in self._dead:
                logs[f"router/layer_{layer}/dead_share"] = self._dead[layer]
        return logs

    def _window(self, layer: int, load_e: Tensor) -> None:
        sums_e = self._sums.pop(layer, 0) + load_e
        steps = self._steps.pop(layer, 0) + 1
        if steps < self.window:
            self._sums[layer], self._steps[layer] = sums_e, steps
            return
        fair = float(sums_e.mean())
        if fair < LEAST_FAIR_LOAD:
            return
        dead = (sums_e < self.dead_share * fair).nonzero().flatten().tolist()
        self._dead[layer] = len(dead) / len(sums_e)
        if dead:
            self.alarms += len(dead)
            named = ", ".join(f"expert {e} {float(sums_e[e]) / fair:.1%}" for e in dead[:8])
            more = f" and {len(dead) - 8} more" if len(dead) > 8 else ""
            self.say(f"warning: dead experts in layer {layer} ({steps} steps, of the fair load): {named}{more}")

    def state(self) -> dict[str, Any]:
        """JSON-able; `load_state` takes it back."""
        layers = sorted({*self._sums, *self._dead})
        rows = [
            [n, self._steps.get(n, 0), self._sums[n].tolist() if n in self._sums else None, self._dead.get(n)]
            for n in layers
        ]
        return {"alarms": self.alarms, "layers": rows}

    def load_state(self, state: dict[str, Any]) -> None:
        self.alarms = state["alarms"]
        self._sums = {n: torch.tensor(sums, dtype=torch.float64) for n, _, sums, _ in state["layers"] if sums}
        self._steps = {n: steps for n, steps, sums, _ in state["layers"] if sums}
        self._dead = {n: dead for n, _, _, dead in state["layers"] if dead is not None}

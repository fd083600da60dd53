"""Runs a pipeline schedule on torch.distributed ranks; loss and gradients are those of one process.

    grid = Grid.create(pipeline=2)                                   # after init_process_group; world = pipeline * data
    schedule = with_offload(with_reductions(build("interleaved", ranks=2, micros=8, virtual=2)))
    pipe = Pipeline(cfg, schedule, place(cfg.num_hidden_layers, 4, mtp=True), grid)
    pipe.local.load(state)                                           # or .init_weights(seed)
    result = pipe.run(Work(head=..., mtp_depth=3), batches, shares)  # gradients: pipe.local's .grad, or pipe.gradients.shards

Messages between two ranks are received in the order in which they are sent, which the schedule says, so tags are not needed;
the next one of every neighbour is always posted. With NCCL every direction of every pair has its own communicator.

Check it:  python -m pytest tests/model/test_pipeline.py
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model.config import ModelConfig
from model.muon_sharded import ShardedMuonSplit
from model.pipeline_gradients import ShardedGradients, WholeGradients
from model.pipeline_memory import Ledger
from model.pipeline_place import StageSpec, stage_names
from model.pipeline_schedule import Op, Schedule, check
from model.pipeline_stage import EVEN, Batch, ModelStage, RankModel, Work


@dataclass
class Grid:
    """Global rank = replica * pipeline + place. `data_group` holds the ranks with the same place, `data_control` too, on gloo."""

    pipeline: int
    data: int
    place: int
    replica: int
    data_group: Any = None
    data_control: Any = None
    links: dict[tuple[int, int], Any] = field(default_factory=dict)

    @classmethod
    def create(cls, pipeline: int) -> Grid:
        """From the initialised process group (one process: no group is needed). ValueError when the sizes do not fit."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        if world % pipeline:
            raise ValueError(f"parallel.pipeline = {pipeline} does not divide the {world} processes")
        grid = cls(pipeline, world // pipeline, rank % pipeline, rank // pipeline)
        if grid.data > 1:
            for place in range(pipeline):
                ranks = [d * pipeline + place for d in range(grid.data)]
                groups = dist.new_group(ranks), dist.new_group(ranks, backend="gloo")
                if place == grid.place:
                    grid.data_group, grid.data_control = groups
        if world > 1 and dist.get_backend() == "nccl":
            # Sends and receives of one communicator run one after the other on a GPU: both ways in one would block.
            for replica in range(grid.data):
                ends = {(a, (a + 1) % pipeline) for a in range(pipeline)} | {
                    ((a + 1) % pipeline, a) for a in range(pipeline)
                }
                for a, b in sorted((a, b) for a, b in ends if a != b):
                    group = dist.new_group([replica * pipeline + a, replica * pipeline + b])
                    if replica == grid.replica:
                        grid.links[a, b] = group
        return grid

    def global_rank(self, place: int) -> int:
        return self.replica * self.pipeline + place


def messages(schedule: Schedule, source: int, target: int) -> list[Op]:
    """What rank `source` sends to `target`, in order; a message is named by the operation that needs it."""
    found = []
    for op in schedule.ops[source]:
        after = {"F": op.stage + 1, "B": op.stage - 1}.get(op.kind, -1)
        if 0 <= after < schedule.stages and schedule.rank_of(after) == target != source:
            found.append(Op(op.kind, op.micro, after))
    return found


class Transport:
    """Point-to-point messages of one rank. `shape(op)` gives (shape, dtype) of the message that op needs."""

    def __init__(self, schedule: Schedule, grid: Grid, device: torch.device, shape: Callable[[Op], tuple]) -> None:
        self.schedule, self.grid, self.device, self.shape = schedule, grid, device, shape
        self.inbox: dict[Op, Tensor] = {}
        self.sending: deque[tuple[Any, Tensor]] = deque()
        others = [r for r in range(schedule.ranks) if r != grid.place]
        self.expected = {r: deque(messages(schedule, r, grid.place)) for r in others}
        self.posted: dict[int, tuple[Op, Tensor, Any]] = {}
        for source in others:
            self._post(source)

    def _post(self, source: int) -> None:
        if self.expected[source]:
            op = self.expected[source].popleft()
            size, dtype = self.shape(op)
            buffer = torch.empty(size, dtype=dtype, device=self.device)
            group = self.grid.links.get((source, self.grid.place))
            self.posted[source] = (op, buffer, dist.irecv(buffer, src=self.grid.global_rank(source), group=group))

    def send(self, op: Op, tensor: Tensor) -> None:
        """`tensor` is what `op` (on whichever rank) needs."""
        target = self.schedule.rank_of(op.stage)
        if target == self.grid.place:
            self.inbox[op] = tensor
            return
        tensor = tensor.contiguous()
        group = self.grid.links.get((self.grid.place, target))
        self.sending.append((dist.isend(tensor, dst=self.grid.global_rank(target), group=group), tensor))
        while self.sending and self.sending[0][0].is_completed():
            self.sending.popleft()

    def take(self, op: Op) -> Tensor:
        """Waits for the message that `op` needs."""
        stage_before = op.stage - 1 if op.kind == "F" else op.stage + 1
        source = self.schedule.rank_of(stage_before)
        while op not in self.inbox:
            arrived, buffer, work = self.posted.pop(source)
            work.wait()
            self.inbox[arrived] = buffer
            self._post(source)
        return self.inbox.pop(op)

    def close(self) -> None:
        for work, _ in self.sending:
            work.wait()
        assert not self.inbox and not self.posted, "messages that nobody took"


def execute(
    schedule: Schedule,
    place: int,
    stages: Mapping[int, Any],
    transport: Transport,
    gradients: Any,
    batches: Sequence[Batch],
    shares: Sequence[float],
    weights: Sequence[Mapping[str, float]],
    trace: Callable[[Op, float, float, float], None] | None = None,
) -> None:
    """Run one rank's list. trace(op, began, ready, ended): seconds; between began and ready it waited for a message."""
    writes = "W" if schedule.split else "B"
    for op in schedule.ops[place]:
        began = ready = time.perf_counter()
        stage = stages[op.stage]
        if op.kind == writes and gradients is not None:
            gradients.open(op.stage)
        if op.kind == "F":
            x = transport.take(op) if op.stage else None
            ready = time.perf_counter()
            out = stage.forward(op.micro, x, batches[op.micro], shares[op.micro], weights[op.micro])
            if op.stage + 1 < schedule.stages:
                transport.send(Op("F", op.micro, op.stage + 1), out)
        elif op.kind == "B":
            gradient = transport.take(op) if op.stage + 1 < schedule.stages else None
            ready = time.perf_counter()
            gradient = stage.backward(op.micro, gradient)
            if op.stage:
                transport.send(Op("B", op.micro, op.stage - 1), gradient)
        elif op.kind == "W":
            stage.weight(op.micro)
        elif op.kind == "R":
            gradients.reduce(op.stage)
        elif op.kind == "O":
            stage.offload(op.micro)
        else:
            stage.load(op.micro)
        if trace is not None:
            trace(op, began, ready, time.perf_counter())
    transport.close()


@dataclass
class StepResult:
    """loss and logs: sums over micro-batches times their shares, over all ranks. router_counts as GlmMoeDsa returns them."""

    loss: float
    logs: dict[str, float]
    router_counts: list[Tensor]


class Pipeline:
    """One rank's end of the pipeline. Reductions (R) in the schedule mean ZeRO-2 shards, otherwise gradients are whole.

    `shared` names the parameters that several stages use: each rank that holds one ends with their summed gradient in .grad.
    owners: an optimizer sharded over the replicas (grid.data_group). Shards are then what it owns; whole gradients are not
    summed over replicas here, as it will send them to their owners.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        schedule: Schedule,
        specs: Sequence[StageSpec],
        grid: Grid,
        device: torch.device | str = "cpu",
        local: RankModel | None = None,
        owners: ShardedMuonSplit | None = None,
    ) -> None:
        if (schedule.ranks, schedule.stages) != (grid.pipeline, len(specs)):
            raise ValueError(
                f"the schedule has {schedule.ranks} ranks and {schedule.stages} stages, the grid {grid.pipeline} ranks and the "
                f"placement {len(specs)} stages"
            )
        check(schedule)
        self.cfg, self.schedule, self.specs, self.grid = cfg, schedule, list(specs), grid
        self.device = torch.device(device)
        own = [specs[s] for s in schedule.stages_of(grid.place)]
        self.local = RankModel(cfg, own, device) if local is None else local
        self.ledger = Ledger()
        self.shared = self._shared()
        # Kept here: during a step in another precision the modules hold copies.
        self.shared_parameters = {name: self.local.get_parameter(name) for name in self.shared}
        stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        self.stages = {spec.index: ModelStage(self.local, spec, self.ledger, schedule.split, stream) for spec in own}
        apart = {
            s: {n: p for n, p in stage.parameters.items() if n not in self.shared} for s, stage in self.stages.items()
        }
        sharded = any(op.kind == "R" for ops in schedule.ops for op in ops)
        self.gradients: WholeGradients | ShardedGradients
        if sharded:
            self.gradients = ShardedGradients(apart, grid.data_group, self.ledger, owners)
        else:
            self.gradients = WholeGradients(apart, grid.data_group if owners is None else None, self.ledger)
        self.trace: list[tuple[Op, float, float, float]] | None = None

    def _shared(self) -> dict[str, Any]:
        """{name: group of all ranks that hold it} of parameters used by several stages; every rank calls this alike."""
        groups: dict[str, Any] = {}
        with torch.device("meta"):
            from model.transformer import GlmMoeDsa

            names = [n for n, _ in GlmMoeDsa(self.cfg).named_parameters()]
        for name in names:
            users = [s.index for s in self.specs if stage_names(self.cfg, s, name)]
            if len(users) < 2:
                continue
            places = sorted({self.schedule.rank_of(s) for s in users})
            ranks = [d * self.grid.pipeline + place for d in range(self.grid.data) for place in places]
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            if self.grid.place in places:
                groups[name] = group
        return groups

    def set_schedule(self, schedule: Schedule) -> None:
        """Another schedule of the same kind, for steps with another number of micro-batches."""
        kind = lambda s: (s.ranks, s.virtual, s.split, any(op.kind == "R" for ops in s.ops for op in ops))  # noqa: E731
        assert kind(schedule) == kind(self.schedule), "stages and gradients are built for another kind of schedule"
        check(schedule)
        self.schedule = schedule

    def _shape(self, work: Work, batches: Sequence[Batch], dtype: torch.dtype) -> Callable[[Op], tuple]:
        def shape(op: Op) -> tuple:
            size = (*batches[op.micro]["input_ids_bs"].shape, self.cfg.hidden_size)
            sender = self.specs[op.stage - 1 if op.kind == "F" else op.stage]
            stacked = sender.norm and not sender.head
            return ((1 + work.mtp_depth, *size) if stacked else size), dtype

        return shape

    def run(
        self,
        work: Work,
        batches: Sequence[Batch],
        shares: Sequence[float],
        dtype: torch.dtype | None = None,
        weights: Sequence[Mapping[str, float]] | None = None,
    ) -> StepResult:
        """Forward and backward of all micro-batches of this replica, from gradients that `clear` left.

        shares weigh the micro-batches' losses: their sum over all replicas is usually 1. dtype: of the activations.
        weights: per micro-batch, of terms of its loss that are means over something else than it (ModelStage.forward).
        """
        if len(batches) != self.schedule.micros:
            raise ValueError(f"the schedule is for {self.schedule.micros} micro-batches, got {len(batches)}")
        if work.mtp_depth and not self.cfg.num_nextn_predict_layers:
            raise ValueError("mtp_depth > 0 but the model has no MTP layer (num_nextn_predict_layers is 0)")
        dtype = next(self.local.parameters()).dtype if dtype is None else dtype
        for stage in self.stages.values():
            stage.begin(work)
        transport = Transport(self.schedule, self.grid, self.device, self._shape(work, batches, dtype))
        trace = None
        if self.trace is not None:
            trace = lambda *event: self.trace.append(event)  # noqa: E731
        weights = [EVEN] * len(batches) if weights is None else weights
        own = self.grid.place, self.stages, transport, self.gradients
        execute(self.schedule, *own, batches, shares, weights, trace)
        self.gradients.finish()
        for name, param in sorted(self.shared_parameters.items()):
            if param.grad is None and param.requires_grad:
                param.grad = torch.zeros_like(param)
            if self.shared[name] is not None and param.requires_grad:
                dist.all_reduce(param.grad, group=self.shared[name])
        return self._collect()

    def _collect(self) -> StepResult:
        mine = {
            "loss": sum(s.loss for s in self.stages.values()),
            "logs": [[k, v] for s in self.stages.values() for k, v in s.logs.items()],
            "counts": [[k, v.tolist()] for s in self.stages.values() for k, v in s.counts.items()],
        }
        loss, logs, counts = 0.0, Counter(), {}
        for part in gather_json(mine, self.device):
            loss += part["loss"]
            for key, value in part["logs"]:
                logs[key] += value
            for layer, values in part["counts"]:
                tensor = torch.tensor(values)
                counts[layer] = counts[layer] + tensor if layer in counts else tensor
        return StepResult(loss, dict(logs), [counts[k].to(self.device) for k in sorted(counts)])

    def clear(self) -> None:
        """Drop all gradients."""
        for param in self.local.parameters():
            param.grad = None
        self.gradients.clear()

    def whole_gradients(self) -> dict[str, Tensor]:
        """This rank's gradients by name, whole; with shards a collective call over the data-parallel group."""
        if isinstance(self.gradients, ShardedGradients):
            found = {n: g for s in sorted(self.stages) for n, g in self.gradients.gather(s).items()}
        else:
            found = {n: p.grad for n, p in self.local.named_parameters() if p.grad is not None}
        return found | {n: self.local.get_parameter(n).grad for n in self.shared}


def gather_json(value: Any, device: torch.device) -> list[Any]:
    """Every rank's value (numbers, strings, lists, dicts), in rank order; one process: [value]."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    text = torch.tensor(list(json.dumps(value, sort_keys=True).encode()), dtype=torch.uint8, device=device)
    size = torch.tensor([text.numel()], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(s) for s in sizes)
    padded = torch.nn.functional.pad(text, (0, longest - text.numel()))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [json.loads(bytes(p[: int(s)].tolist())) for p, s in zip(parts, sizes)]

"""Several processes on one training stage: who this rank is, the few numbers on which all ranks agree, the settings.

Ranks come from tasks/launch.py (`parallel: {processes: 2}` in a stage's parameters) or from an outer launcher, whose
variables are read: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (torchrun, deepspeed). Each rank takes its share of
every step's rows; the loss is the mean over the targets of all ranks; each rank writes its part of checkpoints, rank 0 all
else. What is agreed on here goes through gloo on the host, whatever the gradients travel on.

Check it:  python -m pytest tests/tasks/test_parallel.py
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch import Tensor, nn

from tasks.settings import Section

PATIENCE = datetime.timedelta(hours=2)  # a rank may wait that long for another one: rank 0 evaluates alone
STORE_VARIABLE = "ARCLINE_STORE"  # a file through which ranks of one machine meet; else MASTER_ADDR and MASTER_PORT


class ParallelSettings(Section):
    """How a training stage is spread over processes. No part of a run's identity: another number resumes the same run."""

    processes: int = Field(1, ge=1, description="ranks on this machine; an outer launcher's WORLD_SIZE comes before it")
    launcher: str = Field("fork", pattern="^(fork|spawn|torchrun|deepspeed)$", description="what starts the ranks")
    engine: str = Field("native", pattern="^(native|deepspeed)$", description="what drives backward and step")
    zero_stage: int = Field(
        0, ge=0, le=2, description="DeepSpeed's own sharding, for optimizer.muon: off; 0: ours (model/muon_sharded.py)"
    )
    expert: int = Field(1, ge=1, description="ranks over which every layer's routed experts are spread")
    context: int = Field(1, ge=1, description="ranks over which every sequence is spread")
    context_form: str = Field(
        "gather",
        pattern="^(gather|ulysses)$",
        description="latent keys gathered (fits DSA), or tokens exchanged for heads",
    )
    context_groups: str = Field(
        "fixed",
        pattern="^(fixed|variable)$",
        description="variable: groups of 1 up to `context` ranks, made anew for the lengths of every step (SFT)",
    )
    per_node: int | None = Field(None, ge=1, description="ranks per node; null: all of a group lie on one")
    exchange_stages: int = Field(
        1, ge=1, le=2, description="2: all-to-all inside nodes first, then one message per node"
    )
    bucket_mb: float = Field(64.0, gt=0, description="bytes (in MiB) of gradients or parameters in flight at most")
    pipeline: int = Field(
        1,
        ge=1,
        description="ranks over which the model's layers are spread; divides the processes, the rest are replicas of the "
        "pipeline. With 1, the settings below have no effect",
    )
    virtual: int = Field(1, ge=1, description="pipeline stages per rank; above 1 the schedule is interleaved")
    schedule: str = Field(
        "interleaved",
        pattern="^(gpipe|1f1b|interleaved)$",
        description="order of the micro-batches; interleaved with virtual: 1 is 1f1b",
    )
    flexible_mtp: bool = Field(
        True, description="the MTP block one stage before the output layers (GLM-5 2.4; from three stages on)"
    )
    deferred_weight_gradient: bool = Field(
        False, description="weight gradients put off into the pipeline's gaps (zero bubble)"
    )
    gradient_shards: bool = Field(
        False,
        description="a stage's gradients go to their owners among the replicas as soon as they are ready; two rolling "
        "full buffers per rank, which saves memory where virtual is above 2",
    )
    activation_offload: bool = Field(
        False, description="activations of micro-batches that wait for their backward go to host memory"
    )

    @model_validator(mode="after")
    def _pipeline_fits(self) -> ParallelSettings:
        if self.pipeline == 1:
            return self
        here = f"parallel.pipeline is {self.pipeline}"
        for key, plain in (("expert", 1), ("context", 1), ("engine", "native"), ("zero_stage", 0)):
            if getattr(self, key) != plain:
                raise ValueError(
                    f"{here} and parallel.{key} is {getattr(self, key)!r}: not together; parallel.{key}: {plain}, or "
                    "parallel.pipeline: 1"
                )
        if self.processes > 1 and launched() == 1 and self.processes % self.pipeline:
            raise ValueError(f"{here}, which does not divide parallel.processes ({self.processes})")
        if self.schedule == "1f1b" and self.virtual > 1:
            raise ValueError(
                f"parallel.virtual is {self.virtual}: schedule 1f1b has one stage per rank, take schedule: interleaved"
            )
        if self.schedule == "gpipe" and self.deferred_weight_gradient:
            raise ValueError(
                "parallel.deferred_weight_gradient needs parallel.schedule 1f1b or interleaved, it is gpipe"
            )
        return self

    def check_micro_batches(self, micros: int, keys: str) -> None:
        """ValueError when a replica's step has too few micro-batches for the schedule; `keys` say where they come from."""
        if self.pipeline > 1 and self.virtual > 1 and self.schedule == "interleaved" and micros < self.pipeline:
            raise ValueError(
                f"parallel.virtual is {self.virtual}: interleaved stages take micro-batches in groups of "
                f"parallel.pipeline = {self.pipeline}, but a step has {micros} on each replica of the pipeline ({keys}); "
                "take smaller micro-batches, fewer processes, or parallel.virtual: 1"
            )


class Parallel:
    """This process among the ranks of a stage. `current()` gives the one in force; every method is called by all ranks."""

    def __init__(self, rank: int = 0, world: int = 1, control: dist.ProcessGroup | None = None) -> None:
        self.rank, self.world, self.control = rank, world, control

    @property
    def is_writer(self) -> bool:
        """Whether this rank publishes checkpoints and writes metrics and logs."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where this rank computes: its accelerator when there is one, else the CPU."""
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def sum_(self, number: float) -> float:
        """The sum over ranks, the same to the bit on each."""
        if self.world == 1:
            return number
        return self._sum([number])[0]

    def _sum(self, numbers: Sequence[float]) -> list[float]:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.control)
        return tensor.tolist()

    def any_(self, flag: bool) -> bool:
        """Whether it holds on any rank."""
        return self.sum_(float(flag)) > 0

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's JSON-able value, in the order of ranks."""
        if self.world == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=self.control)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(parts, padded, group=self.control)
        return [json.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]

    def first(self, value: Any) -> Any:
        """The writer's JSON-able value, on every rank."""
        return self.exchange(value if self.is_writer else None)[0]

    def sum_step(self, logs: Mapping[str, float], counts: Sequence[Tensor]) -> tuple[dict[str, float], list[Tensor]]:
        """Sums over ranks of named numbers and of router counts, in one message when all ranks have the same names.

        A rank without any rows may give no counts.
        """
        if self.world == 1:
            return dict(logs), list(counts)
        schema = [sorted(logs), [c.numel() for c in counts]]
        check = zlib.crc32(json.dumps(schema).encode())
        same = torch.tensor([check, -check], dtype=torch.int64)
        dist.all_reduce(same, dist.ReduceOp.MAX, group=self.control)
        if int(same[0]) != -int(same[1]):
            found = self.exchange(schema)
            schema = [sorted({name for names, _ in found for name in names}), max((c for _, c in found), key=len)]
        names, sizes = schema
        own = torch.tensor([float(logs.get(name, 0.0)) for name in names], dtype=torch.float64)
        loads = [c.cpu().double() for c in counts] if counts else [torch.zeros(n, dtype=torch.float64) for n in sizes]
        packed = torch.cat([own, *loads])
        dist.all_reduce(packed, group=self.control)
        parts = packed.split([len(names), *sizes])
        device = counts[0].device if counts else self.device
        return dict(zip(names, parts[0].tolist(), strict=True)), [p.to(torch.int64).to(device) for p in parts[1:]]

    def check_same(self, model: nn.Module, apart: Callable[[str], bool] = lambda name: False) -> None:
        """ValueError when the ranks do not start from the same weights; those named by `apart` differ by design."""
        if self.world == 1:
            return
        with torch.no_grad():
            state = {n: v for n, v in model.state_dict().items() if v.is_floating_point() and not apart(n)}
            sums = [float(v.double().sum()) for v in state.values()]
        if len({json.dumps(one) for one in self.exchange(zlib.crc32(json.dumps(sums).encode()))}) > 1:
            raise ValueError("the ranks do not start from the same weights: do all machines read the same checkpoint?")


@dataclass(frozen=True)
class Part:
    """What a micro-batch is of its step. The loop scales its loss by its share of the step's targets.

    weights: for a term of the loss that is a mean over something else (an objective's `terms`), its own share over that one.
    rank, world: the micro-batch holds every world-th row of the step's batch, from `rank` on.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    rank: int = 0
    world: int = 1

    def weigh(self, name: str, term: Tensor) -> Tensor:
        """A term of the loss, such that the loop's sum over micro-batches and ranks is the mean over the step."""
        weight = self.weights.get(name, 1.0)
        return term if weight == 1.0 else term * weight


WHOLE = Part()
SINGLE = Parallel()


@functools.lru_cache(maxsize=1)
def _of_group(world_group: Any) -> Parallel:
    control = dist.new_group(backend="gloo", timeout=PATIENCE)
    return Parallel(dist.get_rank(), dist.get_world_size(), control)


def current() -> Parallel:
    """The ranks in force: those of torch.distributed when it is set up with more than one, else this process alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return SINGLE
    return _of_group(dist.group.WORLD)


def launched() -> int:
    """How many ranks a launcher started together with this process (WORLD_SIZE); 1 when none did."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start() -> Parallel:
    """Join the ranks that the environment describes: nccl for accelerators, gloo on CPUs. ValueError names what is missing."""
    missing = [name for name in ("RANK", "WORLD_SIZE") if not os.environ.get(name, "").isdigit()]
    if STORE_VARIABLE not in os.environ:
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(f"several ranks are to meet, but the environment lacks {', '.join(missing)}")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options: dict[str, Any] = {"rank": rank, "world_size": world, "timeout": PATIENCE}
    if STORE_VARIABLE in os.environ or os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost"):
        names = [name for _, name in socket.if_nameindex()]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if "lo" in names else "lo0")
    if STORE_VARIABLE in os.environ:
        options["store"] = dist.FileStore(os.environ[STORE_VARIABLE], world)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", **options)
    return current()

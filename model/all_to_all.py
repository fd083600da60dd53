"""All-to-all with unequal parts over a group of ranks: in one stage, or in two that keep node borders in mind (notes E).

One stage: every rank sends a message to every other. Two stages (hierarchical): a rank first hands everything meant for
ranks with local number l, on whatever node, to its own node's rank l (inside the node, fast links); that rank then sends one
message per other node to the rank with its own local number (across nodes). The bytes across nodes are the same, the
messages across nodes fewer by the number of ranks per node and larger by as much; the result is the same bit for bit.

Differentiable: the backward pass is the reverse exchange. `start` and `finish` let other work run while data travels, in
the backward pass too. Every route counts the messages and bytes it sent, in total and across nodes.

Run its tests: `python -m pytest tests/model/test_all_to_all.py`
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist


@dataclass
class Traffic:
    """What one rank sent to other ranks; *_across counts what left its node. Empty messages do not count."""

    messages: int = 0
    bytes: int = 0
    messages_across: int = 0
    bytes_across: int = 0

    def add(self, counts: list[int], row_bytes: int, own: int, across: list[bool]) -> None:
        """counts: rows sent to each member; `own` is this rank's place among them."""
        for i, count in enumerate(counts):
            if i == own or not count:
                continue
            self.messages += 1
            self.bytes += count * row_bytes
            if across[i]:
                self.messages_across += 1
                self.bytes_across += count * row_bytes


@dataclass
class Route:
    """A group of ranks that exchange rows, and how: build it with `make_route`.

    group None is the default group. per_node: ranks per node (members are numbered node by node). inner and outer: this
    rank's node, and the ranks of its local number on all nodes; both None for the exchange in one stage.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    per_node: int
    inner: dist.ProcessGroup | None = None
    outer: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def stages(self) -> int:
        return 1 if self.inner is None else 2


def make_route(ranks: list[int] | None = None, per_node: int | None = None, stages: int = 1) -> Route:
    """The route over `ranks` (global numbers, node by node; None: all). Collective: every rank of the world calls it, with
    the arguments of its own group, as many times as the others. ValueError when the nodes do not divide the group."""
    world = dist.get_world_size()
    ranks = list(range(world)) if ranks is None else ranks
    size, per_node = len(ranks), per_node or len(ranks)
    if stages not in (1, 2):
        raise ValueError(f"an exchange has 1 or 2 stages, got {stages}")
    if size % per_node:
        raise ValueError(f"{size} ranks cannot be split into nodes of {per_node}")
    rank = ranks.index(dist.get_rank())
    local = {"use_local_synchronization": True}  # only members meet
    group = None if size == world else dist.new_group(ranks, **local)
    inner = outer = None
    if stages == 2:
        node, place = divmod(rank, per_node)
        inner = dist.new_group(ranks[node * per_node : (node + 1) * per_node], **local)
        outer = dist.new_group(ranks[place::per_node], **local)
    return Route(group, rank, size, per_node, inner, outer)


class Pending:
    """Data on its way. `out` holds it after `wait`."""

    def __init__(self, out: torch.Tensor, work: dist.Work | None, keep: torch.Tensor):
        self.out, self.work, self.keep = out, work, keep  # the sender's buffer must live until it is sent

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        self.work = self.keep = None
        return self.out


def _send(rows, send: list[int], receive: list[int], group) -> Pending:
    rows = rows.contiguous()
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    return Pending(out, dist.all_to_all_single(out, rows, receive, send, group=group, async_op=True), rows)


def _regroup(rows: torch.Tensor, counts_ab: list[list[int]]) -> torch.Tensor:
    """Pieces in order (a, b) -> the same pieces in order (b, a)."""
    pieces = rows.split([c for row in counts_ab for c in row])
    b = len(counts_ab[0])
    return torch.cat([pieces[i * b + j] for j in range(b) for i in range(len(counts_ab))])


def launch(rows: torch.Tensor, counts_pp: list[list[int]], route: Route) -> Pending:
    """Start one exchange: rows [R, ...] ordered by destination; counts_pp[s][d] rows go from member s to member d.

    Every member passes the same counts. The result is ordered by sender. In two stages the first is over on return.
    """
    me, size = route.rank, route.size
    send, receive = counts_pp[me], [row[me] for row in counts_pp]
    assert rows.shape[0] == sum(send), f"{rows.shape[0]} rows to send, the counts say {sum(send)}"
    row_bytes = rows.element_size() * (rows[0].numel() if rows.shape[0] else 0)
    if route.stages == 1:
        node = me // route.per_node
        route.traffic.add(send, row_bytes, me, [i // route.per_node != node for i in range(size)])
        return _send(rows, send, receive, route.group)
    per, nodes = route.per_node, size // route.per_node
    node, place = divmod(me, per)
    by_node = [send[n * per : (n + 1) * per] for n in range(nodes)]  # [node][local]
    to_local = [sum(by_node[n][j] for n in range(nodes)) for j in range(per)]
    mates = [counts_pp[node * per + i] for i in range(per)]
    gathered = [[mate[n * per + place] for n in range(nodes)] for mate in mates]  # [local sender][node it is for]
    route.traffic.add(to_local, row_bytes, place, [False] * per)
    first = _send(_regroup(rows, by_node), to_local, [sum(g) for g in gathered], route.inner).wait()
    to_node = [sum(g[n] for g in gathered) for n in range(nodes)]
    row_bytes = first.element_size() * (first[0].numel() if first.shape[0] else 0)
    route.traffic.add(to_node, row_bytes, node, [n != node for n in range(nodes)])
    from_node = [sum(receive[n * per : (n + 1) * per]) for n in range(nodes)]
    return _send(_regroup(first, gathered), to_node, from_node, route.outer)


class Exchange:
    """One differentiable exchange, begun by `start` and ended by `finish`; each is called once."""

    def __init__(self, counts_pp: list[list[int]], route: Route):
        self.counts_pp, self.route = counts_pp, route
        self.back_pp = [list(column) for column in zip(*counts_pp)]
        self.pending: Pending | None = None

    def start(self, rows: torch.Tensor) -> torch.Tensor:
        """A tensor that holds the received rows only after `finish`."""
        return _Start.apply(rows, self)

    def finish(self, rows: torch.Tensor) -> torch.Tensor:
        return _Finish.apply(rows, self)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.finish(self.start(rows))


class _Start(torch.autograd.Function):
    """Backward runs after that of everything done between start and finish, so the gradients travel meanwhile."""

    @staticmethod
    def forward(ctx, rows, exchange: Exchange):
        ctx.exchange = exchange
        exchange.pending = launch(rows, exchange.counts_pp, exchange.route)
        return exchange.pending.out

    @staticmethod
    def backward(ctx, _):
        return ctx.exchange.pending.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, exchange: Exchange):
        ctx.exchange = exchange
        exchange.pending.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, drows):
        exchange = ctx.exchange
        exchange.pending = launch(drows, exchange.back_pp, exchange.route)
        # Autograd wants a gradient of this shape now. The real one has another and is on its way: _Start waits for it.
        return drows.new_zeros(()).expand(drows.shape), None


def gather_counts(counts_m: torch.Tensor, route: Route) -> torch.Tensor:
    """int64 [m] of every member: [P, m], on this tensor's device. One small message to each, not counted as traffic."""
    out = [torch.empty_like(counts_m) for _ in range(route.size)]
    dist.all_gather(out, counts_m.contiguous(), group=route.group)
    return torch.stack(out)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sizes: list[int], route: Route):
        ctx.sizes, ctx.route = sizes, route
        others = [i != route.rank for i in range(route.size)]
        node = route.rank // route.per_node
        across = [i // route.per_node != node for i in range(route.size)]
        row_bytes = rows.element_size() * (rows[0].numel() if rows.shape[0] else 0)
        route.traffic.add([rows.shape[0] * o for o in others], row_bytes, route.rank, across)
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])  # the collective wants equal parts
        padded[: rows.shape[0]] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=route.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes)])

    @staticmethod
    def backward(ctx, drows):
        sizes, route = ctx.sizes, ctx.route
        counts_pp = [sizes] * route.size
        parts = launch(drows, counts_pp, route).wait().unflatten(0, (route.size, sizes[route.rank]))
        # Summed here, in rank order and at least in fp32: the same on every run and every transport.
        return parts.sum(0, dtype=torch.promote_types(drows.dtype, torch.float32)).to(drows.dtype), None, None


def gather_rows(rows: torch.Tensor, sizes: list[int], route: Route) -> torch.Tensor:
    """Everybody's rows [R_i, ...] one after the other on every rank; sizes[i] = R_i. Backward sums each part's gradients."""
    return _Gather.apply(rows, sizes, route)

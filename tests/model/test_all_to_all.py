"""The exchange against plain indexing of what every rank holds; two stages against one, bit for bit; traffic by counting.

python -m pytest tests/model/test_all_to_all.py
"""

import numpy as np
import torch
import torch.distributed as dist

from model.all_to_all import Exchange, Traffic, gather_rows, make_route
from tests.model.ranks import run_ranks

WIDTH = 3


def count_matrix(world, seed):
    """Unequal, with empty messages, and one rank that sends nothing at all."""
    counts = np.random.default_rng(seed).integers(0, 5, (world, world))
    counts[world - 1] = 0
    return counts.tolist()


def rows_of(rank, counts, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(sum(counts[rank]), WIDTH, generator=generator)


def exchange_once(rank, world, counts, per_node, stages):
    route = make_route(per_node=per_node, stages=stages)
    rows = rows_of(rank, counts).requires_grad_()
    exchange = Exchange(counts, route)
    started = exchange.start(rows)
    other = (rows * rows).sum()  # work between start and finish, with a gradient of its own
    got = exchange.finish(started)
    forward = Traffic(**vars(route.traffic))
    weight = torch.arange(got.numel(), dtype=torch.float32).view_as(got) + 1000 * rank
    ((got * weight).sum() + other).backward()
    return {"got": got.detach(), "grad": rows.grad, "forward": forward, "both": route.traffic}


def expected(counts):
    """(received rows, gradients of the sent rows) of every rank, from the definition."""
    world = len(counts)
    sent = [rows_of(r, counts) for r in range(world)]
    pieces = [sent[s].split(counts[s]) for s in range(world)]
    got = [torch.cat([pieces[s][d] for s in range(world)]) for d in range(world)]
    weights = [torch.arange(g.numel(), dtype=torch.float32).view_as(g) + 1000 * d for d, g in enumerate(got)]
    back = [w.split([counts[s][d] for s in range(world)]) for d, w in enumerate(weights)]
    grads = [torch.cat([back[d][s] for d in range(world)]) + 2 * sent[s] for s in range(world)]
    return got, grads


def several(rank, world, counts, ways):
    return [exchange_once(rank, world, counts, *way) for way in ways]


def test_rows_arrive_in_the_order_of_their_senders_and_gradients_go_back():
    counts, ways = count_matrix(4, seed=1), [(4, 1), (2, 1), (2, 2), (1, 2)]  # ranks per node, stages
    got, grads = expected(counts)
    for r, results in enumerate(run_ranks(4, several, counts, ways)):
        for result in results:
            assert torch.equal(result["got"], got[r])
            torch.testing.assert_close(result["grad"], grads[r])


def both_ways(rank, world, counts):
    return [exchange_once(rank, world, counts, 2, stages) for stages in (1, 2)]


def test_two_stages_equal_one_bit_for_bit_and_send_fewer_messages_across_nodes():
    counts = [[7, 3, 2, 4], [1, 5, 6, 2], [3, 3, 1, 1], [2, 8, 4, 9]]
    results = run_ranks(4, both_ways, counts)
    totals = []
    for one, two in results:
        assert torch.equal(one["got"], two["got"]) and torch.equal(one["grad"], two["grad"])
        assert one["forward"].messages_across == 2 and two["forward"].messages_across == 1
        totals.append((one["forward"], two["forward"]))
    across = 4 * WIDTH * sum(counts[s][d] for s in range(4) for d in range(4) if s // 2 != d // 2)
    assert [sum(t[i].bytes_across for t in totals) for i in (0, 1)] == [across, across]
    # between the two nodes: every pair of ranks in one stage, one message per local number in two
    assert [sum(t[i].messages_across for t in totals) for i in (0, 1)] == [8, 4]
    for one, _ in results:  # the backward pass sends the reverse: over all ranks the same again
        assert one["both"].messages == 2 * one["forward"].messages
    assert sum(r[1]["both"].bytes_across for r in results) == 2 * across


def gather_once(rank, world, sizes):
    route = make_route()
    rows = (torch.arange(sizes[rank] * 2, dtype=torch.float32).view(-1, 2) + 100 * rank).requires_grad_()
    whole = gather_rows(rows, sizes, route)
    (whole * (rank + 1)).sum().backward()
    return whole.detach(), rows.grad, route.traffic.bytes


def test_gathered_rows_of_unequal_ranks_and_their_summed_gradients():
    sizes = [3, 0, 2]
    results = run_ranks(3, gather_once, sizes)
    want = torch.cat([torch.arange(n * 2, dtype=torch.float32).view(-1, 2) + 100 * r for r, n in enumerate(sizes)])
    for r, (whole, grad, _) in enumerate(results):
        assert torch.equal(whole, want)
        assert torch.equal(grad, torch.full((sizes[r], 2), 6.0))  # 1 + 2 + 3
    assert results[0][2] == 2 * 3 * 8 + (0 + 2) * 8  # its rows to two others, then the others' gradients back


def wrong_nodes(rank, world):
    try:
        make_route(per_node=2)
    except ValueError as problem:
        return str(problem)
    finally:
        dist.barrier()


def test_nodes_must_divide_the_group():
    assert "3 ranks cannot be split into nodes of 2" in run_ranks(3, wrong_nodes)[0]

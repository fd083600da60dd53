"""Muon Split on several ranks against one process: numbers, ownership, bytes sent, memory, state that any rank count reads.

python -m pytest tests/model/test_muon_sharded.py
"""

import pytest
import torch
import torch.distributed as dist

import kernels.newton_schulz as newton_schulz
from kernels.cross_entropy import linear_cross_entropy
from model.muon import OptimConfig, build_optimizer, split_blocks
from model.muon_plan import newton_schulz_cost, plan_units
from model.muon_sharded import ShardedMuonSplit
from model.transformer import GlmMoeDsa
from tests.model.ranks import run_ranks
from tests.model.sizes import micro

ROWS, SIZE, STEPS = 4, 12, 12
CASES = {
    "fp32": OptimConfig(lr_matrix=3e-3),
    "split": OptimConfig(lr_matrix=1e-2, lr_embed=3e-2),
    "head by muon": OptimConfig(lr_matrix=1e-2, lm_head_optimizer="muon", weight_decay=0.2),
    "adamw": OptimConfig(lr_matrix=1e-3, muon="off"),
    "indexer frozen": OptimConfig(lr_matrix=1e-2, train="backbone"),
}


def network(dtype=torch.float64):
    """In float64 nothing but the order of sums can differ, and that by 1e-15: what is left is the algorithm."""
    return GlmMoeDsa(micro()).init_weights(0).to(dtype)


def rows(step):
    """Sequences that count upwards: something that can be learned."""
    start = torch.randint(1, 96, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    return (start + torch.arange(SIZE + 1)) % 95 + 1


def loss_of(model, ids, step):
    """Next-token loss; every third step also trains the MTP layer, whose gradients are absent otherwise."""
    out = model(ids[:, :-1], attention="dense", mtp_depth=int(step % 3 == 0))
    loss = linear_cross_entropy(out.hidden_bsh.flatten(0, 1), model.lm_head.weight, ids[:, 1:].flatten())
    if step % 3 == 0:
        loss = loss + 0.3 * linear_cross_entropy(
            out.mtp_hidden[0][:, :-1].flatten(0, 1), model.lm_head.weight, ids[:, 2:].flatten()
        )
    return loss


def key(group):
    return "index_grad_norm" if group == "indexer" else "grad_norm"


def one_process(cfg, steps=STEPS, clip=0.5, dtype=torch.float64, first=0):
    """The oracle: the plain optimizer and torch's own clipping."""
    model = network(dtype)
    optimizer = build_optimizer(model, cfg)
    losses, norms = [], []
    for step in range(first, first + steps):
        optimizer.set_lr_scale(1 - step / 100)
        loss = loss_of(model, rows(step), step)
        loss.backward()
        parts = {}
        for group in optimizer.param_groups:
            parts.setdefault(key(group["group"]), []).extend(p for p in group["params"] if p.grad is not None)
        norms.append({k: float(torch.nn.utils.clip_grad_norm_(v, clip)) for k, v in parts.items() if v})
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return losses, norms, model, optimizer


def spread(model, optimizer, rank, world, first, steps, clip=0.5):
    """The same on several ranks, each with its rows; micro-batches of one row, so that gradients accumulate."""
    losses, norms = [], []
    for step in range(first, first + steps):
        optimizer.set_lr_scale(1 - step / 100)
        own = rows(step)[rank::world]
        total = torch.zeros(1)
        for place, row in enumerate(own):
            loss = loss_of(model, row[None], step) / ROWS
            if place + 1 == len(own):
                optimizer.arm()
            loss.backward()
            total += loss.detach()
        optimizer.reduce_gradients()
        assert all(p.grad is None for p in model.parameters()), "a gradient outlived its bucket"
        norms.append(optimizer.clip(clip, key))
        optimizer.step()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses, norms


def on_ranks(rank, world, cfg, first=0, steps=STEPS, bucket_bytes=4096, dtype=torch.float64, state=None, weights=None):
    """A run on this rank, with all that the tests look at."""
    model = network(dtype)
    plain = build_optimizer(model, cfg)
    if state is not None:
        model.load_state_dict(weights)
        plain.load_state_tensors(state)
    optimizer = ShardedMuonSplit(plain, bucket_bytes=bucket_bytes, smallest_cut=16)
    calls, real = [], newton_schulz.newton_schulz

    def counted(x_bmn, *args):
        calls.append(tuple(x_bmn.shape))
        return real(x_bmn, *args)

    newton_schulz.newton_schulz = counted
    losses, norms = spread(model, optimizer, rank, world, first, steps)
    newton_schulz.newton_schulz = real
    found = {
        "losses": losses, "norms": norms, "weights": {n: v.clone() for n, v in model.state_dict().items()},
        "calls": calls, "state": optimizer.state_tensors(), "units": optimizer.units, "names": optimizer.names,
        "elements": sum(v.numel() for s in optimizer.inner.state.values() for k, v in s.items() if k != "step"),
        "traffic": optimizer.traffic, "trained": sum(p.numel() for p in optimizer.params),
    }  # fmt: skip
    found["refused"] = [
        refused(optimizer, {f"{name}.exp_avg": torch.zeros(2)}) for name in ("nowhere", "model.norm.weight")
    ]
    return found


def refused(optimizer, tensors):
    try:
        optimizer.load_state_tensors(tensors)
    except ValueError as error:
        return str(error)


def many(rank, world, runs):
    """Several runs in one set of processes: starting them costs more than running."""
    return {name: on_ranks(rank, world, **options) for name, options in runs.items()}


def naive(rank, world, cfg, steps):
    """The plain way: all gradients to all ranks, every rank orthogonalises everything."""
    model = network()
    optimizer = build_optimizer(model, cfg)
    sent = 0
    for step in range(steps):
        optimizer.set_lr_scale(1 - step / 100)
        for row in rows(step)[rank::world]:
            (loss_of(model, row[None], step) / ROWS).backward()
        parts = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    sent += 2 * (world - 1) * p.grad.numel() * p.grad.element_size() // world
                    parts.setdefault(key(group["group"]), []).append(p)
        for members in parts.values():
            torch.nn.utils.clip_grad_norm_(members, 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"weights": {n: v.clone() for n, v in model.state_dict().items()}, "sent": sent}


def far(a, b):
    return max(float((a[k] - b[k]).abs().max()) for k in b)


@pytest.fixture(scope="module")
def two():
    """Runs on two ranks: results[rank][name]."""
    runs = {name: {"cfg": cfg} for name, cfg in CASES.items()}
    runs["fp32"]["dtype"] = torch.float32
    runs["again"] = runs["fp32"]
    runs["one bucket"] = {"cfg": CASES["split"], "bucket_bytes": 1 << 30}
    _, _, model, optimizer = one_process(CASES["split"], steps=5)
    runs["from one"] = {
        "cfg": CASES["split"], "first": 5, "steps": STEPS - 5,
        "state": optimizer.state_tensors(), "weights": model.state_dict(),
    }  # fmt: skip
    return run_ranks(2, many, runs)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(two, name):
    losses, norms, model, optimizer = one_process(CASES[name], dtype=torch.float32 if name == "fp32" else torch.float64)
    for result in two:
        assert result[name]["losses"] == pytest.approx(losses, abs=1e-5)
        for ours, theirs in zip(result[name]["norms"], norms, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        # fp32: a sum in another order is one rounding away, and AdamW and Newton-Schulz carry that through twelve steps
        assert far(result[name]["weights"], model.state_dict()) < (5e-5 if name == "fp32" else 1e-9)
    whole = optimizer.state_tensors()
    assert two[0][name]["state"].keys() == whole.keys() and two[1][name]["state"] == {}
    assert far(two[0][name]["state"], whole) < (5e-5 if name == "fp32" else 1e-9)
    assert losses[1] - losses[10] > 0.1, "it must learn, or equality says little"
    assert norms[0]["grad_norm"] > 0.5, "clipping must act, or it is not tested"


def test_equal_runs_are_equal_to_the_bit(two):
    for result in two:
        for name, value in result["fp32"]["weights"].items():
            assert torch.equal(value, result["again"]["weights"][name])
        assert all(torch.equal(v, two[0]["fp32"]["weights"][n]) for n, v in result["fp32"]["weights"].items())


def test_buckets_change_nothing_and_bound_the_memory(two):
    for result in two:
        small, big = result["split"], result["one bucket"]
        assert far(small["weights"], big["weights"]) == 0
        traffic = small["traffic"]
        largest_unit = max(unit.numel for unit in small["units"]) * 8
        assert traffic.peak_buffer <= traffic.largest_bucket <= max(4096, largest_unit)
        assert big["traffic"].peak_buffer > 10 * traffic.peak_buffer


def blocks(shapes):
    count = {}
    for size, *matrix in shapes:
        matrix = tuple(sorted(matrix))
        count[matrix] = count.get(matrix, 0) + size
    return count


def test_every_matrix_is_orthogonalised_once_and_work_and_state_are_shared(two):
    model = network()
    views = [
        tuple(view.shape)
        for name, p in model.named_parameters()
        if ".layers.3." not in name and p.dim() > 1 and "embed_tokens" not in name and "lm_head" not in name
        for view in split_blocks(name, p.detach(), model.cfg)
        if ".indexer." not in name  # dense attention: the indexer has no gradient
    ]
    mtp = [
        tuple(view.shape)
        for name, p in model.named_parameters()
        if ".layers.3." in name and p.dim() > 1 and ".indexer." not in name
        for view in split_blocks(name, p.detach(), model.cfg)
    ]
    expected = blocks(views * STEPS + mtp * len(range(0, STEPS, 3)))
    assert blocks(two[0]["split"]["calls"] + two[1]["split"]["calls"]) == expected
    work = [sum(newton_schulz_cost(*shape) for shape in r["split"]["calls"]) for r in two]
    assert max(work) < 1.5 * min(work)  # planned for all matrices; here the indexer's and mostly the MTP layer's rest
    elements = [r["split"]["elements"] for r in two]
    assert sum(elements) == sum(v.numel() for k, v in two[0]["split"]["state"].items() if not k.endswith(".step"))
    assert max(elements) < 0.6 * sum(elements)


def test_bytes_sent(two):
    """Gradients once to their owners, parameters once from them; less than gathering what Newton-Schulz needs."""
    world = 2
    model = network()
    trained = {n: p.numel() * 8 for n, p in model.named_parameters() if ".indexer." not in n}
    live = [sum(b for n, b in trained.items() if step % 3 == 0 or ".layers.3." not in n) for step in range(STEPS)]
    matrices = [
        sum(b for n, b in trained.items() if (step % 3 == 0 or ".layers.3." not in n) and model.get_parameter(n).dim() > 1
            and "embed" not in n and "lm_head" not in n)
        for step in range(STEPS)
    ]  # fmt: skip
    sent = {k: sum(r["split"]["traffic"].sent[k] for r in two) for k in ("gradients", "parameters")}
    assert sent["parameters"] == (world - 1) * sum(live)
    assert (world - 1) * sum(live) <= sent["gradients"]
    # The first step expects every parameter to have a gradient and sends nothing too much only from the second on.
    assert sent["gradients"] <= 1.05 * (world - 1) * sum(live)
    ours = sum(sent.values())
    moonlight = 2 * (world - 1) * sum(live) + (world - 1) * sum(matrices) // 2  # gathers momenta in half precision
    gather_all = 2 * (world - 1) * sum(live) + (world - 1) * sum(matrices)  # ZeRO-1 with every matrix on every rank
    assert ours < 0.9 * moonlight < gather_all
    print(
        f"bytes of {STEPS} steps: {ours:,}; Moonlight {moonlight / ours:.2f}x, naive all-gather {gather_all / ours:.2f}x"
    )


def test_one_process_state_continues_on_two_ranks(two):
    losses, _, model, _ = one_process(CASES["split"])
    for result in two:
        assert result["from one"]["losses"] == pytest.approx(losses[5:], abs=1e-5)
        assert far(result["from one"]["weights"], model.state_dict()) < 1e-9


def test_two_ranks_state_continues_in_one_process(two):
    """And nothing is lost on the way: the state is the one that one process has."""
    model = network()
    optimizer = build_optimizer(model, CASES["split"])
    model.load_state_dict(two[0]["split"]["weights"])
    optimizer.load_state_tensors(two[0]["split"]["state"])
    whole, _, reference, _ = one_process(CASES["split"], steps=STEPS + 3)
    for step in range(STEPS, STEPS + 3):
        optimizer.set_lr_scale(1 - step / 100)
        loss = loss_of(model, rows(step), step)
        loss.backward()
        for name in ("grad_norm", "index_grad_norm"):
            members = [
                p for g in optimizer.param_groups if key(g["group"]) == name for p in g["params"] if p.grad is not None
            ]
            torch.nn.utils.clip_grad_norm_(members, 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert float(loss.detach()) == pytest.approx(whole[step], abs=1e-5)
    assert far(model.state_dict(), reference.state_dict()) < 1e-9


@pytest.mark.slow
def test_four_ranks_equal_one_process_and_hand_over_to_two():
    cfg = CASES["split"]
    four = run_ranks(4, many, {"a": {"cfg": cfg, "steps": 6}, "fp32": {"cfg": CASES["fp32"], "dtype": torch.float32}})
    rest = {
        "cfg": cfg,
        "first": 6,
        "steps": STEPS - 6,
        "state": four[0]["a"]["state"],
        "weights": four[0]["a"]["weights"],
    }
    two = run_ranks(2, many, {"b": rest})
    losses, _, model, _ = one_process(cfg)
    assert four[3]["a"]["losses"] + two[1]["b"]["losses"] == pytest.approx(losses, abs=1e-5)
    assert far(two[0]["b"]["weights"], model.state_dict()) < 1e-9
    losses, _, model, _ = one_process(CASES["fp32"], dtype=torch.float32)
    assert four[1]["fp32"]["losses"] == pytest.approx(losses, abs=1e-5)
    assert far(four[1]["fp32"]["weights"], model.state_dict()) < 1e-5


@pytest.mark.slow
def test_the_naive_way_gives_the_same_for_the_same_bytes_and_twice_the_work(two):
    """All-reduce of gradients sends as much as we do; what it wastes is Newton-Schulz on every rank, and the memory."""
    results = run_ranks(2, naive, CASES["split"], STEPS)
    assert far(results[0]["weights"], two[0]["split"]["weights"]) < 1e-9
    assert sum(r["sent"] for r in results) == pytest.approx(
        sum(sum(r["split"]["traffic"].sent.values()) for r in two), rel=0.05
    )


@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_plan_covers_every_element_once_and_is_balanced(world):
    model = network(torch.float32)
    cfg = OptimConfig(lm_head_optimizer="muon")
    groups = build_optimizer(model, cfg).param_groups
    triples = [(n, p, g["kind"]) for g in groups for n, p in zip(g["names"], g["params"], strict=True)]
    units = plan_units(triples, model.cfg, "split", world, smallest_cut=16)
    assert units == plan_units(triples, model.cfg, "split", world, smallest_cut=16)
    seen = [torch.zeros_like(p) for _, p, _ in triples]
    for unit in units:
        name = triples[unit.param][0]
        if unit.view < 0:
            seen[unit.param].view(-1)[unit.first : unit.last] += 1
        else:
            split_blocks(name, seen[unit.param], model.cfg)[unit.view][unit.first : unit.last] += 1
    assert all(bool((s == 1).all()) for s in seen)
    for kind in ("muon", "adamw"):
        loads = [0] * world
        for unit in units:
            if triples[unit.param][2] == kind:
                loads[unit.owner] += unit.cost
        largest = max(u.cost for u in units if triples[u.param][2] == kind)
        assert max(loads) <= sum(loads) / world + largest


def test_state_of_another_model_is_refused(two):
    for result in two:
        unknown, shape = result["fp32"]["refused"]
        assert "'nowhere'" in unknown and "[2], expected [48]" in shape

"""Expert parallelism against the unsharded model in one process: outputs, counts, gradients, traffic.

python -m pytest tests/model/test_expert_parallel.py
"""

import pytest
import torch

from model import all_to_all
from model.all_to_all import make_route
from model.expert_parallel import (
    LocalExperts,
    exchange_bytes,
    is_expert,
    local_experts,
    placed,
    shard_experts,
    whole_experts,
)
from model.moe import MoE
from model.state_parts import InMemory, Piece, Region
from model.transformer import GlmMoeDsa
from tasks.trainer import computing_in
from tests.model.ranks import run_ranks
from tests.model.sizes import micro, spread

EXPERTS = 8
LENGTHS = [5, 9, 1, 7]  # tokens of the ranks: unequal, and one token is fewer than there are experts


def build(case="float64"):
    """float64 with large weights, where only mistakes differ; float32 as training starts; or all tokens to two experts."""
    model = GlmMoeDsa(micro(n_routed_experts=EXPERTS, num_nextn_predict_layers=1))
    model = model.init_weights(0) if case == "float32" else spread(model)
    if case == "skewed":  # experts 0 and 1 only: the other ranks receive nothing
        for module in model.modules():
            if isinstance(module, MoE):
                module.gate.e_score_correction_bias.fill_(-10.0)[:2] = 10.0
    return model if case == "float32" else model.double()


def ids_of(rank):
    return torch.randint(96, (1, LENGTHS[rank]), generator=torch.Generator().manual_seed(rank))


def loss_of(model, ids):
    """A sum over tokens, so that the loss of several batches is the sum of theirs."""
    out = model(ids, attention="dense", mtp_depth=2)
    loss = model.logits(out.hidden_bsh).logsumexp(-1).sum()
    for hidden in out.mtp_hidden:
        loss = loss + model.logits(hidden).square().mean(-1).sum()
    return loss + 0.1 * out.aux_loss, out


def close(got, want, name):
    """To 1e-5 in float32 and 1e-11 in float64, of the tensor's largest number: groups of other sizes round otherwise, by 1e-6."""
    got, want = got.detach(), want.detach()
    difference, size = float((got - want).abs().max()), max(1.0, float(want.abs().max()))
    assert difference <= (1e-5 if want.dtype == torch.float32 else 1e-11) * size, f"{name} differs by {difference}"


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train_step(rank, world, per_node, stages, case):
    route = make_route(per_node=per_node, stages=stages)
    model = shard_experts(build(case), route)
    loss, out = loss_of(model, ids_of(rank))
    before = route.traffic.bytes
    loss.backward()
    return {
        "loss": loss.detach(),
        "hidden": out.hidden_bsh.detach(),
        "mtp": [h.detach() for h in out.mtp_hidden],
        "counts": out.router_counts,
        "grads": whole_experts(gradients(model), route),
        "state": whole_experts(model.state_dict(), route),
        "bytes": (before, route.traffic.bytes - before),
    }


@pytest.mark.parametrize(
    "world, per_node, stages, case",
    [
        (2, 2, 1, "float32"),
        (4, 2, 2, "float64"),
        (4, 4, 1, "skewed"),
        pytest.param(4, 4, 1, "float32", marks=pytest.mark.slow),
        pytest.param(4, 4, 1, "float64", marks=pytest.mark.slow),
    ],
)
def test_ranks_equal_one_process(world, per_node, stages, case):
    model = build(case)
    results = run_ranks(world, train_step, per_node, stages, case)
    total = 0
    for rank, result in enumerate(results):
        loss, out = loss_of(model, ids_of(rank))
        total = total + loss
        close(result["loss"], loss, "loss")
        close(result["hidden"], out.hidden_bsh, "hidden")
        for got, want in zip(result["mtp"], out.mtp_hidden, strict=True):
            close(got, want, "mtp")
        for got, want in zip(result["counts"], out.router_counts, strict=True):
            assert torch.equal(got, want)
    total.backward()
    wanted = gradients(model)
    assert set(wanted) == set(results[0]["grads"])
    for name, want in wanted.items():
        # an expert's gradient is complete on the rank that has it, all others are summed over ranks
        got = results[0]["grads"][name] if is_expert(name) else sum(r["grads"][name] for r in results)
        close(got, want, name)
    for name, tensor in model.state_dict().items():
        assert torch.equal(results[0]["state"][name], tensor), name
    # volume: the formula from the choices of every rank, forward and backward alike
    sent = 0
    for choices_pp in choice_matrices(model, world):
        sent += exchange_bytes(choices_pp, model.cfg.hidden_size, 4 if case == "float32" else 8)
    if stages == 1:
        assert sum(r["bytes"][0] for r in results) == sent
        assert sum(r["bytes"][1] for r in results) == sent


def choice_matrices(model, world):
    """Choices from rank to rank of every MoE call, by watching the router of the unsharded model."""
    calls = {}

    def watch(rank, name):
        def hook(module, inputs, output):
            owner = output[1].flatten() // (EXPERTS // world)
            counts = torch.bincount(owner, minlength=world).tolist()
            calls.setdefault((name, len(seen.setdefault((rank, name), []))), []).append(counts)
            seen[rank, name].append(0)

        return hook

    seen = {}
    for rank in range(world):
        handles = [m.gate.register_forward_hook(watch(rank, n)) for n, m in model.named_modules() if isinstance(m, MoE)]
        with torch.no_grad():
            model(ids_of(rank), attention="dense", mtp_depth=2)
        for handle in handles:
            handle.remove()
    assert all(len(rows) == world for rows in calls.values())
    return list(calls.values())


def watched(rank, world):
    """What happens in one MoE layer, in order."""
    events = []

    def launch(*args):
        events.append("send")
        return sending(*args)

    def wait(pending):
        events.append("wait")
        return waiting(pending)

    sending, waiting = all_to_all.launch, all_to_all.Pending.wait
    all_to_all.launch, all_to_all.Pending.wait = launch, wait
    moe = shard_experts(build("float32"), make_route()).model.layers[1].mlp
    moe.shared_experts.register_forward_hook(lambda *_: events.append("shared"))
    moe.shared_experts.register_full_backward_hook(lambda *_: events.append("shared"))
    x = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    out = moe(x)[0]
    events.append("backward")
    out.square().sum().backward()
    return events


def test_the_shared_expert_computes_while_tokens_travel_both_ways():
    there, back = ["send", "shared", "wait", "send", "wait"], ["send", "wait", "send", "shared", "wait"]
    for events in run_ranks(2, watched):
        assert events == [*there, "backward", *back]


def half_precision(rank, world):
    model = shard_experts(build("float32"), make_route())
    with torch.no_grad(), computing_in(model, torch.bfloat16):
        return model(ids_of(rank), attention="dense").hidden_bsh


def test_bf16_rows_travel_in_bf16():
    model = build("float32")
    for rank, got in enumerate(run_ranks(2, half_precision)):
        with torch.no_grad(), computing_in(model, torch.bfloat16):
            want = model(ids_of(rank), attention="dense").hidden_bsh
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), want.float(), atol=3e-2, rtol=3e-2)


def test_experts_must_split_evenly():
    class Five:
        rank, size = 0, 5

    with pytest.raises(ValueError, match="parallel.expert is 5: the 8 experts"):
        local_experts(8, Five)


def test_local_experts_are_read_and_written_in_their_place():
    class Second:
        rank, size = 1, 2

    tensors = {"a.mlp.experts.down_proj": torch.arange(24.0).view(4, 2, 3), "a.norm.weight": torch.ones(3)}
    local, name = LocalExperts(InMemory(tensors), Second), "a.mlp.experts.down_proj"
    assert local.shape(name) == (2, 2, 3) and torch.equal(local[name], tensors[name][2:])
    assert torch.equal(local.read(name, Region.range(1, 9)), tensors[name][2:].reshape(-1)[1:9])
    assert torch.equal(local["a.norm.weight"], torch.ones(3))
    piece = placed(Piece.whole(name, local[name]), Second)
    assert piece.shape == (4, 2, 3) and piece.region == Region.range(12, 24)
    part = placed(Piece.part(name, (2, 2, 3), local[name].reshape(-1)[1:9], Region.range(1, 9)), Second)
    assert torch.equal(part.region.view(tensors[name]).reshape(-1), part.values)
    assert placed(Piece.whole("a.mlp.experts.down_proj.step", torch.tensor(1.0)), Second) is None
    assert is_expert("m.mlp.experts.gate_up_proj.momentum") and not is_expert("m.mlp.shared_experts.down_proj.weight")

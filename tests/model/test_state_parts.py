"""Regions and pieces against masks and brute force; what ranks own covers every element of a real model's state once.

python -m pytest tests/model/test_state_parts.py
"""

import pytest
import torch

from model.config import ModelConfig
from model.muon import OptimConfig, build_optimizer, split_blocks
from model.muon_sharded import ShardedMuonSplit
from model.state_parts import InMemory, Piece, Region, gather_pieces, load_into, share_out
from model.transformer import GlmMoeDsa
from tests.model.ranks import run_ranks
from tests.tasks.lm_case import MODEL


def covered(pieces, counts):
    """Add to how often each element of each tensor is given, and check the values against the elements' own numbers."""
    for piece in pieces:
        size = torch.Size(piece.shape).numel()
        region = piece.region or Region.range(0, size)
        own = torch.arange(size).reshape(-1)
        got = region.view(own).reshape(-1)
        assert torch.equal(got.to(piece.values.dtype), piece.values.reshape(-1)), piece.name
        count = counts.setdefault(piece.name, torch.zeros(size, dtype=torch.int64))
        region.view(count).add_(1)


def numbered(shapes):
    return {f"t{i}": torch.arange(torch.Size(s).numel()).reshape(s).to(d) for i, (s, d) in enumerate(shapes)}


def test_a_region_is_where_a_view_lies():
    base = torch.arange(4 * 10 * 3).reshape(4, 10, 3)
    for view in (base, base[1:3], base[:, :4], base[1:, 4:], base[2, 3:7], base.view(8, 5, 3)[2:5], base[3:, :4]):
        region = Region.of(view, base)
        assert torch.equal(region.view(base).reshape(-1), view.reshape(-1)) and region.numel == view.numel()
        assert [i for a, b in region.runs() for i in range(a, b)] == view.reshape(-1).tolist()
    with pytest.raises(ValueError, match="no run of blocks"):
        Region.of(base[:, :, :2], base)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_shares_cover_all_once_and_are_even(world):
    tensors = numbered([((5, 7), torch.float32), ((), torch.float32), ((0, 3), torch.float32), ((31,), torch.float64),
                        ((2, 3, 4), torch.bfloat16), ((1,), torch.int64)])  # fmt: skip
    counts, sizes = {}, []
    for rank in range(world):
        pieces = share_out(tensors, rank, world)
        covered(pieces, counts)
        sizes.append(sum(piece.nbytes for piece in pieces))
    assert counts.keys() == tensors.keys() and all((c == 1).all() for c in counts.values())
    assert max(sizes) - min(sizes) <= 16, sizes  # an element on either side
    if world > 1:
        assert any(piece.region for r in range(world) for piece in share_out(tensors, r, world)), "nothing was cut"


def test_in_memory_regions_are_fresh():
    source = InMemory({"a": torch.arange(24.0).reshape(4, 6).t()})
    region = Region(2, 3, 8, 2)
    assert torch.equal(source.read("a", region), source.read("a").reshape(-1)[[2, 3, 4, 10, 11, 12]])
    source.read("a").zero_()
    assert source.tensors["a"].sum() > 0 and "a" in source and "b" not in source


def test_what_does_not_fit_is_named():
    tensors = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"missing: b; unexpected: c; a has shape \[3\], expected \[2\]"):
        load_into(tensors, {"a": torch.ones(3), "c": torch.ones(1)})


def state_of(model, cfg):
    """A full state of every parameter whose values are the elements' numbers."""
    found = {}
    for group in build_optimizer(model, cfg).param_groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            values = torch.arange(p.numel(), dtype=torch.float64).reshape(p.shape)
            if group["kind"] == "muon":
                found[f"{name}.momentum_buffer"] = values
            else:
                found |= {f"{name}.step": torch.tensor(0.0), f"{name}.exp_avg": values, f"{name}.exp_avg_sq": values}
    return found


def owned(rank, world, muon):
    model = GlmMoeDsa(ModelConfig.from_params(MODEL | {"num_attention_heads": 4})).double()  # two heads on one rank
    cfg = OptimConfig(muon=muon)
    optimizer = ShardedMuonSplit(build_optimizer(model, cfg), smallest_cut=8)
    whole = state_of(model, cfg)
    optimizer.load_state_tensors(whole)
    pieces = optimizer.owned_state()
    gathered = gather_pieces(pieces, optimizer.control)
    views = [n for n, p in model.named_parameters() if "kv_b" in n and len(split_blocks(n, p.detach(), model.cfg)) == 2]
    return pieces, gathered, whole, views


@pytest.mark.parametrize("muon", ["split", pytest.param("off", marks=pytest.mark.slow)])
def test_owners_of_the_optimizer_state_cover_it_once(muon):
    found = run_ranks(3, owned, muon)
    counts = {}
    for pieces, gathered, whole, views in found:
        covered(pieces, counts)
        assert views, "the case of strided blocks is there"
        assert gathered == {} or all(torch.equal(gathered[k], whole[k]) for k in whole)
    whole = found[0][2]
    assert counts.keys() == whole.keys() == found[0][1].keys()
    assert all((c == 1).all() for c in counts.values())
    sizes = [sum(p.nbytes for p in pieces) for pieces, *_ in found]
    assert max(sizes) < 0.5 * sum(sizes)
    if muon == "split":
        assert any(p.region and p.region.count > 1 for pieces, *_ in found for p in pieces)


def test_a_part_that_is_all_is_whole():
    assert Piece.part("a", (2, 3), torch.zeros(6), Region.range(0, 6)).region is None

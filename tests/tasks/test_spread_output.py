"""A stage's output in shards written by all ranks: the same tensors that one process writes, and nothing sent.

python -m pytest tests/tasks/test_spread_output.py
"""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file

from model.checkpoint import load_checkpoint, save_checkpoint
from tasks import spread_output
from tasks.parallel import ParallelSettings, current
from tasks.spread_output import output_bytes, save_output, saved_optimizer, write_output
from tests.model.ranks import run_ranks
from tests.tasks.lm_case import micro_model
from tests.tasks.resume_case import Spread, reference

TWO = {"two": ParallelSettings(), "experts": ParallelSettings(expert=2), "pipeline": ParallelSettings(pipeline=2)}
FOUR = {
    "four": ParallelSettings(), "experts twice": ParallelSettings(expert=2),
    "pipelines": ParallelSettings(pipeline=2, processes=4),
}  # fmt: skip
LIMIT = 20000


def written(rank, world, folder, runs):
    """Per layout: (bytes received while writing, bytes of the whole model)."""
    weights, state = reference()
    found = {}
    for name, settings in runs.items():
        with_state = settings.pipeline == 1  # the plain optimizer of this test's case knows no pipeline
        spread = Spread(folder / name / "store", settings).fill(weights, state if with_state else {})
        out = folder / name / "out"
        if rank == 0:
            out.mkdir()
        got, real = [0], dist.all_gather

        def noted(parts, *rest, got=got, real=real, **options):
            got[0] += sum(t.nbytes for t in parts)
            return real(parts, *rest, **options)

        dist.all_gather = noted
        engine = spread.optimizer if with_state else None
        write_output(spread.layout, spread.model, current(), out, optimizer=engine, limit=LIMIT)
        dist.all_gather = real
        found[name] = got[0], output_bytes(spread.layout, spread.model, current())
    return found


def check(folder, runs, world):
    weights, state = reference()
    model = micro_model()
    model.load_state_dict(weights)
    save_checkpoint(model, folder / "one")
    whole = load_file(folder / "one/model.safetensors")
    results = run_ranks(world, all_of_it, folder, runs)
    for name in runs:
        out = folder / name / "out"
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == whole.keys()
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
        shards = sorted(p.name for p in out.glob("model-*.safetensors"))
        assert set(index["weight_map"].values()) == set(shards) and len(shards) >= world
        assert shards == [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        for tensor, shard in index["weight_map"].items():
            with safe_open(out / shard, "pt") as file:
                assert torch.equal(file.get_tensor(tensor), whole[tensor]), tensor
        assert (out / "config.json").read_bytes() == (folder / "one/config.json").read_bytes()
        read = load_checkpoint(out).state_dict()
        assert all(torch.equal(read[k], v) for k, v in model.state_dict().items())
        for received, size in (found[name] for found in results):
            assert received < 4096 and size == sum(t.nbytes for t in weights.values())
        if runs[name].pipeline == 1:
            kept = saved_optimizer(out)
            assert kept.keys() == state.keys() and all(torch.equal(kept[k], state[k]) for k in state)


def all_of_it(rank, world, folder, runs):
    """One set of processes: starting them costs more than what they do."""
    small_and_large(rank, world, folder / "sizes")
    failing(rank, world, folder / "failing")
    sequences_are_whole_afterwards(rank, world, folder / "sequences")
    return written(rank, world, folder, runs)


def test_two_ranks_write_one_checkpoint(tmp_path):
    check(tmp_path, TWO, 2)
    a_model_of_one_shard_is_the_file_of_one_process(tmp_path / "sizes")
    assert not (tmp_path / "failing/model.safetensors.index.json").exists(), "an error of one rank was raised on all"


@pytest.mark.slow
def test_four_ranks_write_one_checkpoint(tmp_path):
    check(tmp_path, FOUR, 4)


def failing(rank, world, folder):
    spread = Spread(folder / "store")

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    real = spread_output.save_file
    if rank == 1:
        spread_output.save_file = full
    with pytest.raises(OSError, match="the output could not be written: rank 1: .*No space left on device"):
        write_output(spread.layout, spread.model, current(), folder)
    spread_output.save_file = real


def sequences_are_whole_afterwards(rank, world, folder):
    """The DSA stages go on to measure the model that was written."""
    spread = Spread(folder, ParallelSettings(context=world))
    assert spread.model.context is not None
    assert save_output(spread.layout, spread.model, current(), folder, limit=LIMIT) is None
    assert spread.model.context is None


def test_without_saved_optimizer(tmp_path):
    assert saved_optimizer(tmp_path) is None


def small_and_large(rank, world, folder):
    spread = Spread(folder / "store").fill(*reference())
    for name in ("small", "large"):
        if rank == 0:
            (folder / name).mkdir()
        limit = {"limit": LIMIT} if name == "large" else {}
        whole = save_output(spread.layout, spread.model, current(), folder / name, None, spread.optimizer, **limit)
        assert (whole is None) == (name == "large")


def a_model_of_one_shard_is_the_file_of_one_process(tmp_path):
    names = {name: sorted(p.name for p in (tmp_path / name).rglob("*.safetensors")) for name in ("small", "large")}
    assert names["small"] == ["model.safetensors", "optimizer.safetensors"] and len(names["large"]) > 4
    one, many = (saved_optimizer(tmp_path / name) for name in names)
    assert one.keys() == many.keys() and all(torch.equal(one[k], many[k]) for k in one)

"""Recomputation with experts and sequences spread over ranks: collectives run again in the backward, numbers stay the same."""

import functools

import pytest
import torch

from tasks.settings import LoopSettings
from tests.model.ranks import run_ranks
from tests.tasks import test_model_parallel as ranked


def job(rank, world, folder):
    found = {}
    for kind in ("none", "selective", "block"):
        ranked.LoopSettings = functools.partial(LoopSettings, recompute=kind)
        for name in ("expert", "both"):
            run = ranked.train(rank, world, folder / kind / name, ranked.TWO[name])
            found[name, kind] = {k: run[k] for k in ("points", "weights", "state")}
    return found


@pytest.mark.slow
def test_two_ranks_with_recomputation_equal_two_without(tmp_path):
    for found in run_ranks(2, job, tmp_path):
        for name in ("expert", "both"):
            plain = found[name, "none"]
            for kind in ("selective", "block"):
                run = found[name, kind]
                assert run["points"] == plain["points"], (name, kind)
                assert all(torch.equal(v, run["weights"][k]) for k, v in plain["weights"].items()), (name, kind)
                assert all(torch.equal(v, run["state"][k]) for k, v in plain["state"].items()), (name, kind)

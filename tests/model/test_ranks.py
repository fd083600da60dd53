"""The helper that other multi-process tests stand on: results by rank, failures named, nobody left running.

python -m pytest tests/model/test_ranks.py
"""

import os
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.model.ranks import RankError, run_ranks


def add_up(rank, world, number):
    total = torch.tensor([float(rank + number)])
    dist.all_reduce(total)
    return {"rank": rank, "total": total, "threads": torch.get_num_threads()}


def fail_on_one(rank, world, pids):
    (pids / str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        raise ValueError("this rank does not like it")
    dist.barrier()


def never_end(rank, world):
    time.sleep(600)


def test_results_come_back_in_rank_order():
    results = run_ranks(3, add_up, 10)
    assert [r["rank"] for r in results] == [0, 1, 2]
    assert all(float(r["total"]) == 33.0 and r["threads"] == 1 for r in results)


def test_a_failure_is_named_and_the_others_are_killed(tmp_path):
    with pytest.raises(RankError, match="rank 1 .*\n(.*\n)*.*this rank does not like it"):
        run_ranks(2, fail_on_one, tmp_path)
    for file in tmp_path.iterdir():
        assert not psutil.pid_exists(int(file.read_text()))


def test_a_rank_that_hangs_is_ended():
    with pytest.raises(RankError, match="rank 0 .*\n(.*\n)*.*in never_end"):
        run_ranks(1, never_end, limit=3)

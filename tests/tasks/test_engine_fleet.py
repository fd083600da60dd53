"""Two engines give what one gives, in order, with the same weights; the failure of one is an error."""

from contextlib import ExitStack

import pytest
import torch

from model.checkpoint import load_checkpoint, save_checkpoint
from model.sampling import SamplingParams
from tasks.engine_client import EngineError
from tasks.engine_fleet import FleetClient, fleet, shares
from tests.tasks.post_training import LocalEngine, save_random_checkpoint

PROMPTS = [[5 + i // 2, 9, 30 + i // 2] for i in range(7)]  # pairs of samples of one prompt, one left over
PARAMS = [SamplingParams(max_new_tokens=20, seed=i, ignore_eos=True) for i in range(7)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_random_checkpoint(tmp_path_factory.mktemp("fleet") / "a")


def other_weights(checkpoint, folder):
    model = load_checkpoint(checkpoint)
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
    save_checkpoint(model, folder)
    return folder


def test_shares_are_whole_and_in_order():
    assert [list(range(7))[s] for s in shares(7, 3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert shares(1, 3) == [slice(0, 1)] and shares(0, 2) == []


def test_two_engines_give_what_one_gives_also_after_new_weights(checkpoint, tmp_path):
    other = other_weights(checkpoint, tmp_path / "b")
    with ExitStack() as stack:
        two = fleet(stack, checkpoint, 2, LocalEngine)
        one = fleet(stack, checkpoint, 1, LocalEngine)
        assert isinstance(two, FleetClient) and isinstance(one, LocalEngine)
        two.parity_gate(None, [[1, 2]])
        before = None
        for version in (1, 2):
            a, b = two.generate(PROMPTS, PARAMS), one.generate(PROMPTS, PARAMS)
            assert [x.output_ids for x in a] == [x.output_ids for x in b]
            assert a[0].output_ids != before
            before = a[0].output_ids
            for x, y in zip(a, b):
                assert x.output_logprobs == pytest.approx(y.output_logprobs, abs=1e-5)
            sequences = [p + x.output_ids for p, x in zip(PROMPTS, a)]
            for x, y in zip(two.score(sequences), one.score(sequences), strict=True):
                assert x == pytest.approx(y, abs=1e-5)
            if version == 1:
                for engine in (two, one):
                    engine.update_weights_from_disk(other, weight_version=version)
                assert all(client.version == 1 for client in two.clients)
        assert two.generate([], []) == []


def test_one_failing_engine_fails_the_call(checkpoint):
    class Broken(LocalEngine):
        def generate(self, prompts, params):
            raise EngineError("/generate: the engine process was killed by signal 9 (SIGKILL)")

    client = FleetClient([LocalEngine(checkpoint), Broken(checkpoint)])
    with pytest.raises(EngineError, match="killed by signal 9"):
        client.generate(PROMPTS, PARAMS)
    client.close()


def test_no_engine_is_refused(checkpoint):
    with ExitStack() as stack, pytest.raises(ValueError, match="at least one engine, got 0"):
        fleet(stack, checkpoint, 0, LocalEngine)


@pytest.mark.slow
def test_two_processes(checkpoint, tmp_path):
    other = other_weights(checkpoint, tmp_path / "b")
    with ExitStack() as stack:
        client = fleet(stack, checkpoint, 2)
        processes = [c.process for c in client.clients]
        client.parity_gate(load_checkpoint(checkpoint), [[5, 9, 30, 31]])
        local = LocalEngine(checkpoint)
        assert [g.output_ids for g in client.generate(PROMPTS, PARAMS)] == [
            g.output_ids for g in local.generate(PROMPTS, PARAMS)
        ]
        client.update_weights_from_disk(other, weight_version=1)
        assert [c.weight_version() for c in client.clients] == [1, 1]
        processes[1].process.kill()
        with pytest.raises(EngineError, match="killed by signal 9"):
            client.generate(PROMPTS, PARAMS)
    assert all(process.exit_code() is not None for process in processes)

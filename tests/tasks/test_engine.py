"""The rollout engine over HTTP: exactness, batching, weight updates, pauses, refusals, and what happens when it dies."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import pytest
import torch
import uvicorn

from model.checkpoint import save_checkpoint
from model.config import ModelConfig
from model.decode import Decoder
from model.decode_check import selection_margins
from model.sampling import SamplingParams
from model.transformer import GlmMoeDsa
from tasks.engine import build_app, parse_args
from tasks.engine_api import parse_generate
from tasks.engine_client import ROOT, EngineClient, EngineError, EngineProcess, ParityError
from tasks.engine_worker import EngineWorker
from tasks.parity import training_logprobs

VOCAB, TOPK, LIMIT = 97, 16, 1024
GREEDY = {"max_new_tokens": 8, "temperature": 0.0}


def build(seed: int, **changes) -> GlmMoeDsa:
    sizes = dict(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, moe_intermediate_size=24, num_hidden_layers=2,
        first_k_dense_replace=1, num_attention_heads=3, q_lora_rank=32, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=4,
        v_head_dim=16, index_n_heads=3, index_head_dim=12, index_topk=TOPK, n_routed_experts=6, num_experts_per_tok=2,
        routed_scaling_factor=1.0, initializer_range=0.15, max_position_embeddings=LIMIT, eos_token_id=[0],
    )  # fmt: skip
    return GlmMoeDsa(ModelConfig(**{**sizes, **changes})).init_weights(seed).requires_grad_(False)


def ids(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB, n).tolist() for n in lengths]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoint directories of two models of one shape and of one of another."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, model in {"a": build(1), "b": build(2), "wide": build(3, moe_intermediate_size=32)}.items():
        save_checkpoint(model, root / name)
    return root


@contextlib.contextmanager
def serve(checkpoint, dtype="float32", max_rows=0):
    """An engine in a thread of this process: (client, worker)."""
    worker = EngineWorker(checkpoint, dtype, max_rows, seed=0, weight_version=0)
    worker.start()
    sock = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_app(worker, {}), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    client = EngineClient(f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=60)
    try:
        client.wait_healthy(30)
        yield client, worker
    finally:
        client.close()
        server.should_exit = server.force_exit = True
        thread.join(10)
        worker.close()
        worker.join(10)


@pytest.fixture
def engine(checkpoints):
    with serve(checkpoints / "a") as pair:
        yield pair


def slow_down(worker: EngineWorker, seconds: float) -> None:
    """Make every decode step of a worker take at least this long, so that a test can act in the middle of a request."""
    step = worker.batch.decoder.forward.step

    def slow(*args):
        time.sleep(seconds)
        return step(*args)

    worker.batch.decoder.forward.step = slow


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


# ---- exactness


def test_generation_equals_the_decoder_and_the_training_forward(engine):
    client, _ = engine
    prompts = ids([10, 10, 3, 40], seed=1)
    params = SamplingParams(max_new_tokens=20, seed=5, ignore_eos=True)
    out = client.generate(prompts, params, return_input_logprobs=True)
    model = build(1)
    own = Decoder(model).generate(prompts, params)
    for prompt, row, expected in zip(prompts, out, own):
        assert row.output_ids == expected.output_ids and row.output_logprobs == expected.output_logprobs
        assert row.finish_reason == "length" and row.prompt_tokens == len(prompt) and row.weight_runs == [(0, 20)]
        reference = training_logprobs(model, [prompt + row.output_ids])[0]
        got = torch.tensor(row.input_logprobs + row.output_logprobs)
        torch.testing.assert_close(got, reference, atol=1e-5, rtol=0)


def test_same_request_same_numbers_and_order_does_not_matter(engine):
    client, _ = engine
    first, second = ids([6, 30, 9], seed=2), ids([12] * 5, seed=3)
    params = {"max_new_tokens": 12, "sampling_seed": 4}
    a = client.generate(first, params)
    b = client.generate(second, params)
    assert client.generate(second, params) == b and client.generate(first, params) == a


def test_concurrent_requests_do_not_touch_each_other(engine):
    client, _ = engine
    calls = [(ids([5 + n] * 3, seed=n), {"max_new_tokens": 10 + n, "sampling_seed": n}) for n in range(6)]
    alone = [client.generate(*call) for call in calls]
    results = [None] * len(calls)
    threads = [
        threading.Thread(target=lambda n=n: results.__setitem__(n, client.generate(*calls[n])))
        for n in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == alone


def test_shared_batches_give_the_same_tokens(checkpoints):
    """--max-rows: requests that arrive during a batch join it; the tokens are those of separate batches."""
    with serve(checkpoints / "a", max_rows=64) as (client, worker):
        calls = [(ids([4 + 3 * n, 9], seed=n), {"max_new_tokens": 16, "sampling_seed": n}) for n in range(5)]
        alone = [client.generate(*call) for call in calls]
        slow_down(worker, 0.02)
        most, results = [0], [None] * len(calls)

        def ask(n: int) -> None:
            time.sleep(0.03 * n)
            results[n] = client.generate(*calls[n])

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(calls))]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            most[0] = max(most[0], worker.load()["num_running_reqs"])
            time.sleep(0.005)
        assert most[0] > 2, "requests never shared a batch"
        for row, expected in zip(sum(results, []), sum(alone, [])):
            assert row.output_ids == expected.output_ids
            np.testing.assert_allclose(row.output_logprobs, expected.output_logprobs, atol=1e-5)


def test_score_is_the_training_forward(engine):
    client, _ = engine
    sequences = ids([2, 15, 60], seed=6)
    for scored, expected in zip(client.score(sequences), training_logprobs(build(1), sequences)):
        torch.testing.assert_close(torch.tensor(scored), expected, atol=1e-5, rtol=0)


def test_wire_format(engine):
    client, _ = engine
    prompt = ids([7], seed=7)[0]
    body = {
        "input_ids": prompt,
        "sampling_params": {**GREEDY, "n": 1, "skip_special_tokens": False, "stop": None},
        "return_logprob": True,
        "logprob_start_len": 3,
        "stream": False,
        "rid": "call-1",
    }
    value = httpx.post(f"{client.url}/generate", json=body).json()
    meta = value["meta_info"]
    assert meta["id"] == "call-1" and meta["weight_version"] == "0" and meta["prompt_tokens"] == 7
    assert meta["finish_reason"] == {"type": "length", "length": 8} and len(value["output_ids"]) == 8
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in value["output_ids"]]
    inputs = meta["input_token_logprobs"]
    assert [entry[1] for entry in inputs] == prompt[3:] and inputs[0][0] is None
    assert [entry[0] for entry in inputs[1:]] == pytest.approx(client.score([prompt])[0][3:], abs=1e-6)
    stop = value["output_ids"][2]
    body["sampling_params"]["stop_token_ids"] = [stop]
    finish = httpx.post(f"{client.url}/generate", json=body).json()["meta_info"]["finish_reason"]
    assert finish == {"type": "stop", "matched": stop}


def test_status_endpoints(engine):
    client, _ = engine
    assert client.healthy() and client.healthy(generate=True)
    info = client.model_info()
    assert info["vocab_size"] == VOCAB and info["weight_version"] == "0" and info["index_topk"] == TOPK
    assert httpx.get(f"{client.url}/get_model_info").json() == info
    assert httpx.get(f"{client.url}/get_weight_version").json() == {"weight_version": "0"}
    assert client.server_info()["paused"] is None
    assert httpx.get(f"{client.url}/get_load").json()[0]["num_reqs"] == 0
    client.flush_cache()


# ---- refusals


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": []}, "non-empty list"),
        ({"input_ids": [[1], []]}, r"input_ids\[1\] must be a non-empty list"),
        ({"input_ids": [1, "2"]}, "prompt 0: token id at position 1 must be an integer, got '2'"),
        ({"input_ids": [[1], [2, True]]}, "prompt 1: token id at position 1 must be an integer, got True"),
        ({"input_ids": [1, VOCAB]}, f"token id {VOCAB} at position 1 is outside"),
        ({"input_ids": [[1], [-5]]}, "prompt 1: token id -5"),
        ({"input_ids": [1] * LIMIT}, "exceed max_position_embeddings"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": LIMIT}}, "exceed max_position_embeddings"),
        ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "temperature must be a finite number"),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p must be in"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 2.5}}, "max_new_tokens must be an integer"),
        ({"input_ids": [1], "sampling_params": {"n": 4}}, "sampling_params.n is not supported"),
        ({"input_ids": [1], "sampling_params": {"min_p": 0.1}}, "sampling_params.min_p is not supported"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": 3}}, "must be a list"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "1 entries for 2 prompts"),
        ({"input_ids": [1], "logprob_start_len": 1}, "logprob_start_len 1 of prompt 0"),
        ({"input_ids": [1], "return_logprob": 1}, "return_logprob must be true or false"),
        ({"input_ids": [1], "stream": True}, "stream is not supported"),
        ({"text": "hello"}, "no tokenizer"),
        ({"input_ids": [1], "top_logprobs_num": 2}, "top_logprobs_num is not supported"),
        ([1, 2], "must be a JSON object"),
        ("nonsense", "not valid JSON"),
    ],
)
def test_bad_requests_get_400_with_the_reason(engine_once, body, message):
    content = {"content": b"{nonsense"} if body == "nonsense" else {"json": body}
    response = httpx.post(f"{engine_once.url}/generate", **content)
    assert response.status_code == 400
    assert re.search(message, response.json()["error"]["message"])


@pytest.fixture(scope="module")
def engine_once(checkpoints):
    with serve(checkpoints / "a") as (client, _):
        yield client


def test_client_raises_the_engines_reason(engine_once):
    with pytest.raises(EngineError, match=f"HTTP 400: prompt 0: token id {VOCAB}") as caught:
        engine_once.generate([[VOCAB]], GREEDY)
    assert caught.value.status == 400
    assert engine_once.generate([], GREEDY) == []


def test_a_remote_address_must_be_meant(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--model", "x", "--host", "0.0.0.0"])
    assert "--allow-remote" in capsys.readouterr().err
    assert parse_args(["--model", "x", "--host", "0.0.0.0", "--allow-remote"]).host == "0.0.0.0"


def test_request_seeds():
    """A shared seed gives each row its own stream; a request without one takes the engine's default."""
    shared = parse_generate({"input_ids": [[1], [1]], "sampling_params": {"sampling_seed": 3}}, default_seed=9)
    assert shared.seeds[0] != shared.seeds[1]
    single = parse_generate({"input_ids": [1], "sampling_params": {"sampling_seed": 3}}, default_seed=10)
    assert single.seeds == shared.seeds[:1]
    unseeded = [parse_generate({"input_ids": [1]}, default_seed=d).seeds for d in (9, 10, 9)]
    assert unseeded[0] == unseeded[2] != unseeded[1]
    listed = parse_generate({"input_ids": [[1], [1]], "sampling_params": [{"seed": 3}, {"seed": 3}]}, default_seed=9)
    assert listed.seeds == [shared.seeds[0]] * 2


# ---- weights


def test_weight_update_changes_numbers_and_version(engine, checkpoints):
    client, _ = engine
    prompts = ids([20, 4], seed=8)
    old = client.score(prompts)
    client.update_weights_from_disk(checkpoints / "b", weight_version=3)
    assert client.weight_version() == 3
    for scored, expected in zip(client.score(prompts), training_logprobs(build(2), prompts)):
        torch.testing.assert_close(torch.tensor(scored), expected, atol=1e-5, rtol=0)
    assert client.generate(prompts, GREEDY)[0].weight_version == 3
    client.update_weights_from_disk(checkpoints / "a", weight_version=4)
    assert client.score(prompts) == old


def test_weight_versions_only_grow_and_failures_keep_the_old_weights(engine, checkpoints, tmp_path):
    client, _ = engine
    prompts = ids([20], seed=9)
    client.update_weights_from_disk(checkpoints / "b", weight_version=2)
    before = client.score(prompts)
    with pytest.raises(EngineError, match="must grow: 2 is not above"):
        client.update_weights_from_disk(checkpoints / "a", weight_version=2)
    post = lambda **body: httpx.post(f"{client.url}/update_weights_from_disk", json=body)  # noqa: E731
    for body, message in [
        ({"model_path": str(checkpoints / "a"), "weight_version": "1"}, "must grow"),
        ({"model_path": str(tmp_path)}, "no config.json"),
        ({"model_path": str(checkpoints / "wide")}, "config differs"),
        ({"model_path": str(checkpoints / "a"), "weight_version": "new"}, "whole number"),
        ({}, "model_path is required"),
    ]:
        response = post(**body)
        assert response.status_code == 400 and message in response.text
    assert client.weight_version() == 2 and client.score(prompts) == before
    assert post(model_path=str(checkpoints / "a")).json()["weight_version"] == "3"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_update_continue_in_the_middle_of_a_request(engine, checkpoints, mode):
    """A rollout spans two weight versions; each token's log-prob is that of the weights that made it."""
    client, worker = engine
    slow_down(worker, 0.02)
    prompt, result = ids([20], seed=10)[0], []
    params = {"max_new_tokens": 40, "sampling_seed": 1, "ignore_eos": True}
    thread = threading.Thread(target=lambda: result.extend(client.generate([prompt], params)))
    thread.start()
    wait_until(lambda: worker.steps >= 5)
    client.pause(mode)
    steps = worker.steps
    time.sleep(0.1)
    assert worker.steps == steps and thread.is_alive() and client.healthy(generate=True)
    client.update_weights_from_disk(checkpoints / "b", weight_version=1)
    client.resume()
    thread.join(30)
    row = result[0]
    (old, old_tokens), (new, new_tokens) = row.weight_runs
    assert (old, new) == (0, 1) and old_tokens + new_tokens == 40 and row.weight_version == 1
    sequence = prompt + row.output_ids
    before, after = (training_logprobs(build(seed), [sequence])[0][19:] for seed in (1, 2))
    got = torch.tensor(row.output_logprobs)
    torch.testing.assert_close(got[:old_tokens], before[:old_tokens], atol=1e-5, rtol=0)
    gap = (got[old_tokens:] - after[old_tokens:]).abs().max()
    # with a recomputed cache the tail is exactly the new model's; with the old cache it is neither model's
    assert gap < 1e-5 if mode == "retract" else gap > 1e-3


def test_pause_abort_ends_requests_and_holds_new_ones(engine):
    client, worker = engine
    slow_down(worker, 0.02)
    results = {}
    params = {"max_new_tokens": 500, "ignore_eos": True}
    first = threading.Thread(target=lambda: results.update(a=client.generate(ids([5]), params)))
    first.start()
    wait_until(lambda: worker.steps >= 3)
    client.pause("abort")
    first.join(30)
    row = results["a"][0]
    assert row.finish_reason == "abort" and 0 < len(row.output_ids) < 500
    held = threading.Thread(target=lambda: results.update(b=client.generate(ids([5]), GREEDY)))
    held.start()
    time.sleep(0.1)
    assert held.is_alive()
    client.resume()
    held.join(30)
    assert results["b"][0].finish_reason == "length"


def test_abort_by_id_and_a_vanished_caller(engine):
    client, worker = engine
    slow_down(worker, 0.02)
    body = {"input_ids": [[1, 2]], "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}, "rid": "x"}
    results = []
    thread = threading.Thread(
        target=lambda: results.append(httpx.post(f"{client.url}/generate", json=body, timeout=60))
    )
    thread.start()
    wait_until(lambda: worker.steps >= 3)
    client.abort("another")
    time.sleep(0.1)
    assert thread.is_alive()
    client.abort("x")
    thread.join(30)
    assert results[0].json()[0]["meta_info"]["finish_reason"]["type"] == "abort"
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{client.url}/generate", json=body, timeout=0.3)
    wait_until(lambda: worker.load()["num_running_reqs"] == 0)
    assert client.generate(ids([5]), GREEDY)[0].finish_reason == "length"


def test_a_failure_inside_the_decoder_reaches_the_caller_and_does_not_end_the_engine(engine):
    client, worker = engine
    forward = worker.decoder.forward

    def broken(*args):
        raise RuntimeError("out of cheese")

    forward.step = broken
    with pytest.raises(EngineError, match="HTTP 500: RuntimeError: out of cheese"):
        client.generate(ids([5]), GREEDY)
    del forward.step
    assert client.generate(ids([5]), GREEDY)[0].finish_reason == "length"


# ---- parity gate


def test_parity_gate_passes_the_true_model_in_both_regimes(engine):
    client, _ = engine
    report = client.parity_gate(build(1), ids([12, 40, 70], seed=11))
    assert report["dense_tokens"] > 20 and report["sparse_tokens"] > 80 and report["max_abs_diff"] < 1e-5
    # sequences of one kind only: the gate makes the other regime from their tokens
    for lengths in ([8], [60]):
        report = client.parity_gate(build(1), ids(lengths, seed=12))
        assert report["dense_tokens"] >= 12 and report["sparse_tokens"] >= 12


def test_parity_gate_stops_other_weights_and_other_numerics(engine, checkpoints):
    client, _ = engine
    with pytest.raises(ParityError, match=r"token id \d+ at position \d+ has log-prob"):
        client.parity_gate(build(2), ids([12, 40], seed=11))
    for dtype in ("int8", "bfloat16"):
        with serve(checkpoints / "a", dtype=dtype) as (rounded, _), pytest.raises(ParityError):
            rounded.parity_gate(build(1), ids([12, 40], seed=11))


def test_parity_gate_sees_a_different_key_selection(engine):
    """Dense attention where training is sparse: equal on short sequences, stopped on long ones."""
    client, worker = engine
    worker.decoder.forward.cfg = build(1, index_topk=512).cfg
    with pytest.raises(ParityError) as caught:
        client.parity_gate(build(1), ids([12, 60], seed=11))
    position = int(str(caught.value).split("at position ")[1].split()[0])
    assert position > TOPK


def test_parity_gate_sees_another_tie_break(checkpoints, tmp_path, monkeypatch):
    """An indexer that scores everything 0 ties everywhere: the lower index wins in training, the higher one in a wrong engine."""
    model = build(1)
    for block in model.blocks:
        block.self_attn.indexer.weights_proj.weight.zero_()
    save_checkpoint(model, tmp_path / "tied")
    with serve(tmp_path / "tied") as (client, worker):
        sequences = ids([12, 60], seed=11)
        assert client.parity_gate(model, sequences)["excused"] == 0
        right = worker.decoder.forward._select

        def wrong(*args):
            causal = torch.ones(args[1].shape[1], args[1].shape[1], dtype=torch.bool).tril()
            return [
                mask & causal.triu(1 - TOPK)[: mask.shape[1], : mask.shape[2]]
                for mask in map(torch.ones_like, right(*args))
            ]

        worker.decoder.forward._select = wrong
        with pytest.raises(ParityError, match="score"):
            client.parity_gate(model, sequences)


def test_parity_gate_excuses_only_what_follows_a_near_tie(engine, monkeypatch):
    """The same disagreement passes when the training forward's own margins there are below rounding, and not otherwise."""
    client, worker = engine
    model, sequences = build(1), ids([12, 60], seed=11)
    forward = worker.decoder.forward
    logits, shift = forward.logits, [0.0]
    forward.logits = lambda hidden: logits(hidden) * (1 + shift[0])
    margins = {"near": torch.inf}

    def fake(model, cases):
        return [torch.full((len(case),), margins["near"]) for case in cases]

    monkeypatch.setattr("tasks.parity.selection_margins", fake)
    shift[0] = 1e-3
    with pytest.raises(ParityError, match="disagree"):
        client.parity_gate(model, sequences)
    margins["near"] = 1e-7
    with pytest.raises(ParityError, match="is not rounding"):  # everything differs: more than the excused share
        client.parity_gate(model, sequences)


def test_selection_margins_find_a_near_tie():
    """Query t's margin is the gap between the last selected and the first rejected key; two equal tokens make it an exact tie."""
    model = build(1)
    sequence = ids([TOPK + 8], seed=3)[0]
    margins = selection_margins(model, [sequence, sequence[:TOPK]])
    assert torch.isinf(margins[0][:TOPK]).all() and torch.isinf(margins[1]).all()
    assert torch.isfinite(margins[0][TOPK:]).any() and (margins[0] > 0).all()
    for block in model.blocks:
        block.self_attn.indexer.weights_proj.weight.zero_()
    assert torch.isinf(selection_margins(model, [sequence])[0]).all()


def test_parity_gate_sees_a_broken_decode_path_behind_a_right_prefill(engine):
    client, worker = engine
    forward, step = worker.decoder.forward, worker.decoder.forward.step
    forward.step = lambda ids_b, lengths_b, cache: step(ids_b, lengths_b, cache) * 1.01
    client.score(ids([12]))
    with pytest.raises(ParityError, match="generate"):
        client.parity_gate(build(1), ids([12, 60], seed=11))


# ---- processes


def test_process_serves_dies_by_signal_and_says_so(checkpoints):
    with EngineProcess(checkpoints / "a", extra=["--dtype", "float32"], weight_version=7) as engine:
        client = engine.client
        assert client.weight_version() == 7
        own = Decoder(build(1)).generate(ids([9]), SamplingParams(max_new_tokens=8, temperature=0.0))
        assert client.generate(ids([9]), GREEDY)[0].output_ids == own[0].output_ids
        killer = threading.Timer(0.5, engine.process.kill)
        killer.start()
        with pytest.raises(EngineError, match=r"/generate: the engine process was killed by signal 9 \(SIGKILL\)"):
            for _ in range(200):
                client.generate(ids([20] * 64), {"max_new_tokens": 900, "ignore_eos": True})
        with pytest.raises(EngineError, match="killed by signal 9"):
            client.model_info()
    assert engine.process.returncode == -signal.SIGKILL


def test_process_that_cannot_load_says_why(tmp_path):
    with pytest.raises(EngineError, match="ended with exit status 1 while starting(.|\n)*no config.json"):
        EngineProcess(tmp_path).start()


@pytest.mark.slow
@pytest.mark.parametrize("thread", ["main", "other"])
def test_process_dies_with_its_parent(checkpoints, thread):
    """kill -9 of the parent, with the engine started from its main thread (signal and pipe) or from another (pipe alone)."""
    code = (
        "import sys, threading, time\n"
        "from tasks.engine_client import EngineProcess\n"
        "engine = EngineProcess(sys.argv[1])\n"
        f"start = threading.Thread(target=engine.start) if {thread == 'other'} else None\n"
        "start.start() if start else engine.start()\n"
        "start.join() if start else None\n"
        "print(engine.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(checkpoints / "a")], cwd=ROOT, stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.kill()
    parent.wait()

    def gone() -> bool:
        try:
            with open(f"/proc/{child}/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    wait_until(gone)

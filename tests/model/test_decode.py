"""Cached decoding against the model's full forward, and the sampler against its definition."""

import numpy as np
import pytest
import torch

from model.config import ModelConfig
from model.decode import DecodeBatch, Decoder
from model.kv_cache import LatentCache
from model.sampling import RowSampler, SamplingParams, row_seed, uniforms
from model.transformer import GlmMoeDsa

VOCAB = 97


def build(topk: int, seed: int = 0, **changes) -> GlmMoeDsa:
    sizes = dict(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, moe_intermediate_size=24, num_hidden_layers=3,
        first_k_dense_replace=1, num_attention_heads=3, q_lora_rank=32, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=4,
        v_head_dim=16, index_n_heads=3, index_head_dim=12, index_topk=topk, n_routed_experts=6, num_experts_per_tok=2,
        routed_scaling_factor=1.5, initializer_range=0.15, max_position_embeddings=512,
    )  # fmt: skip
    model = GlmMoeDsa(ModelConfig(**{**sizes, **changes})).init_weights(seed)
    for layer in model.model.layers[1:]:
        layer_bias = torch.randn(
            layer.mlp.gate.e_score_correction_bias.shape, generator=torch.Generator().manual_seed(seed)
        )
        layer.mlp.gate.e_score_correction_bias.copy_(layer_bias * 0.05)
    return model.requires_grad_(False)


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def full_logprobs(model: GlmMoeDsa, ids: list[int]) -> torch.Tensor:
    """log-probs [S, V] of the training forward for one sequence."""
    return torch.log_softmax(model.logits(model(torch.tensor([ids])).hidden_bsh[0]), -1)


@pytest.mark.parametrize("topk", [6, 24, 512])
def test_decode_equals_full_forward(topk):
    """Ragged prompts, sparse from the first token (6), sparse midway (24, also masked and gathered reads) and dense (512)."""
    model = build(topk)
    rows = prompts([20, 20, 7, 33, 1], seed=1)
    out = Decoder(model).generate(rows, SamplingParams(max_new_tokens=40, seed=3))
    for ids, completion in zip(rows, out, strict=True):
        sequence = ids + completion.output_ids
        expected = full_logprobs(model, sequence)[len(ids) - 1 : -1].gather(
            1, torch.tensor(completion.output_ids)[:, None]
        )[:, 0]
        torch.testing.assert_close(torch.tensor(completion.output_logprobs), expected, atol=1e-5, rtol=0)
        assert len(completion.output_ids) == 40 and completion.finish_reason == "length"


@pytest.mark.parametrize("topk", [6, 512])
def test_greedy_is_the_argmax_of_the_full_forward(topk):
    model = build(topk)
    row = prompts([11], seed=2)[0]
    out = Decoder(model).generate([row], SamplingParams(max_new_tokens=12, temperature=0.0))[0]
    ids = list(row)
    for token in out.output_ids:
        assert token == int(full_logprobs(model, ids)[-1].argmax())
        ids.append(token)


@pytest.mark.parametrize("topk", [6, 512])
def test_score_equals_full_forward(topk):
    model = build(topk)
    rows = prompts([30, 5, 2, 1, 30], seed=4)
    for ids, scored in zip(rows, Decoder(model).score(rows), strict=True):
        expected = full_logprobs(model, ids)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
        assert len(scored) == len(ids) - 1
        torch.testing.assert_close(torch.tensor(scored), expected, atol=1e-5, rtol=0)


def test_score_temperature():
    model = build(512)
    ids = prompts([9])[0]
    logits = model.logits(model(torch.tensor([ids])).hidden_bsh[0])
    expected = torch.log_softmax(logits / 0.7, -1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor(Decoder(model).score([ids], temperature=0.7)[0]), expected, atol=1e-5, rtol=0
    )


def test_group_routing_equals_full_forward():
    model = build(8, n_group=3, topk_group=2)
    row = prompts([15])[0]
    out = Decoder(model).generate([row], SamplingParams(max_new_tokens=10))[0]
    expected = full_logprobs(model, row + out.output_ids)[14:-1].gather(1, torch.tensor(out.output_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(out.output_logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("topk", [6, 512])
def test_batching_does_not_change_what_a_row_draws(topk):
    """A row alone, in a group of equal prompts, beside rows that finish early, or joining a running batch: the same tokens."""
    model = build(topk)
    decoder = Decoder(model)
    rows = prompts([12, 12, 5, 21], seed=5)
    rows = [rows[0], rows[0], rows[1], rows[2], rows[3]]
    params = [SamplingParams(max_new_tokens=n, seed=100 + r) for r, n in enumerate([24, 3, 9, 24, 1])]
    together = decoder.generate(rows, params)
    for row, param, expected in zip(rows, params, together, strict=True):
        alone = decoder.generate([row], [param])[0]
        assert alone.output_ids == expected.output_ids
        np.testing.assert_allclose(alone.output_logprobs, expected.output_logprobs, atol=1e-5)

    batch = DecodeBatch(decoder)
    seeds = [row_seed(p.seed, 0) for p in params]
    done = dict(batch.add(rows[:2], params[:2], seeds[:2], [0, 1]))
    for _ in range(4):
        done.update(batch.step())
    done.update(batch.add(rows[2:], params[2:], seeds[2:], [2, 3, 4]))
    while batch.rows:
        done.update(batch.step())
    assert [done[r].output_ids for r in range(5)] == [c.output_ids for c in together]


@pytest.mark.parametrize("topk", [6, 512])
def test_rebuilt_cache_continues_with_the_new_weights(topk):
    """After a weight change in the middle, a rebuilt batch goes on as the new model would from the same tokens."""
    model = build(topk)
    decoder = Decoder(model, auto_refresh=False)
    rows = prompts([12, 5, 30], seed=6)
    params = [SamplingParams(max_new_tokens=n, seed=n) for n in (20, 4, 20)]
    batch = DecodeBatch(decoder)
    done = dict(batch.add(rows, params, [row_seed(p.seed, 0) for p in params], [0, 1, 2]))
    for _ in range(8):
        done.update(batch.step())
    for p in model.parameters():
        p.mul_(1.05)
    decoder.refresh()
    batch.weight_version = 1
    batch.rebuild()
    while batch.rows:
        done.update(batch.step())
    for row in (0, 2):
        out = done[row]
        assert out.weight_runs == [(0, 9), (1, 11)]
        expected = full_logprobs(model, rows[row] + out.output_ids)[len(rows[row]) - 1 : -1]
        expected = expected.gather(1, torch.tensor(out.output_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(out.output_logprobs)[9:], expected[9:], atol=1e-5, rtol=0)
    assert done[1].weight_runs == [(0, 4)]


def test_long_prompts_and_many_rows_are_prefilled_in_chunks(monkeypatch):
    """The token budget of a prefill chunk changes nothing but memory."""
    decoder = Decoder(build(6))
    rows = prompts([30, 8, 55, 8, 21, 2], seed=9)
    params = SamplingParams(max_new_tokens=6, seed=1)
    whole, scored = decoder.generate(rows, params), decoder.score(rows)
    monkeypatch.setattr("model.decode.PREFILL_TOKENS", 60)
    assert len(decoder._chunks(rows)) > 2
    for a, b in zip(whole, decoder.generate(rows, params), strict=True):
        assert a.output_ids == b.output_ids
        np.testing.assert_allclose(a.output_logprobs, b.output_logprobs, atol=1e-5)
    for a, b in zip(scored, decoder.score(rows), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_rows_of_one_request_have_their_own_streams():
    decoder = Decoder(build(512))
    row = prompts([8])[0]
    out = decoder.generate([row] * 6, SamplingParams(max_new_tokens=12, seed=7))
    assert len({tuple(c.output_ids) for c in out}) == 6
    again = decoder.generate([row] * 6, SamplingParams(max_new_tokens=12, seed=7))
    assert [(c.output_ids, c.output_logprobs) for c in out] == [(c.output_ids, c.output_logprobs) for c in again]


def test_stop_tokens_and_ignore_eos():
    model = build(512, eos_token_id=[3, 5])
    decoder = Decoder(model)
    row = prompts([8])[0]
    free = decoder.generate([row], SamplingParams(max_new_tokens=30, seed=1, ignore_eos=True))[0]
    assert len(free.output_ids) == 30
    stop = free.output_ids[10]
    cut = decoder.generate([row], SamplingParams(max_new_tokens=30, seed=1, ignore_eos=True, stop_token_ids=[stop]))[0]
    first = free.output_ids.index(stop)
    assert cut.output_ids == free.output_ids[: first + 1] and cut.finish_reason == "stop" and cut.matched == stop
    assert len(cut.output_logprobs) == first + 1
    many = decoder.generate([row] * 64, SamplingParams(max_new_tokens=200, seed=2))
    stopped = [c for c in many if c.finish_reason == "stop"]
    assert stopped and all(c.output_ids[-1] in (3, 5) and not {3, 5} & set(c.output_ids[:-1]) for c in stopped)


def test_weights_are_read_live():
    model = build(512)
    decoder = Decoder(model)
    row = prompts([6])[0]
    before = decoder.score([row])[0]
    for p in model.parameters():
        p.mul_(1.1)
    after = decoder.score([row])[0]
    expected = full_logprobs(model, row)[:-1].gather(1, torch.tensor(row)[1:, None])[:, 0]
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-3
    torch.testing.assert_close(torch.tensor(after), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("dtype", "low", "high"), [("bfloat16", 1e-4, 0.3), ("int8", 1e-5, 0.3), ("fp8", 1e-3, 0.3)])
def test_rollout_dtypes_inject_a_mismatch(dtype, low, high):
    model = build(512)
    rows = prompts([40] * 4, seed=8)
    exact, rounded = Decoder(model).score(rows), Decoder(model, dtype=dtype).score(rows)
    gap = np.abs(np.array(exact) - np.array(rounded)).mean()
    assert low < gap < high
    out = Decoder(model, dtype=dtype).generate(rows, SamplingParams(max_new_tokens=4))
    assert all(np.isfinite(c.output_logprobs).all() for c in out)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_damaged_weights_are_reported(temperature):
    model = build(512)
    model.lm_head.weight[3, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        Decoder(model).generate(prompts([4]), SamplingParams(max_new_tokens=3, temperature=temperature))
    with pytest.raises(FloatingPointError, match="not finite"):
        Decoder(model).score(prompts([4]))


def test_zero_new_tokens():
    out = Decoder(build(512)).generate(
        prompts([4, 4]), [SamplingParams(max_new_tokens=0), SamplingParams(max_new_tokens=2)]
    )
    assert out[0].output_ids == [] and len(out[1].output_ids) == 2


def test_abort_returns_what_there_is():
    decoder = Decoder(build(512))
    calls = []
    out = decoder.generate(
        prompts([4, 9]), SamplingParams(max_new_tokens=50), on_step=lambda: calls.append(1) or len(calls) > 6
    )
    assert [c.finish_reason for c in out] == ["abort", "abort"] and all(len(c.output_ids) == 7 for c in out)


@pytest.mark.parametrize(
    ("rows", "params", "message"),
    [
        ([[]], {}, "prompt 0 is empty"),
        ([[1], [2, VOCAB]], {}, r"prompt 1: token id 97 at position 1 is outside \[0, 97\)"),
        ([[-1]], {}, "token id -1 at position 0"),
        ([[1] * 500], {"max_new_tokens": 13}, "500 prompt tokens \\+ 13 new tokens exceed max_position_embeddings 512"),
        ([[1.5]], {}, "flat list of integer token ids"),
    ],
)
def test_bad_prompts_are_named(rows, params, message):
    with pytest.raises(ValueError, match=message):
        Decoder(build(512)).generate(rows, SamplingParams(**params))


@pytest.mark.parametrize(
    "params",
    [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -2}, {"max_new_tokens": -1}, {"temperature": float("nan")},
     {"seed": 1.5}, {"stop_token_ids": [-3]}, {"ignore_eos": 1}],
)  # fmt: skip
def test_bad_sampling_params(params):
    with pytest.raises(ValueError, match=next(iter(params))):
        SamplingParams(**params)


def sampler(rows: int, **params) -> RowSampler:
    seeds = [row_seed(11, row) for row in range(rows)]
    return RowSampler([SamplingParams(**params)] * rows, seeds, torch.device("cpu"))


def test_sampling_frequencies_follow_the_tempered_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
    for temperature in (1.0, 0.5):
        ids, logp = sampler(40000, temperature=temperature).sample(
            logits.expand(40000, -1), np.zeros(40000, dtype=np.int64)
        )
        expected = torch.softmax(logits / temperature, -1)
        counts = torch.bincount(ids, minlength=5) / 40000
        assert (counts - expected).abs().max() < 4 * (0.25 / 40000) ** 0.5
        assert counts[4] == 0
        torch.testing.assert_close(logp, torch.log_softmax(logits / temperature, -1)[ids])


def test_sampling_top_k_and_top_p():
    logits = torch.log(torch.tensor([0.1, 0.4, 0.1, 0.3, 0.1])).expand(4000, -1)
    zeros = np.zeros(4000, dtype=np.int64)

    def support(**params) -> set[int]:
        return set(sampler(4000, **params).sample(logits, zeros)[0].tolist())

    assert support(top_k=1) == {1}
    assert support(top_k=3) == {0, 1, 3}  # ties go to the lower id
    assert support(top_p=0.3) == {1}
    assert support(top_p=0.5) == {1, 3}
    assert support(top_p=0.75) == {0, 1, 3}
    assert support(top_k=3, top_p=0.6) == {1, 3}
    assert support() == {0, 1, 2, 3, 4}


def test_sampling_uniforms_are_a_pure_function_with_even_spread():
    seeds = np.array([row_seed(1, r) for r in range(2000)], dtype=np.int64)
    draws = np.stack([uniforms(seeds, np.full(2000, c)) for c in range(20)])
    assert (draws[3, 5], draws[7, 5]) == (
        uniforms(seeds[5:6], np.array([3]))[0],
        uniforms(seeds[5:6], np.array([7]))[0],
    )
    assert draws.min() >= 0 and draws.max() < 1 and len(np.unique(draws)) == draws.size
    histogram = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert np.abs(histogram - 2000).max() < 6 * 2000**0.5
    for a, b in ((draws[0], draws[1]), (draws[:, :-1], draws[:, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.1


def test_cache_size_is_the_latent_and_grows_without_loss():
    cache = LatentCache.empty(layers=2, rows=3, capacity=10, kv_dim=6, index_dim=4, like=torch.zeros(1))
    assert cache.nbytes == 2 * 3 * 64 * (6 + 4) * 4
    cache.kv.copy_(torch.arange(cache.kv.numel()).view_as(cache.kv))
    before = cache.kv.clone()
    cache.reserve(65)
    assert cache.capacity >= 65 and torch.equal(cache.kv[:, :, :64], before)
    cache.select(torch.tensor([2, 0, 0]))
    assert torch.equal(cache.kv[:, 1, :64], before[:, 0]) and torch.equal(cache.kv[:, 0, :64], before[:, 2])
    other = LatentCache.empty(layers=2, rows=1, capacity=200, kv_dim=6, index_dim=4, like=torch.zeros(1))
    cache.extend(other)
    assert cache.rows == 4 and cache.capacity == other.capacity and torch.equal(cache.kv[:, 1, :64], before[:, 0])


@pytest.mark.parametrize("topk", [6, 512])
def test_odd_sizes_and_tied_embeddings(topk):
    """One row of one token, latents of odd sizes, an output head that is the embedding."""
    odd = dict(hidden_size=13, q_lora_rank=33, kv_lora_rank=9, qk_nope_head_dim=1, v_head_dim=7, num_attention_heads=1)
    model = build(topk, tie_word_embeddings=True, **odd)
    for rows in (prompts([1]), prompts([9, 1, 3])):
        out = Decoder(model).generate(rows, SamplingParams(max_new_tokens=10, seed=1))
        for ids, completion in zip(rows, out, strict=True):
            expected = full_logprobs(model, ids + completion.output_ids)[len(ids) - 1 : -1]
            expected = expected.gather(1, torch.tensor(completion.output_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.output_logprobs), expected, atol=1e-5, rtol=0)

"""Cached decoding of every kind of attention against the model's own full forward, and what a state costs."""

import pytest
import torch

from model.decode import Decoder
from model.sampling import SamplingParams
from model.state_decode import StateDecoder
from model.transformer import GlmMoeDsa
from tests.model.sizes import micro, spread
from tests.model.test_gqa import GQA_SIZES

KINDS = {
    "gqa": GQA_SIZES,
    "mla": {"index_topk": 64},
    "swa": {"layer_types": ["swa", "full", "swa"], "sliding_window": 6, "index_topk": 64},
    "gqa swa": {**GQA_SIZES, "layer_types": ["swa", "swa", "full"], "sliding_window": 5},
    "gdn": {"layer_types": ["gdn", "full", "gdn"], "index_topk": 64},
    "gqa gdn": {**GQA_SIZES, "layer_types": ["gdn", "gdn", "full"]},
    "simple_gdn": {"layer_types": ["simple_gdn", "full", "simple_gdn"], "index_topk": 64},
    "fixed decay": {**GQA_SIZES, "layer_types": ["simple_gdn", "gdn", "swa"], "sliding_window": 3, "simple_gdn_decay": "fixed"},
}  # fmt: skip
PROMPTS = [[5, 9, 40, 41], [7], [60] * 21, list(range(3, 70)), [5, 9]]


def forward_logprobs(model, ids):
    attention = "sparse" if model.cfg.attention == "mla" else "dense"
    with torch.no_grad():
        return model.logits(model(torch.tensor([ids]), attention=attention).hidden_bsh)[0].log_softmax(-1)


@pytest.mark.parametrize("name", list(KINDS))
def test_equals_the_full_forward(name):
    """Ragged prompts, shorter and longer than window and convolution; rows that end at different times."""
    model = spread(GlmMoeDsa(micro(**KINDS[name], eos_token_id=None)), scale=0.12)
    params = [SamplingParams(max_new_tokens=n, seed=n) for n in (12, 20, 9, 15, 1)]
    outs = StateDecoder(model).generate(PROMPTS, params)
    for prompt, out, one in zip(PROMPTS, outs, params, strict=True):
        expected = forward_logprobs(model, prompt + out.output_ids)[len(prompt) - 1 : -1]
        expected = expected.gather(1, torch.tensor(out.output_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(out.output_logprobs), expected, atol=2e-5, rtol=0)
        assert len(out.output_ids) == one.max_new_tokens and out.finish_reason == "length"


def test_sparse_steps_select_as_the_forward_does():
    """DSA layers among others, top-k below the length: in float64, where no rounding decides a selection."""
    model = spread(GlmMoeDsa(micro(layer_types=["swa", "full", "gdn"], sliding_window=6)), scale=0.2).double()
    decoder = StateDecoder(model)
    ids = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(3))
    got = [decoder.prefill([row[:30].tolist() for row in ids], 40)]
    got += [decoder.step(ids[:, t]) for t in range(30, 39)]
    with torch.no_grad():
        expected = model.logits(model(ids).hidden_bsh)[:, 29:39]
        dense = model.logits(model(ids, attention="dense").hidden_bsh)[:, 29:39]
    torch.testing.assert_close(torch.stack(got, 1), expected.float(), atol=1e-5, rtol=0)
    assert (expected - dense).abs().max() > 0.01


def test_equals_the_fast_decoder_where_both_apply():
    model = GlmMoeDsa(micro(initializer_range=0.15)).init_weights(1).requires_grad_(False)
    params = [
        SamplingParams(max_new_tokens=n, seed=n, temperature=t) for n, t in ((9, 1.0), (0, 1.0), (20, 0.7), (12, 0.0))
    ]
    pairs = zip(
        StateDecoder(model).generate(PROMPTS[:4], params), Decoder(model).generate(PROMPTS[:4], params), strict=True
    )
    for a, b in pairs:
        assert a.output_ids == b.output_ids and (a.finish_reason, a.matched) == (b.finish_reason, b.matched)
        assert a.weight_runs == b.weight_runs
        torch.testing.assert_close(torch.tensor(a.output_logprobs), torch.tensor(b.output_logprobs), atol=1e-5, rtol=0)


def test_windows_and_recurrences_keep_states_of_constant_size():
    def size(kinds, capacity):
        decoder = StateDecoder(GlmMoeDsa(micro(**kinds)).init_weights(0))
        decoder.prefill([[5, 6, 7]], capacity)
        return decoder.nbytes

    for kind in ("swa", "gdn", "simple_gdn"):
        for base in ({}, GQA_SIZES):
            kinds = {**base, "layer_types": [kind] * 3, "sliding_window": 8}
            assert size(kinds, 20) == size(kinds, 400)
    # one token: MLA 20 + 8 latents and 16 of the indexer against GQA's 2 * 2 heads of 16, times 3 layers and 4 bytes
    assert size({}, 101) - size({}, 100) == 3 * 44 * 4 and size(GQA_SIZES, 101) - size(GQA_SIZES, 100) == 3 * 64 * 4


def test_stops_and_refusals():
    model = spread(GlmMoeDsa(micro(**GQA_SIZES)))
    free = StateDecoder(model).generate([PROMPTS[0]], SamplingParams(max_new_tokens=30, seed=2, ignore_eos=True))[0]
    stop = free.output_ids[10]
    cut = SamplingParams(max_new_tokens=30, seed=2, ignore_eos=True, stop_token_ids=[stop])
    out = StateDecoder(model).generate([PROMPTS[0]], cut)[0]
    assert out.output_ids == free.output_ids[: free.output_ids.index(stop) + 1] and out.finish_reason == "stop"
    for prompt, message in (
        ([], "prompt 0 is empty"),
        ([96], "token id 96 is outside"),
        ([1] * 512, "exceed max_position"),
    ):
        with pytest.raises(ValueError, match=message):
            StateDecoder(model).generate([prompt], SamplingParams(max_new_tokens=4))
    with pytest.raises(ValueError, match="model.indexer_types"):
        StateDecoder(GlmMoeDsa(micro(indexer_types=["full", "shared", "full"])))

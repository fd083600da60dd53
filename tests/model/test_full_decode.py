"""Generation by whole forward passes: equal to the cached decoder where that applies, and to the model's own logits elsewhere."""

import pytest
import torch

from model.decode import Decoder
from model.full_decode import generate
from model.sampling import SamplingParams
from model.transformer import GlmMoeDsa
from tests.model.sizes import micro, spread
from tests.model.test_gqa import GQA_SIZES

PROMPTS = [[5, 9, 40, 41], [7, 8], [60] * 11, [5, 9, 40, 41]]


def test_equals_the_cached_decoder():
    model = GlmMoeDsa(micro(initializer_range=0.15)).init_weights(1).requires_grad_(False)
    params = [
        SamplingParams(max_new_tokens=n, seed=n, temperature=t) for n, t in ((9, 1.0), (0, 1.0), (20, 0.7), (12, 0.0))
    ]
    for a, b in zip(generate(model, PROMPTS, params), Decoder(model).generate(PROMPTS, params), strict=True):
        assert (a.output_ids, a.finish_reason, a.matched, a.weight_runs) == (
            b.output_ids,
            b.finish_reason,
            b.matched,
            b.weight_runs,
        )
        torch.testing.assert_close(torch.tensor(a.output_logprobs), torch.tensor(b.output_logprobs), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        GQA_SIZES,
        {"layer_types": ["swa", "full", "gdn"], "sliding_window": 4},
        {**GQA_SIZES, "layer_types": ["gdn", "simple_gdn", "swa"]},
    ],
)
def test_greedy_follows_the_models_logits(changes):
    model = spread(GlmMoeDsa(micro(**changes, eos_token_id=None)))
    outs = generate(model, PROMPTS, SamplingParams(max_new_tokens=8, temperature=0.0))
    for prompt, out in zip(PROMPTS, outs, strict=True):
        ids = torch.tensor([prompt + out.output_ids])
        attention = "sparse" if model.cfg.attention == "mla" else "dense"
        with torch.no_grad():
            logits = model.logits(model(ids, attention=attention).hidden_bsh)[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == out.output_ids and out.finish_reason == "length"


def test_bad_prompts_are_named():
    model = GlmMoeDsa(micro(**GQA_SIZES)).init_weights(0)
    for prompt, message in (
        ([], "prompt 0 is empty"),
        ([96], "token id 96 is outside"),
        ([1] * 512, "exceed max_position"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, [prompt], SamplingParams(max_new_tokens=4))

"""Speculative decoding: drafts are the training recurrence, greedy output is plain decoding's, samples keep the distribution."""

import itertools

import numpy as np
import pytest
import torch

from model.decode import Decoder
from model.muon import OptimConfig, build_optimizer
from model.sampling import RowSampler, SamplingParams
from model.speculative import SpeculativeDecoder, SpeculativeStats, accept
from model.transformer import GlmMoeDsa
from tasks.objectives import LanguageModeling
from tests.model.sizes import micro, spread

GREEDY = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)


def trained(steps: int = 60, **changes) -> GlmMoeDsa:
    """A model that has half learnt periodic sequences: some drafts are right, some are not."""
    net = GlmMoeDsa(micro(**changes)).init_weights(0)
    optimizer = build_optimizer(net, OptimConfig(lr_matrix=1e-2, lr_embed=3e-2, lr_head=3e-2, lr_norm=1e-2))
    optimizer.set_lr_scale(1.0)
    objective, rng = LanguageModeling(attention="sparse", mtp_depth=3), np.random.default_rng(0)
    for step in range(steps):
        rows = torch.stack([periodic(rng, 33) for _ in range(8)])
        objective(net, {"input_ids_bs": rows[:, :-1], "targets_bs": rows[:, 1:]}, step)[0].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return net.eval()


def periodic(rng, size: int) -> torch.Tensor:
    phrase = rng.integers(3, 11, int(rng.integers(2, 5)))
    noisy = np.where(rng.random(size) < 0.1, rng.integers(3, 11, size), np.resize(phrase, size))
    return torch.from_numpy(noisy)


@pytest.fixture(scope="module")
def shared():
    return trained()


def prompts(count: int = 5) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [periodic(rng, n).tolist() for n in (1, 3, 12, 25, 40)[:count]]


def test_the_drafts_are_the_training_recurrence(shared):
    """Draft k is depth k's first choice at the last known hidden state, in the training forward over the sequence so far."""
    separate = spread(GlmMoeDsa(micro(num_nextn_predict_layers=3)))
    for net in (shared, separate, spread(GlmMoeDsa(micro()))):
        decoder = SpeculativeDecoder(net, draft_tokens=4)
        seen = []
        original = decoder._draft

        def spy(state, first, uniform, original=original, seen=seen):
            before = [state.tokens_bt[b, : state.known_b[b]].tolist() for b in range(len(state.known_b))]
            drafts, probs = original(state, first, uniform)
            seen.extend(zip(before, drafts.tolist(), strict=True))
            return drafts, probs

        decoder._draft = spy
        decoder.generate(prompts(), GREEDY)
        assert len(seen) > 20
        for known, drafts in seen[:12] + seen[-6:]:
            ids = list(known)
            for k, draft in enumerate(drafts, 1):
                with torch.no_grad():
                    hidden = net(torch.tensor([ids]), attention="sparse", mtp_depth=k).mtp_hidden[k - 1]
                logits = net.logits(hidden[0, len(known) - 2])
                assert logits[draft] >= logits.max() - 1e-4
                ids.append(draft)


@pytest.mark.parametrize("drafting", ["depth_caches", "one_cache"])
@pytest.mark.parametrize("drafts", [1, 4])
def test_greedy_is_plain_greedy(shared, drafting, drafts):
    plain = Decoder(shared).generate(prompts(), GREEDY)
    found, stats = SpeculativeDecoder(shared, drafts, drafting).generate(prompts(), GREEDY)
    assert [c.output_ids for c in found] == [c.output_ids for c in plain]
    for mine, theirs in zip(found, plain, strict=True):
        np.testing.assert_allclose(mine.output_logprobs, theirs.output_logprobs, atol=2e-4)
        assert (mine.finish_reason, mine.matched, mine.weight_runs) == ("length", None, [(0, 40)])
    assert 0 < sum(stats.accepted) < drafts * stats.rounds, "some drafts must be accepted and some rejected"
    assert 1 < stats.acceptance_length <= drafts + 1


def test_greedy_of_random_and_separate_layers():
    for layers in (1, 3):
        net = spread(GlmMoeDsa(micro(num_nextn_predict_layers=layers)))
        plain = Decoder(net).generate(prompts(), GREEDY)
        assert [c.output_ids for c in SpeculativeDecoder(net).generate(prompts(), GREEDY)[0]] == [
            c.output_ids for c in plain
        ]


def test_stop_tokens_and_limits(shared):
    plain = Decoder(shared).generate(prompts(), GREEDY)
    stop = plain[3].output_ids[7]
    params = [
        SamplingParams(max_new_tokens=n, temperature=0.0, stop_token_ids=(stop,), ignore_eos=True)
        for n in (0, 1, 2, 40, 9)
    ]
    theirs = Decoder(shared).generate(prompts(), params)
    mine, _ = SpeculativeDecoder(shared).generate(prompts(), params)
    assert [(c.output_ids, c.finish_reason, c.matched) for c in mine] == [
        (c.output_ids, c.finish_reason, c.matched) for c in theirs
    ]
    assert any(c.finish_reason == "stop" for c in mine)


def test_a_row_does_not_depend_on_the_rows_beside_it(shared):
    params = [SamplingParams(max_new_tokens=20, seed=s, ignore_eos=True, temperature=0.8) for s in range(5)]
    together, _ = SpeculativeDecoder(shared).generate(prompts(), params)
    for row in range(5):
        alone, _ = SpeculativeDecoder(shared).generate([prompts()[row]], [params[row]])
        assert alone[0].output_ids == together[row].output_ids


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations of Pearson's statistic above its mean; cells below five expected counts are pooled."""
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    keep = expected > 0
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    degrees = keep.sum() - 1
    return (statistic - degrees) / (2 * degrees) ** 0.5


def test_acceptance_keeps_the_distribution():
    """20,000 rows of made-up p and q: the first emitted token is distributed as p, although drafts come from q."""
    rng = np.random.default_rng(0)
    p, q = torch.tensor(rng.dirichlet(np.ones(6), 3)), torch.tensor(rng.dirichlet(np.ones(6), 2))
    rows = 20000
    drafts = torch.from_numpy(np.stack([rng.choice(6, rows, p=q[k].numpy()) for k in range(2)], 1))
    u = rng.random((rows, 3))
    count, final = accept(drafts, q.expand(rows, -1, -1), p.expand(rows, -1, -1), u)
    first = torch.where(count > 0, drafts[:, 0], final).numpy()
    assert chi_square(np.bincount(first, minlength=6), p[0].numpy() * rows) < 4
    assert chi_square(np.bincount(drafts[:, 0].numpy(), minlength=6), p[0].numpy() * rows) > 100, (
        "q alone is told apart"
    )
    overlap = torch.minimum(p[:2], q).sum(1)
    assert abs((count > 0).double().mean() - overlap[0]) < 0.02, "acceptance is the overlap of p and q"
    second = torch.where(count > 1, drafts[:, 1], final)[count > 0].numpy()
    assert chi_square(np.bincount(second, minlength=6), p[1].numpy() * len(second)) < 4


@pytest.mark.parametrize("layers", [1, 3])
def test_sampled_sequences_keep_the_distribution(layers):
    """Three tokens over a vocabulary of 6: frequencies of all 216 sequences against the model's own probabilities."""
    net = spread(GlmMoeDsa(micro(vocab_size=6, num_nextn_predict_layers=layers, index_topk=4, eos_token_id=None)), 0.25)
    prompt, rows = [1, 2, 3, 0, 4, 4], 6000
    params = SamplingParams(max_new_tokens=3, temperature=1.3, seed=11)
    found, stats = SpeculativeDecoder(net, 2).generate([prompt] * rows, params)
    every = list(itertools.product(range(6), repeat=3))
    scores = Decoder(net).score([[*prompt, *tail] for tail in every], temperature=1.3)
    expected = np.exp([sum(s[-3:]) for s in scores])
    assert abs(expected.sum() - 1) < 1e-4 and 0.15 < stats.acceptance_rates[0] < 0.98
    place = {tail: i for i, tail in enumerate(every)}
    counts = np.bincount([place[tuple(c.output_ids)] for c in found], minlength=len(every))
    assert chi_square(counts, expected * rows) < 4
    for completion in found[:20]:
        tail = place[tuple(completion.output_ids)]
        np.testing.assert_allclose(completion.output_logprobs, scores[tail][-3:], atol=1e-4)


def test_truncated_sampling_stays_inside_the_nucleus(shared):
    params = SamplingParams(max_new_tokens=12, top_p=0.5, seed=2, ignore_eos=True)
    found, _ = SpeculativeDecoder(shared).generate([prompts()[3]] * 40, params)
    for completion in found[:10]:
        ids = [*prompts()[3], *completion.output_ids]
        with torch.no_grad():
            logits = shared.logits(shared(torch.tensor([ids])).hidden_bsh[0, -13:-1])
        allowed = RowSampler([params] * 12, [0] * 12, logits.device).probs(logits) > 0
        for place, token in enumerate(completion.output_ids):
            assert allowed[place, token], "a token outside of top-p was emitted"


def test_counts():
    stats = SpeculativeStats(rounds=10, accepted=[8, 4, 4, 0])
    assert stats.acceptance_length == 2.6 and stats.acceptance_rates == [0.8, 0.5, 1.0, 0.0]
    assert SpeculativeStats(accepted=[0]).acceptance_length == 0.0


def test_what_cannot_draft_is_refused(shared):
    with pytest.raises(ValueError, match="num_nextn_predict_layers is 0"):
        SpeculativeDecoder(GlmMoeDsa(micro(num_nextn_predict_layers=0)))
    with pytest.raises(ValueError, match="needs a single MTP layer"):
        SpeculativeDecoder(GlmMoeDsa(micro(num_nextn_predict_layers=2)), drafting="one_cache")
    with pytest.raises(ValueError, match="at least 1"):
        SpeculativeDecoder(shared, 0)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        SpeculativeDecoder(shared).generate([[3], []], GREEDY)
    with pytest.raises(ValueError, match="exceed max_position_embeddings"):
        SpeculativeDecoder(shared).generate([[3] * 500], GREEDY)
    with pytest.raises(ValueError, match="outside"):
        SpeculativeDecoder(shared).generate([[96]], GREEDY)

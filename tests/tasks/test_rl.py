"""The shared policy update on a real tiny model: log-probs, micro-batching, direction of learning, resume."""

import pytest
import torch

from model.config import ModelConfig
from model.losses import grpo_icepop_loss
from model.transformer import GlmMoeDsa
from tasks.problems import build_all
from tasks.rl import PolicyConfig, draw_problems, load_state, micro_batches, pad, policy_logprobs, save_state, update
from tasks.rollouts import Sample

CONFIG = PolicyConfig(lr=1e-2, warmup_steps=0)


@pytest.fixture
def model():
    config = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        first_k_dense_replace=1, num_attention_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8, index_n_heads=2, index_head_dim=8, index_topk=4, n_routed_experts=4,
        num_experts_per_tok=2, routed_scaling_factor=1.0, max_position_embeddings=64, num_nextn_predict_layers=1,
    )  # fmt: skip
    return GlmMoeDsa(config).init_weights(0)


def make_samples(model, lengths=(6, 9, 12, 7)):
    generator = torch.Generator().manual_seed(1)
    out = []
    for length in lengths:
        ids = torch.randint(0, 64, (length,), generator=generator).tolist()
        mask = [0, 0] + [1] * (length - 2)
        with torch.no_grad():
            logp = policy_logprobs(model, torch.tensor([ids]), torch.tensor([mask[1:]], dtype=torch.float32))
        out.append(Sample("f", "k", ids, 2, mask, [0.0, *logp[0].tolist()]))
    return out


def loss_of(count):
    def loss(logp, rollout, advantage, mask):
        return grpo_icepop_loss(logp, logp.detach(), rollout, advantage, mask, denominator=count)

    return loss


def test_policy_logprobs_are_those_of_the_logits(model):
    ids = torch.randint(0, 64, (2, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1, 0, 0, 0]], dtype=torch.float32)
    logp = policy_logprobs(model, ids, mask)
    full = model.logits(model(ids).hidden_bsh).log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    assert torch.allclose(logp, full * mask, atol=1e-5)


def test_micro_batches_cover_all_and_respect_the_limit(model):
    samples = make_samples(model)
    groups = micro_batches(samples, 18)
    assert sorted(i for g in groups for i in g) == [0, 1, 2, 3]
    assert all(len(g) * max(len(samples[i].ids) for i in g) <= 18 for g in groups)
    assert pad([[1, 2], [3]], torch.long).tolist() == [[1, 2], [3, 0]]


def test_update_raises_good_samples_and_lowers_bad_ones(model):
    samples = make_samples(model)
    optimizer = CONFIG.optimizer(model)
    frozen = {n: p.clone() for n, p in model.named_parameters() if ".indexer." in n}
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias.clone()

    def totals():
        with torch.no_grad():
            return [
                float(policy_logprobs(model, torch.tensor([s.ids]), pad([s.loss_mask[1:]], torch.float32)).sum())
                for s in samples
            ]

    before = totals()
    stats = update(model, optimizer, samples, [1.0, -1.0, 1.0, -1.0], loss_of(4), CONFIG, 0.1)
    after = totals()
    assert [b < a for b, a in zip(before, after)] == [True, False, True, False]
    assert stats["drop_rate"] == 0 and stats["mismatch"] < 1e-5 and stats["trained_samples"] == 4
    assert frozen and all(torch.equal(p, dict(model.named_parameters())[n]) for n, p in frozen.items())
    assert torch.equal(bias, model.model.layers[1].mlp.gate.e_score_correction_bias)


def test_micro_batching_and_skipping_zero_advantages_do_not_change_the_update(model):
    samples = make_samples(model)
    start = {n: p.clone() for n, p in model.state_dict().items()}
    ends = []
    for micro, order in ((64, [0, 1, 2, 3]), (18, [0, 1, 2, 3])):
        model.load_state_dict(start)
        config = CONFIG.model_copy(update={"micro_tokens": micro})
        advantages = [1.0, 0.0, -0.5, 0.25]
        stats = update(
            model, config.optimizer(model), [samples[i] for i in order], advantages, loss_of(4), config, 1e-3
        )
        assert stats["trained_samples"] == 3
        ends.append((stats["grad_norm"], stats["loss"]))
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)
    model.load_state_dict(start)
    assert update(model, CONFIG.optimizer(model), samples, [0.0] * 4, loss_of(4), CONFIG, 1.0)["grad_norm"] == 0.0
    assert all(torch.equal(p, start[n]) for n, p in model.state_dict().items())


def test_state_resumes_to_the_same_weights(model, tmp_path):
    samples = make_samples(model)
    advantages = [1.0, -1.0, 0.5, -0.5]
    optimizer = CONFIG.optimizer(model)
    update(model, optimizer, samples, advantages, loss_of(4), CONFIG, 1.0)
    save_state(tmp_path, model, optimizer, 1, note="x")
    update(model, optimizer, samples, advantages, loss_of(4), CONFIG, 0.5)
    fresh = GlmMoeDsa(model.cfg)
    again = CONFIG.optimizer(fresh)
    assert load_state(tmp_path / "nowhere", fresh, again) is None
    newest = tmp_path / "step-00000001/model.safetensors"
    good = newest.read_bytes()
    save_state(tmp_path, model, optimizer, 2, note="damaged below")
    (tmp_path / "step-00000002/model.safetensors").write_bytes(good[:-3])
    state = load_state(tmp_path, fresh, again)
    assert state == {"step": 1, "note": "x"}
    update(fresh, again, samples, advantages, loss_of(4), CONFIG, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), fresh.state_dict().values()))


def test_an_update_that_is_not_finite_leaves_the_weights_alone(model):
    samples = make_samples(model)
    start = {n: p.clone() for n, p in model.state_dict().items()}
    optimizer = CONFIG.optimizer(model)
    with pytest.raises(ValueError, match="update is not finite .loss nan, gradient norm nan, 4 samples"):
        update(model, optimizer, samples, [1.0, float("nan"), 0.5, -0.5], loss_of(4), CONFIG, 1.0)
    assert all(torch.equal(p, start[n]) for n, p in model.state_dict().items()) and not optimizer.state_tensors()


def test_draw_problems_takes_turns_and_never_repeats():
    families = build_all(["addition", "rules"])
    first, second = draw_problems(families, 5, 0), draw_problems(families, 5, 1)
    assert [p.family for p in first] == ["addition", "rules", "addition", "rules", "addition"]
    keys = [p.key for p in first + second if p.family == "addition"]
    assert len(set(keys)) == len(keys)


def test_learning_rate_schedule():
    config = PolicyConfig(warmup_steps=1, final_lr_share=0.1)
    assert [config.lr_scale(s, 11) for s in (0, 1, 10)] == pytest.approx([0.5, 0.91, 0.1])

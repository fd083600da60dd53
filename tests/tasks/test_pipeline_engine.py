"""Whole training runs over pipeline ranks equal one process: weights, optimizer state, router bias, logs."""

import dataclasses

import pytest
import torch

from model.config import ModelConfig
from model.muon import OptimConfig, build_optimizer
from model.transformer import GlmMoeDsa
from tasks.objectives import IndexerWarmup, LanguageModeling
from tasks.parallel import Part
from tasks.parallel_engine import norm_name
from tasks.params import compose
from tasks.pipeline_engine import PipelineEngine, PipelineSettings
from tasks.trainer import batch_count
from tests.model.ranks import run_ranks

# Newton-Schulz amplifies differences in the last bit, AdamW's first steps those of gradients near zero: hence eps.
OPTIM = OptimConfig(lr_matrix=3e-3, lr_embed=1e-2, lr_head=1e-2, lr_norm=3e-3, eps=1e-6)
OBJECTIVE = LanguageModeling("dense", 2, mtp_late_lambda=0.1, mtp_late_step=4, mtp_every=2, balance_coef=0.01)
CLIP, BIAS = 0.5, 1e-3


def tiny():
    section = compose("tiny")["model"] | {"vocab_size": 256, "pad_token_id": 0, "eos_token_id": 1}
    return ModelConfig.from_params(section)


def micro_batches(step):
    """Six micro-batches, or five at every third step."""
    generator = torch.Generator().manual_seed(100 + step)
    found = []
    for i in range(5 if step % 3 == 2 else 6):
        ids = torch.randint(2, 256, (2, 33), generator=generator)
        targets = ids[:, 1:].clone()
        targets[0, : 3 * i] = -100
        found.append({"input_ids_bs": ids[:, :-1].contiguous(), "targets_bs": targets})
    return found


def one_process(steps, start=None):
    """(logs of each step, model tensors, optimizer tensors) of the plain loop."""
    torch.set_num_threads(1)
    model = GlmMoeDsa(tiny()).init_weights(0)
    optimizer = build_optimizer(model, OPTIM)
    history = []
    for step in range(steps):
        optimizer.set_lr_scale(1 / (1 + step))
        batches = micro_batches(step)
        counts = [batch_count(b) for b in batches]
        logs, routed = {}, None
        terms = [OBJECTIVE.terms(b, step) for b in batches]
        for batch, count, own in zip(batches, counts, terms):
            share = count / sum(counts)
            weights = {k: n / sum(t[k] for t in terms) / share for k, n in own.items() if n}
            loss, extra = OBJECTIVE(model, batch, step, Part(weights))
            (loss * share).backward()
            new = extra.pop("router_counts")
            routed = new if routed is None else [a + b for a, b in zip(routed, new)]
            for k, v in {"loss": loss.detach(), **extra}.items():
                logs[k] = logs.get(k, 0.0) + share * float(v)
        parts = {}
        for group in optimizer.param_groups:
            parts.setdefault(norm_name(group["group"]), []).extend(p for p in group["params"] if p.grad is not None)
        norms = {k: float(torch.nn.utils.clip_grad_norm_(v, CLIP)) for k, v in parts.items() if v}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.update_router_bias(routed, BIAS)
        history.append(logs | norms)
    return history, model.state_dict(), optimizer.state_tensors()


def train(rank, world, settings, steps, file, again_at=None):
    """The same run over ranks; at `again_at` everything is saved and a new engine goes on."""
    state = torch.load(file)
    engine = PipelineEngine(tiny(), OPTIM, PipelineSettings(**settings))
    engine.load_model(state)
    history = []
    replicas = world // settings["pipeline"]
    for step in range(steps):
        if step == again_at:
            model, optimizer = engine.whole_model(), engine.state_tensors()
            engine = PipelineEngine(tiny(), OPTIM, PipelineSettings(**settings))
            engine.load_model(model)
            engine.load_state_tensors(optimizer)
        engine.set_lr_scale(1 / (1 + step))
        batches = micro_batches(step)[engine.grid.replica :: replicas]
        logs, routed = engine.run_step(OBJECTIVE, batches, step)
        norms = engine.clip_groups(CLIP)
        engine.step()
        engine.zero_grad()
        engine.update_router_bias(routed, BIAS)
        history.append(logs | norms)
    return history, engine.whole_model(), engine.state_tensors()


def compare(world, settings, steps, tmp_path, again_at=None):
    history, model, optimizer = one_process(steps)
    file = tmp_path / "start.pt"
    torch.save(GlmMoeDsa(tiny()).init_weights(0).state_dict(), file)
    for found in run_ranks(world, train, settings, steps, file, again_at):
        for step, (logs, expected) in enumerate(zip(found[0], history, strict=True)):
            assert logs == pytest.approx(expected, rel=2e-4), step
        assert set(found[1]) == set(model) and set(found[2]) == set(optimizer)
        for name, tensor in found[1].items():
            torch.testing.assert_close(tensor, model[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        for name, tensor in found[2].items():
            limit = 1e-4 * float(optimizer[name].abs().max())
            torch.testing.assert_close(
                tensor, optimizer[name], rtol=1e-3, atol=limit, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_ten_steps_on_two_ranks_equal_one_process(tmp_path):
    compare(2, dict(pipeline=2, virtual=2, schedule="zero_bubble", offload=True), 10, tmp_path, again_at=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        dict(pipeline=2, virtual=1, schedule="1f1b", recompute=True),
        dict(pipeline=2, virtual=2, schedule="interleaved", shards=True),
        dict(pipeline=4, virtual=1, schedule="zero_bubble"),
    ],
)
def test_four_ranks_equal_one_process(settings, tmp_path):
    compare(4, settings, 4, tmp_path)


def test_settings_that_do_not_fit():
    with pytest.raises(ValueError, match="parallel.virtual is 2: schedule 1f1b"):
        PipelineSettings(pipeline=2, virtual=2, schedule="1f1b")
    with pytest.raises(ValueError, match="parallel.pipeline = 2 does not divide the 1 processes"):
        PipelineEngine(tiny(), OPTIM, PipelineSettings(pipeline=2))
    with pytest.raises(ValueError, match="warm-up sends no gradients"):
        PipelineEngine(tiny(), dataclasses.replace(OPTIM, train="indexer"), PipelineSettings())
    engine = PipelineEngine(tiny(), OPTIM, PipelineSettings())
    engine.model.init_weights(0)
    with pytest.raises(ValueError, match="IndexerWarmup is not cut into stages"):
        engine.run_step(IndexerWarmup(), micro_batches(0), 0)

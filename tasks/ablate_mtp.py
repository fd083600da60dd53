"""Ablation of multi-token prediction (GLM-5 §2.1, Table 2): acceptance length in real speculative decoding.

    python -m tasks ablate_mtp

Three variants, trained on the same tokens from the same base checkpoint with fresh MTP layers (the whole model, or with
`freeze_backbone` the MTP layers alone): `shared` (one layer applied three times, GLM-5), `one_layer` (one layer trained at
depth 1 and applied again and again when drafting, DeepSeek-V3.2's serving) and `separate` (a layer per depth). Each then
drafts `draft_tokens` tokens per verification (model/speculative.py) on held-out text.
Acceptance length counts the tokens emitted per verification; the paper has 2.76 shared against 2.55.
The base's indexer is not trained yet, so attention is dense throughout (index_topk covers every length).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from model.checkpoint import load_checkpoint
from model.decode import Decoder
from model.sampling import SamplingParams
from model.speculative import SpeculativeDecoder
from model.transformer import GlmMoeDsa
from tasks.ablate_run import AblateConfig, Variant, over_seeds, train_variant, write_results
from tasks.files import derive_seed
from tasks.heldout import flat_heldout, heldout_loss
from tasks.lm_run import checkpoint_dep, language_modeling, token_dep
from tasks.stage import Stage
from tasks.tokens import TokenSet
from tasks.trainer import pick_device

VARIANTS = {"shared": (1, 3), "one_layer": (1, 1), "separate": (3, 3)}  # MTP layers, depth in training


class Config(AblateConfig):
    """See tasks/lm_run.py for the recipe; mtp.depth is the variant's own."""

    freeze_backbone: bool = Field(False, description="only the MTP layers train: equal text from equal backbones")
    draft_tokens: int = Field(4, ge=1, description="drafts per verification (notes A.5: the paper's 4 steps)")
    prompts: int = Field(16, ge=1, description="held-out prompts, domains in turn")
    prompt_tokens: int = Field(64, ge=1)
    new_tokens: int = Field(48, ge=2, description="tokens generated after each prompt")


def with_fresh_mtp(base: GlmMoeDsa, layers: int, seed: int) -> GlmMoeDsa:
    """The base's backbone with `layers` new MTP layers, dense attention at every length."""
    cfg = dataclasses.replace(base.cfg, num_nextn_predict_layers=layers, index_topk=base.cfg.max_position_embeddings)
    model = GlmMoeDsa(cfg).init_weights(seed)
    old = {n: t for n, t in base.state_dict().items() if not n.startswith(f"model.layers.{cfg.num_hidden_layers}.")}
    model.load_state_dict(model.state_dict() | old)
    return model.to(pick_device())


def held_out_prompts(tokens: TokenSet, count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts of `length` tokens from the validation split, domains in turn."""
    import numpy as np

    domains = [d for d in tokens.domains if tokens.tokens(d, "val") > length]
    if not domains:
        raise ValueError(f"no domain has {length} held-out tokens for a prompt")
    prompts = []
    for index in range(count):
        shard = tokens.shard(domains[index % len(domains)], "val")
        at = int(np.random.default_rng(derive_seed(seed, "prompt", index)).integers(len(shard.tokens) - length))
        prompts.append(shard.window(at, length).tolist())
    return prompts


def measure(model: GlmMoeDsa, prompts: Sequence[Sequence[int]], config: Config) -> dict[str, Any]:
    """{drafting: {greedy | sampled: {length, rate_1..n}}}; a single layer drafts both ways."""
    out: dict[str, Any] = {}
    ways = ("depth_caches", "one_cache") if len(model.mtp_layers) == 1 else ("depth_caches",)
    for drafting in ways:
        decoder = SpeculativeDecoder(model, config.draft_tokens, drafting)
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            params = SamplingParams(max_new_tokens=config.new_tokens, temperature=temperature, ignore_eos=True)
            _, stats = decoder.generate(prompts, params)
            rates = {f"rate_{k}": rate for k, rate in enumerate(stats.acceptance_rates, 1)}
            out.setdefault(drafting, {})[name] = {"length": stats.acceptance_length, **rates}
    return out


def speed(model: GlmMoeDsa, prompts: Sequence[Sequence[int]], config: Config) -> dict[str, float]:
    """CPU seconds of plain and of speculative greedy decoding on the same prompts, interleaved; both give the same text."""
    params = SamplingParams(max_new_tokens=config.new_tokens, temperature=0.0, ignore_eos=True)
    plain, drafted = Decoder(model), SpeculativeDecoder(model, config.draft_tokens)
    taken = {"plain": 0.0, "speculative": 0.0}
    for _ in range(2):
        for name, decode in (("plain", plain.generate), ("speculative", drafted.generate)):
            began = time.process_time()
            decode(prompts, params)
            taken[name] += time.process_time() - began
    return {**taken, "ratio": taken["speculative"] / taken["plain"]}


def run(stage: Stage) -> None:
    """Train and measure every variant and seed. Writes data/ablate_mtp/results.json."""
    config: Config = stage.config
    if config.freeze_backbone and config.mtp.every != 1:
        raise ValueError(
            f"ablate_mtp.mtp.every must be 1 with freeze_backbone, got {config.mtp.every}: a step without MTP trains nothing"
        )
    tokens = token_dep(stage)
    base = load_checkpoint(checkpoint_dep(stage))
    prompts = held_out_prompts(tokens, config.prompts, config.prompt_tokens, stage.seed)
    results: dict[str, Any] = {}
    for name, (layers, depth) in VARIANTS.items():
        per_seed = []
        for seed in range(config.seeds):
            own = config.model_copy(update={"mtp": config.mtp.model_copy(update={"depth": depth})})
            with Variant(stage, f"{name}/s{seed}", {"layers": layers, "depth": depth, "seed": seed}) as variant:
                model = with_fresh_mtp(base, layers, stage.rng_seed("weights", seed))
                if config.freeze_backbone:
                    model.requires_grad_(False)
                    for layer in model.mtp_layers:
                        layer.requires_grad_(True)
                objective = language_modeling(own, attention="dense")
                train_variant(variant, own, model, tokens, seed, objective, packing="window")

                def result(model=model) -> dict[str, Any]:
                    held = flat_heldout(
                        heldout_loss(model, tokens, config.heldout.seq_len or config.seq_len, config.heldout.windows)
                    )
                    return {"acceptance": measure(model, prompts, config), "heldout": held["val/all/bits_per_byte"]}

                per_seed.append(variant.once(result))
                if seed == 0:
                    taken = speed(model, prompts[:1], config)
                    stage.timing(**{f"{name}_{k}": v for k, v in taken.items()})
        parameters = sum(p.numel() for layer in model.mtp_layers for p in layer.parameters())
        results[name] = {"draft_parameters": parameters, "layers": layers, "depth": depth, **over_seeds(per_seed)}
        for drafting, modes in results[name]["acceptance"].items():
            shown = ", ".join(f"{m} {v['length']['mean']:.3f} ± {v['length']['sd']:.3f}" for m, v in modes.items())
            stage.print(f"{name} ({parameters:,} draft parameters), {drafting}: acceptance length {shown}")
    write_results(stage, {"draft_tokens": config.draft_tokens, "variants": results})
    stage.rows(variants=len(VARIANTS), prompts=len(prompts))

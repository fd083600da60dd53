"""Evaluate one checkpoint of the line: held-out loss and bits per byte per domain, tasks, needle in a haystack.

    dvc repro evaluate@sft      or      python -m tasks evaluate@sft

Every variant is measured on the same text, the same held-out problems and the same needles, so that differences between
stages are differences between models. `quantized` runs text and needles through the integer emulator (W4A8: weights and
activations) and the tasks with the dequantized weights. Writes data/evaluate/<variant>/results.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field

from tasks.files import atomic_write
from tasks.stage import Stage, StageConfig

PACK = "data/pack/pretrain"


class Config(StageConfig):
    """Parameters of the evaluation, one set for every checkpoint."""

    windows: int = Field(6, ge=1, description="held-out windows per domain")
    window: int = Field(512, ge=2, description="tokens per window")
    batch: int = Field(4, ge=1, description="windows per forward pass")
    needle_lengths: list[int] = Field([256, 512, 1024, 2048], description="context lengths, tokens")
    needle_depths: list[float] = Field([0.1, 0.5, 0.9], description="where the needle lies: 0 start, 1 end")
    needle_per_cell: int = Field(4, ge=0, description="needles per length and depth; 0 leaves the test out")
    needle_distractors: int = Field(0, ge=0, description="other names with other numbers in the same text")
    needle_digits: int = Field(4, ge=1, description="digits of the hidden number")
    families: dict[str, dict[str, Any] | None] = Field({}, description="problem families and their options")
    problems: int = Field(64, ge=1, description="held-out problems per family")
    task_variants: list[str] = Field(
        ["sft", "reasoning_rl", "agentic_rl", "general_rl", "distill", "quantized"],
        description="variants that solve tasks; a model that never saw the chat template scores nothing there",
    )


def checkpoint_of(stage: Stage) -> tuple[Path, Path | None]:
    """(checkpoint directory, canonical artifact or None): the one data dependency that is not the held-out text."""
    others = [d for d in stage.spec.deps if d.startswith("data/") and d != PACK]
    if len(others) != 1:
        raise ValueError(f"stage {stage.name} needs one checkpoint beside {PACK} among its deps, found {others}")
    folder = stage.dep(others[0])
    if (folder / "canonical").is_dir():
        return folder / "dequantized", folder / "canonical"
    return folder, None


def task_accuracy(model: Any, tokenizer: Any, config: Config, seed: int) -> dict[str, dict[str, float]]:
    """Share of held-out problems solved per family, sampling at T = 1 and greedily."""
    from model.decode import Decoder
    from tasks.rl_eval import evaluate_families

    decoder = Decoder(model)
    sampled, greedy = (
        evaluate_families(decoder, tokenizer, config.families, config.problems, seed, temperature=t) for t in (1.0, 0.0)
    )
    return {name: {"sampled": sampled[name], "greedy": greedy[name]} for name in sampled}


def run(stage: Stage) -> None:
    """Measure one checkpoint. ValueError when the dependencies hold no checkpoint or no held-out text."""
    from tokenizers import Tokenizer

    from model.checkpoint import load_checkpoint
    from tasks.heldout import heldout_loss
    from tasks.needle import build_cases, score_cases
    from tasks.tokens import TokenSet

    config: Config = stage.config
    out = stage.out(f"data/evaluate/{stage.variant}")
    folder, canonical = checkpoint_of(stage)
    tokens, tokenizer = TokenSet(stage.dep(PACK)), Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = load_checkpoint(folder).eval()
    results: dict[str, Any] = {}
    if config.families and stage.variant in config.task_variants:
        # Not stage.rng_seed: every checkpoint draws from the same random streams.
        results["tasks"] = task_accuracy(model, tokenizer, config, stage.seed)
        for name, row in results["tasks"].items():
            stage.print(f"{name}: sampled {row['sampled']:.3f}, greedy {row['greedy']:.3f}")
    if canonical:
        from tasks.quant_emulate import integer_model

        model = integer_model(model, canonical)
    results["text"] = heldout_loss(
        model, tokens, config.window, config.windows, "sparse", rows_per_forward=config.batch
    )
    if not results["text"]:
        raise ValueError(f"{PACK}: the held-out split has no text")
    for domain, row in results["text"].items():
        stage.print(f"{domain}: {row['loss']:.4f} nats per token, {row['bits_per_byte']:.4f} bits per byte")
    if config.needle_per_cell:
        cases = build_cases(
            tokens,
            tokenizer,
            [n for n in config.needle_lengths if n <= model.cfg.max_position_embeddings],
            config.needle_depths,
            config.needle_per_cell,
            stage.seed,
            config.needle_distractors,
            config.needle_digits,
        )
        results["needle"] = score_cases(model, cases)
        for length, row in results["needle"].items():
            stage.print(
                f"needle at {length}: found {row['found']:.2f}, log-prob {row['logprob']:.2f} "
                f"(without needle {row['control_logprob']:.2f})"
            )
    atomic_write(out / "results.json", json.dumps(results, indent=1, sort_keys=True) + "\n")
    stage.metric(**results)
    stage.rows(held_out_tokens=results["text"]["all"]["tokens"])

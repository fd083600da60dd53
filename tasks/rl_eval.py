"""Held-out accuracy of problem families under sampling (T = 1) and greedy decoding.

from tasks.rl_eval import evaluate_families
evaluate_families(client_or_decoder, tokenizer, build_all(["addition"]), n=128, seed=0)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.problems import Family, build_all, samples
from tasks.rollouts import Roller


def evaluate_families(
    generator: Any,
    tokenizer: Any,
    families: Mapping[str, Family] | Mapping[str, Mapping | None] | list[str],
    n: int,
    seed: int,
    split: str = "heldout",
    temperature: float = 1.0,
    start: int = 0,
) -> dict[str, float]:
    """Mean score of one trajectory per problem, by family, on problems start .. start+n-1 of the split.

    generator: anything with `generate(prompts, params) -> [Completion]` (an EngineClient or a Decoder). families: built
    ones, or what `build_all` takes. temperature 0 is greedy. The problems do not depend on the seed, the sampling does.
    All families are decoded in one batch.
    """
    if not isinstance(families, Mapping) or not all(hasattr(family, "draw") for family in families.values()):
        families = build_all(families)
    problems = [problem for family in families.values() for problem in samples(family, split, start, n)]
    groups = Roller(tokenizer).roll(generator, problems, 1, seed, temperature)
    return {name: sum(groups[i * n + j][0].reward for j in range(n)) / n for i, name in enumerate(families)}


def load_tokenizer(checkpoint: Path) -> Any:
    """The tokenizer of a checkpoint or tokenizer directory."""
    from tokenizers import Tokenizer

    path = Path(checkpoint) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{checkpoint} holds no tokenizer.json")
    return Tokenizer.from_file(str(path))


def sft_families(data_dir: Path) -> dict[str, dict]:
    """{family: options} of the problems in an SFT data directory."""
    return json.loads((Path(data_dir) / "families.json").read_text())["options"]

"""Whether a model can be trained here, asked before anything is allocated: memory of a rank, length of the samples.

Check it:  python -m pytest tests/tasks/test_lm_settings.py tests/tasks/test_plan.py
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil
import torch

from model.config import ModelConfig
from tasks.costs import refuse_too_large
from tasks.parallel import current
from tasks.stage import Stage


def device_memory() -> int:
    """Bytes of the memory that training on this rank can use: the accelerator's, else its part of the machine's."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1]
    return psutil.virtual_memory().total // int(os.environ.get("LOCAL_WORLD_SIZE", current().world))


def refuse(
    stage: Stage, cfg: ModelConfig, optimizer: Mapping[str, object], train: str = "all", length: int = 0
) -> None:
    """ValueError, before anything is allocated, when a model cannot be trained here or not on samples of `length` tokens."""
    if length > cfg.max_position_embeddings:
        raise ValueError(
            f"stage {stage.name}: the longest sample has {length} tokens, above the model's max_position_embeddings of "
            f"{cfg.max_position_embeddings}"
        )
    refuse_too_large(cfg, optimizer, train, device_memory(), stage.name, current().world)

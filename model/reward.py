"""A scalar reward head on the network: the reward of a whole conversation, read at its last token (GLM-5 §3.4).

python -m pytest tests/tasks/test_reward_model.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from model.checkpoint import load_checkpoint, save_checkpoint

HEAD_FILE = "value_head.safetensors"


class RewardModel(nn.Module):
    """`forward(input_ids [B, S], lengths [B]) -> rewards [B]`; the network's own head is not used."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.cfg = network.cfg
        self.value_head = nn.Linear(self.cfg.hidden_size, 1, bias=False)
        nn.init.zeros_(self.value_head.weight)

    def forward(self, input_ids_bs: Tensor, lengths_b: Tensor) -> Tensor:
        """Rewards float [B]; rows are right-padded, lengths count real tokens."""
        hidden_bsh = self.network(input_ids_bs, attention="sparse").hidden_bsh
        last_bh = hidden_bsh[torch.arange(len(lengths_b), device=hidden_bsh.device), lengths_b - 1]
        return self.value_head(last_bh).squeeze(-1)

    def save(self, folder: Path, tokenizer_dir: Path | None = None) -> None:
        """A checkpoint directory plus the head's own file, so that the network alone still loads anywhere."""
        save_checkpoint(self.network, folder, tokenizer_dir=tokenizer_dir)
        save_file({"weight": self.value_head.weight.detach().contiguous()}, Path(folder) / HEAD_FILE)

    @classmethod
    def load(cls, folder: Path) -> RewardModel:
        """ValueError when the directory has no reward head."""
        path = Path(folder) / HEAD_FILE
        if not path.is_file():
            raise ValueError(f"{folder} is not a reward model: it has no {HEAD_FILE}")
        model = cls(load_checkpoint(folder))
        with torch.no_grad():
            model.value_head.weight.copy_(load_file(path)["weight"])
        return model

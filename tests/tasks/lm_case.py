"""A micro model, token shards and tokenizer that the tests of the language-model stages share."""

import numpy as np
import torch

from model.config import ModelConfig
from model.transformer import GlmMoeDsa
from tasks.tokens import TokenSet, TokenWriter

VOCAB = 96
MODEL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "first_k_dense_replace": 1, "num_attention_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4, "v_head_dim": 16, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
    "max_position_embeddings": 128, "num_nextn_predict_layers": 1,
}  # fmt: skip


def micro_model(seed: int = 0) -> GlmMoeDsa:
    return GlmMoeDsa(ModelConfig.from_params(MODEL)).init_weights(seed)


def random_ids(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB - 1, (rows, size), generator=torch.Generator().manual_seed(seed))


def write_tokens(path, documents: int = 60, domains=("code", "web"), seed: int = 0) -> TokenSet:
    """Documents that repeat a short random phrase: something a micro model can learn."""
    rng = np.random.default_rng(seed)
    with TokenWriter(path, VOCAB, VOCAB - 1, np.full(VOCAB, 2, np.int32)) as writer:
        for i in range(documents):
            phrase = rng.integers(0, 12, rng.integers(2, 6))
            ids = np.tile(phrase, 20)[: int(rng.integers(10, 90))]
            writer.add("val" if i % 6 == 0 else "train", domains[i // 2 % len(domains)], ids.tolist(), 2 * len(ids))
    return TokenSet(path)


def stage_config(**changes) -> dict:
    """A section of params.yaml for two or three steps."""
    config = {
        "tokens": 3 * 4 * 32,
        "seq_len": 32,
        "rows": 4,
        "max_epochs": 50.0,
        "optimizer": {"lr_matrix": 1e-2, "lr_embed": 3e-2},
        "schedule": {"kind": "cosine", "warmup_tokens": 128},
        "loop": {"checkpoint_every": 1, "log_every": 1},
        "mtp": {"depth": 2, "every": 2},
        "heldout": {"windows": 2},
    }
    return config | changes

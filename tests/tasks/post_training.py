"""A checkpoint small enough to train in a test, and an engine in the same process (starting real ones takes seconds)."""

from pathlib import Path

from model.checkpoint import load_checkpoint, load_weights, save_checkpoint
from model.config import ModelConfig
from model.decode import Decoder
from model.transformer import GlmMoeDsa
from tests.tasks.tiny_tokenizer import build

POLICY = {"lr": 5e-3, "warmup_steps": 0}
RUN = {"eval_problems": 4, "prompts": 4, "group_size": 4, "steps": 4, "checkpoint_every": 2, "policy": POLICY}


def save_random_checkpoint(folder: Path) -> Path:
    """Write the checkpoint and its tokenizer; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build()
    tokenizer.save(str(folder / "tokenizer.json"))
    stops = tuple(tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>"))
    config = ModelConfig(
        vocab_size=512, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        first_k_dense_replace=1, num_attention_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8, index_n_heads=2, index_head_dim=8, index_topk=16, n_routed_experts=4,
        num_experts_per_tok=2, routed_scaling_factor=1.0, max_position_embeddings=512, num_nextn_predict_layers=1,
        eos_token_id=stops, pad_token_id=stops[0],
    )  # fmt: skip
    model = GlmMoeDsa(config).init_weights(0)
    model.lm_head.weight.data[list(stops)] *= 3  # turns end now and then
    save_checkpoint(model, folder)
    return folder


class LocalEngine:
    """EngineProcess and its client in one, around an in-process decoder: same calls, same numbers."""

    def __init__(self, checkpoint, threads=1, weight_version=0):
        self.model, self.version, self.client = load_checkpoint(checkpoint), weight_version, self
        self.decoder = Decoder(self.model)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def generate(self, prompts, params):
        completions = self.decoder.generate(prompts, params)
        for completion in completions:
            completion.weight_runs = [(self.version, len(completion.output_ids))]
        return completions

    def score(self, sequences):
        return self.decoder.score(sequences)

    def update_weights_from_disk(self, path, weight_version):
        assert weight_version > self.version
        load_weights(self.model, path)
        self.version = weight_version

    def parity_gate(self, model, sequences):
        assert sequences

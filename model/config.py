"""The model's shape, with the field names of transformers' GlmMoeDsaConfig, and its parameter counts.

Run its tests: `python -m pytest tests/model/test_config.py`
"""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """GLM-5's architecture (notes A.1). All sizes are counts of units; defaults are the paper's full scale."""

    vocab_size: int = 154880
    hidden_size: int = 6144
    intermediate_size: int = 12288
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 78
    first_k_dense_replace: int = 3
    num_attention_heads: int = 64
    q_lora_rank: int = 2048
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 192
    qk_rope_head_dim: int = 64
    v_head_dim: int = 256
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 2048
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 202752
    initializer_range: float = 0.02
    num_nextn_predict_layers: int = 1
    tie_word_embeddings: bool = False
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ValueError(f"model.{field.name} must be a non-negative integer, got {value!r}")
        if isinstance(self.eos_token_id, list):
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        checks = {
            "qk_rope_head_dim must be even": self.qk_rope_head_dim % 2 == 0,
            "index_head_dim must be at least qk_rope_head_dim": self.index_head_dim >= self.qk_rope_head_dim,
            "index_topk must be at least 1": self.index_topk >= 1,
            "first_k_dense_replace must not exceed num_hidden_layers": self.first_k_dense_replace
            <= self.num_hidden_layers,
            "num_experts_per_tok must not exceed n_routed_experts": self.num_experts_per_tok <= self.n_routed_experts,
            "n_group must divide n_routed_experts": self.n_group >= 1 and self.n_routed_experts % self.n_group == 0,
            "topk_group must be between 1 and n_group": 1 <= self.topk_group <= self.n_group,
        }
        for message, ok in checks.items():
            if not ok:
                raise ValueError(f"model.{message}: {self}")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @classmethod
    def from_params(cls, params: dict) -> "ModelConfig":
        """From a params.yaml `model:` section; ValueError names unknown keys."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(params) - known)
        if unknown:
            raise ValueError(f"unknown model parameters: {', '.join(unknown)} (known: {', '.join(sorted(known))})")
        params = dict(params)
        if "rope_theta" in params:
            params["rope_theta"] = float(params["rope_theta"])
        return cls(**params)

    def to_hf(self) -> dict:
        """The config.json dictionary that transformers' GlmMoeDsaConfig reads, with rope_theta always written out."""
        values = dataclasses.asdict(self)
        theta = values.pop("rope_theta")
        values["eos_token_id"] = list(self.eos_token_id) if isinstance(self.eos_token_id, tuple) else self.eos_token_id
        return {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            **values,
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.qk_rope_head_dim,
            "qk_head_dim": self.qk_head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "bos_token_id": None,
            "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
            "indexer_rope_interleave": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "use_cache": True,
        }

    @classmethod
    def from_hf(cls, config: dict) -> "ModelConfig":
        """From a transformers config.json. ValueError when it asks for something this model does not have."""
        if config.get("model_type") != "glm_moe_dsa":
            raise ValueError(f"model_type must be glm_moe_dsa, got {config.get('model_type')!r}")
        for key, required in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
            if config.get(key, required) != required:
                raise ValueError(f"{key}={config[key]!r} is not supported (only {required!r})")
        if "shared" in (config.get("indexer_types") or []):
            raise ValueError("indexer_types with shared layers (GLM-5.2) is not supported")
        rope = config.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"rope_type {rope['rope_type']!r} is not supported (only 'default')")
        fields = {field.name for field in dataclasses.fields(cls)}
        values = {key: value for key, value in config.items() if key in fields and key != "rope_theta"}
        theta = rope.get("rope_theta", config.get("rope_theta"))
        if theta is None:
            raise ValueError("config.json has no rope_theta (rope_parameters.rope_theta)")
        values.setdefault("num_nextn_predict_layers", 0)
        return cls(rope_theta=float(theta), **values)

    def count_parameters(self) -> dict[str, dict[str, int]]:
        """Total and active parameters under the four counting rules of notes A.3; buffers (router bias) are not parameters.

        Keys: backbone (no embeddings, head or MTP), hf (backbone + embeddings + head: what transformers instantiates),
        backbone_mtp (no embeddings or head), everything. Active: routed experts counted per token.
        """
        h, q, kv, heads = self.hidden_size, self.q_lora_rank, self.kv_lora_rank, self.num_attention_heads
        attention = h * q + q + q * heads * self.qk_head_dim + h * (kv + self.qk_rope_head_dim) + kv
        attention += kv * heads * (self.qk_nope_head_dim + self.v_head_dim) + heads * self.v_head_dim * h
        d = self.index_head_dim
        indexer = q * self.index_n_heads * d + h * d + 2 * d + h * self.index_n_heads
        expert = 3 * h * self.moe_intermediate_size
        common = attention + indexer + 2 * h
        router = self.n_routed_experts * h
        moe = {
            "total": common + router + (self.n_routed_experts + self.n_shared_experts) * expert,
            "active": common + router + (self.num_experts_per_tok + self.n_shared_experts) * expert,
        }
        embed = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        counts: dict[str, dict[str, int]] = {"backbone": {}, "hf": {}, "backbone_mtp": {}, "everything": {}}
        for kind in ("total", "active"):
            dense = self.first_k_dense_replace * (common + 3 * h * self.intermediate_size)
            backbone = dense + (self.num_hidden_layers - self.first_k_dense_replace) * moe[kind] + h
            mtp = self.num_nextn_predict_layers * (moe[kind] + 2 * h * h + 3 * h)
            counts["backbone"][kind] = backbone
            counts["hf"][kind] = backbone + embed
            counts["backbone_mtp"][kind] = backbone + mtp
            counts["everything"][kind] = backbone + mtp + embed
        return counts

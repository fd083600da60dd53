"""The model's shape, with the field names of transformers' GlmMoeDsaConfig, and its parameter counts.

Run its tests: `python -m pytest tests/model/test_config.py`
"""

import dataclasses
import math
from dataclasses import dataclass

from model.hf_config import glm_values, known_values

OUR_MODEL_TYPE = "arcline_glm"  # what transformers' glm_moe_dsa cannot express: model.attention gqa, model.layer_types
LAYER_TYPES = ("full", "swa", "gdn", "simple_gdn")
INDEXER_TYPES = ("full", "shared")
OUR_FIELDS = (
    "attention",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "sliding_window",
    "linear_conv_kernel_dim",
    "simple_gdn_decay",
    "indexer_types",
    "index_share_loss",
)


@dataclass(frozen=True)
class ModelConfig:
    """GLM-5's architecture (notes A.1) and its ablations. All sizes are counts of units; defaults are the paper's full scale.

    attention: "mla", or "gqa" (num_key_value_heads groups of head_dim, of which the first qk_rope_head_dim are rotated).
    layer_types: per backbone layer "full", "swa" (the last sliding_window keys), "gdn" or "simple_gdn"; None is all full.
    indexer_types: "full" or "shared" per backbone layer (GLM-5.2): shared layers reuse the keys that the nearest full layer
    before them selected; index_share_loss: an indexer learns from its "own" layer's attention, or from that of all layers
    "served" by it (arXiv 2603.12201). MLA-256 and plain MLA are the same class with other numbers of heads and head dimensions.
    """

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
    # The attention ablations (notes A.4, A.6) and GLM-5.2's IndexShare; their defaults are GLM-5.
    attention: str = "mla"
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    layer_types: tuple[str, ...] | None = None
    sliding_window: int = 4096
    linear_conv_kernel_dim: int = 4
    simple_gdn_decay: str = "none"
    indexer_types: tuple[str, ...] | None = None
    index_share_loss: str = "own"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ValueError(f"model.{field.name} must be a non-negative integer, got {value!r}")
            if field.type is bool and not isinstance(value, bool):
                raise ValueError(f"model.{field.name} must be true or false, got {value!r}")
            if field.type is float:
                object.__setattr__(self, field.name, _positive(field.name, value))
        for name in ("eos_token_id", "layer_types", "indexer_types"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_attention()
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Sizes that contradict each other, and token ids outside the vocabulary; the message has the keys and their values."""
        has_experts = self.first_k_dense_replace < self.num_hidden_layers or self.num_nextn_predict_layers > 0
        least = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"]
        least += ["qk_rope_head_dim", "index_topk", "n_group"]
        if self.attention == "mla":
            least += ["q_lora_rank", "kv_lora_rank", "v_head_dim", "index_n_heads", "index_head_dim"]
        if has_experts:
            least += ["moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"]
        if self.first_k_dense_replace:
            least += ["intermediate_size"]
        for name in least:
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, got {getattr(self, name)}")
        per_group = self.n_routed_experts // self.n_group
        checks = [
            ("must be even", self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim"),
            (
                "must be at least qk_rope_head_dim",
                self.attention != "mla" or self.index_head_dim >= self.qk_rope_head_dim,
                "index_head_dim",
                "qk_rope_head_dim",
            ),
            (
                "must not exceed num_hidden_layers",
                self.first_k_dense_replace <= self.num_hidden_layers,
                "first_k_dense_replace",
                "num_hidden_layers",
            ),
            (
                "must not exceed n_routed_experts",
                self.num_experts_per_tok <= self.n_routed_experts or not has_experts,
                "num_experts_per_tok",
                "n_routed_experts",
            ),
            ("must divide n_routed_experts", self.n_routed_experts % self.n_group == 0, "n_group", "n_routed_experts"),
            ("must be between 1 and n_group", 1 <= self.topk_group <= self.n_group, "topk_group", "n_group"),
            (
                "groups need two experts each (a group is judged by its two best)",
                self.n_group == 1 or per_group >= 2,
                "n_group",
                "n_routed_experts",
            ),
            (
                "must not exceed the experts of topk_group groups",
                self.n_group == 1 or self.num_experts_per_tok <= self.topk_group * per_group,
                "num_experts_per_tok",
                "n_routed_experts",
                "n_group",
                "topk_group",
            ),
        ]
        for message, ok, *keys in checks:
            if not ok:
                found = ", ".join(f"model.{key} is {getattr(self, key)}" for key in keys)
                raise ValueError(f"model.{keys[0]} {message}: {found}")
        for name, ids in (("eos_token_id", self.eos_token_ids), ("pad_token_id", (self.pad_token_id,))):
            for token in ids:
                if token is None and name == "pad_token_id":
                    continue
                if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                    raise ValueError(
                        f"model.{name} {token!r} is no token of the vocabulary: model.vocab_size is {self.vocab_size}"
                    )

    def _check_attention(self) -> None:
        """The fields of the attention variants: values, lengths, and what excludes what. Equal to the default becomes None."""
        for name, allowed in (
            ("attention", ("mla", "gqa")),
            ("simple_gdn_decay", ("none", "fixed")),
            ("index_share_loss", ("own", "served")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"model.{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name, allowed in (("layer_types", LAYER_TYPES), ("indexer_types", INDEXER_TYPES)):
            values = getattr(self, name)
            if values is None:
                continue
            unknown = [v for v in values if v not in allowed]
            if unknown:
                raise ValueError(f"model.{name} has {unknown[0]!r}; each entry must be one of {', '.join(allowed)}")
            if len(values) != self.num_hidden_layers:
                raise ValueError(
                    f"model.{name} has {len(values)} entries, model.num_hidden_layers is {self.num_hidden_layers}"
                )
            if set(values) <= {"full"}:
                object.__setattr__(self, name, None)
        if self.indexer_types is not None:
            if self.attention != "mla" or self.layer_types is not None:
                raise ValueError(
                    "model.indexer_types with 'shared' needs DSA in every layer: model.attention 'mla' and no model.layer_types; "
                    f"got model.attention {self.attention!r}, model.layer_types {self.layer_types}"
                )
            if self.indexer_types[0] != "full":
                raise ValueError(
                    "model.indexer_types must begin with 'full': a shared layer reuses the selection of a layer before it"
                )
        if self.attention == "mla":
            if self.num_key_value_heads is not None or self.head_dim is not None:
                raise ValueError(
                    "model.num_key_value_heads and model.head_dim belong to model.attention 'gqa', not 'mla'"
                )
        else:
            if self.head_dim is None:
                raise ValueError("model.attention 'gqa' needs model.head_dim")
            groups = self.kv_heads
            if groups < 1 or self.num_attention_heads % groups:
                raise ValueError(
                    f"model.num_key_value_heads ({groups}) must divide model.num_attention_heads ({self.num_attention_heads})"
                )
            if self.qk_rope_head_dim > self.head_dim:
                raise ValueError(
                    f"model.qk_rope_head_dim ({self.qk_rope_head_dim}), the rotated part of a head, exceeds model.head_dim "
                    f"({self.head_dim})"
                )
        if "swa" in self.kinds and self.sliding_window < 1:
            raise ValueError("model.sliding_window must be at least 1")
        if "gdn" in self.kinds and self.linear_conv_kernel_dim < 1:
            raise ValueError("model.linear_conv_kernel_dim must be at least 1")

    # ---- one layer's attention

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of attention of each backbone layer: 'full', 'swa', 'gdn' or 'simple_gdn'."""
        return self.layer_types or ("full",) * self.num_hidden_layers

    def kind(self, layer: int) -> str:
        """A layer's kind; layers from num_hidden_layers on (MTP) are always full."""
        return self.kinds[layer] if layer < self.num_hidden_layers else "full"

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer selects keys itself. The MTP layer does, in GLM-5.2 too: its checkpoint carries an indexer."""
        if self.attention != "mla" or self.kind(layer) != "full":
            return False
        return self.indexer_types is None or layer >= self.num_hidden_layers or self.indexer_types[layer] == "full"

    def index_loss_share(self, layer: int) -> float:
        """Weight of a layer's KL term in the indexer's loss: 1 / layers served, or under "own" 1 for full and 0 for shared."""
        if self.indexer_types is None or layer >= self.num_hidden_layers:
            return 1.0
        if self.index_share_loss == "own":
            return float(self.indexer_types[layer] == "full")
        groups = [sum(kind == "full" for kind in self.indexer_types[: i + 1]) for i in range(self.num_hidden_layers)]
        return 1.0 / groups.count(groups[layer])

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values: of GQA, or all of them."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim if self.attention == "mla" else self.head_dim

    @property
    def value_head_dim(self) -> int:
        return self.v_head_dim if self.attention == "mla" else self.head_dim

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
        return cls(**params)

    def to_hf(self) -> dict:
        """The config.json dictionary that transformers' GlmMoeDsaConfig reads, with rope_theta always written out."""
        values = dataclasses.asdict(self)
        theta = values.pop("rope_theta")
        values["eos_token_id"] = list(self.eos_token_id) if isinstance(self.eos_token_id, tuple) else self.eos_token_id
        ours = {name: values.pop(name) for name in OUR_FIELDS}
        if self.attention != "mla" or self.layer_types is not None:
            # transformers refuses both the model_type and these layer types
            ours["layer_types"] = list(self.kinds)
            rope = {"rope_theta": theta, "rope_type": "default"}
            return {"model_type": OUR_MODEL_TYPE, **values, **ours, "hidden_act": "silu", "rope_parameters": rope}
        if self.indexer_types is not None:
            values["indexer_types"] = list(self.indexer_types)
            if self.index_share_loss != "own":
                values["index_share_loss"] = self.index_share_loss
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
        if config.get("model_type") not in ("glm_moe_dsa", OUR_MODEL_TYPE):
            raise ValueError(f"model_type must be glm_moe_dsa or {OUR_MODEL_TYPE}, got {config.get('model_type')!r}")
        fields = {field.name for field in dataclasses.fields(cls)}
        if config["model_type"] == OUR_MODEL_TYPE:
            return cls(**known_values(config, fields))
        # num_key_value_heads, head_dim and layer_types mean something else there
        return cls(**known_values(config, fields - set(OUR_FIELDS)) | glm_values(config))

    def count_parameters(self) -> dict[str, dict[str, int]]:
        """Total and active parameters under the four counting rules of notes A.3; buffers (router bias) are not parameters.

        Keys: backbone (no embeddings, head or MTP), hf (backbone + embeddings + head: what transformers instantiates),
        backbone_mtp (no embeddings or head), everything. Active: routed experts counted per token.
        """
        h = self.hidden_size
        expert = 3 * h * self.moe_intermediate_size
        router = self.n_routed_experts * h
        moe = {
            "total": router + (self.n_routed_experts + self.n_shared_experts) * expert,
            "active": router + (self.num_experts_per_tok + self.n_shared_experts) * expert,
        }
        embed = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        layers, dense = self.num_hidden_layers, self.first_k_dense_replace
        attention = sum(sum(self.attention_parameters(layer).values()) for layer in range(layers))
        counts: dict[str, dict[str, int]] = {"backbone": {}, "hf": {}, "backbone_mtp": {}, "everything": {}}
        for kind in ("total", "active"):
            backbone = attention + layers * 2 * h + h
            backbone += dense * 3 * h * self.intermediate_size + (layers - dense) * moe[kind]
            one = sum(self.attention_parameters(layers).values()) + 2 * h + moe[kind] + 2 * h * h + 3 * h
            mtp = self.num_nextn_predict_layers * one
            counts["backbone"][kind] = backbone
            counts["hf"][kind] = backbone + embed
            counts["backbone_mtp"][kind] = backbone + mtp
            counts["everything"][kind] = backbone + mtp + embed
        return counts

    def attention_parameters(self, layer: int) -> dict[str, int]:
        """Parameters of one layer's attention by kind: matrices, indexer, and norms (with all else that is not a matrix)."""
        h, q, kv, heads = self.hidden_size, self.q_lora_rank, self.kv_lora_rank, self.num_attention_heads
        qk, v, groups, kind = self.qk_head_dim, self.value_head_dim, self.kv_heads, self.kind(layer)
        if self.attention == "mla":
            matrices = h * q + q * heads * qk + h * (kv + self.qk_rope_head_dim)
            matrices += kv * heads * (self.qk_nope_head_dim + v) + heads * v * h
            norms = q + kv
        else:
            matrices, norms = h * heads * qk + h * groups * (qk + v) + heads * v * h, 0
        if kind == "gdn":
            matrices += 2 * heads * h + heads * v * h  # beta, decay, output gate
            channels = heads * qk + groups * (qk + v)
            norms += channels * self.linear_conv_kernel_dim + 2 * heads + v
        indexer = 0
        if self.has_indexer(layer):
            d = self.index_head_dim
            indexer = q * self.index_n_heads * d + h * d + 2 * d + h * self.index_n_heads
        return {"attention": matrices, "indexer": indexer, "norms": norms}


def _positive(name: str, value: object) -> float:
    """A positive finite number; numbers in quotes too, since YAML 1.1 reads 1e-5 as text."""
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"model.{name} must be a positive number, got {value!r}")
    return number

"""A published config.json into the fields of ModelConfig. What this model cannot do is refused by its key, not ignored.

Field names of older releases are understood: `num_experts` and `num_local_experts`, `rope_theta` with `rope_scaling`,
`mlp_layer_types` without first_k_dense_replace, IndexShare as a pattern or a schedule. A key that is not known here says
nothing about the arithmetic (dtype, versions, caches) and is passed over.

Run its tests: `python -m pytest tests/model/test_hf_config.py`
"""

import json
from pathlib import Path

FIXED = {  # keys whose other values change the arithmetic
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
RENAMED = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}


def read_config(path: Path | str) -> dict:
    """The JSON object in `path`; ValueError naming the file when it is missing or is none."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path.parent} is not a checkpoint: it has no {path.name}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected a JSON object, found a {type(raw).__name__}")
    return raw


def known_values(config: dict, fields: set[str]) -> dict:
    """Values of ModelConfig's `fields` in a transformers config of model_type glm_moe_dsa. ValueError names the key."""
    for key, required in FIXED.items():
        if config.get(key, required) not in (required, None):
            raise ValueError(f"{key}={config[key]!r} is not supported (only {required!r})")
    config = dict(config)
    for old, new in RENAMED.items():
        found = config.pop(old, None)
        if found is not None and config.get(new, found) not in (found, None):
            raise ValueError(f"{old}={found!r} contradicts {new}={config[new]!r}")
        if found is not None:
            config[new] = found
    values = {key: value for key, value in config.items() if key in fields}
    if values.get("num_nextn_predict_layers") is None:
        values["num_nextn_predict_layers"] = 0
    return values | {"rope_theta": rope_theta(config)}


def glm_values(config: dict) -> dict:
    """What only model_type glm_moe_dsa writes: dense layers by a pattern, and IndexShare's layers."""
    other = [kind for kind in config.get("layer_types") or () if kind not in ("indexed_attention", "full_attention")]
    if other:
        raise ValueError(f"layer_types {other[0]!r} is not supported (only 'indexed_attention')")
    values = {"indexer_types": indexer_types(config), "index_share_loss": config.get("index_share_loss", "own")}
    layers, pattern = config.get("num_hidden_layers"), config.get("mlp_layer_types")
    if pattern is not None:
        dense = config.get("first_k_dense_replace")
        dense = sum(kind == "dense" for kind in pattern) if dense is None else dense
        if list(pattern) != ["dense"] * dense + ["sparse"] * (len(pattern) - dense) or len(pattern) != layers:
            raise ValueError(
                f"mlp_layer_types other than first_k_dense_replace ({dense}) leading dense layers of num_hidden_layers "
                f"({layers}) is not supported"
            )
        values["first_k_dense_replace"] = dense
    return values


def rope_theta(config: dict) -> float:
    """The base of the rotary embedding. ValueError for every scaling of it, whichever way it is written."""
    theta = []
    for section in ("rope_parameters", "rope_scaling"):
        rope = config.get(section) or {}
        if not isinstance(rope, dict):
            raise ValueError(f"{section} must be a mapping, got {rope!r}")
        kinds = {rope.get("rope_type") or "default", rope.get("type") or "default"} - {"default"}
        if kinds:
            raise ValueError(f"{section}: rope_type {kinds.pop()!r} is not supported (only 'default')")
        theta.append((f"{section}.rope_theta", rope.get("rope_theta")))
        for name, owner in ((f"{section}.partial_rotary_factor", rope), ("partial_rotary_factor", config)):
            if owner.get("partial_rotary_factor") not in (None, 1, 1.0):
                raise ValueError(f"{name}={owner['partial_rotary_factor']!r} is not supported (only 1)")
    theta.append(("rope_theta", config.get("rope_theta")))
    found = {}
    for name, value in theta:
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{name} must be a number, got {value!r}")
        found[name] = float(value)
    if not found:
        raise ValueError("config.json has no rope_theta (rope_parameters.rope_theta)")
    if len(set(found.values())) > 1:
        raise ValueError("contradictory: " + ", ".join(f"{name}={value:g}" for name, value in found.items()))
    return next(iter(found.values()))


def indexer_types(config: dict) -> tuple[str, ...] | None:
    """Full or shared per backbone layer, from `indexer_types` or the schedule keys, as transformers' GlmMoeDsaConfig derives it.

    Entries for MTP layers are dropped: those have indexers of their own. Any other number of entries is a ValueError.
    """
    layers, types, name = config.get("num_hidden_layers"), config.get("indexer_types"), "indexer_types"
    if not isinstance(layers, int):
        raise ValueError(f"num_hidden_layers must be a number of layers, got {layers!r}")
    if types is None:
        types, name = config.get("index_topk_pattern"), "index_topk_pattern"
    if types is None:
        freq, offset = config.get("index_topk_freq"), config.get("index_skip_topk_offset")
        freq, offset = max(1 if freq is None else freq, 1), 2 if offset is None else offset
        return tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(layers))
    if isinstance(types, str):
        types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in types]
    extra = config.get("num_nextn_predict_layers") or 0
    if len(types) not in (layers, layers + extra):
        raise ValueError(
            f"{name} has {len(types)} entries; num_hidden_layers is {layers}, num_nextn_predict_layers {extra}"
        )
    return tuple(types[:layers])


def fp8_block(config: dict) -> int:
    """Side of the square FP8 blocks that quantization_config names, 128 without one. ValueError for other quantization."""
    found = config.get("quantization_config") or {}
    shape = (found.get("weight_block_size") or [128, 128]) if isinstance(found, dict) else None
    ok = isinstance(shape, list | tuple) and len(shape) == 2 and len(set(shape)) == 1 and isinstance(shape[0], int)
    if found and not (
        ok and shape[0] > 0 and found.get("quant_method") == "fp8" and found.get("fmt", "e4m3") == "e4m3"
    ):
        raise ValueError(
            f"quantization_config {found} is not supported: only quant_method fp8, fmt e4m3 in square blocks; dequantize "
            "the checkpoint first"
        )
    return shape[0]

"""A small checkpoint in the HF layout with asymmetric weights, so that a swapped nibble, axis or expert cannot pass."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "eos_token_id": [0],
    "pad_token_id": 0,
    "bos_token_id": None,
    "head_dim": 8,
}


def shapes(config: dict = CONFIG) -> dict[str, tuple[int, ...]]:
    """Every tensor of the HF layout with its shape, the MTP layer included."""
    h, m, e = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    q, kv, heads = config["q_lora_rank"], config["kv_lora_rank"], config["num_attention_heads"]
    nope, rope, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    ni, di, layers = config["index_n_heads"], config["index_head_dim"], config["num_hidden_layers"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], h)}
    for layer in range(layers + 1):
        p = f"model.layers.{layer}"
        out |= {f"{p}.input_layernorm.weight": (h,), f"{p}.post_attention_layernorm.weight": (h,)}
        a = f"{p}.self_attn"
        out |= {
            f"{a}.q_a_proj.weight": (q, h),
            f"{a}.q_a_layernorm.weight": (q,),
            f"{a}.q_b_proj.weight": (heads * (nope + rope), q),
            f"{a}.kv_a_proj_with_mqa.weight": (kv + rope, h),
            f"{a}.kv_a_layernorm.weight": (kv,),
            f"{a}.kv_b_proj.weight": (heads * (nope + v), kv),
            f"{a}.o_proj.weight": (h, heads * v),
            f"{a}.indexer.wq_b.weight": (ni * di, q),
            f"{a}.indexer.wk.weight": (di, h),
            f"{a}.indexer.k_norm.weight": (di,),
            f"{a}.indexer.k_norm.bias": (di,),
            f"{a}.indexer.weights_proj.weight": (ni, h),
        }
        blocks = {"": config["intermediate_size"]}
        if layer >= config["first_k_dense_replace"]:
            out |= {f"{p}.mlp.gate.weight": (e, h), f"{p}.mlp.gate.e_score_correction_bias": (e,)}
            blocks = {f"experts.{i}.": m for i in range(e)} | {"shared_experts.": m}
        for block, width in blocks.items():
            out[f"{p}.mlp.{block}gate_proj.weight"] = (width, h)
            out[f"{p}.mlp.{block}up_proj.weight"] = (width, h)
            out[f"{p}.mlp.{block}down_proj.weight"] = (h, width)
    p = f"model.layers.{layers}"
    out |= {f"{p}.enorm.weight": (h,), f"{p}.hnorm.weight": (h,), f"{p}.eh_proj.weight": (h, 2 * h)}
    out |= {
        f"{p}.shared_head.norm.weight": (h,),
        "model.norm.weight": (h,),
        "lm_head.weight": (config["vocab_size"], h),
    }
    return out


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """A checkpoint of random weights with heavy-tailed rows of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes().items():
        tensor = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensor = 1 + 0.1 * tensor
        elif name.endswith("bias"):
            tensor = 0.01 * tensor
        else:
            rows = torch.rand(shape[0], 1, generator=generator) * 2 + 0.2
            tensor = 0.15 * rows * tensor * (1 + 0.3 * tensor.abs())
        tensors[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    (folder / "tokenizer.json").write_text("{}")
    return folder

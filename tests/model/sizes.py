"""Small configurations that the model's tests share."""

from model.config import ModelConfig

MICRO = dict(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    moe_intermediate_size=24,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    num_attention_heads=3,
    q_lora_rank=32,
    kv_lora_rank=20,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=16,
    index_n_heads=6,
    index_head_dim=16,
    index_topk=8,
    n_routed_experts=6,
    num_experts_per_tok=2,
    routed_scaling_factor=2.5,
    max_position_embeddings=512,
    eos_token_id=[1, 2],
    pad_token_id=1,
)


def micro(**changes) -> ModelConfig:
    return ModelConfig.from_params({**MICRO, **changes})


def same_model(again, model, **args):
    """Bit for bit the same weights and buffers, and the same hidden states up to what a tensor's place in memory changes."""
    import torch

    one, other = model.state_dict(), again.state_dict()
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
    ids = torch.randint(0, 96, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        outputs = (m(ids, **args).hidden_bsh for m in (again, model))
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def spread(model, scale: float = 0.2, seed: int = 0):
    """Weights large enough that attention, routing and index scores differ clearly between tokens. Returns the model."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=generator) * scale
            p.copy_(1 + noise if name.endswith("norm.weight") else noise)
        for name, b in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                b.copy_(torch.randn(b.shape, generator=generator) * 0.1)
    return model

"""MTP: one parameter set unrolled, against the recurrence written out."""

import pytest
import torch

from model.block import BlockArgs
from model.transformer import GlmMoeDsa
from tests.model.sizes import micro, spread


@pytest.fixture(scope="module")
def net():
    return spread(GlmMoeDsa(micro()))


def test_recurrence_by_hand(net):
    ids = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = net(ids, attention="dense", mtp_depth=3)
        assert len(out.mtp_hidden) == 3
        h = out.hidden_bsh
        cis = net.rope(torch.arange(24)[None])
        for k in (1, 2, 3):
            embedded = torch.zeros(2, 24, 48)
            for i in range(24):
                embedded[:, i] = net.model.embed_tokens(
                    ids[:, i + k] if i + k < 24 else torch.zeros(2, dtype=torch.long)
                )
            z = net.mtp.eh_proj(torch.cat([net.mtp.enorm(embedded), net.mtp.hnorm(h)], dim=-1))
            h = net.mtp(z, cis, BlockArgs(attention="dense")).hidden_bsh
            torch.testing.assert_close(out.mtp_hidden[k - 1], net.mtp.shared_head.norm(h))


def test_depths_share_one_parameter_set_and_reach_the_backbone(net):
    ids = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(0))
    out = net(ids, mtp_depth=3)
    mtp = [p for n, p in net.named_parameters() if n.startswith("model.layers.3.") and "indexer" not in n]
    for hidden in out.mtp_hidden:
        grads = torch.autograd.grad(
            hidden.pow(2).sum(), [*mtp, net.model.layers[0].self_attn.o_proj.weight], retain_graph=True
        )
        assert all(g.abs().max() > 0 for g in grads if g.dim() > 1)
    assert torch.equal(net(ids, mtp_depth=1).mtp_hidden[0], out.mtp_hidden[0]), (
        "depth 1 does not depend on the unrolling"
    )


def test_valid_positions_do_not_see_the_filler(net):
    """The last k positions of depth k are filler; positions before them must not depend on it."""
    ids = torch.randint(0, 96, (1, 24), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = net(ids, mtp_depth=2).mtp_hidden[1]
        part = net(ids[:, :20], mtp_depth=2).mtp_hidden[1]
    torch.testing.assert_close(part[:, :18], whole[:, :18], atol=5e-5, rtol=1e-4)
    assert (part[:, 18:] - whole[:, 18:20]).abs().max() > 1e-2, "the filler itself shows"


def test_router_counts_of_all_depths_feed_one_bias(net):
    ids = torch.randint(0, 96, (2, 10), generator=torch.Generator().manual_seed(0))
    plain, unrolled = net(ids), net(ids, mtp_depth=3)
    assert [c.sum().item() for c in plain.router_counts] == [40, 40]
    assert [c.sum().item() for c in unrolled.router_counts] == [40, 40, 120]
    before = net.mtp.mlp.gate.e_score_correction_bias.clone()
    net.update_router_bias(plain.router_counts, 0.5)
    assert torch.equal(net.mtp.mlp.gate.e_score_correction_bias, before)
    net.update_router_bias(unrolled.router_counts, 0.5)
    assert (net.mtp.mlp.gate.e_score_correction_bias - before).abs().max() == 0.5
    with pytest.raises(ValueError, match="counts for 4 MoE layers"):
        net.update_router_bias([*unrolled.router_counts, unrolled.router_counts[0]], 0.5)


def test_asking_a_model_without_mtp_layer():
    with pytest.raises(ValueError, match="no MTP layer"):
        GlmMoeDsa(micro(num_nextn_predict_layers=0))(torch.zeros(1, 4, dtype=torch.long), mtp_depth=1)


def test_separate_layers_take_one_depth_each_and_the_last_serves_the_rest():
    net = spread(GlmMoeDsa(micro(num_nextn_predict_layers=2)))
    assert len(net.mtp_layers) == 2 and net.mtp is net.mtp_layers[0]
    ids = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(0))
    out = net(ids, attention="dense", mtp_depth=3)
    cis, h = net.rope(torch.arange(24)[None]), out.hidden_bsh
    for k, layer in enumerate([net.model.layers[3], net.model.layers[4], net.model.layers[4]], 1):
        embedded = net.model.embed_tokens(torch.cat([ids[:, k:], ids.new_zeros(2, k)], 1))
        h = layer(layer.merge(embedded, h), cis, BlockArgs(attention="dense")).hidden_bsh
        torch.testing.assert_close(out.mtp_hidden[k - 1], layer.shared_head.norm(h))
    assert [c.sum().item() for c in out.router_counts] == [96, 96, 96, 192]
    first = [p for n, p in net.named_parameters() if n.startswith("model.layers.3.mlp.experts")]
    second = [p for n, p in net.named_parameters() if n.startswith("model.layers.4.mlp.experts")]
    loss = out.mtp_hidden[0].pow(2).sum()
    assert all(g is not None for g in torch.autograd.grad(loss, first, retain_graph=True, allow_unused=True))
    assert all(g is None for g in torch.autograd.grad(loss, second, allow_unused=True)), "depth 1 has layer 1 alone"


def test_separate_layers_survive_a_checkpoint(tmp_path):
    from model.checkpoint import load_checkpoint, save_checkpoint

    net = spread(GlmMoeDsa(micro(num_nextn_predict_layers=3)))
    save_checkpoint(net, tmp_path)
    back = load_checkpoint(tmp_path)
    assert back.cfg.num_nextn_predict_layers == 3
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), back.state_dict().values(), strict=True))


def test_transformers_reads_the_backbone_and_ignores_three_mtp_layers(tmp_path):
    from transformers import AutoModelForCausalLM

    from model.checkpoint import save_checkpoint

    net = spread(GlmMoeDsa(micro(num_nextn_predict_layers=3, index_topk=64)))
    save_checkpoint(net, tmp_path)
    ids = torch.randint(0, 96, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()(ids).logits
        torch.testing.assert_close(net.logits(net(ids).hidden_bsh), theirs, atol=2e-4, rtol=2e-4)

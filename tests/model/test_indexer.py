"""The trainable indexer: its gradients exist, are right, and stay inside it."""

import pytest
import torch

from kernels.cross_entropy import linear_cross_entropy
from model.transformer import GlmMoeDsa
from tests.model.sizes import micro, spread


def is_indexer(name):
    return ".indexer." in name


def ids(batch=2, size=40, seed=0):
    return torch.randint(0, 96, (batch, size), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def model64():
    return spread(GlmMoeDsa(micro())).double()


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_gradients_numerically(model64, attention):
    """Central differences in double precision, two entries of every indexer tensor of every layer, MTP included."""
    batch = ids()

    def loss():
        return model64(batch, attention=attention, index_loss_rows=12, rows_seed=5, mtp_depth=2).index_loss

    names = [n for n, _ in model64.named_parameters() if is_indexer(n)]
    params = dict(model64.named_parameters())
    grads = dict(zip(names, torch.autograd.grad(loss(), [params[n] for n in names])))
    assert len(names) == 4 * 5
    for i, name in enumerate(names):
        flat, step = params[name].data.view(-1), 1e-6
        order = grads[name].abs().view(-1).argsort(descending=True)
        for entry in (order[0].item(), order[i % len(order) // 2].item()):
            kept = flat[entry].item()
            flat[entry] = kept + step
            up = loss().item()
            flat[entry] = kept - step
            down = loss().item()
            flat[entry] = kept
            numeric, got = (up - down) / (2 * step), grads[name].view(-1)[entry].item()
            assert got == pytest.approx(numeric, rel=2e-4, abs=2e-8), f"{name}[{entry}]"
        assert grads[name].abs().max() > 1e-6, f"{name} gets no gradient"


def test_warm_up_gives_the_backbone_no_gradient():
    model = spread(GlmMoeDsa(micro()))
    out = model(ids(), attention="dense", index_loss_rows="all", index_only=True, mtp_depth=1)
    assert not out.hidden_bsh.requires_grad and out.aux_loss is None
    out.index_loss.backward()
    for name, p in model.named_parameters():
        if is_indexer(name):
            assert p.grad is not None and p.grad.abs().max() > 0, name
        else:
            assert p.grad is None, name


def test_sparse_stage_gradients_are_disjoint():
    """The language-model loss never reaches the indexer, the KL loss never reaches anything else."""
    model = spread(GlmMoeDsa(micro()))
    batch = ids()
    out = model(batch, attention="sparse", index_loss_rows=16, mtp_depth=1)
    named = dict(model.named_parameters())
    lm = linear_cross_entropy(out.hidden_bsh[:, :-1].flatten(0, 1), model.lm_head.weight, batch[:, 1:].flatten())
    lm = lm + out.mtp_hidden[0].pow(2).mean() + 1e-4 * out.aux_loss
    from_lm = torch.autograd.grad(lm, list(named.values()), allow_unused=True, retain_graph=True)
    from_kl = torch.autograd.grad(out.index_loss, list(named.values()), allow_unused=True)
    for name, a, b in zip(named, from_lm, from_kl):
        assert (a is None) == is_indexer(name), name
        assert (b is None) != is_indexer(name), name


def test_asking_for_the_loss_does_not_change_the_model():
    model = spread(GlmMoeDsa(micro()))
    batch = ids()
    with torch.no_grad():
        plain = model(batch).hidden_bsh
        assert torch.equal(model(batch, index_loss_rows=8).hidden_bsh, plain)
        assert torch.equal(model(batch, index_loss_rows=8, index_only=True).hidden_bsh, plain)


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_loss_is_the_kl_of_the_notes(attention, monkeypatch):
    """B.3 written out row by row: p from the attention's own probabilities over the allowed set, KL against softmax(I)."""
    import model.attention as module

    model = spread(GlmMoeDsa(micro(num_hidden_layers=1, num_nextn_predict_layers=0, index_topk=6))).double()
    batch = ids(2, 20)
    seen = {}
    original = module.MLA.forward

    def spy(mla, x, cis, **kw):
        seen.update(x=x, cis=cis)
        return original(mla, x, cis, **kw)

    monkeypatch.setattr(module.MLA, "forward", spy)
    got = model(batch, attention=attention, index_loss_rows="all").index_loss
    mla = model.blocks[0].self_attn
    x, cis = seen["x"], seen["cis"]
    c_q = mla.project_q_latent(x)
    q = torch.cat(mla.project_q(c_q, cis), -1)
    k, _ = mla.expand_kv(*mla.project_kv_latent(x, cis))
    scores = mla.indexer.scores(c_q, x, cis, mla.indexer.keys(x, cis))
    total = 0.0
    for b in range(2):
        for t in range(20):
            keys = list(range(t + 1))
            if attention == "sparse":
                keys = sorted(sorted(keys, key=lambda s: (-scores[b, t, s].item(), s))[:6])
            p = torch.stack([(k[b, keys, h] @ q[b, t, h] * 20**-0.5).softmax(0) for h in range(3)]).mean(0)
            total += (p * (p.log() - scores[b, t, keys].log_softmax(0))).sum().item()
    assert got.item() == pytest.approx(total / 40, rel=1e-6)


def test_training_the_indexer_raises_its_recall():
    """A few warm-up steps must move attention mass into the indexer's top-k: the point of the loss."""
    model = spread(GlmMoeDsa(micro(num_hidden_layers=1, num_nextn_predict_layers=0)), scale=0.35)
    indexer = [p for n, p in model.named_parameters() if is_indexer(n)]
    optimizer = torch.optim.AdamW(indexer, lr=1e-2)
    batch = ids(4, 64)
    losses = []
    for step in range(40):
        loss = model(batch, attention="dense", index_loss_rows=32, rows_seed=step, index_only=True).index_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses


def test_rows_are_distinct_seeded_and_skip_padding():
    draw = GlmMoeDsa._draw_rows
    rows = draw(10, 3, 4, 30)
    assert rows.shape == (4, 10) and torch.equal(rows, draw(10, 3, 4, 30)) and not torch.equal(rows, draw(10, 4, 4, 30))
    assert all(len(set(r.tolist())) == 10 for r in rows) and not torch.equal(rows[0], rows[1])
    assert torch.equal(draw(99, 0, 2, 5), torch.arange(5).expand(2, -1))
    with pytest.raises(ValueError, match="index_loss_rows"):
        draw(0, 0, 1, 5)
    model = spread(GlmMoeDsa(micro()))
    batch = ids(1, 30)
    mask = torch.arange(30)[None] < 20
    padded = model(batch, index_loss_rows="all", token_mask_bs=mask).index_loss
    torch.testing.assert_close(padded, model(batch[:, :20], index_loss_rows="all").index_loss, rtol=1e-4, atol=1e-6)

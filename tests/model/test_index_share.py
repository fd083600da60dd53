"""IndexShare (GLM-5.2): layers that reuse a selection, against transformers, in training, decoding and on disk."""

import json

import pytest
import torch

import model.attention
from kernels.cross_entropy import linear_cross_entropy
from model.checkpoint import load_checkpoint, save_checkpoint
from model.config import ModelConfig
from model.convert import convert
from model.decode import Decoder
from model.recompute import recomputing
from model.sampling import SamplingParams
from model.transformer import GlmMoeDsa
from tasks.heldout import indexer_recall
from tasks.quant_emulate import hook_linears, quantizable
from tests.model.sizes import micro, same_model, spread

ROUNDING = 5e-5  # of log-probabilities in fp32; 3e-6 was measured with every product summed in another order
TYPES = ["full", "shared", "full", "shared", "shared"]
TIE = 1e-4


def share(types=TYPES, **changes):
    return micro(num_hidden_layers=len(types), indexer_types=types, **changes)


def ids(batch, size, seed=0):
    return torch.randint(0, 96, (batch, size), generator=torch.Generator().manual_seed(seed))


def in_transformers(ours, directory):
    hf_glm = pytest.importorskip("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa")
    save_checkpoint(ours, directory)
    return hf_glm.GlmMoeDsaForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    ).eval()


def test_shared_layers_have_no_indexer_and_the_mtp_layer_has_one():
    names = [n for n, _ in GlmMoeDsa(share()).named_parameters() if ".indexer." in n]
    assert {int(n.split(".")[2]) for n in names} == {0, 2, 5}


def test_dense_lengths_equal_transformers(tmp_path):
    ours = spread(GlmMoeDsa(share(index_topk=64)))
    theirs = in_transformers(ours, tmp_path)
    assert theirs.config.indexer_types == TYPES
    batch = ids(3, 60)
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours(batch).hidden_bsh), theirs(batch).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("path", ["masked", "gathered"])
def test_sparse_lengths_equal_transformers(tmp_path, monkeypatch, path):
    """In every sequence whose selections are free of ties: two implementations round a tie differently."""
    monkeypatch.setattr(model.attention, "attention_path", lambda size, topk: path if size > topk else "dense")
    ours = spread(GlmMoeDsa(share()), scale=0.25)
    theirs = in_transformers(ours, tmp_path)
    size, topk, batch, gaps = 40, 8, ids(32, 40, seed=1), []
    name = "select" if path == "masked" else "select_index"
    select = getattr(model.indexer.Indexer, name)
    causal = torch.ones(size, size, dtype=torch.bool).tril()

    def spy(indexer, c_q, x, cis):
        scores = indexer.scores(c_q, x, cis, indexer.keys(x, cis)).masked_fill(~causal, float("-inf"))
        best = scores.sort(dim=-1, descending=True).values[:, topk:]
        gaps.append((best[..., topk - 1] - best[..., topk]).amin(1))
        return select(indexer, c_q, x, cis)

    monkeypatch.setattr(model.indexer.Indexer, name, spy)
    with torch.no_grad():
        mine, reference = ours.logits(ours(batch).hidden_bsh), theirs(batch).logits
    untied = torch.stack(gaps).amin(0) > TIE
    assert len(gaps) == 2 and untied.sum() >= 8
    torch.testing.assert_close(mine[untied], reference[untied], atol=1e-4, rtol=0)
    with torch.no_grad():
        alone = spread(GlmMoeDsa(share(["full"] * 5)), scale=0.25)
        alone.load_state_dict(ours.state_dict(), strict=False)
        assert (alone.logits(alone(batch).hidden_bsh) - mine)[:, topk:].abs().amax() > 0.1, "sharing must matter here"


def test_config_round_trip_and_transformers_schedule_keys(tmp_path):
    cfg = share()
    assert ModelConfig.from_hf(cfg.to_hf()) == cfg and cfg.to_hf()["model_type"] == "glm_moe_dsa"
    assert "indexer_types" not in micro().to_hf()
    hf_glm = pytest.importorskip("transformers.models.glm_moe_dsa.configuration_glm_moe_dsa")
    for keys in (
        {"index_topk_freq": 4},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"index_topk_pattern": "FSFFSSS"},
    ):
        base = micro(num_hidden_layers=7).to_hf() | keys
        derived = hf_glm.GlmMoeDsaConfig(**base).indexer_types
        assert "shared" in derived and ModelConfig.from_hf(base).indexer_types == tuple(derived)
    # an entry for the MTP layer, which always has an indexer of its own
    longer = cfg.to_hf() | {"indexer_types": [*TYPES, "full"]}
    assert ModelConfig.from_hf(longer) == cfg


def test_checkpoint_round_trip_and_real_layout(tmp_path):
    """Shared layers hold no indexer tensors on disk (GLM-5.2's release); loading is strict about it."""
    model_ = spread(GlmMoeDsa(share()))
    save_checkpoint(model_, tmp_path)
    again = load_checkpoint(tmp_path)
    assert again.cfg == model_.cfg
    same_model(again, model_)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"indexer_types": ["full"] * 5}))
    with pytest.raises(ValueError, match="missing: model.layers.1.self_attn.indexer"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_losses_are_disjoint_and_only_full_layers_learn_to_select(attention):
    model_ = spread(GlmMoeDsa(share()))
    batch = ids(2, 40)
    out = model_(batch, attention=attention, index_loss_rows=12, mtp_depth=1)
    named = dict(model_.named_parameters())
    lm = linear_cross_entropy(out.hidden_bsh[:, :-1].flatten(0, 1), model_.lm_head.weight, batch[:, 1:].flatten())
    lm = lm + out.mtp_hidden[0].square().mean() + out.aux_loss
    from_lm = torch.autograd.grad(lm, list(named.values()), allow_unused=True, retain_graph=True)
    from_kl = torch.autograd.grad(out.index_loss, list(named.values()), allow_unused=True)
    for name, a, b in zip(named, from_lm, from_kl, strict=True):
        assert (a is None) == (".indexer." in name) and (b is None) == (".indexer." not in name), name


def test_the_loss_of_a_full_layer_does_not_depend_on_who_shares_it():
    """Dense warm-up: the same layers, once sharing and once each on its own, give the full layers the same gradient."""
    shared = spread(GlmMoeDsa(share())).double()
    alone = spread(GlmMoeDsa(share(["full"] * 5))).double()
    alone.load_state_dict(shared.state_dict(), strict=False)
    grads = []
    for m in (shared, alone):
        m(ids(2, 30), attention="dense", index_loss_rows="all", index_only=True).index_loss.backward()
        grads.append({n: p.grad for n, p in m.named_parameters() if ".indexer." in n and p.grad is not None})
    assert set(grads[0]) < set(grads[1]) and len(grads[0]) == 2 * 5
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-9, atol=1e-12)


def logprobs(model_, row):
    return torch.log_softmax(model_.logits(model_(torch.tensor([row])).hidden_bsh[0]), -1)


@pytest.mark.parametrize("types", [TYPES, ["full", "shared", "full"]])
@pytest.mark.parametrize("topk", [6, 24, 512])
def test_decoding_equals_the_full_forward(types, topk):
    """Ragged prompts; a shared and a full last layer; sparse from the first token, midway (masked and gathered reads), never."""
    model_ = GlmMoeDsa(share(types, index_topk=topk, initializer_range=0.15)).init_weights(0).requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (20, 20, 7, 33, 1, 70)]
    decoder = Decoder(model_)
    for row, out in zip(rows, decoder.generate(rows, SamplingParams(max_new_tokens=25, seed=4, ignore_eos=True))):
        expected = logprobs(model_, row + out.output_ids)[len(row) - 1 : -1]
        expected = expected.gather(1, torch.tensor(out.output_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(out.output_logprobs), expected, atol=ROUNDING, rtol=0)
    for row, scored in zip(rows, decoder.score(rows)):
        expected = logprobs(model_, row)[:-1].gather(1, torch.tensor(row)[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(scored), expected, atol=ROUNDING, rtol=0)
    _, cache = decoder.prefill(rows)
    assert cache.kv.shape[0] == len(types) and cache.index.shape[0] == types.count("full")


def test_recall_of_shared_layers_and_the_emulator():
    model_ = spread(GlmMoeDsa(share()), scale=0.3)
    batch = ids(2, 40)
    layers = indexer_recall(model_, batch, [8], rows=16)
    assert len(layers) == 5 and all(0 < layer["8"]["indexer"] <= layer["8"]["oracle"] + 1e-6 for layer in layers)
    ranked = model_.blocks[2].self_attn.indexer
    ranked.wq_b.weight.data.mul_(-1)  # other scores in layer 2 change its followers' recall and not the others'
    changed = indexer_recall(model_, batch, [8], rows=16)
    assert [a["8"]["indexer"] == b["8"]["indexer"] for a, b in zip(layers, changed)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    with torch.no_grad():
        before = model_(batch).hidden_bsh
        weights = quantizable(model_)
        assert not any("layers.1.self_attn.indexer" in n for n in weights)
        after = hook_linears(model_, lambda name, x: x @ weights[name].T)(batch).hidden_bsh
    torch.testing.assert_close(after, before, atol=1e-4, rtol=0)


def test_other_kinds_are_refused_by_the_decoder_and_the_emulator():
    gqa = GlmMoeDsa(micro(attention="gqa", head_dim=16, num_nextn_predict_layers=0)).init_weights(0)
    swa = convert(GlmMoeDsa(micro()).init_weights(0), "SFF", "swa")
    for model_, field in ((gqa, "model.attention is 'gqa'"), (swa, "model.layer_types is .'swa'")):
        with pytest.raises(ValueError, match=field):
            Decoder(model_)
        with pytest.raises(ValueError, match="full MLA layers only"):
            hook_linears(model_, lambda name, x: x)


@pytest.mark.parametrize("kind", ["block", "selective"])
@pytest.mark.parametrize(
    "changes", [{"indexer_types": ["full", "shared", "full"]}, {"layer_types": ["gdn", "full", "swa"]}]
)
def test_recomputed_activations_give_the_same_gradients(kind, changes):
    """The selection that a shared layer was given, and the state of the recurrences, to the bit."""
    grads = []
    for chosen in ("none", kind):
        model_ = spread(GlmMoeDsa(micro(**changes, sliding_window=5)))
        with recomputing(model_, chosen):
            out = model_(ids(2, 40), index_loss_rows=8, mtp_depth=1)
            (out.hidden_bsh.square().mean() + out.mtp_hidden[0].square().mean() + out.index_loss).backward()
        grads.append([p.grad for p in model_.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_served_layers_teach_their_indexer_the_average_of_their_attention(attention):
    """float64: the gradient is that of KL(mean of p over the group || softmax(I)), written out; group of three, group of one."""
    types = ["full", "shared", "shared", "full"]
    cfg = share(types, index_share_loss="served", num_nextn_predict_layers=0)
    assert ModelConfig.from_hf(cfg.to_hf()) == cfg
    model_ = spread(GlmMoeDsa(cfg)).double()
    batch, inputs = ids(2, 24), []
    hooks = [
        b.self_attn.register_forward_pre_hook(lambda m, args: inputs.append((m, *(t.detach() for t in args))))
        for b in model_.blocks
    ]
    loss = model_(batch, attention=attention, index_loss_rows="all").index_loss
    for hook in hooks:
        hook.remove()
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    expected, scores, allowed, target = 0.0, None, None, []
    for layer, (mla, x, cis) in enumerate(inputs):
        if mla.indexer is not None:
            scores = mla.indexer.scores(mla.project_q_latent(x).detach(), x, cis, mla.indexer.keys(x, cis))
            allowed = causal.expand(2, -1, -1)
            if attention == "sparse":
                best = scores.masked_fill(~causal, float("-inf")).argsort(dim=-1, descending=True, stable=True)[..., :8]
                allowed = torch.zeros_like(allowed).scatter(-1, best, True) & causal
        q, k, _ = mla.project_qkv(x, cis)
        logits = torch.einsum("bshd,bthd->bhst", q, k) * mla.softmax_scale
        target.append(logits.masked_fill(~allowed[:, None], float("-inf")).softmax(-1).mean(1).detach())
        if layer + 1 == len(types) or types[layer + 1] == "full":
            p = torch.stack(target).mean(0)
            log_q = scores.masked_fill(~allowed, float("-inf")).log_softmax(-1).masked_fill(~allowed, 0.0)
            expected = expected + (p * (p.clamp(min=1e-30).log() - log_q)).sum(-1).mean()
            target = []
    indexers = [p for n, p in model_.named_parameters() if ".indexer." in n]
    for got, wanted in zip(torch.autograd.grad(loss, indexers), torch.autograd.grad(expected, indexers), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-11)
    assert loss > expected  # by the spread of the group's attention, a constant


def test_served_layers_gain_recall_in_warm_up():
    """A random model, whose layers attend to unrelated keys: learning from its own layer alone, an indexer does nothing for the
    layer that shares its selection; learning from both, it serves both, at some cost to the full one."""
    gains = {}
    for kind in ("own", "served"):
        cfg = share(["full", "shared"], num_nextn_predict_layers=0, index_share_loss=kind)
        model_ = spread(GlmMoeDsa(cfg), scale=0.35)
        optimizer = torch.optim.AdamW([p for n, p in model_.named_parameters() if ".indexer." in n], lr=1e-2)
        batch = ids(4, 64)
        before = indexer_recall(model_, batch, [8])
        for step in range(40):
            loss = model_(batch, attention="dense", index_loss_rows=32, rows_seed=step, index_only=True).index_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert all(p.grad is None for n, p in model_.named_parameters() if ".indexer." not in n)
        gains[kind] = [b["8"]["ratio"] - a["8"]["ratio"] for a, b in zip(before, indexer_recall(model_, batch, [8]))]
    assert gains["own"][0] > 0.2 and abs(gains["own"][1]) < 0.05, gains
    assert gains["served"][1] > 0.1 and gains["served"][0] > 0.05, gains

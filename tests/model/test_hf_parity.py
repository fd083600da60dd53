"""transformers' GlmMoeDsaForCausalLM is the numerical reference of the forward pass: same checkpoint, both ways, fp32."""

import json

import pytest
import torch

import model.attention
from model.checkpoint import load_checkpoint, save_checkpoint
from model.transformer import GlmMoeDsa
from tests.model.sizes import micro, spread

hf_glm = pytest.importorskip("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa")
TIE = 1e-4  # index scores closer than this are a tie: the two implementations round differently


def ids(batch, size, seed=0):
    return torch.randint(0, 96, (batch, size), generator=torch.Generator().manual_seed(seed))


def to_hf(model, directory, attn="eager"):
    save_checkpoint(model, directory)
    return hf_glm.GlmMoeDsaForCausalLM.from_pretrained(directory, attn_implementation=attn, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(model, batch):
    return model.logits(model(batch).hidden_bsh)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_logits_equal_where_topk_covers_the_sequence(tmp_path, attn):
    ours = spread(GlmMoeDsa(micro(index_topk=64)))
    theirs = to_hf(ours, tmp_path, attn)
    batch = ids(3, 64)
    with torch.no_grad():
        reference = theirs(batch).logits
    assert reference.std() > 0.5, "weights must be large enough to tell a difference"
    torch.testing.assert_close(logits_of(ours, batch), reference, atol=1e-4, rtol=0)


def test_expert_groups_equal(tmp_path):
    ours = spread(GlmMoeDsa(micro(index_topk=64, n_group=3, topk_group=2)))
    theirs = to_hf(ours, tmp_path)
    batch = ids(2, 40)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(ours, batch), theirs(batch).logits, atol=1e-4, rtol=0)


def test_theirs_loads_into_ours(tmp_path):
    """A checkpoint that transformers initialised and saved, read by us, and back."""
    cfg = micro(index_topk=64, num_nextn_predict_layers=0)
    torch.manual_seed(3)
    theirs = hf_glm.GlmMoeDsaForCausalLM(hf_glm.GlmMoeDsaConfig(**cfg.to_hf(), attn_implementation="sdpa")).eval()
    for gate in (m for m in theirs.modules() if isinstance(m, hf_glm.GlmMoeDsaTopkRouter)):
        gate.e_score_correction_bias.copy_(torch.randn(6) * 0.1)
    theirs.save_pretrained(tmp_path / "hf")
    ours = load_checkpoint(tmp_path / "hf")
    assert ours.cfg == cfg
    batch = ids(2, 50)
    with torch.no_grad():
        reference = theirs(batch).logits
    torch.testing.assert_close(logits_of(ours, batch), reference, atol=1e-4, rtol=0)
    again = to_hf(ours, tmp_path / "ours", attn="sdpa")
    for name, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), f"the way there and back must not change a bit of {name}"
    with torch.no_grad():  # a weight's place in memory may choose another kernel
        torch.testing.assert_close(again(batch).logits, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("path", ["masked", "gathered"])
def test_sparse_selection_and_logits_equal(tmp_path, monkeypatch, path):
    """topk < length: identical selected key sets and logits within 1e-4 in every sequence without tied scores."""
    monkeypatch.setattr(model.attention, "attention_path", lambda size, topk: path if size > topk else "dense")
    ours = spread(GlmMoeDsa(micro()), scale=0.25)
    theirs = to_hf(ours, tmp_path)
    size, topk = 48, 8
    batch = ids(24, size, seed=1)
    our_sets, gaps, their_sets = [], [], []
    name = "select" if path == "masked" else "select_index"
    select = getattr(model.indexer.Indexer, name)

    def spy(indexer, c_q, x, cis):
        masks = select(indexer, c_q, x, cis)
        scores = indexer.scores(c_q, x, cis, indexer.keys(x, cis))
        causal = torch.ones(size, size, dtype=torch.bool).tril()
        best = scores.masked_fill(~causal, float("-inf")).sort(dim=-1, descending=True).values[:, topk:]
        gaps.append((best[..., topk - 1] - best[..., topk]).amin(1))
        if path == "masked":
            our_sets.append(torch.cat([torch.nn.functional.pad(m, (0, size - m.shape[2])) for m in masks], dim=1))
        else:
            our_sets.append(masks.allowed(torch.arange(size).expand(len(x), -1), size))
        return masks

    monkeypatch.setattr(model.indexer.Indexer, name, spy)
    for module in theirs.modules():
        if isinstance(module, hf_glm.GlmMoeDsaIndexer):
            module.register_forward_hook(lambda m, args, out: their_sets.append(out.long()))
    ours_logits = logits_of(ours, batch)
    with torch.no_grad():
        theirs_logits = theirs(batch).logits
    untied = torch.stack(gaps).amin(0) > TIE
    assert untied.sum() >= 8, f"only {int(untied.sum())} of {len(untied)} sequences are free of ties"
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    for mine, index in zip(our_sets, their_sets, strict=True):
        picked = torch.zeros(mine.shape, dtype=torch.bool).scatter_(-1, index, True) & causal
        assert torch.equal(mine[untied], picked[untied])
        assert torch.equal(mine.sum(-1), (torch.arange(size) + 1).clamp(max=topk).expand(len(batch), -1))
    torch.testing.assert_close(ours_logits[untied], theirs_logits[untied], atol=1e-4, rtol=0)
    dense = ours.logits(ours(batch, attention="dense").hidden_bsh)
    assert (dense - ours_logits)[:, topk:].abs().amax() > 0.1, "sparse attention must differ from dense here"


def test_transformers_generates_from_our_checkpoint(tmp_path):
    ours = spread(GlmMoeDsa(micro(index_topk=64)))
    theirs = to_hf(ours, tmp_path)
    assert theirs.generation_config.eos_token_id == [1, 2]
    prompt = ids(1, 12) % 90 + 4
    out = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
    greedy = logits_of(ours, out[:, :-1])[0, prompt.shape[1] - 1 :].argmax(-1)
    assert torch.equal(out[0, prompt.shape[1] :], greedy)


def test_the_mtp_layer_is_the_only_thing_transformers_ignores(tmp_path):
    ours = spread(GlmMoeDsa(micro()))
    save_checkpoint(ours, tmp_path)
    _, info = hf_glm.GlmMoeDsaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert info["unexpected_keys"] and all(k.startswith("model.layers.3.") for k in info["unexpected_keys"])
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 3

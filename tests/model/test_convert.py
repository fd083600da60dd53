"""Conversion of a trained model's layers: which weights travel, how the layers start, and the checkpoint's way there and back."""

import pytest
import torch
import torch.nn.functional as F

from model.checkpoint import load_checkpoint, save_checkpoint
from model.convert import convert, layer_kinds
from model.transformer import GlmMoeDsa
from tests.model.sizes import micro, same_model, spread
from tests.model.test_gqa import GQA_SIZES, ids

BASES = {"mla": {}, "gqa": GQA_SIZES}


@pytest.fixture(scope="module", params=list(BASES))
def trained(request):
    """A model with weights of a trained model's size: attention that is neither uniform nor one-hot."""
    return spread(GlmMoeDsa(micro(**BASES[request.param])), scale=0.15)


def is_indexer_of(name, layers):
    return any(name.startswith(f"model.layers.{i}.self_attn.indexer.") for i in layers)


@pytest.mark.parametrize("kind", ["swa", "simple_gdn"])
def test_weights_travel_unchanged_and_nothing_is_added(trained, kind):
    new = convert(trained, "SFS", kind, sliding_window=6)
    assert new.cfg.layer_types == (kind, "full", kind) and new.cfg.sliding_window == 6
    before, after = trained.state_dict(), new.state_dict()
    assert set(after) == {n for n in before if not is_indexer_of(n, (0, 2))}
    assert all(torch.equal(after[n], before[n]) and after[n].data_ptr() != before[n].data_ptr() for n in after)


def test_a_wide_window_changes_nothing(trained):
    new = convert(trained, "SSS", "swa", sliding_window=64)
    with torch.no_grad():
        a, b = (m(ids(), attention="dense").hidden_bsh for m in (trained, new))
    torch.testing.assert_close(a, b, atol=5e-5, rtol=0)  # rounding; what a window changes is a thousand times that
    narrow = convert(trained, "SSS", "swa", sliding_window=4)
    with torch.no_grad():
        c = narrow(ids(), attention="dense").hidden_bsh
    torch.testing.assert_close(a[:, :4], c[:, :4], atol=5e-5, rtol=0)
    assert (a - c)[:, 4:].abs().max() > 0.05


def test_gdn_reuses_the_projections_and_starts_sane(trained):
    calibration = ids(4, 40, seed=5)
    new = convert(trained, ["gdn", "full", "full"], calibration_ids=calibration)
    before, after = trained.state_dict(), new.state_dict()
    shared = {n for n in before if not is_indexer_of(n, (0,))}
    assert shared < set(after) and all(torch.equal(after[n], before[n]) for n in shared)
    own = {n.removeprefix("model.layers.0.self_attn.") for n in set(after) - shared}
    assert own == {
        "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "b_proj.weight", "a_proj.weight", "g_proj.weight", "A_log",
        "dt_bias", "o_norm.weight",
    }  # fmt: skip
    gdn = new.blocks[0].self_attn
    u = torch.randn(1, 9, 2, 10, generator=torch.Generator().manual_seed(0))
    gdn.q_conv1d.weight.data = gdn.q_conv1d.weight.data[:20]
    torch.testing.assert_close(gdn.q_conv1d(u), F.silu(u))
    x = torch.randn(1, 5, 48)
    decay = gdn.decay(x).exp()
    assert decay.min() > 0.96 and decay.max() < 1 and (gdn.b_proj(x).sigmoid() == 0.5).all()


def test_calibration_gives_heads_the_size_of_their_softmax_attention(trained):
    sizes = {}

    def watch(model, name):
        attention = model.blocks[0].self_attn
        hook = attention.o_proj.register_forward_pre_hook(
            lambda m, args: sizes.__setitem__(name, args[0].square().mean().sqrt())
        )
        with torch.no_grad():
            model(ids(4, 40, seed=6), attention="dense")
        hook.remove()

    watch(trained, "softmax")
    watch(convert(trained, "SFF", "gdn", calibration_ids=ids(4, 40, seed=5)), "calibrated")
    watch(convert(trained, "SFF", "gdn"), "silent")
    assert 0.5 < sizes["calibrated"] / sizes["softmax"] < 2
    assert sizes["silent"] < 0.5 * sizes["softmax"]


@pytest.mark.parametrize("kind", ["swa", "gdn", "simple_gdn"])
def test_converted_models_round_trip_and_convert_on(trained, kind, tmp_path):
    new = convert(trained, "SFF", kind, sliding_window=6, simple_gdn_decay="fixed")
    save_checkpoint(new, tmp_path)
    again = load_checkpoint(tmp_path)
    assert again.cfg == new.cfg
    further = convert(again, "FFS", "swa")  # an F leaves a converted layer converted
    assert further.cfg.layer_types == (kind, "full", "swa")
    same_model(again, new, attention="dense")
    bf16 = load_checkpoint(tmp_path, dtype=torch.bfloat16)
    assert torch.isfinite(bf16(ids(), attention="dense").hidden_bsh).all()
    if kind == "gdn":
        assert bf16.blocks[0].self_attn.A_log.dtype == torch.float32


def test_conversion_is_deterministic(trained):
    a, b, c = (convert(trained, "SFF", "gdn", seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(a[n], b[n]) for n in a) and any(not torch.equal(a[n], c[n]) for n in a)


@pytest.mark.parametrize(
    ("pattern", "kind", "message"),
    [
        ("SF", "swa", "the pattern has 2 layers, the model has model.num_hidden_layers = 3"),
        ("SFX", "swa", "may hold only F"),
        ("SFS", None, "needs the kind of its S layers"),
        ("SFS", "full", "needs the kind of its S layers"),
        (["swa", "full", "rnn"], None, "layer_types has 'rnn'"),
    ],
)
def test_wrong_patterns_are_named(trained, pattern, kind, message):
    with pytest.raises(ValueError, match=message):
        convert(trained, pattern, kind)


def test_only_full_layers_are_converted(trained):
    swa = convert(trained, "SFF", "swa")
    with pytest.raises(ValueError, match="layer 0 is 'swa' and cannot become 'gdn'"):
        layer_kinds(swa, "SFF", "gdn")
    shared = GlmMoeDsa(micro(indexer_types=["full", "shared", "shared"]))
    with pytest.raises(ValueError, match="model.indexer_types"):
        convert(shared, "SFF", "swa")

"""Published layouts, written here from their published names (not by our own saver), come in whole or are refused by name."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from model import checkpoint_import
from model.checkpoint import load_checkpoint, save_checkpoint
from model.checkpoint_import import convert_checkpoint, expected_tensors, import_checkpoint, scan_checkpoint
from model.config import ModelConfig
from model.transformer import GlmMoeDsa
from tests.model.sizes import MICRO, spread

SIZES = {k: v for k, v in MICRO.items() if k not in ("eos_token_id", "pad_token_id")} | {
    "hidden_size": 144, "moe_intermediate_size": 136, "intermediate_size": 160,  # FP8 blocks of 128 do not divide them
}  # fmt: skip
H, V, E, M, L = (
    SIZES[k] for k in ("hidden_size", "vocab_size", "n_routed_experts", "moe_intermediate_size", "num_hidden_layers")
)


def published_names(mtp_copies=False, shared=()):
    """name -> shape, as GLM-5's repository lists them: backbone, then layer N with the MTP glue."""
    c = SIZES
    heads, nope, rope, v = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    q, kv, d, n = c["q_lora_rank"], c["kv_lora_rank"], c["index_head_dim"], c["index_n_heads"]
    names = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,), "lm_head.weight": (V, H)}
    for i in range(L + 1):
        a = f"model.layers.{i}.self_attn"
        names |= {
            f"model.layers.{i}.input_layernorm.weight": (H,), f"model.layers.{i}.post_attention_layernorm.weight": (H,),
            f"{a}.q_a_proj.weight": (q, H), f"{a}.q_a_layernorm.weight": (q,), f"{a}.q_b_proj.weight": (heads * (nope + rope), q),
            f"{a}.kv_a_proj_with_mqa.weight": (kv + rope, H), f"{a}.kv_a_layernorm.weight": (kv,),
            f"{a}.kv_b_proj.weight": (heads * (nope + v), kv), f"{a}.o_proj.weight": (H, heads * v),
        }  # fmt: skip
        if i not in shared:
            names |= {
                f"{a}.indexer.wq_b.weight": (n * d, q), f"{a}.indexer.wk.weight": (d, H), f"{a}.indexer.k_norm.weight": (d,),
                f"{a}.indexer.k_norm.bias": (d,), f"{a}.indexer.weights_proj.weight": (n, H),
            }  # fmt: skip
        m = f"model.layers.{i}.mlp"
        if i < c["first_k_dense_replace"]:
            width = c["intermediate_size"]
            names |= {
                f"{m}.gate_proj.weight": (width, H),
                f"{m}.up_proj.weight": (width, H),
                f"{m}.down_proj.weight": (H, width),
            }
            continue
        names |= {f"{m}.gate.weight": (E, H), f"{m}.gate.e_score_correction_bias": (E,)}
        for where in [*(f"experts.{e}" for e in range(E)), "shared_experts"]:
            names |= {f"{m}.{where}.{p}_proj.weight": (M, H) for p in ("gate", "up")} | {
                f"{m}.{where}.down_proj.weight": (H, M)
            }
    g = f"model.layers.{L}"
    names |= {f"{g}.enorm.weight": (H,), f"{g}.hnorm.weight": (H,), f"{g}.eh_proj.weight": (H, 2 * H)}
    names |= {f"{g}.shared_head.norm.weight": (H,)}
    if mtp_copies:
        names |= {f"{g}.embed_tokens.weight": (V, H), f"{g}.shared_head.head.weight": (V, H)}
    return names


def is_fp8(name, shape):
    """What the FP8 releases quantize: the linear layers, not embedding, head, router, norms, eh_proj or weights_proj."""
    kept = ("embed_tokens", "lm_head", "shared_head", "mlp.gate.", "eh_proj", "weights_proj", "norm")
    return len(shape) == 2 and not any(k in name for k in kept)


def random_tensors(names):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in names.items():
        value = torch.randn(shape, generator=generator) * 0.1
        tensors[name] = 1 + value if name.endswith("norm.weight") else value
    for copy, of in (("embed_tokens", "model.embed_tokens.weight"), ("shared_head.head", "lm_head.weight")):
        name = f"model.layers.{L}.{copy}.weight"
        if name in tensors:
            tensors[name] = tensors[of].clone()
    return tensors


def write(folder, kind="bf16", shards=5, config=None, edit=None, index=True, **options):
    """A published directory; returns the values as fp32 that its reader must see."""
    folder.mkdir(parents=True)
    names = published_names(**options)
    tensors, truth = {}, {}
    for name, value in random_tensors(names).items():
        if name.endswith(("e_score_correction_bias", "mlp.gate.weight")):
            tensors[name] = truth[name] = value
        elif kind == "fp8" and is_fp8(name, value.shape):
            rows, columns = (math.ceil(n / 128) for n in value.shape)
            scale, seen = torch.empty(rows, columns), torch.empty_like(value)
            values = torch.empty_like(value, dtype=torch.float8_e4m3fn)
            for r in range(rows):  # block by block, as the reference quantizer does
                for c in range(columns):
                    at = (slice(r * 128, (r + 1) * 128), slice(c * 128, (c + 1) * 128))
                    scale[r, c] = value[at].abs().max() / 448
                    values[at] = (value[at] / scale[r, c]).to(values.dtype)
                    seen[at] = values[at].float() * scale[r, c]
            tensors[name], tensors[name + "_scale_inv"], truth[name] = values, scale, seen
        else:
            tensors[name] = value.to({"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp32": torch.float32}[kind])
            truth[name] = tensors[name].float()
    if edit:
        edit(tensors)
    order = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = order[i::shards]  # a scale and its weight mostly lie in different shards
        save_file({n: tensors[n] for n in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    settings = {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", **SIZES, "num_nextn_predict_layers": 1,
        "num_key_value_heads": SIZES["num_attention_heads"], "hidden_act": "silu", "attention_bias": False, "ep_size": 1,
        "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rms_norm_eps": 1e-5, "dtype": "bfloat16",
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "tie_word_embeddings": False,
        "norm_topk_prob": True, "n_shared_experts": 1, "eos_token_id": [1, 2], "pad_token_id": 1,
    }  # fmt: skip
    if kind == "fp8":
        settings["quantization_config"] = {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings | (config or {})))
    return truth


def stacked(model):
    """Our parameters under published names, taken apart by hand."""
    found = {}
    for name, value in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for e in range(E):
                found[name.replace("gate_up_proj", f"{e}.gate_proj.weight")] = value[e, :M]
                found[name.replace("gate_up_proj", f"{e}.up_proj.weight")] = value[e, M:]
        elif name.endswith("experts.down_proj"):
            for e in range(E):
                found[name.replace("down_proj", f"{e}.down_proj.weight")] = value[e]
        else:
            found[name] = value
    return found


def agrees(model, truth):
    found = stacked(model)
    copies = {n for n in truth if re.search(rf"layers\.{L}\.(embed_tokens|shared_head\.head)\.", n)}
    assert found.keys() == truth.keys() - copies
    for name, value in found.items():
        assert torch.equal(value.float(), truth[name]), name


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp8"])
def test_every_tensor_arrives_with_its_value(tmp_path, kind, copies):
    truth = write(tmp_path / "hf", kind, mtp_copies=copies)
    scan = scan_checkpoint(tmp_path / "hf")
    assert scan.counts["weights"] == len(published_names()) and scan.counts["copies in the MTP layer"] == 2 * copies
    quantized = sum(is_fp8(n, s) for n, s in published_names().items()) if kind == "fp8" else 0
    assert scan.counts["fp8"] == scan.counts["fp8 scales"] == quantized
    assert scan.is_own_layout == (kind != "fp8" and not copies)
    assert f"{len(truth) + quantized} tensors" in scan.report()
    model = import_checkpoint(tmp_path / "hf")
    agrees(model, truth)
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp8"])
def test_conversion_is_our_layout_with_the_same_values(tmp_path, kind):
    truth = write(tmp_path / "hf", kind, mtp_copies=True)
    (tmp_path / "hf/tokenizer.json").write_text("{}")
    convert_checkpoint(tmp_path / "hf", tmp_path / "ours", max_shard_bytes=300_000)
    model = load_checkpoint(tmp_path / "ours")
    rounded = {
        n: v.bfloat16().float()
        if kind == "fp8" and v.dim() == 2 and "mlp.gate." not in n and "weights_proj" not in n
        else v
        for n, v in truth.items()
    }
    agrees(model, rounded)
    assert (
        len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 3 and (tmp_path / "ours/tokenizer.json").is_file()
    )
    assert json.loads((tmp_path / "ours/config.json").read_text())["dtype"] == (
        "float32" if kind == "fp32" else "bfloat16"
    )
    assert scan_checkpoint(tmp_path / "ours").is_own_layout


def test_the_forward_of_an_imported_model_is_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    write(tmp_path / "hf", "bf16")
    theirs = transformers.GlmMoeDsaForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.randint(V, (2, 7), generator=torch.Generator().manual_seed(0))
    ours = import_checkpoint(tmp_path / "hf")
    with torch.no_grad():
        assert (theirs(ids).logits - ours.logits(ours(ids).hidden_bsh)).abs().max() < 1e-4


def test_what_transformers_saves_comes_in_without_its_lost_mtp_layer(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GlmMoeDsaConfig(
        **SIZES, num_key_value_heads=3, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}
    )
    theirs = transformers.GlmMoeDsaForCausalLM(config)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
    theirs.save_pretrained(tmp_path / "t", max_shard_size="300KB")
    raw = json.loads((tmp_path / "t/config.json").read_text())
    (tmp_path / "t/config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    scan = scan_checkpoint(tmp_path / "t")
    assert scan.cfg.num_nextn_predict_layers == 0 and "has no MTP" in scan.report()
    ours = import_checkpoint(tmp_path / "t")
    ids = torch.arange(7)[None]
    with torch.no_grad():
        assert (theirs(ids).logits - ours.logits(ours(ids).hidden_bsh)).abs().max() < 1e-4


def test_fused_experts_and_shared_indexers(tmp_path):
    def fuse(tensors):
        for i in range(1, L + 1):
            m = f"model.layers.{i}.mlp.experts"
            parts = {p: [tensors.pop(f"{m}.{e}.{p}_proj.weight") for e in range(E)] for p in ("gate", "up", "down")}
            tensors[f"{m}.gate_up_proj"] = torch.stack([torch.cat([g, u]) for g, u in zip(parts["gate"], parts["up"])])
            tensors[f"{m}.down_proj"] = torch.stack(parts["down"])

    truth = write(tmp_path / "fused", edit=fuse)
    agrees(import_checkpoint(tmp_path / "fused"), truth)
    assert scan_checkpoint(tmp_path / "fused").counts["fused expert tensors"] == 2 * L

    types = {"indexer_types": ["full", "shared", "full"]}
    truth = write(tmp_path / "shared", config=types, shared=(1,))
    model = import_checkpoint(tmp_path / "shared")
    agrees(model, truth)
    assert model.cfg.indexer_types == ("full", "shared", "full")
    write(tmp_path / "spare", config=types)
    scan = scan_checkpoint(tmp_path / "spare")
    assert scan.counts["indexer tensors of sharing layers, not used"] == 5, "counted, not silently ignored"


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.__setitem__(name, value)


def retype(name, dtype):
    return lambda tensors: tensors.__setitem__(name, tensors[name].to(dtype))


EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
GLUE, NORM, LATE = (
    f"model.layers.{L}.eh_proj.weight",
    "model.layers.0.self_attn.q_norm.weight",
    f"model.layers.{L + 1}.enorm.weight",
)
SCALE = EXPERT + "_scale_inv"
NARROW = torch.ones(M, H - 1).bfloat16()
MISFITS = {
    "a missing expert": ("bf16", drop(EXPERT), f"1 missing: {EXPERT}"),
    "a missing MTP part": ("bf16", drop(GLUE), f"1 missing: {GLUE}"),
    "an unknown name": ("bf16", put(NORM, torch.ones(4)), f"1 unknown: {NORM}"),
    "a layer too many": ("bf16", put(LATE, torch.ones(H)), f"1 unknown: {LATE}"),
    "a wrong shape": ("bf16", put(EXPERT, NARROW), rf"{EXPERT}: \({M}, {H - 1}\) in the file, \({M}, {H}\) expected"),
    "mixed types": ("bf16", retype(EXPERT, torch.float16), f"matrices of mixed types: .* is BF16, {EXPERT} is F16"),
    "integers": ("bf16", retype(EXPERT, torch.int32), f"{EXPERT} is I32; expected one of"),
    "a lost scale": ("fp8", drop(SCALE), f"{EXPERT} is FP8 and has no {SCALE}"),
    "a scale without FP8": ("fp8", retype(EXPERT, torch.bfloat16), f"{SCALE} scales {EXPERT}, which is BF16, not FP8"),
    "a wrong scale": ("fp8", put(SCALE, torch.ones(1, 1)), r"scale_inv: F32 \(1, 1\) in the file, \(2, 2\) expected"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_misfits_are_named(tmp_path, case):
    kind, edit, says = MISFITS[case]
    write(tmp_path / "hf", kind, edit=edit)
    with pytest.raises(ValueError, match=says):
        scan_checkpoint(tmp_path / "hf")


def test_broken_directories_are_named(tmp_path):
    write(tmp_path / "a")
    shard = tmp_path / "a/model-00003-of-00005.safetensors"
    data = shard.read_bytes()
    shard.unlink()
    with pytest.raises(ValueError, match="1 of 5 shards are missing: model-00003-of-00005.safetensors"):
        scan_checkpoint(tmp_path / "a")
    shard.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="model-00003-of-00005.safetensors: not a whole safetensors file"):
        scan_checkpoint(tmp_path / "a")
    shard.write_bytes(data)
    index = tmp_path / "a/model.safetensors.index.json"
    listed = json.loads(index.read_text())
    moved = dict(listed["weight_map"])
    name = "model.norm.weight"
    moved[name] = next(f for f in moved.values() if f != moved[name])
    index.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ValueError, match="names 1 tensors that are not in the file it names .model.norm.weight"):
        scan_checkpoint(tmp_path / "a")
    del moved[name]
    index.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ValueError, match="misses 1 that files hold .model.norm.weight"):
        scan_checkpoint(tmp_path / "a")
    index.write_text(json.dumps(listed))
    save_file({"x": torch.ones(1)}, tmp_path / "a/consolidated.safetensors")
    assert (
        "1 safetensors files are not in the index and not read: consolidated.safetensors"
        in scan_checkpoint(tmp_path / "a").report()
    )

    write(
        tmp_path / "b",
        mtp_copies=True,
        edit=lambda t: t[f"model.layers.{L}.embed_tokens.weight"].view(torch.int16)[0].add_(1),
    )
    with pytest.raises(ValueError, match=f"layers.{L}.embed_tokens.weight differs from model.embed_tokens.weight"):
        import_checkpoint(tmp_path / "b")
    for i, (config, says) in enumerate(
        [
            (
                {"quantization_config": {"quant_method": "compressed-tensors"}},
                "quantization_config .* is not supported",
            ),
            ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types other than"),
            ({"model_type": "deepseek_v3"}, "model_type must be glm_moe_dsa"),
            ({"hidden_size": 143}, "hidden|expected"),
        ]
    ):
        write(tmp_path / f"c{i}", config=config)
        with pytest.raises(ValueError, match=says):
            scan_checkpoint(tmp_path / f"c{i}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no .*safetensors"):
        scan_checkpoint(tmp_path / "empty")


def test_our_own_checkpoints_are_scanned_as_such(tmp_path):
    model = spread(GlmMoeDsa(ModelConfig.from_params({**MICRO, "tie_word_embeddings": True})))
    save_checkpoint(model, tmp_path)
    assert scan_checkpoint(tmp_path).is_own_layout
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    scan = scan_checkpoint(tmp_path)
    assert not scan.is_own_layout and scan.counts["copies of tied weights"] == 1
    assert torch.equal(import_checkpoint(tmp_path).lm_head.weight, model.lm_head.weight)


def test_the_names_at_full_scale_are_those_of_the_release():
    """GLM-5's layer 78 has 791 tensors (mlx, vLLM and GGUF converters count them); the backbone follows A.1."""
    cfg = ModelConfig()
    names = expected_tensors(cfg)
    assert sum(n.startswith("model.layers.78.") for n in names) == 791
    per_moe = 791 - 4
    assert len(names) == 75 * per_moe + 3 * (per_moe - 256 * 3 - 2) + 791 + 3
    assert sum(t.numel() for n, t in names.items() if "e_score" not in n and "layers.78." not in n) == 743_911_199_232


def test_fp8_values_are_transformers_own(tmp_path):
    """Every quantized matrix against transformers' block rule, ragged blocks too (the release has one: kv_a_proj, 576 rows).

    Not against its loader with dequantize=True: that divides the matrix by the grid of scales instead of by 128, refuses 576
    rows in 5 blocks, and gives 144 rows in 2 blocks a wrong scale from row 72 on.
    """
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    write(tmp_path / "hf", "fp8")
    stored = {n: t for p in (tmp_path / "hf").glob("*.safetensors") for n, t in load_file(p).items()}
    found = stacked(import_checkpoint(tmp_path / "hf"))
    names = [n.removesuffix("_scale_inv") for n in stored if n.endswith("_scale_inv")]
    assert any(stored[n].shape[0] % 128 for n in names) and len(names) > 50
    for name in names:
        theirs = fp8._dequantize_fp8_weight(stored[name], stored[name + "_scale_inv"], [128, 128], torch.float32)
        assert torch.equal(found[name], theirs), name


def test_power_of_two_scales(tmp_path):
    """DeepSeek-V3.2's ue8m0 scales (one byte, a power of two) stand for the same numbers as fp32 ones."""

    def powers(dtype):
        def edit(tensors):
            for name in [n for n in tensors if n.endswith("_scale_inv")]:
                tensors[name] = tensors[name].log2().ceil().exp2().to(dtype)

        return edit

    write(tmp_path / "a", "fp8", edit=powers(torch.float32))
    write(tmp_path / "b", "fp8", edit=powers(torch.float8_e8m0fnu))
    a, b = (stacked(import_checkpoint(tmp_path / x)) for x in "ab")
    assert all(torch.equal(v, b[n]) for n, v in a.items())


def test_conversion_holds_one_shard_and_reads_each_tensor_once(tmp_path, monkeypatch):
    write(tmp_path / "hf", "fp8", mtp_copies=True)
    written, read = [], []
    real_save, real_read = checkpoint_import.save_file, checkpoint_import._Reader.stored

    def save(tensors, path, **options):
        written.append(sum(t.nbytes for t in tensors.values()))
        real_save(tensors, path, **options)

    def stored(self, name):
        read.append(name)
        return real_read(self, name)

    monkeypatch.setattr(checkpoint_import, "save_file", save)
    monkeypatch.setattr(checkpoint_import._Reader, "stored", stored)
    scan = convert_checkpoint(tmp_path / "hf", tmp_path / "ours", max_shard_bytes=200_000)
    assert len(written) > 5 and max(written) <= 200_000
    twice = sorted(n for n in set(read) if read.count(n) > 1)
    assert set(read) == set(scan.stored)
    assert twice == ["lm_head.weight", "model.embed_tokens.weight"], "read again to be compared with their copies"

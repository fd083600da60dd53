"""Every profile is a whole line: each stage's section validates, lengths and vocabularies agree."""

from __future__ import annotations

import pytest

from tasks.params import compose, profiles
from tasks.spec import load_specs, select, stage_module, validate_config


@pytest.fixture(scope="module")
def specs():
    return load_specs()


@pytest.mark.parametrize("name", profiles())
def test_every_stage_validates(name, specs):
    params = compose(name)
    for spec in specs.values():
        validate_config(spec, select(params, spec.params), stage_module(spec.base).Config)


@pytest.mark.parametrize("name", profiles())
def test_sizes_agree(name):
    params = compose(name)
    assert params["tokenizer"]["vocab_size"] == params["model"]["vocab_size"]
    assert params["long_data"]["val_fraction"] == params["pack"]["midtrain"]["val_fraction"]
    lengths = [params["midtrain"][s]["seq_len"] for s in ("s1", "s2", "s3")]
    assert lengths == sorted(set(lengths)) and lengths[-1] <= params["model"]["max_position_embeddings"]
    assert params["long_data"]["contexts"][-1] <= params["model"]["max_position_embeddings"]


def test_the_papers_line():
    """Token budgets, contexts and rates of the paper (section 2, appendix A; notes C.4 and D.1)."""
    params = compose("glm5")
    mid = params["midtrain"]
    assert [mid[s]["seq_len"] for s in ("s1", "s2", "s3")] == [32768, 131072, 202752]
    assert [mid[s]["tokens"] for s in ("s1", "s2", "s3")] == [1e12, 5e11, 5e10]
    assert params["pretrain"]["general"]["tokens"] + params["pretrain"]["reasoning"]["tokens"] == 27e12
    warmup = params["dsa_warmup"]
    assert warmup["tokens"] == 1000 * 14 * 202752 and warmup["seq_len"] == 202752 and warmup["rows"] == 14
    assert params["dsa_adapt"]["tokens"] == 20e9
    rl = params["reasoning_rl"]
    assert (rl["prompts"], rl["group_size"]) == (32, 32)

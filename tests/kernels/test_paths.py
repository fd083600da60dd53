"""The choice of a kernel's path: defaults, overrides, errors that name what exists, and what the log says."""

import logging

import pytest
import torch

from kernels import paths


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(paths, "_chosen", {})
    monkeypatch.setattr(paths, "_known", {})
    monkeypatch.delenv(paths.VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_defaults_by_device_and_dtype(monkeypatch):
    monkeypatch.setattr(paths, "triton_available", lambda: True)
    assert paths.choose("gathered_attention", "cpu", torch.float32) == "cpu"
    assert paths.choose("gathered_attention", "cuda", torch.bfloat16) == "triton"
    assert paths.choose("gathered_attention", "cuda", torch.float64) == "cpu"
    monkeypatch.setattr(paths, "triton_available", lambda: False)
    monkeypatch.setattr(paths, "_known", {})
    assert paths.choose("gathered_attention", "cuda", torch.bfloat16) == "cpu"


def test_the_variable_overrides_and_force_comes_first(monkeypatch):
    monkeypatch.setenv(paths.VARIABLE, "gathered_attention=reference, select_keys=cpu")
    assert paths.choose("gathered_attention", "cpu", torch.float32) == "reference"
    with paths.force(gathered_attention="cpu"):
        assert paths.choose("gathered_attention", "cpu", torch.float32) == "cpu"
    assert paths.choose("gathered_attention", "cpu", torch.float32) == "reference"


@pytest.mark.parametrize(
    "text, words",
    [
        ("gatherd=cpu", ["gatherd", "gathered_attention"]),
        ("select_keys=cuda", ["cuda", "reference, cpu, triton"]),
        ("select_keys", ["op=path", "select_keys"]),
    ],
)
def test_mistakes_name_what_exists(monkeypatch, text, words):
    monkeypatch.setenv(paths.VARIABLE, text)
    with pytest.raises(ValueError) as error:
        paths.choose("select_keys", "cpu", torch.float32)
    assert all(word in str(error.value) for word in [*words, paths.VARIABLE])


def test_unknown_operator_and_unusable_triton(monkeypatch):
    with pytest.raises(ValueError, match="operators: .*index_scores"):
        paths.choose("attention", "cpu", torch.float32)
    with pytest.raises(ValueError, match="no path 'fast'"), paths.force(select_keys="fast"):
        pass
    monkeypatch.setattr(paths, "triton_available", lambda: True)
    with paths.force(select_keys="triton"), pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        paths.choose("select_keys", "cpu", torch.float32)
    monkeypatch.setattr(paths, "triton_available", lambda: False)
    with paths.force(select_keys="triton"), pytest.raises(ValueError, match="not installed"):
        paths.choose("select_keys", "cuda", torch.float32)


def test_choices_are_logged_once_and_reported(caplog):
    with caplog.at_level(logging.INFO, "arcline.kernels"):
        for _ in range(3):
            paths.choose("select_keys", "cpu", torch.float32)
        paths.choose("index_scores", "cpu", torch.bfloat16)
    assert [r.getMessage() for r in caplog.records] == [
        "kernel select_keys on cpu float32: cpu (default)",
        "kernel index_scores on cpu bfloat16: cpu (default)",
    ]
    assert paths.report() == "index_scores cpu/bfloat16: cpu; select_keys cpu/float32: cpu"

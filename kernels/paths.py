"""Which implementation an operator runs: an explicit choice, logged once and listed by `report()`.

    ARCLINE_KERNELS=gathered_attention=reference,select_index=cpu python -m tasks pretrain-general

Paths: "reference" is the plain torch formula, autograd included; "cpu" the fast torch formulation (written for a CPU's caches, it
runs on any device); "triton" the Triton kernel. Without an override a CUDA tensor takes "triton" where the operator has one and
Triton can be imported, everything else takes "cpu". A CPU tensor takes "triton" only by override, under Triton's interpreter.

Run its tests: `python -m pytest tests/kernels/test_paths.py`
"""

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

VARIABLE = "ARCLINE_KERNELS"
ALL = ("reference", "cpu", "triton")
# Every operator with a choice, and the paths it has. A new kernel adds its row here and dispatches in its public function.
OPERATORS: dict[str, tuple[str, ...]] = {
    "index_scores": ALL,
    "select_keys": ALL,
    "select_index": ALL,
    "gathered_attention": ALL,
    "mla_preprocess": ALL,
    "mla_training": ALL,
    "grouped_experts": ALL,
    "linear_cross_entropy": ALL,
    "newton_schulz": ALL,
    "quantize_int4": ("cpu", "triton"),
    "fp8": ("cpu", "triton"),
}

_log = logging.getLogger("arcline.kernels")
_chosen: dict[tuple[str, str, str], str] = {}
_known: dict[
    tuple, str
] = {}  # choices without force, by what they depend on: a decoding step asks several hundred times
_forced: dict[str, str] = {}


@cache
def triton_available() -> bool:
    """True when Triton is installed; it is not imported here."""
    return importlib.util.find_spec("triton") is not None


def _check(op: str, path: str, source: str) -> None:
    if op not in OPERATORS:
        raise ValueError(f"{source}: unknown kernel operator {op!r}; operators: {', '.join(sorted(OPERATORS))}")
    if path not in OPERATORS[op]:
        raise ValueError(f"{source}: operator {op!r} has no path {path!r}; its paths: {', '.join(OPERATORS[op])}")


@cache
def _parse(text: str) -> dict[str, str]:
    overrides = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        op, equals, path = (s.strip() for s in item.partition("="))
        if not equals:
            raise ValueError(f"{VARIABLE}: expected op=path[,op=path...], found {item!r}")
        _check(op, path, VARIABLE)
        overrides[op] = path
    return overrides


def _usable(op: str, device: torch.device, source: str) -> None:
    if not triton_available():
        raise ValueError(f"{source}: operator {op!r} on path 'triton', but Triton is not installed")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"{source}: operator {op!r} on path 'triton' for a CPU tensor needs Triton's interpreter: "
            "set TRITON_INTERPRET=1 before Python starts (slow, for tests), or choose 'cpu'"
        )


def choose(op: str, device: torch.device | str, dtype: torch.dtype) -> str:
    """The path of `op` for tensors of this device and dtype; remembered for `report`.

    `force` comes before the environment variable ARCLINE_KERNELS, that before the default. ValueError for an operator or a path
    that does not exist, naming those that do, and for a Triton path that cannot run here.
    """
    key = op, device, dtype, os.environ.get(VARIABLE)
    if not _forced and key in _known:
        return _known[key]
    path = _choose(op, torch.device(device), dtype)
    if not _forced:
        _known[key] = path
    return path


def _choose(op: str, device: torch.device, dtype: torch.dtype) -> str:
    if op not in OPERATORS:
        _check(op, "", "choose")
    path, source = _forced.get(op), "force"
    if path is None:
        path, source = _parse(os.environ.get(VARIABLE, "")).get(op), VARIABLE
    if path is None:
        # float64 is for checks: the Triton kernels accumulate in fp32
        wanted = device.type == "cuda" and dtype != torch.float64 and triton_available()
        path, source = "triton" if wanted and "triton" in OPERATORS[op] else "cpu", "default"
    elif path == "triton":
        _usable(op, device, source)
    key = op, device.type, str(dtype).removeprefix("torch.")
    if _chosen.get(key) != path:
        _chosen[key] = path
        _log.info("kernel %s on %s %s: %s (%s)", *key, path, source)
    return path


@contextmanager
def force(**paths: str) -> Iterator[None]:
    """Within the block the named operators take the given paths: `with force(gathered_attention="reference"): ...`."""
    for op, path in paths.items():
        _check(op, path, "force")
    before = dict(_forced)
    _forced.update(paths)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def report() -> str:
    """One line of the choices made so far, for a log: "gathered_attention cpu/float32: cpu; ..."; empty before the first."""
    return "; ".join(f"{op} {device}/{dtype}: {path}" for (op, device, dtype), path in sorted(_chosen.items()))

"""Runs Triton checks outside the test process: through Triton's interpreter on a CPU, natively where CUDA is at hand.

TRITON_INTERPRET must be set before triton is imported and changes it for the whole process, so each test module's checks run in
one child process of their own. A test module holds plain functions check_*(device) that import the kernels themselves, and

    test_triton = triton_checks(__name__)

gives pytest one test per check. A function launches(dtype) that calls every kernel on CPU tensors is a check, too, for fp32 and
bf16: each launch is replaced by compiling the kernel to sm_90 machine code (needs no GPU), which finds what the interpreter
forgives: types, shapes that tl.dot refuses, more shared memory than a block has. By hand:

    TRITON_INTERPRET=1 python -m tests.kernels.triton_case tests.kernels.test_triton_indexer run
    python -m tests.kernels.triton_case tests.kernels.test_triton_indexer compile
"""

import importlib
import json
import os
import subprocess
import sys
import traceback
from functools import cache

import pytest

from kernels.paths import triton_available

LIMIT_SECONDS = 240
MARK = "triton-checks:"
SHARED_BYTES = 232448  # of one block on sm_90
COMPILE = ("compile_fp32", "compile_bf16")


def device() -> str:
    """Where the checks' tensors live."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@cache
def outcomes(module: str, mode: str) -> dict[str, str]:
    """Every check of a module ("run") or its compilations ("compile") in one child process: name -> "" or its traceback."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    if device() == "cpu" and mode == "run":
        env["TRITON_INTERPRET"] = "1"
    child = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_case", module, mode],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith(MARK)]
    assert lines, f"{module} ended with status {child.returncode}\n{child.stdout}\n{child.stderr}"
    return json.loads(lines[-1].removeprefix(MARK))


def triton_checks(module: str):
    """A pytest test, one case per function check_* of the module."""
    names = sorted(name for name in vars(sys.modules[module]) if name.startswith("check_"))
    if hasattr(sys.modules[module], "launches"):
        names += [pytest.param(name, marks=pytest.mark.slow) for name in COMPILE]

    @pytest.mark.skipif(not triton_available(), reason="Triton is not installed (it comes with the test extra)")
    @pytest.mark.parametrize("name", names)
    def test(name):
        problem = outcomes(module, "compile" if name in COMPILE else "run")[name]
        assert not problem, problem

    return test


def _compile_launches(launches, dtype) -> None:
    """Call launches(dtype) with every kernel launch replaced by its compilation to sm_90."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    pointers = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32"}
    pointers |= {torch.bool: "*i1", torch.int8: "*i8", torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv"}
    seen = []

    def compile_instead(self, *args, grid, warmup, **kwargs):
        bound = dict(zip(self.arg_names, args)) | {k: v for k, v in kwargs.items() if k in self.arg_names}
        constants = {p.name: bound[p.name] for p in self.params if p.is_constexpr or bound[p.name] is None}
        signature = {}
        for name, value in bound.items():
            if name in constants:
                signature[name] = "constexpr"
            elif isinstance(value, torch.Tensor):
                signature[name] = pointers[value.dtype]
            else:
                signature[name] = "i32" if isinstance(value, int) else "fp32"
        built = triton.compile(ASTSource(self, signature, constants), target=GPUTarget("cuda", 90, 32))
        assert built.metadata.shared <= SHARED_BYTES, f"{self.__name__}: {built.metadata.shared} bytes of shared memory"
        seen.append(self.__name__)

    original, JITFunction.run = JITFunction.run, compile_instead
    try:
        launches(dtype)
    finally:
        JITFunction.run = original
    assert seen, "launches() started no kernel"


def main(module: str, mode: str = "run") -> None:
    import torch

    loaded = importlib.import_module(module)
    if mode == "run":
        calls = {name: (check, device()) for name, check in sorted(vars(loaded).items()) if name.startswith("check_")}
    else:
        calls = {
            f"compile_{name}": (lambda d: _compile_launches(loaded.launches, d), dtype)
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        }
    results = {}
    for name, (call, argument) in calls.items():
        try:
            call(argument)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
            print(results[name], file=sys.stderr)
    print(MARK + json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])

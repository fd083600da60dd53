"""The house of the design: imports go one way, code that a stage runs is among its dependencies, the extras resolve."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tasks.params import ROOT
from tasks.spec import load_specs

PACKAGES = ("flows", "tasks", "model", "kernels")
# The frame runs stages and does not shape their results; DESIGN.md section 3.
FRAME = {
    "tasks/__init__.py",
    "tasks/stage.py",
    "tasks/stage_run.py",
    "tasks/tracking.py",
    "tasks/params.py",
    "tasks/files.py",
    "tasks/storage.py",
    "tasks/remote.py",
    "tasks/__main__.py",
}


@cache
def imported(path: Path) -> frozenset[str]:
    """Dotted names that a file imports, at the top or inside functions, and modules it starts with `-m`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.List):  # [sys.executable, "-m", "tasks.engine", ...]
            values = [e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
            names |= {v for v in values if v.split(".")[0] in PACKAGES and "." in v}
    return frozenset(names)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package):
    allowed = PACKAGES[PACKAGES.index(package) :]
    for path in sources(package):
        roots = {name.split(".")[0] for name in imported(path)}
        wrong = roots & (set(PACKAGES) - set(allowed))
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"
        if package != "flows":
            assert "prefect" not in roots, f"{path.relative_to(ROOT)} imports prefect outside flows/"
        if package == "tasks" and path.name not in ("stage.py", "spec.py", "tracking.py"):
            assert not roots & {"mlflow", "dvc"}, f"{path.relative_to(ROOT)} talks to MLflow or DVC past the contract"


def code_closure(module: str) -> set[str]:
    """Project files (relative paths) that a stage module reaches by imports, without the frame."""
    found: set[str] = set()
    todo = [ROOT / "tasks" / f"{module}.py"]
    while todo:
        path = todo.pop()
        relative = path.relative_to(ROOT).as_posix()
        if relative in found or relative in FRAME:
            continue
        found.add(relative)
        for name in imported(path):
            target = ROOT / (name.replace(".", "/") + ".py")
            if name.split(".")[0] in PACKAGES and target.is_file():
                todo.append(target)
    return found


def test_every_stage_depends_on_the_code_it_runs():
    missing = {}
    for spec in load_specs().values():
        covered = tuple(spec.deps)
        lacking = [
            f for f in sorted(code_closure(spec.base)) if not any(f == d or f.startswith(d + "/") for d in covered)
        ]
        if lacking:
            missing[spec.name] = lacking
    assert not missing, f"dvc.yaml lacks code dependencies: {missing}"


def test_every_stage_depends_on_the_shipped_models_that_its_code_names():
    models = {p.name: p.relative_to(ROOT).as_posix() for p in [*ROOT.glob("conf/*"), *ROOT.glob("tasks/*.json")]}
    models = {name: path for name, path in models.items() if name.endswith((".json", ".safetensors"))}
    lacking, found = {}, set()
    for spec in load_specs().values():
        for file in code_closure(spec.base):
            text = (ROOT / file).read_text(encoding="utf-8")
            named = {path for name, path in models.items() if f'"{name}"' in text or f'/{name}"' in text}
            found |= named
            if named - set(spec.deps):
                lacking[spec.name] = sorted(named - set(spec.deps))
    assert found == set(models.values()) and not lacking, (found, lacking)


def test_data_stages_do_not_load_torch():
    """A stage that needs no torch does not pay for importing it."""
    names = sorted({s.base for s in load_specs().values() if s.meta["phase"] == "curate"})
    code = f"import sys\nfor n in {names!r}: __import__('tasks.' + n)\nassert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_no_pickle_and_no_shell():
    for package in PACKAGES:
        for path in sources(package):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert not {n.split(".")[0] for n in imported(path)} & {"pickle", "dill", "cloudpickle", "shelve"}, path
            calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
            for call in calls:
                name = ast.unparse(call.func)
                assert name not in ("torch.load", "torch.save", "eval", "exec", "os.system"), f"{path}: {name}"
                shell = [k for k in call.keywords if k.arg == "shell" and ast.unparse(k.value) == "True"]
                assert not shell, f"{path}: shell=True"


@pytest.mark.network
@pytest.mark.slow
def test_the_gpu_extra_resolves_beside_the_base(tmp_path):
    """Ranges in pyproject.toml leave room for what the GPU extra pins. Resolved only; nothing is installed."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    probe = subprocess.run(
        [*pip, "download", "--no-deps", "-d", str(tmp_path), "six==1.17.0"], capture_output=True, text=True
    )
    if probe.returncode:
        pytest.skip("no package registry can be reached")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = tmp_path / "requirements.txt"
    wanted.write_text("\n".join([*project["dependencies"], *project["optional-dependencies"]["gpu"]]))
    plan = ["install", "--dry-run", "--ignore-installed", "--prefer-binary", "--quiet", "-r", str(wanted)]
    result = subprocess.run([*pip, *plan], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]

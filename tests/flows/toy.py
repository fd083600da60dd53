"""A small project that runs on the real frame: `flows/` and the frame modules of `tasks/`, with stages of a few lines.

Every stage folds its dependencies and parameters into a hash chain, step by step with a checkpoint after each, so a run
that resumed wrongly ends in another hash. Each step is also noted in work/trace/<stage>, which no rerun erases.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import yaml

REPO = Path(__file__).resolve().parents[2]
STARTED: list[subprocess.Popen] = []

STAGE = '''"""One stage of a test project."""

import hashlib
import json
import os
import signal
import subprocess
import time

from tasks.files import atomic_write, list_files
from tasks.stage import StageConfig


class Config(StageConfig):
    steps: int = 3
    seconds: float = 0.0
    fail: bool = False
    child: bool = False
    die_at: int = -1
    text: str = ""


def run(stage):
    cfg = stage.config
    trace = stage.root / "work" / "trace" / stage.name
    trace.parent.mkdir(parents=True, exist_ok=True)
    if cfg.child:  # a process that outlives its parent unless somebody ends it
        subprocess.Popen(["sleep", "600"])
    state = stage.scratch / "state.json"
    if state.is_file():
        step, chain = json.loads(state.read_text())
    else:
        chain = hashlib.sha256(cfg.text.encode())
        for dep in stage.spec.deps:
            path = stage.dep(dep)
            for file in list_files(path) if path.is_dir() else [path]:
                if file.name != "manifest.json":
                    chain.update(file.read_bytes())
        step, chain = 0, chain.hexdigest()
    while step < cfg.steps:
        with open(trace, "a") as file:
            file.write(f"{cfg.text}:{step}\\n")
        time.sleep(cfg.seconds / cfg.steps)
        died = trace.with_suffix(".died")
        if cfg.die_at == step and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if cfg.fail and step == cfg.steps - 1:
            raise ValueError("this stage was told to fail")
        chain = hashlib.sha256(f"{chain}{step}{stage.rng_seed(step)}".encode()).hexdigest()
        step += 1
        atomic_write(state, json.dumps([step, chain]))
        stage.log(step, value=int(chain[:4], 16))
        stage.print(f"step {step}")
    for out in stage.spec.outs:
        (stage.out(out) / "result.txt").write_text(chain)
    stage.metric(value=int(chain[:6], 16))
'''


def heed_interrupts() -> None:
    """A shell's background jobs ignore SIGINT, and so would everything that the tests start below one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Project:
    """A checkout in `root` whose commands run as processes that the test can watch and kill."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def env(self, **extra: str) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "ARCLINE_"))}
        path = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
        quiet = {"PYTHONPATH": str(self.root), "PWD": str(self.root), "PATH": path, "SHELL": "/bin/sh", "NO_COLOR": "1"}
        return {**env, **quiet, "OMP_NUM_THREADS": "1", **extra}

    def start(self, *args: str, **extra: str) -> subprocess.Popen:
        """`python *args` in the project, its output in work/out-<n>.txt (also as `.output()` of the process)."""
        (self.root / "work").mkdir(exist_ok=True)
        path = self.root / "work" / f"out-{len(list((self.root / 'work').glob('out-*')))}.txt"
        with open(path, "w") as file:
            process = subprocess.Popen(
                [sys.executable, *args],
                cwd=self.root,
                env=self.env(**extra),
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=heed_interrupts,
            )
        STARTED.append(process)
        process.output = path.read_text  # type: ignore[attr-defined]
        return process

    def run(self, *args: str, timeout: float = 300, **extra: str) -> tuple[int, str]:
        """`python *args` to its end: exit status and output."""
        process = self.start(*args, **extra)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"{args} ran over {timeout} s:\n{process.output()}") from None
        return code, process.output()  # type: ignore[attr-defined]

    def lock(self) -> str:
        return (self.root / "dvc.lock").read_text()

    def processes(self) -> list[str]:
        """Command lines of living stage processes of this project (their working directory is `root`)."""
        import psutil

        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(self.root):
                    line = " ".join(process.cmdline())
                    if "-m tasks" in line or "sleep 600" in line:
                        found.append(line)
            except psutil.Error:
                continue
        return found

    def stage_process(self, name: str):
        """The process of a running stage as psutil has it, or None."""
        import psutil

        for process in psutil.process_iter():
            try:
                if process.cwd() == str(self.root) and process.cmdline()[-3:] == ["-m", "tasks", name]:
                    return process
            except psutil.Error:
                continue
        return None

    def report(self) -> dict:
        """What the last flow run says of itself."""
        return json.loads((self.root / "work" / "run.json").read_text())

    def stages(self) -> dict[str, str]:
        """How each stage of the last flow run ended."""
        return self.report()["stages"]


class Toy(Project):
    """A toy project in `root`. `edges` maps each stage to the stages it depends on."""

    def __init__(self, root: Path, edges: dict[str, list[str]], meta: dict[str, dict] | None = None) -> None:
        super().__init__(root)
        self.edges = edges
        shutil.copytree(REPO / "flows", root / "flows", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(REPO / "tasks", root / "tasks", ignore=shutil.ignore_patterns("__pycache__"))
        (root / "conf").mkdir()
        stages = {}
        for name, upstream in edges.items():
            (root / "tasks" / f"{name}.py").write_text(STAGE)
            stages[name] = {
                "cmd": f"python -m tasks {name}",
                "deps": [f"data/{up}" for up in upstream] or ["conf/input.txt"],
                "params": ["seed", name],
                "outs": [f"data/{name}"],
                "metrics": [f"metrics/{name}.json"],
                "meta": {"phase": "first" if not upstream else "later", **(meta or {}).get(name, {})},
            }
        (root / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}, sort_keys=False))
        (root / "conf" / "input.txt").write_text("input\n")
        (root / ".dvc").mkdir()
        shutil.copy(REPO / ".dvc" / "config", root / ".dvc" / "config")
        with open(root / ".dvc" / "config", "a") as file:
            file.write("    no_scm = true\n")
        shutil.copy(REPO / ".dvcignore", root)
        shutil.copy(REPO / "prefect.yaml", root)
        self.params: dict = {"profile": "tiny", "seed": 0, **{name: {} for name in edges}}
        self.set()

    def set(self, **stages: dict) -> None:
        """Changes parameters of stages in the profile `tiny` and in params.yaml."""
        for name, values in stages.items():
            self.params[name] = {**self.params.get(name, {}), **values} if isinstance(values, dict) else values
        text = yaml.safe_dump(self.params, sort_keys=False)
        (self.root / "conf" / "tiny.yaml").write_text(text)
        (self.root / "params.yaml").write_text(text)

    def result(self, name: str) -> str:
        return (self.root / "data" / name / "result.txt").read_text()

    def trace(self, name: str) -> list[str]:
        path = self.root / "work" / "trace" / name
        return path.read_text().splitlines() if path.exists() else []


def wait_until(check, seconds: float = 60, what: str = "") -> None:
    """Polls `check` until it is true."""
    import time

    end = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds} s in vain for {what or check}")
        time.sleep(0.05)

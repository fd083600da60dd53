"""The stage contract: what every stage of the line gets once, from here.

A stage `name` (or `name-variant`, or DVC's `name@variant`) of dvc.yaml runs as `python -m tasks name-variant`. Its
module `tasks/<name>.py` holds `Config` (a strict `StageConfig`: the section `<name>` of params.yaml, or
`<name>.<variant>` where the section has that key) and `run(stage)`. The contract: outputs appear whole or not at all
with their manifest last; scratch under work/<stage>/<fingerprint of params and dependencies> for resuming after a
kill; seeds derived from one; one MLflow run; metrics as a JSON file; rejected records kept, counted and bounded; a
time limit. This module is what a stage sees of it; tasks/stage_run.py runs one.

Of tasks/, only this module, tasks/spec.py and tasks/tracking.py talk to MLflow and DVC.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from tasks import storage
from tasks.files import (
    atomic_write,
    content_hash,
    derive_seed,
    fsync_tree,
    list_files,
    remove,
    replace_path,
    sha256_file,
)
from tasks.params import ROOT
from tasks.spec import (
    FromCheckpoint,
    StageConfig,
    StageSpec,
    fingerprint,
    flatten_params,
    validate_config,
)

# Whose version can change a stage's bytes; recorded in the manifest when the stage imported it.
_VERSIONED = ("torch", "numpy", "tokenizers", "pyarrow", "resiliparse", "datasketch", "transformers", "safetensors")


class Stage:
    """What `run(stage)` receives. Paths are given as dvc.yaml has them."""

    def __init__(self, spec: StageSpec, params: dict, config: StageConfig, root: Path = ROOT, record: Any = None):
        self.spec, self.params, self.config, self.root = spec, params, config, Path(root)
        self.name, self.base, self.variant = spec.name, spec.base, spec.variant
        self.seed: int = int(params.get("seed", 0))
        self.starting: Path | None = None  # what init_from became (tasks/init_from.py)
        self._record = record
        self._staging: dict[str, Path] = {}
        self._metrics: dict = {}
        self._rows: dict[str, int] = {}
        self._seen = self._rejected = 0
        self._rejects = None
        self._series: dict[int, dict[str, float]] = {}
        self._series_file = None

    @cached_property
    def dep_hashes(self) -> dict[str, str]:
        """Content of every dependency, and of `init_from`, which may stand in for one (tasks/init_from.py)."""
        start = self.config.starts_elsewhere(self.spec) if isinstance(self.config, FromCheckpoint) else None
        absent = self.config.replaced(self.spec) if start else None
        hashes = {d: content_hash(self.root / d) for d in self.spec.deps if d not in (absent, start)}
        if start:
            hashes["init_from"] = content_hash(self.root / start)
            pinned = self.config.init_sha256
            if pinned and pinned != hashes["init_from"]:
                raise ValueError(
                    f"stage {self.name}: init_from {start} has the content hash {hashes['init_from']}, init_sha256 asks for "
                    f"{pinned}: the directory has changed"
                )
        return hashes

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.spec, self.params, self.dep_hashes)

    # paths
    def dep(self, path: str) -> Path:
        """A declared dependency, or a path below one."""
        if not any(path == d or path.startswith(d.rstrip("/") + "/") for d in self.spec.deps):
            raise ValueError(f"stage {self.name} reads {path}, which dvc.yaml does not list among its deps")
        return self.root / path

    def out(self, path: str) -> Path:
        """The staging directory of a declared out; it takes its place when the stage has succeeded."""
        if path not in self.spec.outs:
            raise ValueError(f"stage {self.name} writes {path}, which dvc.yaml does not list among its outs")
        if path not in self._staging:
            final = self.root / path
            staging = final.with_name(f".{final.name}.partial")
            remove(staging)
            staging.mkdir(parents=True)
            if self.params.get("storage"):
                storage.mark(staging, f"{storage.check_prefix(self.params['storage'])}/{path}")
            self._staging[path] = staging
        return self._staging[path]

    @property
    def scratch(self) -> Path:
        """Resume directory of exactly these parameters and dependencies; kept over a kill, removed on success."""
        path = self.root / "work" / self.name / self.fingerprint
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def evidence(self) -> Path:
        """Where what explains a fault is kept, beyond the stage's end: refused batches and their story."""
        return self.root / "work" / "evidence" / self.name

    def rng_seed(self, *item: object) -> int:
        """63-bit seed of one random choice: from (seed, stage, item)."""
        return derive_seed(self.seed, self.name, *item)

    # numbers
    def log(self, step: int, **values: float) -> None:
        """One point of the stage's time series (MLflow, and the stage's plots file). No wall-clock numbers here."""
        if self._series_file is None:
            self._load_series()
            self._series_file = open(self._series_path, "a", encoding="utf-8")
            self._series_file.write("\n")
        clean = {k: float(v) for k, v in values.items()}
        self._series.setdefault(int(step), {}).update(clean)
        self._series_file.write(json.dumps([int(step), clean]) + "\n")
        self._series_file.flush()
        if self._record:
            self._record.log(int(step), clean)

    @property
    def _series_path(self) -> Path:
        return self.scratch / "series.jsonl"

    def _load_series(self) -> None:
        """Points of a killed run with this fingerprint, so that a resumed stage plots its whole curve."""
        if self._series_path.is_file():
            for line in self._series_path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # the last line of a killed process may be torn
                    step, values = json.loads(line)
                    self._series.setdefault(step, {}).update(values)

    def metric(self, **values: Any) -> None:
        """Final numbers (nested mappings allowed): the stage's metrics file and MLflow. No wall-clock numbers here."""
        self._metrics.update(values)

    def timing(self, **seconds: float) -> None:
        """Wall-clock and speed numbers: MLflow only, since two equal runs differ in them."""
        self.print("  ".join(f"{k} {v:.2f}" for k, v in seconds.items()))
        if self._record:
            self._record.metric({f"timing/{k}": float(v) for k, v in seconds.items()})

    def rows(self, **counts: int) -> None:
        """Row counts for the manifest."""
        self._rows.update({k: int(v) for k, v in counts.items()})

    def artifact(self, path: Path) -> None:
        """A small file for the MLflow run."""
        if self._record:
            self._record.artifact(Path(path))

    def child(self, name: str, params: dict) -> Any | None:
        """An MLflow run nested below the stage's, for one variant of an ablation; None where nothing is recorded.

        Has log(step, values), metric(values) and close(status), which the caller must call.
        """
        if not self._record or not self._record.id:
            return None
        from tasks import tracking

        tags = {"stage": self.name, "variant": name, "mlflow.parentRunId": self._record.id}
        return tracking.open_record(self.root / "work" / "spool", f"{self.name}/{name}", flatten_params(params), tags)

    # records
    def seen(self, n: int = 1) -> None:
        """Count input records, the base of the reject share."""
        self._seen += n

    def reject(self, record_id: str, reason: str, detail: str = "") -> None:
        """Set a bad input record aside: a line in rejects/ of the first out, counted, never dropped silently."""
        if self._rejects is None:
            folder = self.out(self.spec.outs[0]) / "rejects"
            folder.mkdir(exist_ok=True)
            self._rejects = open(folder / "part-00000.jsonl", "w", encoding="utf-8")
        line = {"id": str(record_id), "reason": reason, "detail": detail[:2000]}
        self._rejects.write(json.dumps(line, ensure_ascii=True) + "\n")
        self._rejected += 1

    # talk
    def print(self, message: str) -> None:
        """One line for the person who watches, and for the log."""
        print(f"[{self.name}] {message}", flush=True)

    def progress(self, items: Iterable, total: int | None = None, label: str = "") -> Iterator:
        """Pass `items` through with a progress line at most every five seconds: count, share, estimate of time left."""
        if total is None and hasattr(items, "__len__"):
            total = len(items)  # type: ignore[arg-type]
        start = last = time.monotonic()
        for count, item in enumerate(items, 1):
            yield item
            now = time.monotonic()
            if now - last >= 5:
                last = now
                left = f", about {(now - start) / count * (total - count):.0f} s left" if total else ""
                self.print(f"{label or 'progress'} {count}{f'/{total}' if total else ''}{left}")

    # end
    def check_rejects(self) -> None:
        """ValueError when more records than `max_reject_share` were rejected. One or two in a small input are no reason,
        unless the share is 0 or they are more than a quarter of it."""
        base, share = max(self._seen, self._rejected), self.config.max_reject_share
        if self._rejected > max(share * base, min(2, base / 4) if share else 0):
            raise ValueError(
                f"stage {self.name}: {self._rejected} of {base} records were rejected, above max_reject_share = "
                f"{self.config.max_reject_share}; reasons are in {self._keep_rejects()}"
            )

    def _keep_rejects(self) -> Path:
        """The failed stage's outs vanish; what tells why must not."""
        self._rejects.flush()
        kept = self.root / "work" / "rejects" / f"{self.name}.jsonl"
        atomic_write(kept, Path(self._rejects.name).read_bytes())
        return kept

    def manifest(self, out: Path) -> dict:
        """What a directory holds and what it came from. Nothing in it depends on when or where the stage ran."""
        files = [
            {"path": p.relative_to(out).as_posix(), "bytes": p.stat().st_size, "sha256": sha256_file(p)}
            for p in list_files(out)
        ]
        versions = {m: metadata.version(m) for m in _VERSIONED if m in sys.modules}
        return {
            "stage": self.name,
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "config": self.config.model_dump(mode="json"),
            "deps": self.dep_hashes,
            "rows": dict(sorted(self._rows.items())),
            "rejected": self._rejected,
            "bytes": sum(f["bytes"] for f in files),
            "versions": {"python": platform.python_version(), **versions},
            "files": files,
        }

    def close_files(self) -> None:
        for handle in (self._rejects, self._series_file):
            if handle:
                handle.close()

    def publish(self) -> None:
        """Manifests, metrics and plots written, then everything renamed into place."""
        missing = [o for o in self.spec.outs if o not in self._staging]
        if missing:
            raise AssertionError(f"stage {self.name} ended without writing {missing}")
        for staging in self._staging.values():
            storage.put_all(staging)
            atomic_write(staging / "manifest.json", json.dumps(self.manifest(staging), indent=1, sort_keys=True) + "\n")
            fsync_tree(staging)
        for path in self.spec.metrics:
            atomic_write(self.root / path, json.dumps(self._metrics, indent=1, sort_keys=True) + "\n")
        if self._series_file is None:  # the run before this one may have been killed behind its last point
            self._load_series()
        points = [{"step": s, **dict(sorted(v.items()))} for s, v in sorted(self._series.items())]
        for path in self.spec.plots:
            atomic_write(self.root / path, json.dumps(points, indent=0) + "\n")
        for path, staging in self._staging.items():
            replace_path(staging, self.root / path)
        if self._record:
            self._record.metric(flatten(self._metrics))
        remove(self.root / "work" / self.name)

    def discard(self) -> None:
        """Remove what a failed stage had staged; scratch stays for the next try."""
        for staging in self._staging.values():
            remove(staging)


def flatten(values: dict, prefix: str = "") -> dict[str, float]:
    """Nested numbers as `a/b/c: x`; anything that is not a finite number is left out."""
    result: dict[str, float] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            result.update(flatten(value, f"{name}/"))
        elif isinstance(value, (int, float)) and value == value and abs(value) != float("inf"):
            result[name] = float(value)
    return result


def run_stage_for_test(
    module: Any,
    config: dict,
    params: dict | None = None,
    deps: dict[str, Path] | None = None,
    outs: Iterable[str] = (),
    name: str | None = None,
    seed: int = 0,
    tmp: Path = Path("."),
    plots: Iterable[str] = (),
) -> Stage:
    """Run a stage without DVC in `tmp`: `deps` maps declared paths to real ones, which are linked in. Returns the stage."""
    base = module.__name__.rpartition(".")[2]
    name = name or base
    for path, real in (deps or {}).items():
        target = tmp / path
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(Path(real).resolve())
    variant = name[len(base) + 1 :]
    section = {variant: config} if variant else config
    all_params = {"seed": seed, **(params or {}), base: section}
    spec = StageSpec(
        name,
        tuple(deps or {}),
        tuple(all_params),
        tuple(outs),
        (f"metrics/{re.sub('[@-]', '_', name)}.json",),
        tuple(plots),
    )
    stage = Stage(spec, all_params, validate_config(spec, all_params, module.Config), tmp)
    try:
        module.run(stage)
        stage.check_rejects()
        stage.close_files()
        stage.publish()
    except BaseException:
        stage.close_files()
        stage.discard()
        raise
    return stage

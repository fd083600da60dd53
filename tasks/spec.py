"""What dvc.yaml and params.yaml say of a stage, and why it is stale.

DVC itself resolves dvc.yaml (templates, foreach); this module and tasks/stage.py are the only ones in tasks/ that talk
to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.files import atomic_write, canonical_json
from tasks.params import ROOT, load_params


class StageConfig(BaseModel):
    """Base of every stage's `Config`: unknown keys are errors, values keep their declared types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    max_reject_share: float = Field(0.05, ge=0, le=1, description="the stage fails above this share of bad records")


class FromCheckpoint(StageConfig):
    """Base of the `Config` of a stage that starts from a checkpoint; see tasks/init_from.py."""

    STARTS_FROM: ClassVar[str | None] = None  # the dependency that dvc.yaml declares for it

    init_from: str | None = Field(None, description="checkpoint directory to start from; null: the declared dependency")
    init_sha256: str | None = Field(
        None, pattern="^[0-9a-f]{64}$", description="content hash that init_from must have (python -m tasks init-check)"
    )

    def declared(self, spec: StageSpec) -> str | None:
        """The dependency of dvc.yaml that is the checkpoint to start from, None when there is none."""
        return self.STARTS_FROM if self.STARTS_FROM in spec.deps else None

    def starts_elsewhere(self, spec: StageSpec) -> str | None:
        """`init_from` where it is not what another stage of the line makes, else None."""
        return None if self.init_from is None or self.init_from == self.declared(spec) else self.init_from

    def replaced(self, spec: StageSpec) -> str | None:
        """The declared dependency that `init_from` stands in for: it need not exist."""
        return self.declared(spec) if self.starts_elsewhere(spec) else None


@dataclass(frozen=True)
class StageSpec:
    """What dvc.yaml says of one stage."""

    name: str
    deps: tuple[str, ...]
    params: tuple[str, ...]
    outs: tuple[str, ...]
    metrics: tuple[str, ...] = ()
    plots: tuple[str, ...] = ()
    meta: dict = field(default_factory=dict)

    @property
    def base(self) -> str:
        return re.split("[@-]", self.name, maxsplit=1)[0]

    @property
    def variant(self) -> str:
        return self.name[len(self.base) + 1 :]


def load_specs(root: Path = ROOT) -> dict[str, StageSpec]:
    """Every stage of dvc.yaml, resolved by DVC itself (foreach, templates). ValueError when it does not parse.

    What DVC said is kept in work/cache under the hash of all that it read: a stage's process need not load DVC, which takes a
    second, each time one starts.
    """
    read = [importlib.metadata.version("dvc").encode()]
    read += [path.read_bytes() for path in (root / "dvc.yaml", root / "params.yaml", Path(__file__)) if path.is_file()]
    key = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in read)).hexdigest()
    cache = root / "work" / "cache" / "specs.json"
    try:
        kept = json.loads(cache.read_text(encoding="utf-8"))
        if kept["key"] == key:
            return {name: _spec(name, fields) for name, fields in kept["stages"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none yet, of an older form, or cut short
    specs = _resolve(root)
    stages = {name: {k: v for k, v in asdict(spec).items() if k != "name"} for name, spec in specs.items()}
    with contextlib.suppress(OSError):  # a workspace that cannot be written to has no stages to run either
        cache.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(cache, json.dumps({"key": key, "stages": stages}))
    return specs


def _spec(name: str, fields: dict) -> StageSpec:
    return StageSpec(name, **{k: v if k == "meta" else tuple(v) for k, v in fields.items()})


def _resolve(root: Path) -> dict[str, StageSpec]:
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo(str(root)) as repo:
            stages = list(repo.index.stages)
    except DvcException as error:
        raise ValueError(f"dvc.yaml: {error}") from error
    specs = {}
    for stage in stages:
        if not getattr(stage, "name", None):
            continue  # a `.dvc` file: data under version control, not a step of the line
        deps = [d.def_path for d in stage.deps if type(d).__name__ != "ParamsDependency"]
        params = [key for d in stage.deps if type(d).__name__ == "ParamsDependency" for key in d.params]
        metrics = [o.def_path for o in stage.outs if o.metric]
        plots = [o.def_path for o in stage.outs if o.plot]
        outs = [o.def_path for o in stage.outs if not o.metric and not o.plot]
        specs[stage.name] = StageSpec(
            stage.name,
            *(tuple(sorted(v)) for v in (deps, params)),
            tuple(outs),
            tuple(metrics),
            tuple(plots),
            stage.meta or {},
        )
    return specs


def select(params: dict, keys: Iterable[str]) -> dict:
    """The part of `params` that dotted `keys` name. ValueError for a key that is not there."""
    result: dict = {}
    for key in keys:
        source, target = params, result
        parts = key.split(".")
        for depth, part in enumerate(parts):
            if not isinstance(source, dict) or part not in source:
                raise ValueError(f"params.yaml has no {'.'.join(parts[: depth + 1])!r}, which dvc.yaml asks for")
            source = source[part]
            if depth + 1 < len(parts):
                target = target.setdefault(part, {})
        target[parts[-1]] = source
    return result


def validate_config(spec: StageSpec, params: dict, config_class: type[StageConfig]) -> StageConfig:
    """The stage's section of `params` as its `Config`. ValueError names every wrong key by its full path."""
    section, path = params.get(spec.base, {}), spec.base
    if spec.variant and isinstance(section, dict) and spec.variant in section:
        section, path = section[spec.variant], f"{spec.base}.{spec.variant}"
    try:
        # JSON mode: strict types, yet lists may stand for tuples, as YAML has no tuples.
        return config_class.model_validate_json(json.dumps(section))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = ".".join([path, *map(str, problem["loc"])])
            wrong = "unknown key" if problem["type"] == "extra_forbidden" else problem["msg"]
            lines.append(f"  params.yaml: {key}: {wrong} (found {problem['input']!r})")
        raise ValueError(f"stage {spec.name}: its parameters do not fit\n" + "\n".join(lines)) from None


_PLACE = ("parallel", "engine", "workers", "address")  # where a stage runs, never what it makes


def _without_place(section: Any) -> Any:
    return {k: v for k, v in section.items() if k not in _PLACE} if isinstance(section, dict) else section


def fingerprint(spec: StageSpec, params: dict, dep_hashes: dict[str, str]) -> str:
    """Identity of one run of a stage: its name, its parameters and the content of its dependencies (32 hex digits).

    A section `parallel` and the keys `engine`, `workers` and `address` are left out: a killed run goes on where it was on
    another number of processes, or on another engine (tasks/mapshuffle.py).
    """
    own = params.get(spec.base)
    if isinstance(own, dict):
        own = {k: _without_place(v) if k == spec.variant else v for k, v in own.items()}
        params = {**params, spec.base: _without_place(own)}
    text = canonical_json({"stage": spec.name, "params": params, "deps": dep_hashes})
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def stage_module(base: str) -> Any:
    """The module of a stage. ValueError when there is none."""
    try:
        module = importlib.import_module(f"tasks.{base}")
    except ModuleNotFoundError as error:
        if error.name != f"tasks.{base}":
            raise
        raise ValueError(f"no stage {base!r}: there is no module tasks/{base}.py") from None
    if not hasattr(module, "run") or not hasattr(module, "Config"):
        raise ValueError(f"tasks/{base}.py is not a stage: it has no Config and run(stage)")
    return module


def find_spec(name: str, root: Path = ROOT) -> StageSpec:
    """One stage of dvc.yaml. ValueError lists the stages when the name is unknown."""
    specs = load_specs(root)
    if name not in specs:
        raise ValueError(f"dvc.yaml has no stage {name!r}; it has: {', '.join(specs)}")
    return specs[name]


def flatten_params(params: dict, prefix: str = "") -> dict[str, str]:
    """Parameters as MLflow wants them: flat names, text values."""
    result: dict[str, str] = {}
    for key, value in params.items():
        if isinstance(value, dict):
            result.update(flatten_params(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = str(value)
    return result


def describe(name: str, root: Path = ROOT) -> dict:
    """What `--dry-run` prints: the resolved config, inputs, outputs and why the stage is stale (empty: it is not)."""
    from dvc.repo import Repo

    spec = find_spec(name, root)
    params = select(load_params(root), spec.params)
    config = validate_config(spec, params, stage_module(spec.base).Config)
    with Repo(str(root)) as repo:
        status = repo.status(targets=[name])
    shared = {k: v for k, v in params.items() if k != spec.base}
    return {
        "stage": name,
        "config": config.model_dump(mode="json"),
        "shared": shared,
        "inputs": {d: "present" if (root / d).exists() else "MISSING" for d in spec.deps},
        "outputs": [*spec.outs, *spec.metrics, *spec.plots],
        "stale": [reason for reasons in status.values() for reason in reasons],
        "meta": spec.meta,
    }

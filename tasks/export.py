"""Export: the canonical W4A8 artifact as files for seven Chinese accelerators, each read back by an independent reader.

    dvc repro export      or      python -m tasks export

Writes data/export/<platform>/ with an `export_manifest.json` that says what was verified (format, numerics, device) and
against which loader's source. §5 of the paper names the platforms; formats are in each tasks/export_<platform>.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field

from tasks import (
    export_ascend,
    export_cambricon,
    export_enflame,
    export_hygon,
    export_kunlunxin,
    export_metax,
    export_moorethreads,
)
from tasks.export_format import ExportOptions, Platform
from tasks.export_verify import verify
from tasks.files import atomic_write, list_files
from tasks.quant_recipe import Canonical
from tasks.stage import Stage, StageConfig

_MODULES = (
    export_ascend,
    export_metax,
    export_hygon,
    export_kunlunxin,
    export_cambricon,
    export_enflame,
    export_moorethreads,
)
PLATFORMS: dict[str, Platform] = {module.PLATFORM.name: module.PLATFORM for module in _MODULES}


class Config(StageConfig):
    """Parameters of the export."""

    platforms: list[str] = Field(list(PLATFORMS), description="which platforms to write")
    shard_gib: float = Field(4.0, gt=0, description="size limit of one safetensors file, GiB")
    cambricon_experts: Literal["int4", "int8"] = Field(
        "int4", description="int4 is experimental (nibble order unpublished); int8 widens the codes, which is exact"
    )


def export_platform(platform: Platform, source: Path, folder: Path, options: ExportOptions) -> dict:
    """Write one platform's directory, read it back independently, and leave its export_manifest.json. Returns that."""
    canonical = Canonical(source / "canonical")
    folder.mkdir(parents=True, exist_ok=True)
    platform.write(canonical, source / "calibration", folder, options)
    checks = verify(canonical.folder, folder, platform.name)
    experimental = platform.name == "cambricon" and options.cambricon_experts == "int4"
    manifest = {
        "platform": platform.name,
        "maker": platform.maker,
        "experts": platform.experts,
        "others": platform.others,
        "loader": {"source": platform.loader, "version": platform.version},
        "verified": {"format": True, "numerics": platform.numerics and not experimental, "device": False},
        "experimental": experimental,
        "checks": checks,
        "bytes": sum(p.stat().st_size for p in list_files(folder)),
        "notes": platform.notes,
    }
    atomic_write(folder / "export_manifest.json", json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return manifest


def run(stage: Stage) -> None:
    """Export every configured platform. ValueError for an unknown platform, or when a file does not read back equal."""
    config: Config = stage.config
    unknown = sorted(set(config.platforms) - set(PLATFORMS))
    if unknown:
        raise ValueError(f"export.platforms: unknown {', '.join(unknown)}; known: {', '.join(PLATFORMS)}")
    options = ExportOptions(int(config.shard_gib * 2**30), config.cambricon_experts)
    out = stage.out("data/export")
    source = stage.dep("data/quantize")
    for name in stage.progress(config.platforms, label="platform"):
        manifest = export_platform(PLATFORMS[name], source, out / name, options)
        verified = manifest["verified"]
        stage.print(
            f"{name}: {manifest['bytes'] / 2**20:.1f} MiB, "
            + ", ".join(f"{k} {'verified' if v else 'not verified'}" for k, v in verified.items())
        )
        stage.metric(
            **{
                name: {
                    "mib": round(manifest["bytes"] / 2**20, 3),
                    **{k: int(v) for k, v in verified.items()},
                    **{k: v for k, v in manifest["checks"].items() if k in ("codes", "fp8_relative_mse")},
                }
            }
        )
    stage.rows(platforms=len(config.platforms))

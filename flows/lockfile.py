"""dvc.lock written whole and in one order.

DVC truncates dvc.lock and writes it anew: a process killed in between leaves a broken file, and a stage that starts in
between cannot read it. It also appends stages in the order in which they happen to end. `install` makes the DVC of this
process write beside and rename, with stages sorted by name, so equal runs leave equal files. Used by flows/runner.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def _modify_yaml(path: str, fs: Any = None) -> Iterator[dict]:
    """Stands in for dvc.utils.serialize.modify_yaml."""
    from dvc.utils.serialize import dumps_yaml, parse_yaml_for_update

    file = Path(path)
    data = parse_yaml_for_update(file.read_text(encoding="utf-8"), path) if file.exists() else {}
    yield data
    stages = data.get("stages")
    if file.name == "dvc.lock" and stages:
        items = sorted(stages.items())
        stages.clear()
        stages.update(items)
    write(file, dumps_yaml(data) if data else "")


def write(file: Path, text: str) -> None:
    """Beside, fsynced, renamed."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    with open(part, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(part, file)


def install() -> None:
    """Idempotent. Called before the first stage runs."""
    from dvc import dvcfile

    dvcfile.modify_yaml = _modify_yaml

"""Resume checkpoints of a training run: written whole or not at all, checked before they are used, and kept few.

    step-00000050/   model.safetensors, optimizer.safetensors, trainer.json, manifest.json (last; hashes of the others)
    best/            the same, of the best held-out evaluation

A directory appears by a rename when everything in it has reached the disk, so a kill leaves the one before. What a disk
breaks afterwards (a torn, shortened or flipped file) is found by its hash: the checkpoint is set aside with a warning and
the one before is used. With `background` a thread writes from a copy in host memory while training goes on; one checkpoint
is under way at most, and an error in it surfaces at the next step.

Check it:  python -m pytest tests/tasks/test_resume.py        measure it:  python -m tests.bench.checkpointing
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from tasks.files import atomic_dir, canonical_json, remove

Files = Mapping[str, Mapping[str, Tensor]]  # file name without suffix -> tensors
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Found:
    """A checkpoint read back: its step, the tensors of each file, and the JSON-able state."""

    step: int
    files: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def file_hash(path: Path) -> str:
    """Hex XXH3-128 of a file's content: 20 GB a second, against accidents, not against an attacker."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def to_host(tensors: Mapping[str, Tensor], copy: bool) -> dict[str, Tensor]:
    """Contiguous tensors in host memory, no two of them sharing it (safetensors refuses that); `copy`: all are copies."""
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().to("cpu", copy=copy).contiguous()
        place = value.untyped_storage().data_ptr()
        result[name] = value.clone() if place in seen and value.numel() else value
        seen.add(place)
    return result


def write_checkpoint(folder: Path, files: Files, state: Mapping[str, Any]) -> None:
    """Write one checkpoint directory, manifest last, and put it in place whole."""
    with atomic_dir(folder) as staging:
        for name, tensors in files.items():
            # safetensors refuses an empty file; an optimizer without state yet is one.
            save_file(dict(tensors) or {"empty": torch.zeros(1)}, staging / f"{name}.safetensors")
        (staging / "trainer.json").write_text(json.dumps(state, sort_keys=True), encoding="utf-8")
        listed = {
            path.name: {"bytes": path.stat().st_size, "xxh3_128": file_hash(path)} for path in sorted(staging.iterdir())
        }
        manifest = {"files": listed, "check": xxhash.xxh3_128(canonical_json(listed).encode()).hexdigest()}
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")


def check_checkpoint(folder: Path) -> None:
    """ValueError naming the file when a checkpoint directory is not what was written."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder.name} has no {MANIFEST}: it was not written to its end")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        listed, check = manifest["files"], manifest["check"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder.name}/{MANIFEST} is not readable: {error}") from None
    if xxhash.xxh3_128(canonical_json(listed).encode()).hexdigest() != check:
        raise ValueError(f"{folder.name}/{MANIFEST} does not match its own checksum")
    for name, expected in listed.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{folder.name}/{name} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise ValueError(f"{folder.name}/{name} has {file.stat().st_size} bytes, {expected['bytes']} were written")
        if file_hash(file) != expected["xxh3_128"]:
            raise ValueError(f"{folder.name}/{name} does not match its hash: the file was damaged after it was written")


def read_checkpoint(folder: Path) -> Found:
    """A checked checkpoint. ValueError as `check_checkpoint`."""
    check_checkpoint(folder)
    files = {p.stem: load_file(p) for p in sorted(folder.glob("*.safetensors"))}
    for tensors in files.values():
        tensors.pop("empty", None)
    state = json.loads((folder / "trainer.json").read_text(encoding="utf-8"))
    return Found(state["step"], files, state)


class ResumeStore:
    """The checkpoints of one run in `folder`, the newest `keep_last` of them; `say` gets warnings."""

    def __init__(self, folder: Path, keep_last: int, say: Callable[[str], None], background: bool = False) -> None:
        self.folder, self.keep_last, self.say, self.background = Path(folder), keep_last, say, background
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    def steps(self) -> list[int]:
        """Steps of the checkpoints in place, ascending."""
        return sorted(int(p.name[5:]) for p in self.folder.glob("step-*") if re.fullmatch(r"step-\d{8}", p.name))

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, files: Files, state: Mapping[str, Any], *, best: bool = False) -> None:
        """Write the checkpoint of a step, or replace the best one; with `background` this returns after a copy in memory."""
        self.wait()
        folder = self.folder / "best" if best else self._path(step)
        hosted = {name: to_host(tensors, copy=self.background) for name, tensors in files.items()}
        text = json.loads(json.dumps(state))  # the loop goes on changing its lists
        if not self.background:
            self._write(folder, hosted, text)
            return
        self._writer = threading.Thread(target=self._guarded_write, args=(folder, hosted, text), name="checkpoint")
        self._writer.start()

    def _guarded_write(self, *args: Any) -> None:
        try:
            self._write(*args)
        except BaseException as error:  # noqa: BLE001 (handed to the training loop)
            self._error = error

    def _write(self, folder: Path, files: Files, state: Mapping[str, Any]) -> None:
        write_checkpoint(folder, files, state)
        for step in self.steps()[: -self.keep_last]:
            shutil.rmtree(self._path(step))

    def check(self) -> None:
        """Raises what went wrong in the background since the last call; never waits."""
        if self._error is not None:
            error, self._error = self._error, None
            raise OSError(f"a checkpoint could not be written: {error}") from error

    def wait(self) -> None:
        """Until nothing is being written; then as `check`."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        self.check()

    def load(self, at_most: int | None = None) -> Found | None:
        """The newest whole checkpoint (of step `at_most` or before); damaged ones are set aside with a warning."""
        self.wait()
        for step in reversed(self.steps()):
            if at_most is not None and step > at_most:
                continue
            try:
                return read_checkpoint(self._path(step))
            except ValueError as error:
                self.say(f"warning: checkpoint set aside as damaged: {error}")
                aside = self.folder / f"damaged-{self._path(step).name}"
                remove(aside)
                self._path(step).rename(aside)
        return None

    def load_best(self) -> Found:
        """The best checkpoint. ValueError when it is damaged or there is none."""
        self.wait()
        return read_checkpoint(self.folder / "best")

    def drop_after(self, step: int) -> None:
        """Forget checkpoints of later steps: the run went back before them and will come by another way."""
        self.wait()
        for later in self.steps():
            if later > step:
                shutil.rmtree(self._path(later))

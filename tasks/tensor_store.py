"""Streaming access to directories of safetensors, one tensor at a time, so that no stage holds a whole model.

python -m tasks.tensor_store data/distill      prints every tensor's name, dtype and shape
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tasks.files import atomic_write


class TensorReader:
    """Tensors of a directory of safetensors files by name; with an index file or without. ValueError when there is none.

    `pattern` selects the files (a directory may hold calibration data beside the weights).
    """

    def __init__(self, folder: Path, pattern: str = "*.safetensors"):
        from safetensors import safe_open

        self.folder = Path(folder)
        files = sorted(self.folder.glob(pattern))
        if not files:
            raise ValueError(f"{self.folder} holds no {pattern} file: expected a checkpoint directory")
        self._open = [safe_open(str(f), framework="pt") for f in files]
        self._where = {name: handle for handle in self._open for name in handle.keys()}

    def names(self) -> list[str]:
        """Every tensor name, sorted so that layer 10 follows layer 9."""
        return sorted(self._where, key=natural_key)

    def get(self, name: str):
        """One tensor. KeyError when the directory does not have it."""
        return self._where[name].get_tensor(name)

    def __iter__(self) -> Iterator[tuple[str, object]]:
        for name in self.names():
            yield name, self.get(name)


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Sort key in which numbers inside dotted names compare as numbers."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


class TensorWriter:
    """Writes `<stem>.safetensors`, or `<stem>-0000i-of-0000n.safetensors` with an index once `shard_bytes` is exceeded.

    `always_number` names even a single shard with its number, and writes its index. Use as a context manager.
    """

    def __init__(self, folder: Path, stem: str = "model", shard_bytes: int = 4 << 30, *, always_number: bool = False):
        self.folder, self.stem, self.shard_bytes, self.always_number = Path(folder), stem, shard_bytes, always_number
        self.folder.mkdir(parents=True, exist_ok=True)
        self._pending: dict = {}
        self._pending_bytes = self._total = 0
        self._shards: list[list[str]] = []

    def put(self, name: str, tensor) -> None:
        """Add one tensor (kept until its shard is full). ValueError for a name that was already written."""
        if name in self._pending or any(name in shard for shard in self._shards):
            raise ValueError(f"tensor {name} written twice to {self.folder}")
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += size
        self._total += size

    def _part(self, number: int) -> Path:
        return self.folder / f"{self.stem}.part{number:05d}.safetensors"

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self._pending, str(self._part(len(self._shards))), metadata={"format": "pt"})
        self._shards.append(sorted(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is not None:
            return
        if self._pending:
            self._flush()
        count = len(self._shards)
        single = count == 1 and not self.always_number
        weight_map = {}
        for number, names in enumerate(self._shards):
            final = f"{self.stem}.safetensors" if single else f"{self.stem}-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        if not single:
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
            atomic_write(self.folder / f"{self.stem}.safetensors.index.json", json.dumps(index, indent=2) + "\n")


COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def copy_side_files(source: Path, target: Path, *, config_update: dict | None = None) -> None:
    """Copy a checkpoint's configuration and tokenizer files; `config_update` is merged into config.json."""
    for name in COPIED:
        if (Path(source) / name).is_file():
            data = (Path(source) / name).read_bytes()
            if name == "config.json" and config_update:
                data = (json.dumps(json.loads(data) | config_update, indent=2, sort_keys=True) + "\n").encode()
            atomic_write(Path(target) / name, data)


if __name__ == "__main__":
    for tensor_name, tensor in TensorReader(Path(sys.argv[1])):
        print(f"{tensor_name:70s} {str(tensor.dtype):18s} {list(tensor.shape)}")

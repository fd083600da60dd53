"""Start any phase from a checkpoint directory: `init_from:` in a stage's section of params.yaml.

    sft:
      init_from: /models/GLM-5            # instead of data/dsa_adapt; relative paths start at the project
      init_sha256: 4f0c...                # optional: what `python -m tasks init-check` printed; anything else is refused

    python -m tasks init-check DIR        every tensor accounted for, tokenizer, content hash; nothing is written
    dvc repro -s sft                      that stage alone; its upstream stages need not exist

The directory is one of this project's, one that transformers saved, or a published one (model/checkpoint_import.py); the
latter two are converted once into the stage's scratch. The hash of the directory's content is part of the stage's identity
and of its output's manifest, so that a changed checkpoint is another run. dvc.yaml names the same path in the stage's deps,
`- ${sft.init_from}`, which DVC fills in from params.yaml: the graph then has no edge to the stages that are not needed.

Check it:  python -m pytest tests/tasks/test_init_from.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tasks.files import atomic_dir, content_hash
from tasks.stage import FromCheckpoint, Stage


def starting_checkpoint(stage: Stage) -> Path | None:
    """The directory, in this project's layout, that a stage starts from; None for a stage that starts from nothing.

    ValueError when `init_from` does not fit its own config.json, or its tokenizer is not the one of the stage's data.
    """
    config: FromCheckpoint = stage.config
    path = config.starts_elsewhere(stage.spec)
    if path is None:
        declared = config.init_from or config.declared(stage.spec)
        return stage.dep(declared) if declared else None
    if stage.starting is None:
        stage.starting = _prepare(stage, stage.root / path)
    return stage.starting


def _prepare(stage: Stage, directory: Path) -> Path:
    from model.checkpoint_import import convert_checkpoint, scan_checkpoint

    scan = scan_checkpoint(directory)
    stage.print(f"init_from: {scan.report()}")
    check_tokenizer(stage, directory)
    if scan.is_own_layout:
        return directory
    converted = stage.scratch / "init"
    if not converted.is_dir():
        with atomic_dir(converted) as folder:
            convert_checkpoint(directory, folder)
        stage.print(f"init_from: converted to this project's layout in {converted.relative_to(stage.root)}")
    return converted


def check_tokenizer(stage: Stage, directory: Path) -> None:
    """ValueError when the checkpoint's tokenizer and the one that made the stage's data differ, saying where.

    Data is tied to a tokenizer by its own records: `data/tokenizer` among the dependencies, or the byte length of every
    token in `data/pack/*`. A checkpoint without a tokenizer passes where the stage has another source for it.
    """
    theirs, ours = directory / "tokenizer.json", "data/tokenizer"
    if not theirs.is_file():
        if ours not in stage.spec.deps:
            raise ValueError(
                f"init_from {directory} has no tokenizer.json, and stage {stage.name} has no other tokenizer"
            )
        return
    vocabulary = _vocabulary(theirs)
    if ours in stage.spec.deps:
        _same(_vocabulary(stage.dep(ours) / "tokenizer.json"), vocabulary, f"{ours}/tokenizer.json", theirs)
    packed = next((d for d in stage.spec.deps if d.startswith("data/pack")), None)
    if packed:
        from tokenizers import Tokenizer

        from tasks.tokens import TokenSet, token_byte_lengths

        lengths = token_byte_lengths(Tokenizer.from_file(str(theirs)))
        made = TokenSet(stage.dep(packed)).token_bytes
        if len(lengths) != len(made) or (lengths != made).any():
            raise ValueError(
                f"{packed} was made by another tokenizer than {theirs}: {len(made)} tokens there, {len(lengths)} here"
                + (", of other lengths" if len(lengths) == len(made) else "")
                + ". Pack the data with the checkpoint's tokenizer (tokenizer.init_from)"
            )


def _vocabulary(path: Path) -> dict[str, int]:
    """Token -> id of a tokenizer.json, added tokens included."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    return {**raw.get("model", {}).get("vocab", {}), **{t["content"]: t["id"] for t in raw.get("added_tokens", [])}}


def _same(ours: dict[str, int], theirs: dict[str, int], our_name: str, their_path: Path) -> None:
    if ours == theirs:
        return
    token = min((t for t in {*ours, *theirs} if ours.get(t) != theirs.get(t)), key=lambda t: (ours.get(t, 1 << 60), t))
    raise ValueError(
        f"the tokenizers of {our_name} ({len(ours)} tokens) and {their_path} ({len(theirs)}) differ, first at {token!r}: "
        f"id {ours.get(token)} and {theirs.get(token)}"
    )


def main(argv: list[str]) -> int:
    """`python -m tasks init-check DIR`: what a directory holds, or what does not fit (ValueError)."""
    if len(argv) != 1:
        raise ValueError("usage: python -m tasks init-check DIR")
    from model.checkpoint_import import scan_checkpoint

    directory = Path(argv[0])
    scan = scan_checkpoint(directory)
    print(scan.report())
    print(
        "layout: "
        + ("this project's own" if scan.is_own_layout else "published; converted when a stage starts from it")
    )
    tokenizer = directory / "tokenizer.json"
    print(f"tokenizer: {len(_vocabulary(tokenizer))} tokens" if tokenizer.is_file() else "tokenizer: none")
    sys.stdout.flush()
    print(f"init_sha256: {content_hash(directory)}")
    return 0

"""Resume checkpoints of a training run: written by all ranks, whole or not at all, checked before use, and kept few.

    step-00000050/   weights and optimizer state in a file per rank, counters, manifest.json (tasks/resume_files.py)
    best/            the same, of the best held-out evaluation

Every rank writes what it owns into one staging directory, flushes it and reports bytes and hash; when all have, the writer
adds the manifest and renames the directory, so that a kill of any rank at any moment leaves the one before. An error on one
rank is raised on all. Nothing but these reports is sent. What a disk breaks afterwards (a torn, shortened or flipped file)
is found by its hash: each rank checks its share of the files, the checkpoint is set aside with a warning and the one before
is used. With `background` a thread of each rank writes from a copy in host memory while training goes on; one checkpoint is
under way at most, and it is finished, or its error raised, at the step after the last rank is done. All ranks must see
`folder` (one machine, or a file system that they share) and call every method but `steps`.

Check it:  python -m pytest tests/tasks/test_resume.py tests/tasks/test_resume_ranks.py
Measure:   python -m tests.bench.checkpointing
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from model.state_parts import Piece, Source
from tasks.files import fsync_dir, remove, replace_path
from tasks.parallel import SINGLE, Parallel
from tasks.resume_files import check_checkpoint, open_checkpoint, part_name, to_host, write_end, write_part

Files = Mapping[str, Sequence[Piece] | Mapping[str, Tensor]]  # stem -> what this rank writes; whole tensors do, too


@dataclass(frozen=True)
class Found:
    """A checkpoint that was checked: its step, the tensors of each file, to be read from it, and the JSON-able state."""

    step: int
    files: Mapping[str, Source]
    state: dict[str, Any]


def read_checkpoint(folder: Path) -> Found:
    """A checkpoint, checked by this process alone. ValueError as `check_checkpoint`."""
    check_checkpoint(folder)
    files, state = open_checkpoint(folder)
    return Found(state["step"], files, state)


class _Save:
    """A checkpoint under way: this rank's part of it, its thread, and what came of it."""

    def __init__(self, final: Path, state: dict[str, Any]) -> None:
        self.final, self.state = final, state
        self.staging = final.with_name(f".{final.name}.partial")
        self.report: dict[str, Any] = {}
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def write(self, files: Mapping[str, Sequence[Piece]], rank: int, world: int) -> None:
        if not self.staging.is_dir():
            raise OSError(f"{self.staging} is not seen here: the ranks need one file system for resume checkpoints")
        for stem, pieces in files.items():
            name = part_name(stem, rank, world)
            self.report[name] = write_part(self.staging / name, pieces)

    def guarded_write(self, *args: Any) -> None:
        try:
            self.write(*args)
        except BaseException as error:  # noqa: BLE001 (handed to the training loop)
            self.error = error


class ResumeStore:
    """The checkpoints of one run in `folder`, the newest `keep_last` of them; `say` gets warnings."""

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        say: Callable[[str], None],
        background: bool = False,
        ranks: Parallel = SINGLE,
    ) -> None:
        self.folder, self.keep_last, self.say, self.background = Path(folder), keep_last, say, background
        self.ranks = ranks
        self._save: _Save | None = None
        self._swept = False

    def steps(self) -> list[int]:
        """Steps of the checkpoints in place, ascending."""
        return sorted(int(p.name[5:]) for p in self.folder.glob("step-*") if re.fullmatch(r"step-\d{8}", p.name))

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _sweep(self) -> None:
        """Once, on the writer: what a killed run left half done goes, or goes back to its place."""
        if self._swept:
            return
        self._swept = True
        for left in [*self.folder.glob(".step-*.partial"), *self.folder.glob(".best.partial")]:
            remove(left)
        for aside in [*self.folder.glob(".step-*.old"), *self.folder.glob(".best.old")]:
            place = self.folder / aside.name[1 : -len(".old")]
            if place.exists():
                remove(aside)
            else:  # killed between the two renames of a replacement
                aside.rename(place)

    # writing
    def save(self, step: int, files: Files, state: Mapping[str, Any], *, best: bool = False) -> None:
        """Write the checkpoint of a step, or replace the best one; with `background` this returns after a copy in memory.

        files: of every stem ('model', 'optimizer'), what this rank owns. OSError on all ranks when it cannot be written.
        """
        self.wait()
        # the loop goes on changing its lists
        save = _Save(self.folder / "best" if best else self._path(step), json.loads(json.dumps(state)))
        self._agree(self._prepare, save)
        self._save = save
        try:
            hosted = {
                stem: to_host(
                    [Piece.whole(*i) for i in own.items()] if isinstance(own, Mapping) else own, self.background
                )
                for stem, own in files.items()
            }
        except Exception as error:  # noqa: BLE001 (no memory for the copy: the other ranks must hear of it)
            save.error, hosted = error, {}
        args = (hosted, self.ranks.rank, self.ranks.world)
        if self.background:
            save.thread = threading.Thread(target=save.guarded_write, args=args, name="checkpoint")
            save.thread.start()
        else:
            save.guarded_write(*args)
            self._finish()

    def _prepare(self, save: _Save) -> None:
        self._sweep()
        remove(save.staging)
        save.staging.mkdir(parents=True)

    def _agree(self, act: Callable[..., None], *args: Any) -> None:
        """The writer acts; what goes wrong there is raised on all ranks."""
        error = None
        if self.ranks.is_writer:
            try:
                act(*args)
            except Exception as caught:  # noqa: BLE001 (raised below, on all ranks)
                error = caught
        text = self.ranks.first(None if error is None else f"a checkpoint could not be written: {error}")
        if text is not None:
            raise OSError(text) from error

    def _finish(self) -> None:
        """All ranks have written or failed: publish the checkpoint, or raise on all what went wrong on one."""
        save, self._save = self._save, None
        if isinstance(save.error, KeyboardInterrupt | SystemExit):
            raise save.error
        reports = self.ranks.exchange({"files": save.report, "error": save.error and str(save.error)})
        failed = [f"rank {rank}: {row['error']}" for rank, row in enumerate(reports) if row["error"] is not None]
        if failed:
            if self.ranks.is_writer:
                remove(save.staging)
            text = failed[0] if self.ranks.world > 1 else failed[0].partition(": ")[2]
            raise OSError(f"a checkpoint could not be written: {text}") from save.error
        self._agree(self._publish, save, {name: row for report in reports for name, row in report["files"].items()})

    def _publish(self, save: _Save, listed: dict[str, dict[str, Any]]) -> None:
        try:
            write_end(save.staging, listed, save.state)
        except BaseException:
            remove(save.staging)
            raise
        fsync_dir(save.staging)
        replace_path(save.staging, save.final)
        for step in self.steps()[: -self.keep_last]:
            shutil.rmtree(self._path(step))

    def check(self) -> None:
        """Finish what has been written in the background on all ranks, or raise what went wrong there; never waits for it."""
        if self._save is not None and not self.ranks.any_(self._save.thread.is_alive()):
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written; then as `check`."""
        if self._save is not None:
            self._save.thread.join()
            self._finish()

    # reading
    def load(self, at_most: int | None = None) -> Found | None:
        """The newest whole checkpoint (of step `at_most` or before); damaged ones are set aside with a warning."""
        self.wait()
        self._agree(self._sweep)
        while True:
            fitting = [step for step in self.steps() if at_most is None or step <= at_most]
            step = self.ranks.first(fitting[-1] if fitting else None)
            if step is None:
                return None
            folder = self._path(step)
            problem = self._problem(folder)
            if problem is None:
                files, state = open_checkpoint(folder)
                return Found(state["step"], files, state)
            self.say(f"warning: checkpoint set aside as damaged: {problem}")
            if self.ranks.is_writer:
                for older in self.folder.glob("damaged-step-*"):  # one is kept to look at
                    remove(older)
                folder.rename(self.folder / f"damaged-{folder.name}")

    def _problem(self, folder: Path) -> str | None:
        """What is wrong with a checkpoint; every rank looks at its share of the files.

        OSError on all ranks when one does not see it: that is no damage, and setting it aside would lose it.
        """
        try:
            check_checkpoint(folder, self.ranks.rank, self.ranks.world)
            problem = None
        except ValueError as error:
            problem = str(error)
        found = self.ranks.exchange([folder.is_dir(), problem])
        blind = [rank for rank, (seen, _) in enumerate(found) if not seen]
        if blind and found[0][0]:
            raise OSError(
                f"rank {blind[0]} does not see {folder}: the ranks need one file system for resume checkpoints"
            )
        return next((problem for _, problem in found if problem is not None), None)

    def load_best(self) -> Found:
        """The best checkpoint. ValueError when it is damaged or there is none."""
        self.wait()
        self._agree(self._sweep)
        problem = self._problem(self.folder / "best")
        if problem is not None:
            raise ValueError(problem)
        files, state = open_checkpoint(self.folder / "best")
        return Found(state["step"], files, state)

    def drop_after(self, step: int) -> None:
        """Forget checkpoints of later steps: the run went back before them and will come by another way."""
        self.wait()
        for later in self.steps() if self.ranks.is_writer else ():
            if later > step:
                shutil.rmtree(self._path(later))

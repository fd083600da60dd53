"""Checkpoints of several ranks: read by any number in any layout, nothing gathered, whole or absent after a kill or an error.

python -m pytest tests/tasks/test_resume_ranks.py
"""

import itertools
import json
import os
import resource
import signal

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import tasks.files
import tasks.resume
import tasks.resume_files
from model.state_parts import Piece, Region, share_out
from tasks.files import canonical_json
from tasks.parallel import ParallelSettings, current
from tasks.resume import ResumeStore, read_checkpoint
from tasks.resume_files import file_hash, write_end, write_part
from tests.model.ranks import RankError, run_ranks
from tests.tasks.resume_case import Spread, reference
from tests.tasks.test_resume import equal

LAYOUTS = {
    1: {"one": None},
    2: {"two": ParallelSettings(), "two, experts": ParallelSettings(expert=2)},
    4: {"four": ParallelSettings(), "four, experts twice": ParallelSettings(expert=2)},
}


# ---- files, without ranks


def write_shares(folder, tensors, world):
    folder.mkdir()
    listed = {}
    for rank in range(world):
        name = f"model-{rank + 1:05d}-of-{world:05d}.safetensors"
        listed[name] = write_part(folder / name, share_out(tensors, rank, world))
    write_end(folder, listed, {"step": 1})


@pytest.mark.parametrize("world", [2, 5])
def test_any_region_is_read_exactly(tmp_path, world):
    generator = torch.Generator().manual_seed(world)
    tensors = {
        "a": torch.randn(7, 11, generator=generator), "b": torch.randn(3, generator=generator).bfloat16(),
        "c": torch.tensor(4.0), "d": torch.randn(2, 5, 6, generator=generator).double(), "e": torch.zeros(0, 2),
    }  # fmt: skip
    write_shares(tmp_path / "step-00000001", tensors, world)
    source = read_checkpoint(tmp_path / "step-00000001").files["model"]
    assert source.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert source.shape(name) == tuple(tensor.shape) and torch.equal(source[name], tensor)
        size = tensor.numel()
        for start, length, gap, count in itertools.product((0, 1, size // 2), (1, 4, size), (0, 3), (1, 2, 3)):
            region = Region(start, length, length + gap, count)
            if list(region.runs())[-1][1] <= size and length:
                before = source.bytes_read
                assert torch.equal(source.read(name, region), region.view(tensor).reshape(-1))
                assert source.bytes_read - before == region.numel * tensor.element_size(), "no more than was asked for"


def test_an_engine_that_forgets_or_doubles_a_part_is_refused(tmp_path):
    values = torch.arange(10.0)
    for number, (ranges, message) in enumerate(
        [([(0, 4), (6, 10)], r"elements 4\.\.6 of w are written by no rank"),
         ([(0, 4), (3, 10)], r"elements 3\.\.4 of w are written twice"),
         ([(0, 9)], r"elements 9\.\.10 of w are written by no rank")]
    ):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        for rank, (first, last) in enumerate(ranges):
            piece = Piece.part("w", (10,), values[first:last], Region.range(first, last))
            write_part(folder / f"model-{rank + 1:05d}-of-00002.safetensors", [piece])
        with pytest.raises(ValueError, match=message):
            write_end(folder, {}, {"step": 1})


def before(folder, weights, state):
    """A checkpoint as one process wrote it before there was an index: whole tensors in two files."""
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    save_file(state, folder / "optimizer.safetensors")
    (folder / "trainer.json").write_text(json.dumps({"step": 5}))
    rows = {p.name: {"bytes": p.stat().st_size, "xxh3_128": file_hash(p)} for p in sorted(folder.iterdir())}
    check = tasks.resume_files.xxhash.xxh3_128(canonical_json(rows).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"files": rows, "check": check}))


# ---- layouts


def saved(rank, world, folder, seed, runs, muon):
    weights, state = reference(muon, seed)
    for name, settings in runs.items():
        Spread(folder / name, settings, muon).fill(weights, state).save(5)


def loaded(rank, world, folder, settings, muon="split"):
    return Spread(folder, settings, muon).load()


def loaded_all(rank, world, folder, names, runs, muon):
    return {(name, kind): loaded(rank, world, folder / name, s, muon) for name in names for kind, s in runs.items()}


def same_as(results, weights, state):
    assert all(found[0] == 5 for found in results)
    for ours, theirs in ((results[0][1], weights), (results[0][2], state)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], theirs[k]) for k in theirs)


def exchange(folder, worlds, muon="split", written=()):
    """Every layout of `worlds` writes (but those already `written`); every layout reads what each wrote, to the bit."""
    weights, state = reference(muon, 1)
    for world in set(worlds) - set(written):
        if world == 1:
            saved(0, 1, folder, 1, LAYOUTS[1], muon)
        else:
            run_ranks(world, saved, folder, 1, LAYOUTS[world], muon)
    before(folder / "before/step-00000005", weights, state)
    names = ["before", *(name for world in worlds for name in LAYOUTS[world])]
    for world in worlds:
        if world == 1:
            results = [loaded_all(0, 1, folder, names, LAYOUTS[1], muon)]
        else:
            results = run_ranks(world, loaded_all, folder, names, LAYOUTS[world], muon)
        for key in results[0]:
            same_as([found[key] for found in results], weights, state)
            size = sum(t.nbytes for t in state.values())
            reads = [found[key][3]["optimizer"] for found in results]
            counters = 4 * len(state) * world  # a parameter's counter is read by all who own a part
            assert size <= sum(reads) <= size + counters and max(reads) < 0.7 * size + counters or world == 1


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two ranks do without being killed, in one set of processes: results[name] of both, and where."""
    folder = tmp_path_factory.mktemp("two")
    results = run_ranks(2, several, folder)
    return {name: [found[name] for found in results] for name in results[0]}, folder


def several(rank, world, folder):
    saved(rank, world, folder / "layouts", 1, LAYOUTS[2], "split")
    return {
        "counted": counted(rank, world, folder / "counted", ParallelSettings(expert=2)),
        "full": limited(rank, world, folder / "full", False, 1),
        "full, background": limited(rank, world, folder / "full in background", True, 0),
        "no manifest": no_manifest(rank, world, folder / "no manifest"),
        "apart": apart(rank, world, folder / "apart"),
        "fallback": fallback(rank, world, folder / "fallback"),
        "background": in_background(rank, world, folder / "background"),
    }


def test_every_layout_reads_what_another_wrote(two):
    tmp_path = two[1] / "layouts"
    exchange(tmp_path, (1, 2), written=(2,))
    assert sorted(p.name for p in (tmp_path / "two, experts/step-00000005").iterdir()) == [
        "index.json", "manifest.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors", "trainer.json",
    ]  # fmt: skip
    for stem in ("model", "optimizer"):
        sizes = [p.stat().st_size for p in (tmp_path / "two/step-00000005").glob(f"{stem}-*.safetensors")]
        assert max(sizes) < 0.6 * sum(sizes), "both ranks write, as much"
    for kind in ("missing", "flipped bit"):
        damage_part(tmp_path / "two/step-00000005", kind)
        with pytest.raises(
            ValueError, match="optimizer-00002-of-00002.safetensors (is missing|does not match its hash)"
        ):
            read_checkpoint(tmp_path / "two/step-00000005")


def damage_part(folder, kind):
    path = folder / "optimizer-00002-of-00002.safetensors"
    if kind == "missing":
        path.rename(folder / "aside")
        return
    (folder / "aside").rename(path)
    data = bytearray(path.read_bytes())
    data[-5] ^= 8
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("muon", ["split", "off"])
def test_four_ranks_and_experts_held_twice(tmp_path, muon):
    exchange(tmp_path, (1, 2, 4), muon)


# ---- what is sent and held


def counted(rank, world, folder, settings):
    """Bytes that reach this rank from others: in save, and in the gather of before."""
    spread = Spread(folder, settings).fill(*reference())
    got = {"bytes": 0}
    real = {name: getattr(dist, name) for name in ("recv", "all_gather", "broadcast", "gather", "all_reduce", "reduce")}

    def note(name):
        def call(first, *rest, **options):
            tensors = first if isinstance(first, list) else [first]
            got["bytes"] += sum(t.nbytes for t in tensors)
            return real[name](first, *rest, **options)

        return call

    for name in real:
        setattr(dist, name, note(name))
    spread.save(1)
    saving = got["bytes"]
    got["bytes"] = 0
    spread.optimizer.state_tensors()
    gathering = got["bytes"]
    for name, function in real.items():
        setattr(dist, name, function)
    owned = {stem: sum(p.nbytes for p in pieces) for stem, pieces in spread.files().items()}
    return saving, gathering, owned


def test_nothing_is_gathered_and_owners_hold_their_share(two):
    weights, state = reference()
    total = {"model": sum(t.nbytes for t in weights.values()), "optimizer": sum(t.nbytes for t in state.values())}
    found = two[0]["counted"]
    for saving, _, owned in found:
        assert saving < 4096, "reports of bytes and hashes only"
        for stem, size in owned.items():
            assert size < 0.6 * total[stem], "what a rank hands over is what it owns"
    for stem in total:
        assert sum(owned[stem] for *_, owned in found) == total[stem]
    assert found[0][1] > 0.4 * total["optimizer"] > 20 * found[0][0], "the gather of before, for comparison"


# ---- kills


def plant(victim, function, call, when):
    """The rank dies in the call-th call of a function of the writing, before or after it (or half way through a file)."""
    module = {"save_file": tasks.resume_files, "rename": os, "rmtree": tasks.resume.shutil}.get(function, tasks.resume)
    real, calls = getattr(module, function), itertools.count(1)

    def planted(*args, **options):
        number = next(calls)
        if number == call and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **options)
        if number == call:
            if when == "half":
                with open(args[1], "r+b") as file:
                    file.truncate(os.path.getsize(args[1]) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    if current().rank == victim:
        setattr(module, function, planted)


def tensors_of(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {f"w{i}": torch.randn(40, 30, generator=generator) for i in range(3)},
        "optimizer": {f"w{i}.m": torch.randn(40, 30, generator=generator) for i in range(3)},
    }


def shares(step):
    ranks = current()
    return {stem: share_out(tensors, ranks.rank, ranks.world) for stem, tensors in tensors_of(step).items()}


def killed(rank, world, folder, background, best, moment):
    store = ResumeStore(folder, 2, print, background, current())
    for step in (1, 2):
        store.save(step, shares(step), {"step": step})
    store.save(2, shares(2), {"step": 2}, best=True)
    store.wait()
    plant(*moment)
    store.save(3, shares(3), {"step": 3}, best=best)
    store.wait()
    raise AssertionError("nobody died")


def saved_again(rank, world, folder, step):
    store = ResumeStore(folder, 2, print, ranks=current())
    found = store.load()
    content = {stem: dict(source) for stem, source in found.files.items()}
    left = sorted(p.name for p in folder.iterdir())
    best = store.load_best()
    best = best.step, {stem: dict(source) for stem, source in best.files.items()}
    current().first(None)
    store.save(step, shares(step), {"step": step})
    return found.step, content, left, best, sorted(p.name for p in folder.iterdir())


# victim, function, its call, before or after it; what is newest afterwards; whether the best one is replaced
QUICK = [
    ((1, "save_file", 2, "half"), 2, False),
    ((0, "rename", 2, "before"), 2, True),
]
SLOW = [
    ((1, "write_part", 1, "before"), 2, False),
    ((0, "write_end", 1, "after"), 2, False),
    ((0, "save_file", 1, "half"), 2, False),
    ((1, "write_part", 2, "after"), 2, False),
    ((0, "write_part", 2, "after"), 2, False),
    ((0, "write_end", 1, "before"), 2, False),
    ((0, "replace_path", 1, "before"), 2, False),
    ((0, "replace_path", 1, "after"), 3, False),
    ((0, "rmtree", 1, "before"), 3, False),
    ((0, "rmtree", 1, "after"), 3, False),
    ((1, "write_part", 1, "after"), 2, True),
    ((0, "rename", 1, "before"), 2, True),
    ((0, "rename", 1, "after"), 2, True),
    ((0, "replace_path", 1, "after"), 2, True),
]


def after_a_kill(folder, background, moment, newest, best):
    folder.mkdir()
    with pytest.raises(RankError) as caught:
        run_ranks(2, killed, folder, background, best, moment)
    text, other = str(caught.value), 1 - moment[0]
    assert f"rank {moment[0]} (exit code -9)" in text and "nobody died" not in text
    assert f"rank {other} (exit code 1):\nTraceback" in text, f"the other rank ends by itself: {text}"
    for found, content, left, (best_step, best_content), end in run_ranks(2, saved_again, folder, 4):
        assert found == newest and equal(content, tensors_of(newest))
        assert [name for name in left if name.startswith(".") or name.startswith("damaged")] == [], left
        replaced = best and moment[1] == "replace_path" and moment[3] == "after"
        assert best_step == (3 if replaced else 2) and equal(best_content, tensors_of(best_step))
        assert end == ["best", *[f"step-{step:08d}" for step in (newest, 4)]]


@pytest.mark.parametrize("moment, newest, best", QUICK)
def test_kill_9_of_any_rank_while_saving(tmp_path, moment, newest, best):
    after_a_kill(tmp_path / "a", background=best, moment=moment, newest=newest, best=best)


@pytest.mark.slow
def test_kill_9_at_every_moment(tmp_path):
    for number, (moment, newest, best) in enumerate(SLOW):
        after_a_kill(tmp_path / str(number), number % 2 == 1, moment, newest, best)


# ---- errors


def limited(rank, world, folder, background, victim):
    """A disk that is full on one rank: files may not grow beyond a few kilobytes there."""
    store = ResumeStore(folder, 2, print, background, current())
    store.save(1, shares(1), {"step": 1})
    store.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    messages = []
    try:
        store.save(2, shares(2), {"step": 2})
        while store._save is not None:
            store.check()
    except OSError as error:
        messages.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    current().first(None)
    left = sorted(p.name for p in folder.iterdir())
    current().first(None)
    store.save(3, shares(3), {"step": 3})
    found = store.load()
    return messages, left, found.step, {stem: dict(source) for stem, source in found.files.items()}


@pytest.mark.parametrize("name, victim", [("full", 1), ("full, background", 0)])
def test_a_full_disk_on_one_rank_is_an_error_on_all(two, name, victim):
    for messages, left, step, content in two[0][name]:
        assert len(messages) == 1 and f"a checkpoint could not be written: rank {victim}: " in messages[0], messages
        assert "too large" in messages[0], messages
        assert left == ["step-00000001"] and step == 3 and equal(content, tensors_of(3))


def no_manifest(rank, world, folder):
    store = ResumeStore(folder, 2, print, ranks=current())

    def full(*args):
        raise OSError(28, "No space left on device")

    real, tasks.resume_files.write_synced = tasks.resume_files.write_synced, full
    with pytest.raises(OSError, match="a checkpoint could not be written: .*No space left on device"):
        store.save(1, shares(1), {"step": 1})
    tasks.resume_files.write_synced = real
    return sorted(p.name for p in folder.iterdir())


def test_a_disk_that_is_full_for_the_manifest_is_an_error_on_all(two):
    assert two[0]["no manifest"] == [[], []]


def apart(rank, world, folder):
    store = ResumeStore(folder / str(rank), 2, print, ranks=current())
    with pytest.raises(OSError) as caught:
        store.save(1, shares(1), {"step": 1})
    if rank == 0:
        ResumeStore(folder / "0", 2, print).save(2, {"model": tensors_of(2)["model"]}, {"step": 2})
    with pytest.raises(OSError) as not_seen:
        store.load()
    return str(caught.value), str(not_seen.value)


def test_ranks_without_a_common_file_system_are_told(two):
    for text in (text for found in two[0]["apart"] for text in found):
        assert "rank 1" in text and "need one file system" in text
    assert read_checkpoint(two[1] / "apart/0/step-00000002").step == 2, "one that a rank does not see is not damaged"


# ---- damage and background on several ranks


def fallback(rank, world, folder):
    lines = []
    store = ResumeStore(folder, 2, lines.append, ranks=current())
    for step in (1, 2):
        store.save(step, shares(step), {"step": step})
    if rank == 0:
        path = folder / "step-00000002/optimizer-00001-of-00002.safetensors"
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
    current().first(None)
    found = store.load()
    return found.step, {stem: dict(source) for stem, source in found.files.items()}, lines


def test_a_damaged_part_is_found_whichever_rank_looks_at_it(two):
    for step, content, lines in two[0]["fallback"]:
        assert step == 1 and equal(content, tensors_of(1))
        assert len(lines) == 1 and "optimizer-00001-of-00002.safetensors does not match its hash" in lines[0]
    assert sorted(p.name for p in (two[1] / "fallback").iterdir()) == ["damaged-step-00000002", "step-00000001"]


def in_background(rank, world, folder):
    for name, background in (("plain", False), ("threads", True)):
        store = ResumeStore(folder / name, 2, print, background, current())
        for step in (1, 2, 3):
            pieces = shares(step)
            store.save(step, pieces, {"step": step})
            if background:
                for own in pieces.values():
                    for piece in own:
                        piece.values.zero_()  # training goes on
            store.check()
        store.wait()


def test_background_files_are_those_of_the_moment(two):
    tmp_path = two[1] / "background"
    names = sorted(p.relative_to(tmp_path / "plain") for p in (tmp_path / "plain").rglob("*") if p.is_file())
    assert len(names) == 2 * 7
    for name in names:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "threads" / name).read_bytes(), name

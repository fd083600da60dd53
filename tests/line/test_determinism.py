"""The real line on the micro profile: equal runs leave equal locks, and so does a run in which every stage was killed.

A lock holds the hash of every output, so equal locks mean byte-identical outputs. Minutes of work, and the corpus is
fetched (once: downloads are kept by hash in work/cache, or $ARCLINE_CACHE).
"""

import os
import random
import shutil
import subprocess
import time

import psutil
import pytest

from tests.flows.toy import REPO, Project, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(3600)]
FLOW = ("-m", "flows.lifecycle")


class Checkout(Project):
    """A copy of `source`'s files on the micro profile, nothing run yet."""

    def __init__(self, root, source, env):
        super().__init__(root)
        shutil.copytree(source, root, dirs_exist_ok=True)
        self.extra = {**env, "MLFLOW_TRACKING_URI": "sqlite:///none.db", "GIT_CEILING_DIRECTORIES": str(root.parent)}
        self.extra["ARCLINE_CACHE"] = os.environ.get("ARCLINE_CACHE") or str(REPO / "work" / "cache")
        assert self.run("-m", "tasks", "profile", "micro")[0] == 0

    def watched_run(self, kill_after: dict[str, float], *args: str) -> tuple[int, dict[str, float], set[str]]:
        """One flow run. Stages named in kill_after get SIGKILL that many seconds after they started, once.

        Returns the exit status, how long each stage was seen running, and which were killed.
        """
        process = self.start(*FLOW, *args, **self.extra)
        begun: dict[str, float] = {}
        lasted: dict[str, float] = {}
        killed: set[str] = set()
        while process.poll() is None:
            for name, stage in self.stages_now().items():
                now = time.monotonic()
                begun.setdefault(name, now)
                lasted[name] = now - begun[name]
                if name in kill_after and name not in killed and lasted[name] >= kill_after[name]:
                    stage.kill()
                    killed.add(name)
            time.sleep(0.05)
        return process.returncode, lasted, killed

    def stages_now(self) -> dict[str, psutil.Process]:
        found = {}
        for process in psutil.process_iter():
            try:
                line = process.cmdline()
                if line[-3:-1] == ["-m", "tasks"] and process.cwd() == str(self.root):
                    found[line[-1]] = process
            except psutil.Error:
                continue
        return found


def output(project):
    return sorted((project.root / "work").glob("out-*.txt"), key=lambda p: int(p.stem[4:]))[-1].read_text()[-4000:]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """This checkout's own files as they are now: code is a dependency of stages, so all runs here use one copy."""
    root = tmp_path_factory.mktemp("source")
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, check=True).stdout.decode()
    for name in listed.split("\0"):
        if name and name != "dvc.lock" and (REPO / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, root / name)
    with open(root / ".dvc" / "config", "a") as file:
        file.write("    no_scm = true\n")
    return root


@pytest.fixture(scope="module")
def clean(tmp_path_factory, source, services):
    """The micro line run once without a disturbance: the checkout and how long each stage took."""
    project = Checkout(tmp_path_factory.mktemp("clean"), source, services)
    status, lasted, _ = project.watched_run({})
    assert status == 0, output(project)
    return project, lasted


def differences(one, two):
    """Stages whose entries in dvc.lock differ: what to look at when a test here fails."""
    import yaml

    a, b = (yaml.safe_load(project.lock())["stages"] for project in (one, two))
    return [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]


def test_two_clean_runs_give_the_same_lock(clean, source, tmp_path, services):
    again = Checkout(tmp_path, source, services)
    status, _, _ = again.watched_run({})
    assert status == 0, output(again)
    assert differences(clean[0], again) == []
    assert clean[0].lock() == again.lock()
    shutil.rmtree(tmp_path)


def test_every_stage_killed_at_a_random_moment_and_rerun_gives_the_same_lock(clean, source, tmp_path, services):
    reference, lasted = clean
    project = Checkout(tmp_path, source, services)
    moment = random.Random(0)
    left = dict(sorted(lasted.items()))
    plan = {name: moment.uniform(0.05, 0.6) * seconds for name, seconds in left.items()}
    took = dict(lasted)
    for _ in range(len(left) + 3):
        status, seen, killed = project.watched_run(plan)
        wait_until(lambda: not project.processes(), 20, "everything a killed stage had started to be gone")
        took |= {name: seconds for name, seconds in seen.items() if name not in killed}
        plan = {name: after for name, after in plan.items() if name not in killed}
        if status == 0:
            break
    assert status == 0, output(project)
    # What was quicker this time than its moment is run by force, killed, and run by force again, so that it resumes.
    for name in list(plan):
        for share in (moment.uniform(0.2, 0.6), 0.1, 0.0):
            _, _, killed = project.watched_run({name: share * took[name]}, "--force", "--targets", name)
            if killed:
                status, _, _ = project.watched_run({}, "--force", "--targets", name)
                assert status == 0, output(project)
                del plan[name]
                break
    status, _, _ = project.watched_run({})
    assert status == 0, output(project)
    assert not plan, f"never caught: {sorted(plan)}"
    assert differences(reference, project) == []
    assert reference.lock() == project.lock()

"""flows/setup.py and the Makefile: a bare interpreter sets up, a second time costs nothing, a failure says what to do."""

import shutil
import subprocess
import sys

import pytest

from flows import setup
from tests.flows.toy import REPO


@pytest.mark.slow
def test_installs_once_and_again_when_the_lock_changes(tmp_path):
    lock, venv, said = tmp_path / "requirements.lock", tmp_path / "venv", []
    lock.write_text("# nothing\n")
    setup.install(venv, lock, said.append)
    assert (venv / "bin" / "python").exists() and any("installing" in line for line in said)
    said.clear()
    setup.install(venv, lock, said.append)
    assert said == []
    lock.write_text("a-package-that-no-index-has==0.0.0.dev0\n")
    with pytest.raises(SystemExit, match="pip could not install"):
        setup.install(venv, lock, said.append)
    lock.write_text("# nothing\n")
    said.clear()
    setup.install(venv, lock, said.append)
    assert any("installing" in line for line in said), "a failed installation is not taken for a good one"


def test_missing_system_packages_are_named_when_they_cannot_be_installed(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, **_: None)
    with pytest.raises(SystemExit, match="(?s)git: for .*apt-get install git"):
        setup.system_packages(lambda line: None)


def test_optional_programs_are_mentioned_not_demanded(monkeypatch):
    have = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **_: None if name == "npm" else have(name) or "/bin/true")
    said = []
    setup.system_packages(said.append)
    assert any(line.startswith("note: npm not found") for line in said)


def test_set_up_and_services_need_no_installed_package():
    code = "import sys; sys.path.insert(0, '.'); import flows.setup, flows.services"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_make_says_what_is_wrong(tmp_path):
    done = subprocess.run(["make", "PYTHON=", "setup"], cwd=REPO, capture_output=True, text=True)
    assert done.returncode and "no python 3.11 or 3.12 found" in done.stderr
    shutil.copy(REPO / "Makefile", tmp_path)
    assert subprocess.run(["make", "stop"], cwd=tmp_path).returncode == 0, "nothing was ever started: nothing to stop"

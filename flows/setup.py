"""Sets up the environment: a virtual environment with the versions of requirements.lock, and what the system must have.

    python3 -m flows.setup .venv        done in a second when nothing has changed (`make setup`)
    python3 -m flows.setup --lock       write requirements.lock anew from pyproject.toml (`make lock`)

Runs on a bare interpreter: only the standard library is imported here.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from flows import ROOT

VERSIONS = ((3, 11), (3, 12))


def required() -> dict[str, str]:
    """Debian packages the line cannot do without that are missing here, each with what it is for."""
    missing = {}
    if shutil.which("git") is None:
        missing["git"] = "the commit of a result"
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        missing[f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"] = "virtual environments"
    return missing


def optional() -> dict[str, str]:
    """What makes the line better where it is present."""
    missing = {}
    if shutil.which("npm") is None:
        missing["npm"] = "the corpus goes without its npm packages"
    if shutil.which("apt-get") is None:
        missing["apt-get"] = "the corpus goes without Debian's documentation packages"
    return missing


def system_packages(say=print) -> None:
    """Installs what is missing with apt where that is allowed. SystemExit names what a person has to install."""
    missing = required()
    if missing and shutil.which("apt-get") and os.geteuid() == 0:
        say(f"installing with apt: {', '.join(missing)}")
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], env=quiet, check=False)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], env=quiet, check=False)
        importlib.invalidate_caches()
        missing = required()
    if missing:
        needs = "\n".join(f"  {name}: for {why}" for name, why in missing.items())
        raise SystemExit(
            f"error: missing system packages:\n{needs}\nInstall them: sudo apt-get install {' '.join(missing)}"
        )
    for name, why in optional().items():
        say(f"note: {name} not found; {why}")


def wanted(lock: Path) -> str:
    """What identifies an installation: the lock and the interpreter."""
    return hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()


def install(venv: Path, lock: Path, say=print) -> None:
    """Creates `venv` with exactly `lock`, unless its stamp says that it holds it already. SystemExit when pip fails."""
    stamp = venv / ".installed"
    if stamp.is_file() and stamp.read_text() == wanted(lock) and (venv / "bin" / "python").exists():
        return
    if sys.version_info[:2] not in VERSIONS:
        raise SystemExit(f"error: python {sys.version.split()[0]}; the line needs 3.11 or 3.12")
    system_packages(say)
    say(f"installing requirements.lock into {venv.name} (minutes the first time)")
    stamp.unlink(missing_ok=True)
    if not (venv / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "install", "-qq", "--no-input", "-r", str(lock)])
    if done.returncode:
        raise SystemExit("error: pip could not install requirements.lock; its message is above")
    check = subprocess.run([*pip, "check"], capture_output=True, text=True)
    if check.returncode:
        say(f"note: pip check: {check.stdout.strip()}")
    stamp.write_text(wanted(lock))


def write_lock(lock: Path, say=print) -> None:
    """Resolves pyproject.toml with the `test` extra in an environment of its own and freezes it."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", f"{ROOT}[test]"], check=True)
        frozen = subprocess.run(
            [*pip, "freeze", "--all", "--exclude", "pip"], check=True, capture_output=True, text=True
        )
    lines = []
    for line in sorted(frozen.stdout.splitlines(), key=str.lower):
        if "==" in line and not line.startswith("arcline"):
            # torch calls its CPU build 2.13.0+cpu: the suffix belongs to one index, the version to all.
            lines.append(line.partition("+")[0])
    header = [line for line in lock.read_text().splitlines() if line.startswith("#")] if lock.exists() else []
    lock.write_text("\n".join([*header, *lines]) + "\n")
    say(f"{lock.name}: {len(lines)} packages")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.setup", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("venv", nargs="?", default=".venv")
    parser.add_argument("--lock", action="store_true", help="write requirements.lock anew")
    args = parser.parse_args(argv)
    lock = ROOT / "requirements.lock"
    if args.lock:
        write_lock(lock)
    else:
        install(ROOT / args.venv, lock)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What `make` does once the environment is there.

    python -m flows run [DEPLOYMENT]    services up, deploy, run lifecycle/tiny (or another) and watch; then the results
    python -m flows deploy              deploy prefect.yaml, unless what it depends on has not changed
    python -m flows results             the results table and the three addresses

`run` ends with status 1 when a stage failed and shows the end of that stage's log.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

from flows import ROOT
from flows.services import ServiceError, Services, request

PHASES = ("curate", "pretrain", "midtrain", "posttrain", "deploy", "evaluate", "ablate")


def deploy(services: Services, state: dict, say=print) -> int:
    """Deploys every deployment of prefect.yaml. Skipped when nothing it reads has changed and the server has them."""
    digest = hashlib.sha256(state["prefect"].encode())
    for name in ("prefect.yaml", "flows/lifecycle.py"):
        digest.update((ROOT / name).read_bytes())
    mark = digest.hexdigest()
    known = request("GET", f"{state['prefect']}/api/deployments/name/lifecycle/tiny")[0] == 200
    stamp = services.home / "deployed"
    if known and stamp.exists() and stamp.read_text() == mark:
        return 0
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    env = {**services.env(state), "PWD": str(ROOT)}  # prefect.yaml puts $PWD where the worker shall work
    done = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
        return done.returncode
    stamp.write_text(mark)
    say("deployed lifecycle/tiny and the phases: " + ", ".join(f"{phase}/tiny" for phase in PHASES))
    return 0


def run(deployment: str) -> int:
    """Services, deployments, one watched run, results. Exit status of the run."""
    services = Services()
    try:
        state = services.up()
    except ServiceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if code := deploy(services, state):
        return code
    print(f"running lifecycle/{deployment}; follow it at {state['prefect']}/runs", flush=True)
    last = ROOT / "work" / "run.json"
    last.unlink(missing_ok=True)
    command = [sys.executable, "-m", "prefect", "deployment", "run", f"lifecycle/{deployment}", "--watch"]
    env = {**services.env(state), "COLUMNS": "160"}
    try:
        code = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL).returncode
    except KeyboardInterrupt:
        print(f"\nno longer watching; the run goes on. Cancel it at {state['prefect']}/runs, or end it with: make stop")
        return 130
    if code:
        explain(last)
        return code
    results(state)
    return 0


def explain(last: Path) -> None:
    """Names the failed stages of the last run and shows the end of their logs."""
    from flows.runner import tail

    try:
        report = json.loads(last.read_text())
    except (OSError, ValueError):
        print("the run ended without a report; see work/services/worker.log:", file=sys.stderr)
        print("  " + "\n  ".join(tail(ROOT / "work" / "services" / "worker.log")), file=sys.stderr)
        return
    print(f"\n{report['message']}", file=sys.stderr)
    for name in report["failed"]:
        path = ROOT / "work" / "logs" / f"{name}.log"
        print(f"\nend of {path.relative_to(ROOT)}:", file=sys.stderr)
        print("  " + "\n  ".join(tail(path, 25)), file=sys.stderr)


def results(state: dict) -> None:
    """The results table, then the addresses of Prefect, MLflow and the report."""
    print()
    table = subprocess.run([sys.executable, "-m", "tasks.report", "--table"], cwd=ROOT, capture_output=True, text=True)
    print(table.stdout.rstrip() if table.returncode == 0 else metrics_table())
    report = ROOT / "data" / "report" / "report.html"
    print(f"\nPrefect  {state.get('prefect') or 'not running'}")
    print(f"MLflow   {state.get('mlflow') or 'not running'}")
    print(f"Report   {report.as_uri() if report.exists() else 'not made yet: dvc repro report'}")


def metrics_table() -> str:
    """Every final number of the last run, one a line: what there is to see before the report stage has run."""
    from tasks.tracking import flatten

    lines = []
    for path in sorted((ROOT / "metrics").glob("*.json")):
        values = flatten(json.loads(path.read_text()))
        lines += [f"{path.stem:28} {key:44} {value}" for key, value in values.items()]
    return "\n".join(lines) or "no metrics yet"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flows", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("run", "deploy", "results"))
    parser.add_argument("deployment", nargs="?", default="tiny", help=f"tiny, {', '.join(PHASES)}")
    args = parser.parse_args(argv)
    if args.command == "run":
        return run(args.deployment)
    services = Services()
    if args.command == "results":
        results(services.load())
        return 0
    try:
        return deploy(services, services.up())
    except ServiceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

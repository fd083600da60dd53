"""The flow of the line: one Prefect task per stage of dvc.yaml, named as the stage, in DVC's order.

    python -m flows.lifecycle                                  all of it, with or without a server
    python -m flows.lifecycle --targets sft evaluate@sft       stages, groups of variants or phases, and what they need
    python -m flows.lifecycle --force --targets curate         run these again although nothing changed
    prefect deployment run lifecycle/tiny --watch              the same through the server and a worker
    prefect deployment run curate/tiny --watch                 one phase; ablate/tiny is the one that is not in the line

One flat flow with phases as tags: a sub-flow would be one node of the graph and a barrier between phases. A stage that
did not change is Completed as "Cached"; after a failure its descendants are NotReady and independent branches finish.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading

from flows import ROOT, connect

connect()  # before prefect is imported

from prefect import flow, task  # noqa: E402
from prefect.futures import wait  # noqa: E402
from prefect.logging import get_run_logger  # noqa: E402
from prefect.states import Completed, Failed, State  # noqa: E402
from prefect.task_runners import ThreadPoolTaskRunner  # noqa: E402

from flows import graph  # noqa: E402
from flows.runner import Runner, StageFailed, Stopped, workspace  # noqa: E402
from tasks.files import atomic_write  # noqa: E402

SLOTS = int(os.environ.get("ARCLINE_CONCURRENCY", "2"))
RETRY_DELAY_S = 2


class _Run:
    """What the tasks of one flow run share."""

    def __init__(self, plan: graph.Plan, force: bool, runner: Runner) -> None:
        self.plan, self.force, self.runner = plan, force, runner
        self.ended: dict[str, str] = {}  # stage -> Cached | Restored | Completed | Failed
        self._lock = threading.Lock()

    def forced(self, name: str) -> bool:
        return self.force and name in self.plan.selected

    def is_cached(self, node: graph.Node) -> bool:
        """Nothing to do: unchanged at the start of the run, and nothing upstream has run since."""
        if self.forced(node.name) or node.name in self.plan.changed:
            return False
        return all(self.ended.get(up) == "Cached" for up in node.upstream)

    def end(self, name: str, how: str) -> None:
        with self._lock:
            self.ended[name] = how


@task(persist_result=False)
def run_stage(stage: str) -> State:
    """Bring one stage of dvc.yaml up to date."""
    run, node = _current(stage)
    if run.is_cached(node):
        run.end(stage, "Cached")
        return Completed(name="Cached", message="unchanged")
    logger = get_run_logger()
    try:
        how = run.runner.run(node, run.forced(stage), lambda line: logger.log(_level(line), "%s", _plain(stage, line)))
    except (StageFailed, Stopped):
        run.end(stage, "Failed")
        raise
    run.end(stage, how)
    return Completed(name=how, message=None if how == "Completed" else "outs taken from the cache")


_runs: dict[str, _Run] = {}  # by flow run id: stages of one process share their run without passing it through Prefect


def _current(stage: str) -> tuple[_Run, graph.Node]:
    from prefect.runtime import flow_run

    run = _runs[str(flow_run.id)]
    return run, run.plan.nodes[stage]


def _plain(stage: str, line: str) -> str:
    """A stage's line without square brackets that `--watch` would take for markup and hide, or die of ("[/b]")."""
    return line.replace(f"[{stage}]", f"{stage}:", 1).replace("[/", "[ /")


def _level(line: str) -> int:
    start = line[:40].lower()
    if start.startswith(("error", "traceback")):
        return logging.ERROR
    return logging.WARNING if "warning" in start else logging.INFO


@flow(
    name="lifecycle",
    persist_result=False,
    validate_parameters=True,
    task_runner=ThreadPoolTaskRunner(max_workers=1000),  # type: ignore[arg-type]
)
def lifecycle(targets: list[str] | None = None, force: bool = False, profile: str | None = None) -> State:
    """From raw documents to a quantized, exported and evaluated model: the stages of dvc.yaml in their order.

    Args:
        targets: What to bring up to date: stages (sft, midtrain-s2), groups of variants (evaluate) or phases (curate,
            pretrain, midtrain, posttrain, deploy, evaluate, ablate). What they depend on is brought up to date first.
            Empty means the whole line, which leaves out what is marked `by_request` (ablate).
        force: Run the targets again although nothing they depend on has changed.
        profile: Compose conf/<profile>.yaml into params.yaml first (tiny, node, glm5, ...). Empty leaves params.yaml
            as it is.
    """
    from prefect.runtime import flow_run

    logger = get_run_logger()
    with workspace(ROOT, logger.info):
        if profile:
            from tasks.params import use_profile

            if done := use_profile(profile, ROOT):
                logger.info(done)
        plan = graph.plan(targets, ROOT, logger.info)
        logger.info("%d stages, %d of them changed", len(plan.nodes), len(plan.changed))
        parent = _Parent(str(flow_run.id), {"targets": targets, "force": force, "profile": profile})
        run = _Run(plan, force, Runner(ROOT, SLOTS, on_first=parent.open))
        _runs[str(flow_run.id)] = run
        futures: dict = {}
        try:
            for node in plan.nodes.values():
                stage_task = run_stage.with_options(
                    name=node.name,
                    task_run_name=node.name,
                    tags={t for t in (node.phase, *node.tags) if t},
                    retries=node.retries,
                    retry_delay_seconds=RETRY_DELAY_S,
                    retry_condition_fn=_worth_retrying,
                )
                futures[node.name] = stage_task.submit(node.name, wait_for=[futures[up] for up in node.upstream])
            wait(list(futures.values()))
        except BaseException:  # cancelled, terminated or interrupted
            run.runner.stop()
            parent.close("FAILED")
            raise
        finally:
            _runs.pop(str(flow_run.id), None)
        state = _summary(run, {name: future.state for name, future in futures.items()})
        parent.close("FINISHED" if state.is_completed() else "FAILED")
        return state


# The flow by the name of each phase: deployments are called <flow>/<deployment>, and these curate/tiny and so on.
curate, pretrain, midtrain, posttrain, deploy, evaluate, ablate = (
    lifecycle.with_options(name=name, description=f"The stages of phase {name}, and what they need.")
    for name in ("curate", "pretrain", "midtrain", "posttrain", "deploy", "evaluate", "ablate")
)


def _worth_retrying(_task, _run, state: State) -> bool:
    with contextlib.suppress(Exception):
        return isinstance(state.result(raise_on_failure=False), StageFailed)
    return False


def _summary(run: _Run, states: dict[str, State]) -> State:
    """The state of the whole run, with one line that says what happened."""
    counts: dict[str, int] = {}
    for state in states.values():
        counts[state.name] = counts.get(state.name, 0) + 1
    text = f"{len(states)} stages: " + ", ".join(f"{n} {name.lower()}" for name, n in sorted(counts.items()))
    failed = [name for name, state in states.items() if state.is_failed() or state.is_crashed()]
    good = all(state.is_completed() for state in states.values())
    if failed:
        logs = ", ".join(str(run.runner.log_path(name).relative_to(ROOT)) for name in failed)
        text += f". Failed: {', '.join(failed)} (see {logs})"
    report = {"message": text, "failed": failed, "stages": {name: state.name for name, state in states.items()}}
    atomic_write(ROOT / "work" / "run.json", json.dumps(report, indent=1) + "\n")
    return Completed(message=text) if good else Failed(message=text)


class _Parent:
    """The MLflow run above the stages' runs. Opened with the first stage that really runs: a cached run leaves none."""

    def __init__(self, flow_run_id: str, params: dict) -> None:
        self._id, self._params, self._record = flow_run_id, params, None

    def open(self) -> dict[str, str]:
        from tasks.tracking import open_record

        params = {key: value for key, value in self._params.items() if value}
        self._record = open_record(ROOT / "work" / "spool", "lifecycle", params, {"prefect.flow_run_id": self._id})
        return {"ARCLINE_PARENT_RUN": self._record.id} if self._record.id else {}

    def close(self, status: str) -> None:
        if self._record is not None:
            self._record.close(status)


def main(argv: list[str] | None = None) -> int:
    """Runs the flow in this process; exit status 1 when a stage failed."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m flows.lifecycle", description=lifecycle.description)
    parser.add_argument("--targets", nargs="+", metavar="TARGET", help="stages, groups of variants or phases")
    parser.add_argument("--force", action="store_true", help="run the targets again although nothing has changed")
    parser.add_argument("--profile", help="compose conf/<profile>.yaml into params.yaml first")
    args = parser.parse_args(argv)
    state = lifecycle(targets=args.targets, force=args.force, profile=args.profile, return_state=True)
    print(state.message)
    return 0 if state.is_completed() else 1


if __name__ == "__main__":
    import sys

    # Under `-m` this module is __main__; run the copy that Prefect and the deployments know.
    from flows.lifecycle import main as run

    sys.exit(run())

"""Command line of the stages.

python -m tasks STAGE              run one stage of dvc.yaml in this process (what `dvc repro STAGE` calls)
python -m tasks STAGE --dry-run    its resolved config, inputs, outputs, and why it is stale
python -m tasks --list             every stage with its phase
python -m tasks profile NAME       compose conf/NAME.yaml into params.yaml
python -m tasks plan --profile NAME --cluster gpus=8   memory, operations and days before anything runs
python -m tasks init-check DIR     what a checkpoint directory holds, before `init_from` names it (tasks/init_from.py)
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys


def _die_with_parent() -> None:
    """A killed flow must leave no orphan stage (Linux: PR_SET_PDEATHSIG; elsewhere the flow's own handler has to do)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:  # it died between the two calls
            os._exit(1)


def _follow_log() -> None:
    """Send this process's output to the file that the flow tails."""
    path = os.environ.get("ARCLINE_STAGE_LOG")
    if path:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)


def _pin_threads() -> None:
    """A result depends on how many threads share a sum, so the count is a parameter, set before anything starts threads."""
    from tasks.params import load_params

    threads = str(load_params().get("threads", 1))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = threads
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _print_json(value: object) -> None:
    """Plain JSON on a pipe, coloured on a terminal."""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        from rich import print_json as show

        show(json.dumps(value))
    else:
        print(json.dumps(value, indent=2))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tasks", description="Run or inspect the stages of the line.")
    parser.add_argument("stage", nargs="?", help="a stage of dvc.yaml, or `profile`, `plan`, `init-check`")
    parser.add_argument("name", nargs="?", help="with `profile`: the profile to compose")
    parser.add_argument("--list", action="store_true", help="list the stages")
    parser.add_argument(
        "--local_rank", help=argparse.SUPPRESS
    )  # DeepSpeed's launcher adds it; LOCAL_RANK says the same
    parser.add_argument("--dry-run", action="store_true", help="show what would run and why, run nothing")
    argv = sys.argv[1:] if argv is None else argv
    planning, checking = argv[:1] == ["plan"], argv[:1] == ["init-check"]
    args = parser.parse_args(argv[:1] if planning or checking else argv)
    from tasks import launch, params, spec

    try:
        if planning:
            from tasks import plan

            return plan.main(argv[1:])
        if checking:
            from tasks import init_from

            return init_from.main(argv[1:])
        if args.list:
            for one in spec.load_specs().values():
                print(f"{one.meta.get('phase', ''):10} {one.name}")
        elif args.stage == "profile":
            if not args.name:
                raise ValueError(f"which profile? There are: {', '.join(params.profiles())}")
            changed = params.write_profile(args.name)
            print(f"params.yaml {'now holds' if changed else 'already held'} profile {args.name}")
        elif not args.stage:
            parser.print_help()
        elif args.dry_run:
            _print_json(spec.describe(args.stage))
        else:
            _die_with_parent()
            _follow_log()
            _pin_threads()
            launch.run(args.stage)
    except (ValueError, FileNotFoundError, TimeoutError) as error:
        if os.environ.get("ARCLINE_TRACEBACK") == "1":
            import traceback

            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())

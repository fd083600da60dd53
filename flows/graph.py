"""The line as DVC sees it: stages, what they depend on, and which of them are out of date.

Nothing here runs a stage. dvc.yaml is the only place where the graph is written; this reads it through DVC.

    python -m flows.graph [TARGET ...]      list the stages a run would cover, marking those that would run
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from flows import ROOT

T = TypeVar("T")


@dataclass(frozen=True)
class Node:
    """One stage. `upstream` are the stages that make its dependencies, `ahead` is how many stages the longest chain has
    that waits for it; the rest comes from `meta:` in dvc.yaml."""

    name: str
    upstream: tuple[str, ...]
    phase: str = ""
    tags: tuple[str, ...] = ()
    retries: int = 0
    timeout_minutes: float | None = None
    ahead: int = 0
    by_request: bool = False  # runs only where a target names it

    @property
    def group(self) -> str:
        """The name that variants share: `midtrain` of `midtrain-s2`, `evaluate` of `evaluate@sft`."""
        return re.split("[@-]", self.name)[0]


@dataclass(frozen=True)
class Plan:
    """The stages of a run in an order in which each comes after its upstream stages."""

    nodes: dict[str, Node]
    selected: frozenset[str]  # what the targets named; the rest of `nodes` is there because these depend on it
    changed: frozenset[str]  # stages whose own deps, params, command or outs differ from dvc.lock


def read(root: Path = ROOT) -> dict[str, Node]:
    """All stages of the workspace in topological order. ValueError when dvc.yaml does not parse."""
    with _open(root) as repo:
        return _nodes(repo)


def plan(targets: Iterable[str] | None = None, root: Path = ROOT, say: Callable[[str], None] = print) -> Plan:
    """What a run of `targets` covers. One look at the whole workspace: what has not changed costs nothing later.

    Waits, and says so, while another DVC process is at work on a stage.
    """
    with _open(root) as repo:
        nodes = _nodes(repo)
        selected = match(nodes, targets)
        wanted = closure(nodes, selected)
        changed = {name.rpartition(":")[2] for name in when_free(repo.status, say)} & wanted
    return Plan({n: node for n, node in nodes.items() if n in wanted}, selected, frozenset(changed))


def match(nodes: dict[str, Node], targets: Iterable[str] | None) -> frozenset[str]:
    """Names that `targets` stand for. A target is a stage, a group of variants or a phase. ValueError when unknown.

    No targets: everything but what is marked `by_request`.
    """
    if not targets:
        return frozenset(name for name, node in nodes.items() if not node.by_request)
    found: set[str] = set()
    for target in targets:
        hits = {n for n, node in nodes.items() if target in (n, node.group, node.phase)}
        if not hits:
            phases = sorted({node.phase for node in nodes.values() if node.phase})
            raise ValueError(
                f"unknown target {target!r}. Phases: {', '.join(phases) or 'none'}. Stages: {', '.join(nodes)}"
            )
        found |= hits
    return frozenset(found)


def closure(nodes: dict[str, Node], names: Iterable[str]) -> set[str]:
    """`names` and everything upstream of them."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo.extend(nodes[name].upstream)
    return found


def when_free(act: Callable[[], T], say: Callable[[str], None], check: Callable[[], None] = lambda: None) -> T:
    """`act()`, again and again while another DVC process holds what it needs; `check` may raise to end the waiting."""
    from dvc.exceptions import DvcException
    from dvc.lock import LockError

    told = False
    while True:
        try:
            return act()
        except DvcException as error:
            held = next((cause for cause in causes(error) if isinstance(cause, LockError)), None)
            if held is None:
                raise
            if not told:
                say(f"waiting for another DVC process: {' '.join(str(held).split())[:300]}")
                told = True
            check()
            time.sleep(1)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it was raised from, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__


def _open(root: Path):
    from dvc.repo import Repo

    return Repo(str(root), _wait_for_lock=True)


def _nodes(repo) -> dict[str, Node]:
    from dvc.exceptions import DvcException
    from networkx import topological_sort

    try:
        graph = repo.index.graph  # an edge goes from a stage to what it depends on
    except DvcException as error:
        raise ValueError(f"dvc.yaml: {error}") from error
    order = list(topological_sort(graph))
    depth: dict = {}
    for stage in reversed(order):
        depth[stage] = 1 + max((depth[s] for s in graph.successors(stage)), default=-1)
    ahead: dict = {}
    for stage in order:
        ahead[stage] = 1 + max((ahead[s] for s in graph.predecessors(stage)), default=-1)
    nodes: dict[str, Node] = {}
    # By depth, and at equal depth in dvc.yaml's order: the same list on every machine.
    for stage in sorted(repo.index.stages, key=lambda s: depth[s]):
        if not getattr(stage, "name", None):
            continue  # a `.dvc` file: data under version control, not a step
        meta = stage.meta or {}
        limit = meta.get("timeout_minutes")
        nodes[stage.name] = Node(
            name=stage.name,
            upstream=tuple(sorted(s.name for s in graph.successors(stage) if getattr(s, "name", None))),
            phase=str(meta.get("phase", "")),
            tags=tuple(str(tag) for tag in meta.get("tags", ())),
            retries=int(meta.get("retries", 0)),
            timeout_minutes=float(limit) if limit else None,
            ahead=ahead[stage],
            by_request=bool(meta.get("by_request", False)),
        )
    return nodes


if __name__ == "__main__":
    import sys

    whole = plan(sys.argv[1:] or None)
    for name, node in whole.nodes.items():
        mark = "*" if name in whole.changed else " "
        print(f"{mark} {node.phase:10} {name:28} <- {', '.join(node.upstream)}")

"""The picture of the line: dvc.yaml's stages in bands by phase, in layers within a band, with the edges that matter.

    python -m tasks.report_dag > line.svg

Edges that follow from others are left out (transitive reduction); the full graph is dvc.yaml's. All nodes stand on one
column grid, so that edges between bands run in the gaps between bands and columns and never behind a node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

import yaml

PHASES = ("curate", "pretrain", "midtrain", "posttrain", "deploy", "evaluate")
NODE_W, NODE_H, GAP_X, GAP_Y, BAND_PAD, BAND_GAP, LEFT = 114, 38, 30, 12, 14, 30, 108


@dataclass(frozen=True)
class Node:
    """A stage: its phase, what it reads and writes, as dvc.yaml has them."""

    name: str
    phase: str
    deps: tuple[str, ...]
    outs: tuple[str, ...]


def _paths(items: list) -> list[str]:
    return [next(iter(item)) if isinstance(item, dict) else item for item in items or []]


def _value(values: dict, found: re.Match) -> str:
    """What a dotted key stands for; the text as it is when there is no such key."""
    for part in found[1].split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return found[0] if values is None else str(values)


def read_graph(path: Path) -> dict[str, Node]:
    """Stages of a dvc.yaml, `foreach` over a mapping or a list expanded, `${a.b}` filled in from the params.yaml beside it.

    ValueError when it has no stages.
    """
    params = Path(path).with_name("params.yaml")
    values = yaml.safe_load(params.read_text(encoding="utf-8")) if params.is_file() else {}
    stages = (yaml.safe_load(Path(path).read_text()) or {}).get("stages")
    if not stages:
        raise ValueError(f"{path} declares no stages")
    nodes = {}
    for name, body in stages.items():
        each = body.get("foreach")
        variants = {"": ""} if each is None else each if isinstance(each, dict) else {str(v): v for v in each}
        spec = body if each is None else body["do"]
        for key, item in variants.items():

            def fill(text: str, key: str = key, item: object = item) -> str:
                text = text.replace("${key}", str(key)).replace("${item}", str(item))
                return re.sub(r"\$\{([\w.]+)\}", lambda found: _value(values, found), text)

            full = f"{name}@{key}" if each is not None else name
            outs = _paths(spec.get("outs")) + _paths(spec.get("metrics")) + _paths(spec.get("plots"))
            phase = (spec.get("meta") or {}).get("phase", "")
            deps = tuple(fill(d) for d in _paths(spec.get("deps")))
            nodes[full] = Node(full, phase, deps, tuple(fill(o) for o in outs))
    return nodes


def edges(nodes: Mapping[str, Node]) -> dict[str, set[str]]:
    """stage -> the stages whose outputs it reads (a directory dependency covers everything below it)."""

    def reads(dep: str, out: str) -> bool:
        return out == dep or out.startswith(dep + "/") or dep.startswith(out + "/")

    return {
        n.name: {m.name for m in nodes.values() if m is not n and any(reads(d, o) for d in n.deps for o in m.outs)}
        for n in nodes.values()
    }


def reduced(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The graph without edges that a longer path implies. ValueError for a cycle."""
    ancestors: dict[str, set[str]] = {}

    def collect(name: str, path: tuple[str, ...] = ()) -> set[str]:
        if name in path:
            raise ValueError(f"the graph has a cycle through {name}")
        if name not in ancestors:
            ancestors[name] = (
                set().union(*({p} | collect(p, (*path, name)) for p in graph[name])) if graph[name] else set()
            )
        return ancestors[name]

    for name in graph:
        collect(name)
    return {n: {p for p in ps if not any(p in ancestors[q] for q in ps if q != p)} for n, ps in graph.items()}


def layout(
    nodes: Mapping[str, Node], graph: Mapping[str, set[str]]
) -> tuple[dict[str, tuple[float, float]], dict, int, int]:
    """(node -> top-left corner, phase -> (y, height), width, height). Layers run left to right within a phase's band.

    A layer of more than four stages without edges among themselves is spread along the band instead of stacked.
    """
    phases = [p for p in PHASES if any(n.phase == p for n in nodes.values())]
    phases += sorted({n.phase for n in nodes.values()} - set(phases))
    place, bands, y, columns_used = {}, {}, 8.0, 1
    for phase in phases:
        members = [n.name for n in nodes.values() if n.phase == phase]
        depth: dict[str, int] = {}

        def layer(name: str, members: list[str] = members, depth: dict[str, int] = depth) -> int:
            if name not in depth:
                depth[name] = 1 + max((layer(p) for p in graph[name] if p in members), default=-1)
            return depth[name]

        columns: dict[int, list[str]] = {}
        for name in members:
            columns.setdefault(layer(name), []).append(name)
        cells, column = {}, 0
        for index in sorted(columns):
            names = columns[index]
            wide = -(-len(names) // 2) if len(names) > 4 else 1
            for i, name in enumerate(names):
                cells[name] = (column + i % wide, i // wide, -(-len(names) // wide))
            column += wide
        rows = max(total for *_, total in cells.values())
        columns_used = max(columns_used, column)
        height = 2 * BAND_PAD + rows * NODE_H + (rows - 1) * GAP_Y
        for name, (cx, cy, total) in cells.items():
            offset = (rows - total) // 2 * (NODE_H + GAP_Y)
            place[name] = (LEFT + cx * (NODE_W + GAP_X), y + BAND_PAD + offset + cy * (NODE_H + GAP_Y))
        bands[phase] = (y, height)
        y += height + BAND_GAP
    return place, bands, LEFT + columns_used * (NODE_W + GAP_X), round(y - BAND_GAP + 8)


def draw(nodes: Mapping[str, Node], captions: Mapping[str, str] | None = None) -> str:
    """The graph as SVG; `captions` adds a second line to a node, such as its result."""
    captions = captions or {}
    graph = reduced(edges(nodes))
    place, bands, width, height = layout(nodes, graph)
    out = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="The stages of the line and what each reads" '
        f'style="min-width:{round(width * 0.82)}px" xmlns="http://www.w3.org/2000/svg">'
    ]
    for phase, (y, tall) in bands.items():
        out.append(f'<rect class="band" x="0" y="{y:.0f}" width="{width}" height="{tall:.0f}" rx="8"/>')
        out.append(f'<text class="phase" x="12" y="{y + tall / 2 + 4:.0f}">{escape(phase)}</text>')
    lanes = _Lanes()
    for name, parents in graph.items():
        near = sorted(p for p in parents if nodes[p].phase == nodes[name].phase)
        if len(near) > 4:  # a spread layer that feeds one stage: a frame around it, and one edge
            xs, ys = ([place[p][i] for p in near] for i in (0, 1))
            x0, y0, x1, y1 = min(xs) - 6, min(ys) - 6, max(xs) + NODE_W + 6, max(ys) + NODE_H + 6
            out.append(
                f'<rect class="frame" x="{x0:.0f}" y="{y0:.0f}" width="{x1 - x0:.0f}" height="{y1 - y0:.0f}" rx="8"/>'
            )
            out.append(_beside((x1, (y0 + y1) / 2), (place[name][0], place[name][1] + NODE_H / 2)))
            near = []
        for parent in near:
            (x0, y0), (x1, y1) = place[parent], place[name]
            out.append(_beside((x0 + NODE_W, y0 + NODE_H / 2), (x1, y1 + NODE_H / 2)))
        for parent in sorted(p for p in parents if nodes[p].phase != nodes[name].phase):
            path = _between(
                place[parent],
                place[name],
                bands[nodes[parent].phase],
                bands[nodes[name].phase],
                lanes,
                below=_covered(place, nodes, parent, 1),
                above=_covered(place, nodes, name, -1),
            )
            out.append(path)
    for name, (x, y) in place.items():
        node, second = nodes[name], captions.get(name, "")
        reads = ", ".join(d for d in node.deps if d.partition("/")[0] not in ("tasks", "model", "kernels"))
        tip = f"{name}\nreads {reads or 'nothing'}\nwrites {', '.join(node.outs)}"
        variant = name.partition("@")[2] or name.removeprefix(f"{node.phase}-")
        first = y + (16 if second else 23)
        out.append(
            f'<g class="node"><title>{escape(tip)}</title>'
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{NODE_W}" height="{NODE_H}" rx="6"/>'
            f'<text class="n" text-anchor="middle" x="{x + NODE_W / 2:.0f}" y="{first:.0f}">{escape(variant)}</text>'
        )
        if second:
            out.append(
                f'<text class="c" text-anchor="middle" x="{x + NODE_W / 2:.0f}" y="{y + 30:.0f}">{escape(second)}</text>'
            )
        out.append("</g>")
    return "".join(out) + "</svg>"


def _covered(place: Mapping[str, tuple[float, float]], nodes: Mapping[str, Node], name: str, side: int) -> bool:
    """Whether another node of the band stands in the same column, below (side 1) or above (side -1)."""
    x, y = place[name]
    return any(
        abs(place[m][0] - x) < 1 and (place[m][1] - y) * side > 1
        for m in nodes
        if m != name and nodes[m].phase == nodes[name].phase
    )


def _beside(start: tuple[float, float], end: tuple[float, float]) -> str:
    """A curve from a node's right side to another's left side, within a band."""
    (x0, y0), (x1, y1) = start, end
    turn = max(x0, x1 - GAP_X)  # straight past the columns between, then a curve in the last gap
    half = (turn + x1) / 2
    curve = f"M{x0:.0f} {y0:.0f}L{turn:.0f} {y0:.0f}C{half:.0f} {y0:.0f} {half:.0f} {y1:.0f} {x1:.0f} {y1:.0f}"
    return f'<path class="edge" d="{curve}"/>'


class _Lanes:
    """Gives each edge that shares a gap its own line, a few pixels from the others."""

    def __init__(self) -> None:
        self.used: dict[tuple[str, int], int] = {}

    def take(self, kind: str, at: float, room: float) -> float:
        """A coordinate near `at`, within `room` of it: 0, +4, -4, +8, ... in turn."""
        index = self.used[kind, round(at)] = self.used.get((kind, round(at)), -1) + 1
        offset = 4 * ((index + 1) // 2) * (1 if index % 2 else -1)
        return at + max(-room, min(room, offset))


def _between(start, end, start_band, end_band, lanes: _Lanes, below: bool, above: bool) -> str:
    """A path with rounded corners from one band to another, along the gaps.

    It leaves at the bottom, or at the right when a node stands `below` the first one; it enters at the top, or at the left
    when a node stands `above` the second one.
    """
    down = end_band[0] > start_band[0]
    leave = start_band[0] + start_band[1] + BAND_GAP / 2 if down else start_band[0] - BAND_GAP / 2
    enter = end_band[0] - BAND_GAP / 2 if down else end_band[0] + end_band[1] + BAND_GAP / 2
    room = BAND_GAP / 2 - 4
    if below:
        x0 = lanes.take("column", start[0] + NODE_W + GAP_X / 2, GAP_X / 2 - 4)
        points = [(start[0] + NODE_W, start[1] + NODE_H / 2), (x0, start[1] + NODE_H / 2)]
    else:
        x0 = start[0] + NODE_W / 2
        points = [(x0, start[1] + (NODE_H if down else 0))]
    gutter = lanes.take("column", end[0] - GAP_X / 2, GAP_X / 2 - 4)
    x1, target = end[0] + NODE_W / 2, (end[0] + NODE_W / 2, end[1] + (0 if down else NODE_H))
    if above:
        x1, target = gutter, (end[0], end[1] + NODE_H / 2)
    near = lanes.take("row", enter, room)
    if abs(leave - enter) < 1:
        points += [(x0, near), (x1, near)]
    else:
        out = lanes.take("row", leave, room)
        points += [(x0, out), (gutter, out)]
        points += [] if above else [(gutter, near), (x1, near)]
    if above:
        points.append((gutter, target[1]))
    return f'<path class="edge" d="{_rounded([*points, target])}"/>'


def _rounded(points: list[tuple[float, float]], radius: float = 5) -> str:
    """SVG path along horizontal and vertical segments with rounded corners."""
    path = f"M{points[0][0]:.0f} {points[0][1]:.0f}"
    for (xa, ya), (xb, yb), (xc, yc) in zip(points, points[1:], points[2:]):
        before, after = abs(xb - xa) + abs(yb - ya), abs(xc - xb) + abs(yc - yb)
        r = min(radius, before / 2, after / 2)
        if r < 1:
            path += f"L{xb:.0f} {yb:.0f}"
            continue
        xs, ys = xb - (xb - xa) / before * r, yb - (yb - ya) / before * r
        xe, ye = xb + (xc - xb) / after * r, yb + (yc - yb) / after * r
        path += f"L{xs:.1f} {ys:.1f}Q{xb:.0f} {yb:.0f} {xe:.1f} {ye:.1f}"
    return path + f"L{points[-1][0]:.0f} {points[-1][1]:.0f}"


if __name__ == "__main__":
    print(draw(read_graph(Path("dvc.yaml"))))

"""Pictures as SVG text: the heat map, the draft tree, the error along the taps. Colour is never the only sign: shape and dash say the same.

Colours come from classes, so that the style sheet decides for light and dark. Everything that a store wrote is escaped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from reports import numbers
from reports.page_data import HeatMap

# Upper ends of the steps of the ramp, in shares of the bound; a bit-exact cell has a step of its own, and so has what is above the bound.
HEAT_STEPS = (1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0)
HEAT_LEGEND = ("0 (exact)", "≤ 0.0001", "≤ 0.001", "≤ 0.01", "≤ 0.1", "≤ 0.3", "≤ 1", "> 1")
TITLES_MAX = 1_500  # tooltips cost about 90 bytes each; above this the table alone has the numbers
TREE_NODES_MAX = 160
POINTS_MIN = 3  # fewer are no way to travel; the numbers beside the picture say it
TAPS_MAX = 300  # above this the trace is shown per layer

_CELL = 20
_LABEL = 112


def heat_step(share: float) -> int:
    """0 (exact) .. 6 within the bound, 7 above it."""
    if not share <= 1.0:
        return len(HEAT_STEPS) + 1
    return 0 if share <= 0.0 else next(i for i, end in enumerate(HEAT_STEPS, 1) if share <= end)


def heat_map(heat: HeatMap, name: str) -> str:
    """op x layer; > 1 is crossed out as well as coloured."""
    width, height = _LABEL + _CELL * len(heat.layers) + 4, 22 + _CELL * len(heat.ops)
    over = sum(heat_step(cell.share) == 7 for cell in heat.cells.values())
    label = f"Largest share of the error bound per operation and layer, {name}: {over} of {len(heat.cells)} cells above the bound"
    out = [_open("heat", width, height, label)]
    every = 1 if len(heat.layers) <= 24 else 5
    for j, layer in enumerate(heat.layers):
        if not layer.isdigit() or int(layer) % every == 0:
            out.append(f'<text class="axis" x="{_LABEL + _CELL * j + _CELL / 2:g}" y="13" text-anchor="middle">{escape(layer)}</text>')
    titled = len(heat.cells) <= TITLES_MAX
    for i, op in enumerate(heat.ops):
        y = 20 + _CELL * i
        out.append(f'<text class="axis" x="{_LABEL - 8}" y="{y + 14}" text-anchor="end">{escape(_short(op, 17))}</text>')
        for j, layer in enumerate(heat.layers):
            cell = heat.cells.get((op, layer))
            if cell is None:
                continue
            x, step = _LABEL + _CELL * j, heat_step(cell.share)
            tap = f" at {cell.tap}" if cell.tap and cell.tap != op else ""
            title = f"{op} {layer}: {numbers.times(cell.share)}{tap}; {numbers.plural(cell.checked, 'scalar')}"
            inner = f"<title>{escape(title)}</title>" if titled else ""
            out.append(f'<rect class="h{step}" x="{x}" y="{y}">{inner}</rect>')
            if step == 7:
                out.append(f'<path class="cross" d="M{x + 5} {y + 5}l8 8m0-8l-8 8"/>')
    return "".join(out) + "</svg>"


def tree(round_: dict[str, Any], name: str) -> str:
    """The draft tree from left to right. Raises nothing: what is no tree gives an empty string.

    Keys: tokens, parents (-1: root), path (accepted by the engine), expected_path (accepted by the specification; empty: the same), guilty (nodes).
    """
    parents, tokens = _ints(round_.get("parents")), _ints(round_.get("tokens"))
    if not parents or len(tokens) != len(parents):
        return ""
    total = len(parents)
    parents, tokens = parents[:TREE_NODES_MAX], tokens[:TREE_NODES_MAX]
    if any(not -1 <= parent < i for i, parent in enumerate(parents)):
        return ""
    engine, ought = _ints(round_.get("path")), _ints(round_.get("expected_path") or round_.get("path"))
    guilty = set(_ints(round_["guilty"] if isinstance(round_.get("guilty"), list) else [round_.get("guilty", -1)]))
    depth, row, rows = _layout(parents)
    step_x, step_y = 76, 28
    width, height = 20 + step_x * max(depth) + 62, 10 + step_y * rows
    x = [12 + step_x * d for d in depth]
    y = [6 + step_y * r for r in row]
    label = f"Draft tree {name}: {numbers.plural(total - 1, 'node')} below the root; the engine accepts {engine}, the specification {ought}"
    label += "".join(f"; node {node} is wrong" for node in sorted(guilty) if node >= 0)
    out = [_open("tree", width, height, label)]
    engine_edges, ought_edges = _edges(engine), _edges(ought)
    for i, parent in enumerate(parents):
        if parent >= 0:
            edge = (parent, i)
            kind = {(True, True): "both", (False, True): "ought", (True, False): "engine"}.get(
                (edge in engine_edges, edge in ought_edges), "draft"
            )
            x0, y0, x1, y1 = x[parent] + 50, y[parent] + 10, x[i], y[i] + 10
            middle = (x0 + x1) / 2
            out.append(f'<path class="edge {kind}" d="M{x0:g} {y0:g}C{middle:g} {y0:g} {middle:g} {y1:g} {x1:g} {y1:g}"/>')
    for i, token in enumerate(tokens):
        classes = "node" + (" kept" if i in ought else "") + (" guilty" if i in guilty else "")
        say = [f"node {i}, token {token}"]
        say += ["accepted by the engine"] if i in engine else []
        say += ["accepted by the specification"] if i in ought else []
        say += ["here it goes wrong"] if i in guilty else []
        out.append(f'<g class="{classes}"><title>{"; ".join(say)}</title>')
        if i in guilty:
            out.append(f'<rect class="ring" x="{x[i] - 3:g}" y="{y[i] - 3:g}" width="56" height="26" rx="6"/>')
        out.append(f'<rect x="{x[i]:g}" y="{y[i]:g}" width="50" height="20" rx="4"/>')
        mark = "✕ " if i in guilty else ""
        out.append(f'<text x="{x[i] + 25:g}" y="{y[i] + 14:g}" text-anchor="middle">{mark}{token}</text></g>')
    return "".join(out) + "</svg>"


def tree_note(round_: dict[str, Any]) -> str:
    """What the picture leaves out, if anything."""
    total = len(round_.get("parents") or [])
    return f"The first {TREE_NODES_MAX} of {total} nodes are drawn; case.json has all." if total > TREE_NODES_MAX else ""


def trace_points(trace: Sequence[Any]) -> list[tuple[str, int, float, float]]:
    """(tap, layer, relative error, share of bound) in data order; entries of another shape are left out. Long traces: the worst per layer."""
    points = []
    for entry in trace:
        if isinstance(entry, dict):
            entry = [entry.get("tap"), entry.get("layer"), entry.get("relative_error"), entry.get("share")]
        try:
            tap, layer, error, share = entry
            points.append((str(tap), int(layer), _magnitude(error), _magnitude(share)))
        except (TypeError, ValueError):
            continue
    if len(points) <= TAPS_MAX:
        return points
    worst: dict[int, tuple[str, int, float, float]] = {}
    for point in points:
        old = worst.get(point[1])
        if old is None or _key(point) > _key(old):
            worst[point[1]] = point
    return list(worst.values())


def trace(points: Sequence[tuple[str, int, float, float]], guilty: tuple[str, int]) -> str:
    """Two panels over the same taps: the relative error (log, dots), and the share of the bound (log, bars; above 1 hatched and marked)."""
    if len(points) < POINTS_MIN:
        return ""
    count = len(points)
    step = min(22.0, max(4.0, 660 / count))
    left, panel, gap = 46, 84, 16
    names = step >= 11
    width, height = left + step * count + 12, 2 * panel + gap + (96 if names else 34)
    over = [p for p in points if not p[3] <= 1.0]
    first = f"; first above its bound: {over[0][0]}, layer {over[0][1]}, {numbers.times(over[0][3])}" if over else "; none above its bound"
    out = [_open("trace", width, height, f"Error along {numbers.plural(count, 'tap')}{first}")]
    errors, shares = _Log([p[2] for p in points], panel), _Log([*(p[3] for p in points), 1.0], panel)
    base = 2 * panel + gap
    out += _bands(points, left, step, base, panel + gap - 4)
    for scale, top, title in ((errors, 0.0, "relative error"), (shares, panel + gap, "share of bound")):
        for decade in scale.ticks():
            y = top + scale.y(10.0**decade)
            out.append(f'<path class="grid" d="M{left} {y:.1f}h{step * count:.1f}"/>')
            out.append(f'<text class="axis" x="{left - 6}" y="{y + 3.5:.1f}" text-anchor="end">{_decade(decade)}</text>')
        out.append(f'<text class="panel-title" x="{left + 2}" y="{top + 10:.1f}">{title}</text>')
    limit = panel + gap + shares.y(1.0)
    out.append(f'<path class="limit" d="M{left} {limit:.1f}h{step * count:.1f}"/>')
    dots = []
    for i, (tap, layer, error, share) in enumerate(points):
        x = left + step * i
        middle = x + step / 2
        is_guilty = (tap, layer) == guilty
        y = errors.y(error)
        if error > 0 or error != error:
            # The line breaks where the error is 0: a fall to the base line and back would draw the eye to what is exact.
            connected = i > 0 and points[i - 1][2] != 0
            dots.append(f"{'L' if connected else 'M'}{middle:.1f} {y:.1f}")
        top = panel + gap + shares.y(share)
        above = not share <= 1.0
        title = f"{tap}, layer {layer}: relative error {numbers.value(error, 3)}; {numbers.times(share)}"
        out.append(f'<g class="{"tap guilty" if is_guilty else "tap"}"><title>{escape(title)}</title>')
        kind = "over" if above else "bar"
        if share > 0 or above:
            out.append(
                f'<rect class="{kind}" x="{x + step * 0.15:.1f}" y="{top:.1f}" width="{step * 0.7:.1f}" height="{max(1.0, base - top):.1f}"/>'
            )
        if above:
            out.append(f'<path class="mark" d="M{middle:.1f} {top - 2:.1f}l-3.5 -6h7z"/>')
        out.append(
            f'<circle class="{"dot" if error > 0 or error != error else "dot zero"}" cx="{middle:.1f}" cy="{y:.1f}" r="{min(2.6, step / 3):.1f}"/>'
        )
        if names:
            style = "axis name strong" if is_guilty else "axis name"
            out.append(
                f'<text class="{style}" transform="translate({middle + 3.5:.1f} {base + 8}) rotate(-60)" text-anchor="end">'
                f"{escape(_short(tap, 16))}</text>"
            )
        out.append("</g>")
    out.append(f'<path class="line" d="{"".join(dots)}"/>')
    return "".join(out) + "</svg>"


class _Log:
    """Position of a positive number on a log axis of `size` pixels; 0 lies on the base line, infinity at the top."""

    def __init__(self, values: Sequence[float], size: float) -> None:
        logs = [math.log10(v) for v in values if 0 < v < math.inf]
        self.low = math.floor(min(logs, default=-1.0)) - 1 if logs else -2
        self.high = max(self.low + 2, math.ceil(max(logs, default=0.0)))
        self.size = size

    def y(self, number: float) -> float:
        top = 14.0  # room for the panel's title and the marks
        if not number < math.inf:
            return top - 4
        if number <= 0:
            return self.size
        part = (math.log10(number) - self.low) / (self.high - self.low)
        return self.size - (self.size - top) * min(1.0, max(0.0, part))

    def ticks(self) -> list[int]:
        every = max(1, math.ceil((self.high - self.low) / 4))
        return [d for d in range(self.low + 1, self.high + 1) if d % every == 0]


def _bands(points: Sequence[tuple[str, int, float, float]], left: float, step: float, base: float, gap_middle: float) -> list[str]:
    """Every other layer has a ground of its own; its number stands between the panels, or below where the taps have no names."""
    out, start, shade = [], 0, False
    for i in range(1, len(points) + 1):
        if i == len(points) or points[i][1] != points[start][1]:
            x, width = left + step * start, step * (i - start)
            if shade:
                out.append(f'<rect class="band" x="{x:.1f}" y="0" width="{width:.1f}" height="{base}"/>')
            word = str(points[start][1]) if step < 11 else f"layer {points[start][1]}"
            if step >= 11 and width >= 40 and points[start][1] >= 0:
                out.append(f'<text class="axis" x="{x + width / 2:.1f}" y="{gap_middle:.1f}" text-anchor="middle">{word}</text>')
            if step < 11 and width >= 14:
                out.append(f'<text class="axis" x="{x + width / 2:.1f}" y="{base + 14}" text-anchor="middle">{word}</text>')
            start, shade = i, not shade
    if step < 11:
        out.append(f'<text class="axis" x="{left}" y="{base + 29}">layer</text>')
    return out


def _layout(parents: list[int]) -> tuple[list[int], list[float], int]:
    """Depth and row of each node, and the number of rows: leaves take rows in depth-first order, a parent the middle of its children."""
    children: list[list[int]] = [[] for _ in parents]
    depth = [0] * len(parents)
    roots = []
    for i, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(i)
            depth[i] = depth[parent] + 1
        else:
            roots.append(i)
    row, leaves, order, stack = [0.0] * len(parents), 0, [], roots[::-1]
    while stack:  # depth first without recursion: a chain may be longer than Python's stack
        node = stack.pop()
        order.append(node)
        stack += children[node][::-1]
    for node in order:
        if not children[node]:
            row[node] = leaves
            leaves += 1
    for node in reversed(order):
        if children[node]:
            row[node] = (row[children[node][0]] + row[children[node][-1]]) / 2
    return depth, row, leaves


def _edges(path: list[int]) -> set[tuple[int, int]]:
    return set(itertools.pairwise(path))


def _ints(values: Any) -> list[int]:
    try:
        return [int(v) for v in values or []]
    except (TypeError, ValueError):
        return []


def _magnitude(number: Any) -> float:
    """JSON has no infinity: campaigns write 1e308 for it."""
    size = abs(float(number))
    return math.inf if size >= 1e300 else size


def _key(point: tuple[str, int, float, float]) -> float:
    return math.inf if math.isnan(point[3]) else point[3]


def _decade(power: int) -> str:
    return {0: "1", 1: "10", 2: "100", -1: "0.1", -2: "0.01"}.get(power, f"1e{power}")


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _open(kind: str, width: float, height: float, label: str) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg class="{kind}" role="img" aria-label="{escape(label, quote=True)}" {size} xmlns="http://www.w3.org/2000/svg">'

"""Which of several equal choices an engine takes: argmax, router, candidates of a depth, nodes of the draft tree. Questions with one right answer
under the spec's rule (the lowest index, N5; the lowest rank path, T3) and others under the rules that engines are known to use instead."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.probing import Line, likely, sure, unknown
from spec.ops import OPS
from spec.weights import philox

Ask = Callable[[str, Mapping[str, NDArray[Any]], Mapping[str, int | float]], dict[str, NDArray[Any]]]
Path = tuple[int, ...]
Sum = Callable[[float, float], float]


def argmax_line(ask: Ask) -> Line:
    """Rows with two to many equal maxima, signed zeros among them."""
    rng = philox("measure argmax")
    found: list[int] = []
    equal: list[list[int]] = []
    for width in (5, 37, 1000, 4099, 129_280):  # the last one is a real vocabulary
        logits = rng.standard_normal((12, width)).astype(np.float32)
        for row in range(12):
            places = np.sort(rng.permutation(width)[: 2 + row % 4])
            logits[row, places] = 9
            if row >= 8:
                logits[row] = -1
                logits[row, places] = np.where(np.arange(len(places)) % 2 == row % 2, 0.0, -0.0)
            equal.append(places.tolist())
        found += ask("argmax", {"logits": logits}, {})["ids"].tolist()
    return tie_line("argmax ties", found, equal, "rows with several equal maxima, up to 129280 wide")


def tie_line(name: str, found: list[int], equal: list[list[int]], what: str) -> Line:
    """`equal`: the indices, ascending, that are equally right in each row."""
    text = f"{len(found)} {what}"
    if not all(index in places for index, places in zip(found, equal, strict=True)):
        return unknown(name, f"{text}: some choices are none of the equal ones")
    if found == [places[0] for places in equal]:
        return sure(name, "lowest", f"{text}: always the lowest index")
    if found == [places[-1] for places in equal]:
        return sure(name, "highest", f"{text}: always the highest index")
    return sure(name, "any", f"{text}: the lowest index in {sum(a == b[0] for a, b in zip(found, equal, strict=True))}")


def router_line(ask: Ask) -> Line:
    """Scores and bias on a coarse grid, with and without groups: which experts, as sets, since equal ones have no order of their own."""
    asked_rows = other = explained = 0
    for number, (experts, top_k, groups, top_groups) in enumerate(((8, 2, 1, 1), (64, 6, 1, 1), (16, 3, 4, 2), (64, 8, 8, 4))):
        rng = philox("measure router", number)
        scores = (np.ceil(4 * rng.random((96, experts))) / 8).astype(np.float32)
        inputs = {"scores": scores, "bias": np.zeros(experts, np.float32)}
        params = {
            "top_k": top_k, "groups": groups, "top_groups": top_groups, "group_score_max": 0, "norm_top_k": 1, "routed_scale": 1.0, "denominator_eps": 1e-20,
        }  # fmt: skip
        params |= {name: 0.0 if kind == "float" else 0 for name, kind in OPS["route"].params.items() if name not in params}
        found = np.sort(ask("route", inputs, params)["ids"], 1)
        golden = np.sort(OPS["route"].function(inputs, params)["ids"], 1)
        wrong = (found != golden).any(1)
        asked_rows, other = asked_rows + len(scores), other + int(wrong.sum())
        if groups == 1:  # without groups a tie is explained where the chosen scores are the same numbers
            legal: NDArray[np.bool_] = np.asarray(((found >= 0) & (found < experts)).all(1, keepdims=True))
            picked = np.sort(np.take_along_axis(scores, np.where(legal, found, 0), 1), 1)
            right = legal[:, 0] & (picked == np.sort(np.take_along_axis(scores, golden, 1), 1)).all(1)
            explained += int((wrong & right).sum())
            if (wrong & ~right).any():
                return unknown("ties", "the router picks experts that no rule for ties explains")
    if not other:
        return sure("ties", "lowest", f"{asked_rows} rows of equal router scores, with and without groups: always the lower expert")
    if explained:
        return sure(
            "ties", "any", f"{asked_rows} rows of equal router scores: other experts than the lower ones in {other}, with the same scores"
        )
    return likely("ties", "any", f"{asked_rows} rows of equal router scores: other experts in {other}, only where there are groups")


def candidates_line(ask: Ask) -> Line:
    """Logits on a coarse grid: ids by rank of a depth."""
    logits = np.rint(2 * philox("measure candidates").standard_normal((48, 61))).astype(np.float32)
    found = ask("draft_table", {"logits": logits}, {"budget": 12})["ids"]
    lowest = np.argsort(-logits, 1, kind="stable")[:, :12]
    highest = 60 - np.argsort(-logits[:, ::-1], 1, kind="stable")[:, :12]
    name, text = "top-k ties", f"{found.size} candidates of rows with many equal logits"
    inside = np.clip(found, 0, 60)
    once = (np.diff(np.sort(found, 1), axis=1) > 0).all()
    best = np.array_equal(np.take_along_axis(logits, inside, 1), np.take_along_axis(logits, lowest, 1))
    if not (once and best and np.array_equal(inside, found)):
        return unknown(name, f"{text}: some are not the best ones")
    if np.array_equal(found, lowest):
        return sure(name, "lowest", f"{text}: always the lowest index")
    if np.array_equal(found, highest):
        return sure(name, "highest", f"{text}: always the highest index")
    return sure(name, "any", f"{text}: the lowest index in {100 * float((found == lowest).mean()):.0f} %")


# ---- the heap of the draft tree ----------------------------------------------------------------------------------------------------------


def exact_sum(above: float, value: float) -> float:
    """Exact: the probes hold numbers whose sums a double holds."""
    return above + value


def float32_sum(above: float, value: float) -> float:
    return float(np.float32(above) + np.float32(value))


def heap_lines(ask: Ask) -> list[Line]:
    """Trees whose order of nodes depends on the rule for ties, and trees whose order depends on the precision of path scores."""
    grids = [_grid_table(number) for number in range(48)]
    rules = {
        "rank path": _by_path,
        "first in, first out": _first_in(False),
        "first in, first out, child first": _first_in(True),
        "last in, first out": _last_in,
    }
    built = [_asked_tree(ask, table) for table in grids]
    expected = {rule: [tree(table, BUDGET, exact_sum, key) for table in grids] for rule, key in rules.items()}
    telling = sum(any(expected[rule][i] != expected["rank path"][i] for rule in rules) for i in range(len(grids)))
    text = f"{len(grids)} trees with equal path scores, {telling} of which tell the rules apart"
    matches = [rule for rule in rules if expected[rule] == built]
    if matches:
        ties = sure("heap ties", matches[0], f"{text}: always {matches[0]}")
        ties_of = rules[matches[0]]
    elif any(not _descends(table, paths) for table, paths in zip(grids, built, strict=True)):
        text = f"{text}: some are no best-first trees under any rule"
        return [unknown("heap ties", text), unknown("float32_scores", text)]
    else:
        ties = sure(
            "heap ties",
            "another rule",
            f"{text}: {sum(a != b for a, b in zip(built, expected['rank path'], strict=True))} differ from the rank paths",
        )
        return [ties, unknown("float32_scores", "the order of ties is not understood, so that of near ties is not either")]
    close = [_close_table(number) for number in range(48)]
    built = [_asked_tree(ask, table) for table in close]
    wide, narrow = ([tree(table, BUDGET, add, ties_of) for table in close] for add in (exact_sum, float32_sum))
    text = f"{len(close)} trees with path scores closer than float32 holds, {sum(a != b for a, b in zip(wide, narrow, strict=True))} of which tell"
    if built == wide:
        return [ties, sure("float32_scores", False, f"{text}: always the order of exact sums")]
    if built == narrow:
        return [ties, sure("float32_scores", True, f"{text}: always the order of float32 sums")]
    return [ties, unknown("float32_scores", f"{text}: neither the order of exact sums nor that of float32 sums")]


BUDGET, DEPTHS, WIDTH = 10, 3, 5


def _grid_table(number: int) -> NDArray[np.float32]:
    """Log-probabilities that are multiples of 1/4, so that many sums are equal."""
    steps = np.floor(2 * np.abs(philox("measure heap", number).standard_normal((DEPTHS, WIDTH)))) / 4
    return (-np.cumsum(steps, 1)).astype(np.float32)


def _close_table(number: int) -> NDArray[np.float32]:
    """First ranks near -20 that differ by some 2**-19, below them rows that begin with a large value: float32 sums of 40 round to 2**-18."""
    rng = philox("measure sums", number)
    first = -20 - np.sort(rng.integers(0, 24, WIDTH)) * 2.0**-19
    rest = [-20 - np.sort(rng.integers(0, 24, WIDTH)) * 2.0**-19 for _ in range(DEPTHS - 1)]
    return np.stack([first, *rest]).astype(np.float32)


def _asked_tree(ask: Ask, table: NDArray[np.float32]) -> list[Path]:
    """The rank paths of an engine's nodes, in its order. ids are ranks, so that tokens are ranks."""
    ids = np.tile(np.arange(table.shape[1], dtype=np.int32), (len(table), 1))
    found = ask("best_first_tree", {"ids": ids, "log_probs": table}, {"budget": BUDGET, "root": 0})
    paths: list[Path] = [()]
    for node in range(1, max(0, min(BUDGET, int(found["count"][0]))) + 1):
        parent = int(found["parents"][node])
        paths.append((*paths[parent], int(found["tokens"][node])) if 0 <= parent < node else ())
    return paths[1:]


def _descends(table: NDArray[np.float32], paths: list[Path]) -> bool:
    """Distinct paths whose scores, in order, are the best ones."""
    values = table.astype(np.float64)

    def scores(of: list[Path]) -> list[float]:
        return [float(sum(values[depth, rank] for depth, rank in enumerate(path))) for path in of]

    legal = all(path and len(path) <= len(values) and min(path) >= 0 and max(path) < values.shape[1] for path in paths)
    return legal and len(set(paths)) == len(paths) and scores(paths) == scores(tree(table, BUDGET, exact_sum, _by_path))


Key = Callable[[Path, int], Any]
"""(rank path, number of pushes so far) -> what decides between equal scores, the smaller first."""


def _by_path(path: Path, pushes: int) -> Any:
    return path


def _last_in(path: Path, pushes: int) -> Any:
    return -pushes


def _first_in(child_first: bool) -> Key:
    def key(path: Path, pushes: int) -> Any:
        """A popped node pushes its sibling and its child; pushes are numbered in pairs, and the order within a pair is the rule's."""
        child = path[-1] == 0
        return (pushes // 2, child != child_first)

    return key


def tree(table: NDArray[np.float32], budget: int, add: Sum, key: Key) -> list[Path]:
    """Rank paths in the order in which a heap with this sum and this rule for ties gives them."""
    values = table.astype(np.float64)
    depths, width = values.shape
    pushes = 0
    heap: list[tuple[float, Any, Path, float]] = []

    def push(path: Path, above: float) -> None:
        nonlocal pushes
        pushes += 1
        score = add(above, float(values[len(path) - 1, path[-1]]))
        heapq.heappush(heap, (-score, key(path, pushes), path, above))

    push((0,), 0.0)
    pushes = 1
    out: list[Path] = []
    while heap and len(out) < budget:
        negative, _, path, above = heapq.heappop(heap)
        out.append(path)
        if path[-1] + 1 < width:
            push((*path[:-1], path[-1] + 1), above)
        else:
            pushes += 1
        if len(path) < depths:
            push((*path, 0), -negative)
        else:
            pushes += 1
    return out

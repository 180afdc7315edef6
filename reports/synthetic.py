"""An invented store, for tests, for measuring, and for looking at the page. Seeded: the same arguments give the same rows.

No engine ran: every name of an engine starts with "invented".
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from reports.cells import every
from reports.schema import RUNGS
from reports.store import Store

START = 1_790_000_000.0
_TAPS = (
    ("attn_norm", "rms_norm"), ("q_a", "matmul"), ("q", "matmul"), ("kv_a", "matmul"), ("latent", "rms_norm"), ("q_rope", "rope"), ("k_rope", "rope"),
    ("q_absorb", "q_absorb"), ("scores", "scores"), ("probs", "softmax"), ("o_latent", "o_latent"), ("o_heads", "o_heads"), ("attn_out", "matmul"),
    ("attn_residual", "add"), ("ffn_norm", "rms_norm"), ("router_scores", "router_scores"), ("expert_ids", "route"), ("expert_out", "matmul"),
    ("ffn_out", "combine"), ("ffn_residual", "add"),
)  # fmt: skip
_OPS = (
    "matmul",
    "rms_norm",
    "rope",
    "softmax",
    "tree_attention",
    "route",
    "moe",
    "draft_table",
    "best_first_tree",
    "tree_mask",
    "accept",
    "compact",
)
_CASE = {
    "kind": "session",
    "schema": 1,
    "generator": 1,
    "preset": "tiny",
    "weights_seed": 3,
    "prompts": [[7, 41]],
    "chunk": 0,
    "mixed": True,
}


def fill(path: str | os.PathLike[str], *, trials: int = 2_000, engines: int = 1, findings: int = 6, layers: int = 6, seed: int = 1) -> Path:
    """A store with two nights: `trials` and `findings` in all, spread over the engines."""
    draw = random.Random(seed)
    names = [f"invented-{chr(97 + i)}" for i in range(engines)]
    described = [{"name": name, "version": f"0.{i + 3}.1", "profile": "float32-any-order"} for i, name in enumerate(names)]
    common = {"engines": described, "machine": "2 cores, no accelerator, Linux", "commit": "4f1c2a9", "paritree": "0.1.0", "budget": "2h"}
    command = "paritree nightly --engine ./libinvented.so --budget 2h --store night"
    store = Store.create_or_open(path)
    nights = []
    for night in range(2):
        run = {"run_id": f"night-{night}", "started": START + 86_400.0 * night, "seed": 7 + night, "purpose": "nightly", "command": command}
        nights.append(store.start_run(common | run))
        mine = range(findings) if night else range(1, findings, 3)
        ids = [_report(store, nights[night], names[i % engines], i, layers, draw) for i in mine]
        if night and findings > 3:
            store.record_replay(ids[3], nights[1], 2, 5)
        with store.writer(nights[night], "w0") as writer:
            for i in range(trials if night else trials // 10):
                _trial(writer, names[i % engines], i, bool(findings), draw)
            _judgements(writer, names, layers, bool(findings), draw)
            _coverage(writer, names[0], draw)
        last = {"finished": START + 86_400.0 * night + 7_100, "trials": trials, "findings": len(ids), "stopped": "budget"}
        store.finish_run(nights[night], last)
    _judge(store, common, names[0])
    store.close()
    return Path(path)


def _trial(writer: Any, engine: str, i: int, failing: bool, draw: random.Random) -> None:
    rung = RUNGS[draw.choice((0, 0, 0, 0, 1, 2, 3, 4, 5))]
    chance = draw.random()
    verdict = "EXACT" if rung in ("ops", "accept and commit") and chance < 0.4 else "WITHIN_BOUND"
    if chance > 0.985:
        verdict = "UNVERIFIED"
    elif chance > 0.97:
        verdict = "UNSUPPORTED"
    elif failing and chance > 0.955 and RUNGS.index(rung) >= 3:
        verdict = "DEFECT"
    reached = ";".join(RUNGS[1 : RUNGS.index(rung) + 1]) if rung != "ops" else ""
    row = {
        "engine": engine,
        "kind": "op" if rung == "ops" else "session",
        "rung": rung,
        "rungs": reached,
        "case_id": f"{i:016x}",
        "verdict": verdict,
    }
    writer.add_trial(
        row | {"checked": draw.randrange(200, 90_000), "unverified": draw.choice((0, 0, 0, 12)), "duration_ms": 5 + 30 * chance, "seed": i}
    )


def _judgements(writer: Any, engines: list[str], layers: int, failing: bool, draw: random.Random) -> None:
    for engine in engines:
        for op in _OPS:
            row = {
                "engine": engine,
                "rung": "ops",
                "op": op,
                "tap": op,
                "rule": "bound",
                "verdict": "WITHIN_BOUND",
                "case_id": "ab",
                "checked": 4096,
            }
            exact = op in ("accept", "compact", "tree_mask", "best_first_tree")
            writer.add_judgement(row | {"share": 0.0 if exact else 10 ** draw.uniform(-3.5, -0.3)})
        for layer in range(layers):
            for tap, op in _TAPS:
                share = 10 ** draw.uniform(-3, -0.4) if op != "add" else 0.0
                verdict = "WITHIN_BOUND"
                if failing and tap == "o_latent" and layer == min(1, layers - 1):
                    share, verdict = 33.36, "DEFECT"
                rung = RUNGS[1 + layer % 3] if verdict == "WITHIN_BOUND" else "tree verify"
                row = {
                    "engine": engine,
                    "rung": rung,
                    "op": op,
                    "tap": tap,
                    "layer": layer,
                    "rule": "bound",
                    "verdict": verdict,
                    "case_id": "cd",
                }
                writer.add_judgement(row | {"share": share, "checked": 12_288})


def _report(store: Store, run_id: str, engine: str, i: int, layers: int, draw: random.Random) -> str:
    tap, op = _TAPS[(10 + 3 * i) % len(_TAPS)]
    verdict = ("DEFECT", "DEFECT", "NONFINITE", "DEFECT", "CRASHED", "HUNG")[i % 6]
    rung = RUNGS[3 + i % 3]
    layer = min(1 + i % 5, layers - 1)
    nodes = 4 + i % 9
    parents = [-1] + [max(0, k - 1 - draw.randrange(0, 3)) for k in range(1, nodes)]
    path, at = [0], 0
    while children := [k for k, p in enumerate(parents) if p == at]:
        at = children[0]
        path.append(at)
    found, share = 0.12510, 33.36
    if verdict == "NONFINITE":
        found, share = float("nan"), float("inf")
    message = {
        "DEFECT": "The row reads the cache of a rejected branch; everything before it agrees.",
        "NONFINITE": "A row that sees nothing divides 0 by 0.",
        "CRASHED": "Signal 11 (segmentation fault) in the third forward.",
        "HUNG": "No answer within 2.0 s; the median is 0.03 s.",
    }[verdict]
    case = _CASE | {"rounds": [[[[0, 1]] * (nodes - 1)]], "weights_seed": i}
    row: dict[str, Any] = {
        "run_id": run_id, "engine": engine, "verdict": verdict, "op": op, "rule": "M7", "output": tap if i < 6 else f"{tap}{i}", "rung": rung,
        "layer": layer, "step": 2, "token": 3, "index": [3, 0, 17], "message": message, "case_id": f"{i:016x}", "minimal": True, "nodes": nodes,
        "case": json.dumps(case, separators=(",", ":")), "checks": 96 + 7 * i, "engine_version": "0.3.1", "profile": "float32-any-order",
        "hits": 1 + draw.randrange(60), "replay": f"paritree replay F-invented-{i} --engine ./libinvented.so",
    }  # fmt: skip
    if verdict in ("DEFECT", "NONFINITE"):
        row |= {"found": found, "expected": 0.125, "bound": 3e-6, "share": share, "trace": _trace(tap, layer, layers, draw)}
        tokens = [draw.randrange(0, 128) for _ in parents]
        round_ = {
            "title": "round 1, sequence 0",
            "tokens": tokens,
            "parents": parents,
            "path": path[:2],
            "expected_path": path,
            "guilty": path[-1],
        }
        row["tree"] = [round_]
    if i % 3 == 0:
        row["bisect"] = {"by": "commit", "first_bad": "4f1c2a9", "last_good": "b07d3e1", "steps": 6}
    name, _ = store.report_finding(row)
    store.update_finding(name, {"capsule": f"findings/{name}", "replay": f"paritree replay {name} --engine ./libinvented.so --store night"})
    return name


def _trace(guilty: str, guilty_layer: int, layers: int, draw: random.Random) -> list[list[Any]]:
    points: list[list[Any]] = []
    error, bad = 3e-8, False
    for layer in range(layers):
        for tap, op in _TAPS:
            if layer == guilty_layer and tap == guilty:
                error, bad = 4e-3, True
                points.append([tap, layer, error, 33.36])
                continue
            error *= draw.uniform(0.9, 1.2)
            points.append(
                [
                    tap,
                    layer,
                    0.0 if op == "route" else error,
                    0.0 if op in ("add", "route") else 10 ** draw.uniform(-2, -0.5 if bad else -0.8),
                ]
            )
    return points


def _coverage(writer: Any, engine: str, draw: random.Random) -> None:
    for region, values in {
        "tree.depth": [*range(1, 9), 12, 16],
        "tree.shape": ["chain", "star", "random", "one branch point", "full"],
        "mask.width": [31, 32, 33, 63, 64, 65],
        "prefix length mod 64": [0, 1, 63],
        "hazard": ["nan-poison", "guard-words", "stale-mask", "freed-sources", "repeat"],
    }.items():
        for value in values:
            number = 0 if value in (16, 65) else draw.randrange(3, 900)
            cell = {"engine": engine, "region": region, "value": value, "trials": number, "findings": 3 if value == "stale-mask" else 0}
            writer.add_coverage(cell)
    known = [cell for cell in every() if cell[4] == "float32" or cell[5] == "none"]
    for _ in range(400):
        writer.add_cell(engine, draw.choice(known), failing=draw.random() < 0.01)


def _judge(store: Store, common: dict[str, Any], engine: str) -> None:
    """A mutation run and a run on an engine that is right."""
    run_id = store.start_run(common | {"run_id": "mutation", "purpose": "mutation", "engines": [], "started": START + 50_000.0})
    with store.writer(run_id, "w0") as writer:
        for i, (mutant, defect, op) in enumerate(
            [
                ("mask-drops-bit-31", "mask", "tree_mask"),
                ("rope-position-is-slot", "positions", "rope"),
                ("rejected-branch-kept", "cache", "compact"),
                ("bias-in-weights", "routing", "route"),
                ("softmax-without-max", "numerics", "softmax"),
                ("tie-takes-highest", "ties", "argmax"),
            ]
        ):
            row = {"mutant": mutant, "defect_class": defect, "expected_op": op, "source": f"invented report {100 + i}", "trials": 40 + i}
            caught = i != 4
            row |= {"found": caught, "localised": caught and i != 1, "found_op": op if caught and i != 1 else "scores" if caught else ""}
            sizes = {
                "minimal_nodes": 2 + i if caught else -1,
                "stated_nodes": 2 + i,
                "seconds": 0.4 + i,
                "checks": 90 + i,
                "reproduced": caught,
            }
            writer.add_mutation(row | sizes)
        for mutant, defect, op in (("page-not-moved", "cache", "compact"), ("mask-from-last-call", "mask", "tree_mask")):
            unsampled = {"mutant": mutant, "defect_class": defect, "expected_op": op, "source": "invented report 110", "seconds": -1.0}
            writer.add_mutation(unsampled)
        writer.add_mutation({"mutant": "split-k-order", "benign": True, "defect_class": "benign", "trials": 500, "minimal_nodes": -1})
    store.finish_run(run_id, {"finished": START + 50_600.0, "stopped": "complete"})
    right = [{"name": engine, "version": "right", "profile": "float32-any-order"}]
    run_id = store.start_run(common | {"run_id": "alarms", "purpose": "false-alarms", "engines": right, "started": START + 51_000.0})
    with store.writer(run_id, "w0") as writer:
        for i in range(600):
            writer.add_trial({"engine": engine, "case_id": f"r{i}", "verdict": "WITHIN_BOUND", "rung": "ops", "checked": 100})
    store.finish_run(run_id, {"finished": START + 51_300.0, "trials": 600, "stopped": "complete"})

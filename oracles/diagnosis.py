"""From a number out of bounds to the rule that was broken: a hint is promoted to a rule only if it explains every failing row within
the certified bound while the specification does not. What no hypothesis explains keeps the rule of its bound.

Positions show in q_rope and k_rope (C2), visibility in probs, or in o_latent where nothing before it is tapped (C3, C6), and
the cache in scores of committed keys (K1), where cache_rows is not offered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from oracles.ball import Ball, Wide, concatenate
from oracles.compare import Near, close_number
from oracles.history import History
from oracles.judgement import Judgement, Verdict
from oracles.ops import o_latent, rope, scores, softmax

if TYPE_CHECKING:
    from oracles.walked import Walked


REGION = ("o_latent", "o_heads", "attn_out")
ROWS_TRIED = 8


def refine(
    judgement: Judgement, walked: Walked, name: str, layer: int, near: Near, values: NDArray[Any], failing: NDArray[np.bool_], row: int,
    index: tuple[int, ...],
) -> Judgement:  # fmt: skip
    """`row`: the global row that `judgement` names, `index` its element in the stacked tap."""
    if name in ("q_rope", "k_rope"):
        return _position(judgement, walked, name, near, values, failing, row)
    if name == "probs":
        return _weights(judgement, walked, near, values, row, index)
    if name == "scores" and values[index] == -np.inf and walked.history.visible[row][index[2]]:
        return _hidden(judgement, walked, row, index[2])
    if name == "scores":
        return _moved_keys(judgement, walked, near, values, row)
    if name in REGION and not walked.has("probs", layer):
        return _visibility(judgement, walked, name, layer, values, failing)
    return judgement


def _told(judgement: Judgement, rule: str, hint: str, op: str | None = None) -> Judgement:
    """The same element under another rule, with the explanation before the rule id."""
    text = judgement.message.removesuffix(f" ({judgement.rule})")
    return dataclasses.replace(judgement, rule=rule, op=op or judgement.op, message=f"{text}: {hint} ({rule})")


def _position(
    judgement: Judgement, walked: Walked, name: str, near: Near, values: NDArray[Any], failing: NDArray[np.bool_], row: int
) -> Judgement:  # fmt: skip
    """C2: the row is turned as at another position."""
    history, model, c = walked.history, walked.model, walked.model.config
    source = walked.seen("q")[..., c.nope_dim :] if name == "q_rope" else walked.seen("kv_a")[:, c.kv_rank :]
    span = history.span_of(row)
    slot = int(np.flatnonzero(span.keys == row)[0])
    candidates = dict.fromkeys([slot, *range(int(history.position.max()) + len(history) + 2)])
    found = values[row : row + 1].astype(np.float64)
    turned = source[row : row + 1]
    for position in candidates:
        cos, sin = (table.astype(np.float64) for table in model.rotary.tables(np.array([position])))
        if name == "q_rope":
            cos, sin = cos[:, None], sin[:, None]
        ball = rope.bound(turned, cos, sin, c.rope_layout == "half", walked.arithmetic.at("rope"))
        if within(found, ball):
            due = int(history.position[row])
            what = ", which is its cache slot," if position == slot else ""
            return _told(judgement, "C2", f"the row is turned as at position {position}{what} and not {due}")
    return judgement


def within(found: Wide, ball: Ball) -> bool:
    rad = 0.0 if ball.rad is None else ball.rad
    with np.errstate(invalid="ignore"):
        return bool((np.abs(found - ball.mid) <= rad).all())


def _hidden(judgement: Judgement, walked: Walked, row: int, key: int) -> Judgement:
    """C3: a score of -inf is how a mask is written, so that it is the softmax's decision on what the row sees, and not a wrong product."""
    told = _told(judgement, "C3", f"the row must see {key_name(walked, row, key)}", "softmax")
    return dataclasses.replace(told, verdict=Verdict.DEFECT, tap="probs")


def _weights(
    judgement: Judgement, walked: Walked, near: Near, values: NDArray[Any], row: int, index: tuple[int, ...]
) -> Judgement:  # fmt: skip
    """C3: a weight on a key that the row does not see, none on one that it sees, or weights of what it sees that do not add up to 1."""
    key = index[2]
    seen = walked.history.visible[row]
    if not seen[key]:
        return _told(judgement, "C3", f"the row does not see {key_name(walked, row, key)}")
    weights = values[row, index[1]].astype(np.float64)
    if weights[key] == 0:
        return _told(judgement, "C3", f"the row must see {key_name(walked, row, key)}")
    total = float(weights[seen].sum())
    rad = near.ball.rad
    slack = float(rad[row, index[1]][seen].sum()) if rad is not None else 0.0
    missing = [
        int(k)
        for k in np.flatnonzero(
            seen
            & (weights == 0)
            & (near.ball.mid[row, index[1]] > np.broadcast_to(rad if rad is not None else 0.0, near.ball.mid.shape)[row, index[1]])
        )
    ]
    if missing:
        return _told(judgement, "C3", f"the row must see {key_name(walked, row, missing[0])}, too")
    stray = np.flatnonzero(~seen & (weights != 0))
    if len(stray):
        return _told(judgement, "C3", f"the row also looks at {key_name(walked, row, int(stray[0]))}, which it does not see")
    if abs(total - 1) > slack:
        return _told(
            judgement, "C3", f"the weights of the keys that it sees add up to {close_number(total, 1.0)}, so it looks at another key"
        )
    return judgement


def _moved_keys(judgement: Judgement, walked: Walked, near: Near, values: NDArray[Any], row: int) -> Judgement:
    """K1: each failing score of the row is that of another row's key, which stands where the right one should; C6 if all of those belong to
    another sequence."""
    history = walked.history
    span = history.span_of(row)
    rad = 0.0 if near.ball.rad is None else near.ball.rad[row]
    wrong = history.visible[row] & ~(np.abs(values[row] - near.ball.mid[row]) <= rad).all(0)
    ball = _scores_of(walked, row)
    assert ball.rad is not None
    named = []
    for key in np.flatnonzero(wrong).tolist():
        found = values[row, :, key : key + 1].astype(np.float64)
        match = np.flatnonzero((np.abs(found - ball.mid[0]) <= ball.rad[0]).all(0))
        if not len(match) or key not in span.committed:
            return judgement
        named.append((key, int(match[0])))
    key, other = named[0]
    hint = f"{key_name(walked, row, key)} scores like {key_name(walked, row, other)}"
    if all(history.sequence[o] != history.sequence[k] for k, o in named):
        return _told(judgement, "C6", hint)
    return _told(judgement, "K1", hint, "compact")


def _scores_of(walked: Walked, row: int) -> Ball:
    """[1, H, T]: the scores of one row against every key ever written."""
    query = concatenate([walked.seen("q_absorb")[row : row + 1], walked.seen("q_rope")[row : row + 1]], -1)
    keys = concatenate([walked.seen("latent"), walked.seen("k_rope")], -1)
    return scores.bound(query, keys, walked.model.scale, walked.arithmetic.at("scores"))


def _visibility(
    judgement: Judgement, walked: Walked, name: str, layer: int, values: NDArray[Any], failing: NDArray[np.bool_]
) -> Judgement:  # fmt: skip
    """C3, C6, K1, K2: no weights were shown, but one mistake about what rows see explains every failing row of the step that is tried."""
    rows = np.flatnonzero(failing & (walked.history.step == judgement.step))[:ROWS_TRIED].tolist()
    told = [{sentence: (rule, keys) for rule, sentence, keys in hypotheses(walked, row)} for row in rows]
    for sentence, (rule, _) in told[0].items():
        keys = [of_row[sentence][1] if sentence in of_row else None for of_row in told]
        if all(k is not None and _explains(walked, name, layer, values, row, k) for row, k in zip(rows, keys, strict=True)):
            return _told(judgement, rule, sentence, "compact" if rule.startswith("K") else "softmax")
    return judgement


def _explains(walked: Walked, name: str, layer: int, values: NDArray[Any], row: int, keys: NDArray[np.intp]) -> bool:
    """Whether the tap's row is what it would be if the row looked at `keys`, and not at those that it must see."""
    if not len(keys) or np.array_equal(np.sort(keys), np.flatnonzero(walked.history.visible[row])):
        return False
    a, matrices = walked.arithmetic.widest, walked.model.matrices
    weights = softmax.bound(_scores_of(walked, row)[:, :, keys], np.ones((1, 1, len(keys)), np.bool_), a)
    ball = o_latent.bound(weights, walked.seen("latent")[keys], len(keys), a)
    if name != "o_latent":
        ball = matrices.heads(ball, f"{layer}.w_vc", a)
    if name == "attn_out":
        ball = matrices.product(ball.reshape(1, -1), f"{layer}.o", a, f"{layer}.o_bias" if walked.model.config.attention_bias else "")
    return within(values[row : row + 1].astype(np.float64), ball)


def key_name(walked: Walked, row: int, key: int) -> str:
    """A key in words, from where `row` stands."""
    history = walked.history
    place = f"row {int(history.row[key])} of step {int(history.step[key])}"
    if history.sequence[key] != history.sequence[row]:
        return f"{place}, of sequence {int(history.sequence[key])}"
    if key == row:
        return "itself"
    if history.batch[key] == history.batch[row]:
        if history.visible[row, key]:
            return f"its ancestor, row {int(history.row[key])}"
        return f"row {int(history.row[key])} of another branch" if key < row else f"row {int(history.row[key])}, which comes later"
    kept = key in history.span_of(row).committed
    return f"{place}" if kept else f"{place}, which was rejected"


def of_cache(
    walked: Walked, layer: int, step: int, kept: NDArray[np.intp], rows: Ball, found: NDArray[Any], share: Wide
) -> Judgement:  # fmt: skip
    """A cache row that is not what the commits kept: which row it is instead, and whether it lay below P already (K7)."""
    history = walked.history
    at = int(np.flatnonzero(share.max(1) > 1)[0])
    column, own = int(share[at].argmax()), int(kept[at])
    rule = cache_rule(history, step, own, at, len(kept))
    other = next((int(g) for g in range(len(history)) if g != own and within(found[at].astype(np.float64), rows[g])), None)
    hint = ""
    if other is not None:
        hint = f": this is row {int(history.row[other])} of step {int(history.step[other])}{is_rejected(history, other)}"
        hint += f", not row {int(history.row[own])} of step {int(history.step[own])}"
    value, due = float(found[at, column]), float(rows.mid[own, column])
    name = f"cache[{layer}, {at}, {column}]"
    text = f"{name} is {close_number(value, due)}, but must be {close_number(due, value)}{hint} ({rule})"
    verdict = Verdict.NONFINITE if not np.isfinite(value) and np.isfinite(due) else Verdict.DEFECT
    return Judgement(
        verdict, rule, "compact", "cache", "accept and commit", layer, step, at, (layer, at, column), value, due,
        share=float("inf"), checked=int(found.size), message=text,
    )  # fmt: skip


def cache_rule(history: History, step: int, own: int, at: int, length: int) -> str:
    """K7 for a row that was below P before the last commit of its sequence, else K1. `own`: the row that should stand at `at`."""
    sequence = int(history.sequence[own])
    before = [kept for number, of_sequence, _, kept in history.commits if number < step and of_sequence == sequence]
    return "K7" if at < length - (len(before[-1]) if before else length) else "K1"


def is_rejected(history: History, row: int) -> str:
    """` (rejected)` if a commit dropped the row."""
    return " (rejected)" if any(row in pending and row not in kept for _, _, pending, kept in history.commits) else ""


def hypotheses(walked: Walked, row: int) -> Iterator[tuple[str, str, NDArray[np.intp]]]:
    """(rule, sentence, keys that the row would see instead, repeated where a slot holds a copy) for the usual mistakes."""
    history = walked.history
    span = history.span_of(row)
    everyone = np.arange(len(history))
    same_batch = history.batch == history.batch[row]
    batch = everyone[same_batch & (history.sequence == history.sequence[row])]
    ancestors = everyone[history.visible[row] & same_batch]
    committed = span.committed

    def keys(*parts: NDArray[np.intp]) -> NDArray[np.intp]:
        return np.concatenate(parts).astype(np.intp)

    yield "C3", "it looks at every earlier row of its batch, not only at its ancestors", keys(committed, batch[batch <= row])
    yield "C3", "it looks at every row of its sequence in the batch", keys(committed, batch)
    siblings = batch[(history.parent[batch] == history.parent[row]) & (batch != row)]
    yield "C3", "it looks at its siblings", keys(committed, ancestors, siblings)
    yield "C3", "it does not look at its ancestors in the batch", keys(committed, np.array([row]))
    yield "C3", "it does not look at the committed prefix", ancestors
    yield "C3", "it does not look at itself", keys(committed, ancestors[ancestors != row])
    yield "C6", "it looks at rows of other sequences in its batch", keys(committed, everyone[same_batch])
    commits = [c for c in history.commits if c[0] < history.step[row] and c[1] == history.sequence[row]]
    if not commits:
        return
    _, _, pending, kept = commits[-1]
    before = committed[: len(committed) - len(kept)]
    count = len(kept)
    yield "K1", "the cache holds the first rows of the last batch instead of those on the path", keys(before, pending[:count], ancestors)
    first = [c[2][: len(c[3])] for c in commits]
    if sum(map(len, first)) == len(committed):
        yield "K1", "the cache holds the first rows of each batch instead of those on the path", keys(*first, ancestors)
    rejected = pending[~np.isin(pending, kept)]
    yield "K2", "it looks at the rejected rows of the last step", keys(before, pending, ancestors)
    for more in range(1, len(rejected) + 1):
        yield "K2", f"it looks at {more} slots behind the path", keys(committed, pending[count : count + more], ancestors)
        yield "K2", f"it looks at {more} of the rejected rows of the last step", keys(committed, rejected[:more], ancestors)
    yield "K2", "it does not look at the last committed row", keys(committed[:-1], ancestors)

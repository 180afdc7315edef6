"""Hypothesis strategies for cases. They draw recipes, never arrays; the size class comes first, then what it holds.

`size` is "small" or "full": discovery begins small, so that an easy bug is met small. Sizes lie on and beside the boundaries of
common tiles. Overrides of a preset break coincidences (BUGZOO region 2), one bundle at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cache
from typing import Any

from hypothesis import strategies as st

from campaigns.case import Case, GenerateCase, Node, OpCase, SessionCase, TreeCase
from campaigns.operands import REFUSALS, REFUSED, REGIMES
from campaigns.weights import REGIMES as WEIGHT_REGIMES
from campaigns.weights import checkpoint_at
from spec.config import preset
from spec.sampling import Sampling
from spec.weights import is_large

Draw = Callable[[st.SearchStrategy[Any]], Any]

SIZES = ("small", "full")

# Frozen: a change of these makes two campaigns incomparable, so it raises campaigns.case.GENERATOR.
MIX = {"op": 0.60, "tree": 0.25, "session": 0.15}
FROZEN_ROWS_MIN = 24  # a frozen-mix session: large enough to cross a tile of 16 in every engine,
FROZEN_ROUNDS_MIN = 2  # to show a commit that is wrong from round 2 on (BUGZOO region 3),
FROZEN_LAYERS_MIN = 2  # and to have a dense and a sparse layer
WEIGHT_SEEDS = 3  # a small pool, so that weights are made once and engines stay open

# Strategies are made once per argument: making, labelling and validating one costs more than drawing from it
_pick = cache(st.sampled_from)
_int = cache(st.integers)

SEEDS = st.integers(0, 2**20 - 1)
_FEW = (1, 2, 3, 4, 5, 7, 8, 9)
_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17)
_WIDE = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 129)
_KEYS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 257, 520)


def _one_of(values: tuple[Any, ...], size: str, small: int = 5) -> st.SearchStrategy[Any]:
    return _pick(values[:small] if size == "small" else values)


# Operations

Shape = Callable[[Draw, str], tuple[dict[str, int], dict[str, float]]]


def _plain(**words: tuple[int, ...]) -> Shape:
    def draw_dims(draw: Draw, size: str) -> tuple[dict[str, int], dict[str, float]]:
        return {word: draw(_one_of(values, size)) for word, values in words.items()}, {}

    return draw_dims


def _rms_norm(draw: Draw, size: str) -> tuple[dict[str, int], dict[str, float]]:
    return {"T": draw(_one_of(_ROWS, size)), "N": draw(_one_of(_WIDE, size))}, {"eps": draw(_pick((1e-6, 1e-5, 1e-3)))}


def _rope(draw: Draw, size: str) -> tuple[dict[str, int], dict[str, float]]:
    dims = {"T": draw(_one_of(_ROWS, size)), "H": draw(_one_of(_FEW, size)), "half": draw(_pick((1, 2, 3, 4, 5, 8, 16)))}
    return dims, {"half_layout": draw(_int(0, 1))}


def _scores(draw: Draw, size: str) -> tuple[dict[str, int], dict[str, float]]:
    dims = {
        "T": draw(_one_of(_FEW, size)),
        "H": draw(_one_of(_FEW, size)),
        "C": draw(_one_of(_WIDE, size)),
        "S": draw(_one_of(_KEYS[:16], size)),
    }
    return dims, {"scale": draw(_pick((1.0, 0.125, 0.2236068)))}


def _tree_attention(draw: Draw, size: str) -> tuple[dict[str, int], dict[str, float]]:
    rank = draw(_one_of(_WIDE[:14], size))
    dims = {"T": draw(_one_of(_ROWS, size)), "H": draw(_one_of(_FEW[:5], size)), "S": draw(_one_of(_KEYS, size))}
    return dims | {"C": rank + draw(_pick((2, 4, 8)))}, {"kv_rank": rank, "scale": draw(_pick((1.0, 0.125, 0.2236068)))}


def _router_scores(draw: Draw, size: str) -> tuple[dict[str, int], dict[str, float]]:
    return {"T": draw(_one_of(_ROWS, size)), "E": draw(_one_of(_WIDE, size))}, {"softmax": draw(_int(0, 1))}


def _route(draw: Draw, size: str) -> tuple[dict[str, int], dict[str, float]]:
    groups = draw(_pick((1, 1, 2, 3, 4)))
    maximum = 1 if groups == 1 else draw(_int(0, 1))
    per_group = draw(_int(1 if maximum else 2, 4 if size == "small" else 9))
    top_groups = draw(_int(1, groups))
    top_k = draw(_int(1, min(8, top_groups * per_group)))
    params = {"top_k": top_k, "groups": groups, "top_groups": top_groups, "group_score_max": maximum}
    params |= {"norm_top_k": draw(_int(0, 1)), "routed_scale": draw(_pick((1.0, 1.5, 2.5)))}
    params |= {"denominator_eps": draw(_pick((1e-20, 0.0)))}
    later = draw(_int(0, 7))  # what only some engines do, one in four
    params |= {"denominator_clamp": 2.0**-14} if later == 6 else {"group_fill_zero": 1} if later == 7 and groups > 1 else {}
    return {"T": draw(_one_of(_ROWS, size)), "E": groups * per_group}, params


def _moe(draw: Draw, size: str) -> tuple[dict[str, int], dict[str, float]]:
    experts = draw(_int(1, 4 if size == "small" else 9))
    dims = {"T": draw(_one_of(_FEW, size)), "E": experts, "K": draw(_int(1, min(4, experts)))}
    return dims | {"N": draw(_one_of(_WIDE[:14], size)), "F": draw(_one_of(_WIDE[:13], size))}, {}


def _sample(draw: Draw, size: str) -> tuple[dict[str, int], dict[str, float]]:
    """Half of the rules truncate, half have penalties; the seeds need 64 bits."""
    dims = {"T": draw(_one_of(_FEW, size)), "V": draw(_one_of(_WIDE, size)), "J": draw(_pick((1, 2, 3, 5, 9)))}
    cut, penal = draw(_int(0, 1)), draw(_int(0, 1))
    params: dict[str, float] = {"temperature": draw(_pick((1.0, 0.7, 1.3, 0.05, 0.0))), "top_k_ties_all": draw(_int(0, 1))}
    params |= {"top_k": draw(_pick((0, 0, 1, 2, 5, 40))) if cut else 0, "top_p": draw(_pick((1.0, 0.9, 0.5, 0.25))) if cut else 1.0}
    params |= {
        "min_p": draw(_pick((0.0, 0.0, 0.1, 1.0))) if cut else 0.0,
        "repetition_penalty": draw(_pick((1.0, 1.3, 0.8))) if penal else 1.0,
    }
    params |= {
        "presence_penalty": draw(_pick((0.0, 0.5))) if penal else 0.0,
        "frequency_penalty": draw(_pick((0.0, 0.37))) if penal else 0.0,
    }
    return dims, params | {"seed": draw(_int(0, 2**63 - 1)), "prompt_len": draw(_int(1, dims["J"]))}


def _draft_table(draw: Draw, size: str) -> tuple[dict[str, int], dict[str, float]]:
    return {"L": draw(_one_of(_FEW, size)), "V": draw(_one_of(_WIDE, size))}, {"budget": draw(_one_of(_WIDE[:13], size))}


def _best_first_tree(draw: Draw, size: str) -> tuple[dict[str, int], dict[str, float]]:
    dims = {"L": draw(_one_of(_FEW, size)), "K": draw(_one_of(_WIDE[:11], size))}
    return dims, {"budget": draw(_one_of((*_WIDE[:15], 60), size)), "root": draw(_int(0, 9))}


def _tree_mask(draw: Draw, size: str) -> tuple[dict[str, int], dict[str, float]]:
    return {"M": draw(_one_of(_WIDE[:17], size))}, {"prefix_len": draw(_pick((0, 1, 2, 7, 15, 16, 31, 33, 63)))}


def _compact(draw: Draw, size: str) -> tuple[dict[str, int], dict[str, float]]:
    rows, pending = draw(_pick((0, 1, 2, 7, 15, 16, 17, 63))), draw(_one_of(_WIDE[:13], size))
    return {"S": rows + pending, "C": draw(_one_of(_WIDE[:14], size)), "J": draw(_int(1, pending))}, {"prefix_len": rows}


OP_SHAPES: dict[str, Shape] = {
    "embed": _plain(V=_WIDE, N=_WIDE, T=_ROWS), "rms_norm": _rms_norm, "matmul": _plain(T=_ROWS, K=_WIDE, N=_WIDE), "rope": _rope,
    "q_absorb": _plain(T=_FEW, H=_FEW, n=_WIDE[:14], R=_WIDE[:14]), "scores": _scores, "softmax": _plain(T=_FEW, H=_FEW, S=_KEYS),
    "o_latent": _plain(T=_FEW, H=_FEW, S=_KEYS[:16], R=_WIDE[:14]), "o_heads": _plain(T=_FEW, H=_FEW, R=_WIDE[:14], v=_WIDE[:14]),
    "tree_attention": _tree_attention, "router_scores": _router_scores, "route": _route, "swiglu": _plain(T=_ROWS, N=_WIDE),
    "moe": _moe, "int4_matmul": _plain(T=_ROWS, G=(1, 2, 3, 4, 5, 8, 9), N=_WIDE), "combine": _plain(T=_ROWS, K=_FEW, N=_WIDE), "add": _plain(T=_ROWS, N=_WIDE), "argmax": _plain(T=_ROWS, V=_WIDE),
    "sample": _sample,
    "draft_table": _draft_table, "best_first_tree": _best_first_tree, "tree_mask": _tree_mask, "accept": _plain(M=_WIDE[:15]),
    "compact": _compact,
}  # fmt: skip


def op_cases(size: str = "full", ops: tuple[str, ...] = tuple(OP_SHAPES), hazards: tuple[str, ...] = ()) -> st.SearchStrategy[OpCase]:
    @st.composite
    def build(draw: Draw) -> OpCase:
        op = draw(_pick(ops))
        dims, params = OP_SHAPES[op](draw, size)
        regime = draw(_pick((*REGIMES, *REGIMES, REFUSED) if op in REFUSALS else REGIMES))
        return OpCase(op, tuple(sorted(dims.items())), tuple(sorted(params.items())), regime, draw(SEEDS), draw(_hazards(hazards)))

    return build()


@cache
def _hazards(names: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    """None most of the time, one now and then: two at once hide each other's cause."""
    return _pick(((), (), *((name,) for name in names)))


# Trees


_TREE_SMALL: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("budget", tuple(range(7))),
    ("depth", (1, 2, 3)),
    ("vocab", tuple(range(1, 7))),
    ("prefix_len", (0, 1, 2, 7, 15, 16, 17, 33)),
    ("cache_dim", (1, 3, 8)),
    ("grid", (0, -1, 1, 3)),
    ("follow", (80, 100, 0, 50)),
)
_TREE_FULL: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("budget", (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 22, 31, 33)),
    ("depth", tuple(range(1, 9))),
    ("vocab", (1, 2, 3, 5, 8, 16, 33, 64, 100)),
    *_TREE_SMALL[3:],
)


def tree_cases(size: str = "full", hazards: tuple[str, ...] = ()) -> st.SearchStrategy[TreeCase]:
    """All fields but the seed are digits of one integer, the budget first: one draw where nine would take as long as the trial itself.

    Shrinking the integer shrinks the budget first, then the depth, and so on.
    """
    fields = _TREE_SMALL if size == "small" else _TREE_FULL
    every_hazard = ((), (), *((name,) for name in hazards))
    radices = [len(every_hazard), 6, *(len(values) for _, values in reversed(fields))]

    def build(number: int, seed: int) -> TreeCase:
        digits = []
        for radix in radices:
            number, digit = divmod(number, radix)
            digits.append(digit)
        given = {name: values[digit] for (name, values), digit in zip(reversed(fields), digits[2:], strict=True)}
        gone = (0, 0, 0, 1, given["vocab"] - 1, given["vocab"])[digits[1]]  # candidates of -inf: none, one, all but one, all
        return TreeCase(**given, minus_infinity=gone, seed=seed, hazards=every_hazard[digits[0]])

    return st.builds(build, _int(0, math.prod(radices) - 1), SEEDS)


# Sessions

Bundle = tuple[tuple[str, Any], ...]
OVERRIDES: tuple[Bundle, ...] = (
    (),
    (("rope_dim", 4),),
    (("groups", 4), ("top_groups", 2)),
    (("groups", 2), ("top_groups", 1), ("group_score", "max")),
    (("yarn", (8.0, 16, 32.0, 1.0, 0.707, 1.3)),),
    (("yarn", (8.0, 4096, 1.0, 1.0, 1.0, 1.0)),),
    (("yarn", None),),
    (("routed_scale", 2.5), ("top_k", 3)),
    (("q_rank", 0),),
    (("tied", True),),
    (("scoring", "softmax"), ("norm_top_k", False)),
    (("scoring", "softmax"), ("group_score", "max"), ("groups", 4), ("top_groups", 3)),
    (("rope_layout", "half"),),
    (("latent_eps", 1e-3),),
    (("denominator_eps", 0.0),),
    (("shared_experts", 2),),
    (("shared_experts", 0),),
    (("first_dense", 0),),
    (("layers", 3),),
    (("heads", 1), ("v_dim", 17)),
    (("kv_rank", 7), ("nope_dim", 5)),
    (("hidden", 33), ("dense_dim", 31), ("expert_dim", 9)),
    (("top_k", 8),),
    (("vocab", 65),),
    (("window", 3),),
    (("attention_bias", True),),
    (("cache_format", "bfloat16"),),
    (("cache_format", "float16"),),
    (("rope_table_len", 128),),
    (("denominator_clamp", 0.75),),
    (("groups", 4), ("top_groups", 2), ("group_fill", "zero")),
    (("vocab", 12),),
    (("experts", 6), ("top_k", 3)),  # no multiple of the usual blocks
    (("window", 5), ("heads", 3)),
)
# Enough terms for another kernel, which the certified bounds of such sums are too wide to show; the statistical ones do
LONG_SUM: Bundle = (("dense_dim", 4096),)
# Regimes that show a mistake in what a field of the configuration asks for
PARTNERS = {"groups": ("negative-bias", "negative-bias", "level-router"), "window": ("ordinary",), "hidden": ("fenced",)}
PLAN_HAZARDS = ("fork", "evict", "orphan", "late", "interleaved")


@cache
@st.composite
def _tree(draw: Draw, node_max: int) -> tuple[Node, ...]:
    """Size class first: empty, chain, star, full binary, one branch point, random."""
    count = draw(_int(0, node_max))
    if not count:
        return ()
    style = draw(_pick(("random", "chain", "star", "full", "branch")))
    hits = draw(_int(0, 2**count - 1))
    branch = draw(_int(0, count - 1)) if style == "branch" else 0
    nodes = []
    for index in range(count):  # node number index + 1; back 0 is its predecessor
        if style == "random":
            back = draw(_int(0, min(index, 5)))
        elif style == "star":
            back = index
        elif style == "full":
            back = index - index // 2
        else:
            back = index if style == "branch" and index == branch else 0
        nodes.append((back, hits >> index & 1))
    return tuple(nodes)


@cache
@st.composite
def _generate(draw: Draw, size: str, samples: bool = False) -> GenerateCase:
    return GenerateCase(
        drafter=draw(_pick(("random", "noisy", "table", "chain", "none", "dflash", "edge"))),
        seed=draw(_int(0, 1000)),
        acceptance=draw(_pick((80, 50, 100))),
        grid=draw(_pick((-1, 0, 2))),
        budget=draw(_int(0, 4 if size == "small" else 12)),
        block_len=draw(_int(1, 3 if size == "small" else 6)),
        max_new=draw(_int(1, 4 if size == "small" else 10)),
        stop_at=draw(_pick((-1, 2, 4, 0))),
        sampling=draw(_sampling()) if samples and draw(st.booleans()) else (),
    )


_BUDGETS = (2, 1, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20, 33, 40)  # a mask of 32 columns ends in the tree, small vocabularies in the budget


def long_prompts(model: Model) -> st.SearchStrategy[list[SessionCase]]:
    """One session with more keys than a block of any usual kernel, and a tree behind them: without taps an engine takes them in one go."""
    name, overrides, seed, regime, checkpoint = model
    prompts = st.tuples(_pick((257, 270, 289)), _int(0, 1000)).map(lambda prompt: (prompt,))
    rounds = _tree(4).map(lambda tree: ((tree,), ((),)))
    fixed = (st.just(part) for part in (name, overrides, seed, regime))
    return st.lists(st.builds(SessionCase, *fixed, prompts, rounds, checkpoint=st.just(checkpoint)), min_size=1, max_size=1)


@st.composite
def loop_sessions(draw: Draw, model: Model, size: str, samples: bool = False) -> SessionCase:
    """Short prompts and then the engine's own loop, for an engine that does not say which trees it builds: the drafter puts the target's
    continuation at the edge of each tree, and the accepted lengths show what was in it (spec.drafters.EdgeDrafter). `samples`: a third draws."""
    small = size == "small"
    name, overrides, seed, regime, checkpoint = model
    loop = GenerateCase(
        drafter="edge",
        seed=draw(_int(0, 1000)),
        acceptance=100,
        grid=-1,
        budget=draw(_one_of(_BUDGETS, size)),
        block_len=draw(_int(1, 3 if small else 7)),
        max_new=draw(_int(2, 6 if small else 20)),
        stop_at=draw(_pick((-1, -1, -1, 5))),
        sampling=draw(_sampling()) if samples and draw(_int(0, 2)) == 2 else (),
    )
    prompts = tuple((draw(_pick((1, 2, 4, 5))), draw(_int(0, 1000))) for _ in range(draw(_pick((1, 2)))))
    return SessionCase(name, overrides, seed, regime, prompts, (), generate=loop, checkpoint=checkpoint)


@cache
@st.composite
def _sampling(draw: Draw) -> tuple[tuple[str, float], ...]:
    """Temperatures at which a tiny model's draws differ from its argmax, and any mixture of the other fields. Penalties below their neutral value
    make streams repeat themselves, so that the tokens of a path matter to its later nodes (A6)."""
    fields = {
        "temperature": (0.7, 1.0, 2.0, 0.0),
        "top_k": (0.0, 0.0, 1.0, 3.0, 20.0),
        "top_p": (1.0, 1.0, 0.9, 0.5),
        "min_p": (0.0, 0.0, 0.05),
        "repetition_penalty": (1.0, 1.0, 1.3, 0.6),
        "presence_penalty": (0.0, 0.0, 1.5, -2.0),
        "frequency_penalty": (0.0, 0.0, 1.0, -2.0),
    }
    drawn = {name: draw(_pick(values)) for name, values in fields.items()}
    neutral = Sampling()
    return tuple((name, value) for name, value in drawn.items() if name == "temperature" or value != getattr(neutral, name))


Model = tuple[str, Bundle, int, str, str]
"""(preset, overrides, weights seed, regime of the weights, checkpoint): what an engine opens once and then keeps open."""


@cache
@st.composite
def models(draw: Draw, size: str, checkpoint: str = "", only: str = "", long_sums: bool = False) -> Model:
    """`checkpoint`: a folder; one batch in four of the full size is drawn from it. `only`: the preset of all others. `long_sums`: one in fifty."""
    small = size == "small"
    if checkpoint and not small and draw(_int(0, 3)) == 0:
        return "tiny", (), 0, "ordinary", checkpoint
    name = only or draw(_pick(("tiny",) if small else ("tiny", "tiny", "tiny", "tiny-softmax", "small")))
    overrides = () if small and draw(st.booleans()) else draw(_overrides(name))
    if long_sums and not small and draw(_int(0, 49)) == 49:
        overrides = LONG_SUM if name == "tiny" else overrides
    partners = next((regimes for field, regimes in PARTNERS.items() if field in dict(overrides)), ())
    regime = draw(_pick(("ordinary",) * 6 + tuple(WEIGHT_REGIMES) + 6 * partners))
    return name, overrides, draw(_int(0, WEIGHT_SEEDS - 1)), regime, ""


@st.composite
def sessions_of(
    draw: Draw,
    model: Model,
    size: str,
    loops: bool,
    hazards: tuple[str, ...],
    relations: tuple[str, ...] = ("",),
    samples: bool = False,
) -> SessionCase:
    small = size == "small"
    count = draw(_pick((1, 2) if small else (1, 2, 2, 3)))
    length = _pick((1, 2, 3, 4) if small else (1, 2, 3, 5, 7, 8, 9, 13, 17))
    name, overrides, seed, regime, checkpoint = model
    loop = draw(_generate(size, samples)) if loops and draw(_int(0, 3)) == 0 else None
    relation = draw(_pick(relations))
    return SessionCase(
        preset=name,
        overrides=overrides,
        weights_seed=seed,
        regime=regime,
        prompts=tuple((draw(length), draw(_int(0, 1000))) for _ in range(count)),
        rounds=tuple(tuple(draw(_tree(4 if small else 9)) for _ in range(count)) for _ in range(draw(_int(1, 2 if small else 3)))),
        chunk=draw(_pick((0, 1, 2) if small else (0, 0, 0, 3, 4, 7))),
        mixed=draw(_pick((True, True, True, False))),
        generate=loop,
        hazards=draw(_hazards(hazards)),
        checkpoint=checkpoint,
        relation="" if relation == "budget" and loop is None else relation,
    )


def session_cases(size: str = "full", *, loops: bool = True, hazards: tuple[str, ...] = PLAN_HAZARDS) -> st.SearchStrategy[SessionCase]:
    """`loops`: some sessions end with the engine's own loop."""
    return models(size).flatmap(lambda model: sessions_of(model, size, loops, hazards))


def frozen_sessions(*, loops: bool = True, hazards: tuple[str, ...] = PLAN_HAZARDS) -> st.SearchStrategy[SessionCase]:
    """Sessions of the frozen mix: full size, lengthened until they qualify."""
    return session_cases("full", loops=loops, hazards=hazards).map(lengthened)


def session_batches(
    size: str,
    most: int,
    *,
    loops: bool = True,
    hazards: tuple[str, ...] = PLAN_HAZARDS,
    checkpoint: str = "",
    only: str = "",
    relations: tuple[str, ...] = ("",),
    samples: bool = False,
    hides_trees: bool = False,
) -> st.SearchStrategy[list[SessionCase]]:
    """Sessions that share one model, so that weights are made and the engine is opened once for all of them. Full ones are in the frozen mix.

    `samples`: half of the loops draw their tokens. `hides_trees`: half of the batches are `loop_sessions`, because only these show the trees.
    """

    if only and is_large(preset(only)):
        return st.lists(full_width_sessions(only), min_size=1, max_size=1)

    def of_model(model: Model) -> st.SearchStrategy[list[SessionCase]]:
        one = sessions_of(model, size, loops, hazards, relations, samples)
        if hides_trees and model[1] == LONG_SUM:
            return st.lists(one, min_size=1, max_size=1)
        whole = st.lists(one.map(lengthened) if size == "full" else one, min_size=1, max_size=most)
        if not (hides_trees and loops):
            return whole
        loop = st.lists(loop_sessions(model, size, samples), min_size=1, max_size=most)
        if size == "small":
            return whole | loop
        long = whole if "rope_table_len" in dict(model[1]) else long_prompts(model)
        return _int(0, 47).flatmap(lambda kind: long if kind == 47 else loop if kind % 2 else whole)

    return models(size, checkpoint, only, hides_trees).flatmap(of_model)


def full_width_sessions(name: str) -> st.SearchStrategy[SessionCase]:
    """A layer in full width: one sequence, a prompt of one token and one decoded token, nothing else: each token costs seconds."""
    prompts = st.tuples(st.just(1), _int(0, 1000)).map(lambda prompt: (prompt,))
    return st.builds(SessionCase, st.just(name), st.just(()), _int(0, WEIGHT_SEEDS - 1), st.just("ordinary"), prompts, st.just((((),),)))


@cache
@st.composite
def _overrides(draw: Draw, name: str) -> Bundle:
    """One bundle that fits the preset; the empty one where it does not."""
    bundle: Bundle = draw(_pick(OVERRIDES))
    return bundle if _fits(name, bundle) else ()


_FITS: dict[tuple[str, Bundle], bool] = {}


def _fits(name: str, bundle: Bundle) -> bool:
    from campaigns.case import CaseError
    from campaigns.plan import config_of

    if (name, bundle) not in _FITS:
        try:
            config_of(SessionCase(name, bundle, 0, "ordinary", ((1, 0),), ()))
            _FITS[name, bundle] = True
        except CaseError:
            _FITS[name, bundle] = False
    return _FITS[name, bundle]


def rows_of(case: SessionCase) -> int:
    """Rows of the prompts and of the rounds (the engine's own loop is not counted)."""
    sequences = len(case.prompts)
    nodes = sum(len(tree) for trees in case.rounds for tree in trees[:sequences])
    return sum(length for length, _ in case.prompts) + len(case.rounds) * sequences + nodes


def layers_of(case: SessionCase) -> int:
    if case.checkpoint:
        return checkpoint_at(case.checkpoint).config.layers
    return int(dict(case.overrides).get("layers", preset(case.preset).layers))


def in_frozen_mix(case: Case) -> bool:
    """Whether a case counts as a frozen-mix session."""
    return (
        isinstance(case, SessionCase)
        and rows_of(case) >= FROZEN_ROWS_MIN
        and len(case.rounds) >= FROZEN_ROUNDS_MIN
        and layers_of(case) >= FROZEN_LAYERS_MIN
    )


def lengthened(case: SessionCase) -> SessionCase:
    """The case with a second round, if it has one only, and a first prompt long enough for FROZEN_ROWS_MIN rows."""
    rounds = case.rounds if len(case.rounds) >= FROZEN_ROUNDS_MIN else (case.rounds * FROZEN_ROUNDS_MIN)[:FROZEN_ROUNDS_MIN]
    longer = dataclasses.replace(case, rounds=rounds)
    lacking = FROZEN_ROWS_MIN - rows_of(longer)
    if lacking > 0:
        length, seed = case.prompts[-1]
        longer = dataclasses.replace(longer, prompts=(*case.prompts[:-1], (length + lacking, seed)))
    return longer

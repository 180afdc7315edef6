"""Bugs planted in the device code: a name, the lines that change, and the operation at which the judge must say so.

A plant is a replacement of text that occurs exactly once in kernels.cuh, so that it cannot rot silently; `mutated` gives the changed source,
which both devices compile. Each is a bug of a kind that public engines had (BUGZOO classes in brackets).
"""

from __future__ import annotations

from dataclasses import dataclass

from impls.cuda.source import expanded


@dataclass(frozen=True)
class Plant:
    """`op`: where a judge has to find it. `ops`: what a campaign for it draws. `forms`: which form of the kernels runs it."""

    name: str
    find: str
    replace: str
    op: str
    kind: str
    forms: str = "fast"


PLANTS: tuple[Plant, ...] = (
    Plant(
        "missing-barrier",  # [k] the weights of a row are normalised by other threads than those that read them
        "    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;\n    __syncthreads();\n    x = warp_sum(",
        "    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;\n    x = warp_sum(",
        "rms_norm",
        "a barrier between writing and reading partial sums is gone",
    ),
    Plant(
        "narrow-offset",  # [h] row times width in too few bits
        "out[static_cast<long long>(blockIdx.x) * out_row + c] = gain[c] * (row[c] * inverse);",
        "out[static_cast<unsigned char>(blockIdx.x * out_row) + c] = gain[c] * (row[c] * inverse);",
        "rms_norm",
        "the row offset passes through 8 bits, so that it shows at small sizes",
    ),
    Plant(
        "tail-unmasked",  # [h] the last, partial tile counts as if it were full
        "own[j] = place(j) < vocab ? row[place(j)] : minus_infinity();",
        "own[j] = place(j) < vocab ? row[place(j)] : 0.0f;",
        "draft_table",
        "columns past the end take part in the sum",
    ),
    Plant(
        "empty-row",  # [h] NaN for a row that sees nothing
        "        const float base = top == minus_infinity() ? 0.0f : top;  // nothing is seen yet: each weight is exp(-inf) = 0",
        "        const float base = top;",
        "tree_attention",
        "the guard for rows that see nothing is gone",
    ),
    Plant(
        "merge-base",  # [j] natural log against log2
        "const float factor = exp2f(own.x - base);",
        "const float factor = expf(own.x - base);",
        "tree_attention",
        "the merge takes maxima in base 2 for natural logarithms",
    ),
    Plant(
        "silent-tf32",  # [k] tensor-core rounding under a float32 profile
        "            a_tile[at % DEPTH][at / DEPTH] = m < rows && k < inner ? a[static_cast<long long>(m) * a_row + k] : 0.0f;",
        "            a_tile[at % DEPTH][at / DEPTH] =\n"
        "                m < rows && k < inner ? __uint_as_float(__float_as_uint(a[static_cast<long long>(m) * a_row + k]) & 0xffffe000u) : 0.0f;",
        "matmul",
        "operands lose 13 bits",
    ),
    Plant(
        "compaction-order",  # [j] in place, from the end
        "    for (int start = 0; start < rows; start += BATCH) {\n        unsigned held[BATCH];",
        "    for (int start = (rows - 1) / BATCH * BATCH; start >= 0; start -= BATCH) {\n        unsigned held[BATCH];",
        "compact",
        "rows move before those that they overwrite",
    ),
    Plant(
        "stale-workspace",  # [k] the padding of a sort is whatever was there
        "    for (unsigned i = count + threadIdx.x; i < padded; i += ONCE_THREADS) held[i] = 0;\n",
        "    for (unsigned i = count + threadIdx.x; i < padded; i += ONCE_THREADS) held[i] = held[i] ? held[i] : ~0ull;\n",
        "draft_table",
        "uninitialised shared memory is sorted with the candidates",
    ),
    Plant(
        "tie-order",  # [b] the higher id wins
        "return (static_cast<unsigned long long>(key) << 32) | (0xffffffffu - static_cast<unsigned>(index));",
        "return (static_cast<unsigned long long>(key) << 32) | ((0xffffffffu - static_cast<unsigned>(index)) ^ (index < 2 ? 1u : 0u));",
        "argmax",
        "of the first two indices the higher one wins a tie",
    ),
    Plant(
        "path-order",  # [a] equal scores in the order of insertion
        "return a == b ? depth_a < depth_b : a < b;  // a prefix comes first",
        "return a == b ? depth_a < depth_b : a > b;  // a prefix comes first",
        "best_first_tree",
        "equal scores leave in the wrong order",
    ),
    Plant(
        "noise-counter",  # [h] the block number in too few bits
        "unsigned long long c0 = index + 1ull, c1",
        "unsigned long long c0 = (index & 7u) + 1ull, c1",
        "sample",
        "the counter of the noise passes through 3 bits, so that it shows at small vocabularies",
    ),
    Plant(
        "noise-by-slot",  # [f] randomness keyed by where a row stands in the batch
        "noise = {rule->seed, static_cast<unsigned long long>(source.length + depth), ",
        "noise = {rule->seed, static_cast<unsigned long long>(row), ",
        "sample",
        "the noise is that of the row's slot instead of the token's position",
    ),
    Plant(
        "mass-with-itself",  # [b] off by one at the cut
        "const bool earlier = precedes(z[i], first + i, token.z, token.index);",
        "const bool earlier = precedes(z[i], first + i, token.z, token.index) || first + i == token.index;",
        "sample",
        "top-p counts a token among those before it, so that the head loses its last one",
    ),
    Plant(
        "decides-for-itself",  # [c] row i decides about i instead of about its children
        "if (parent >= 0 && parent < i && tokens[i] == target[parent]) chosen[parent] = i;",
        "if (parent >= 0 && parent < i && tokens[i] == target[i]) chosen[parent] = i;",
        "accept",
        "a node is accepted by its own row",
    ),
    Plant(
        "page-crossing",  # [j] the first row of a page is looked up in the page before
        "static_cast<long long>(pages[key / page_size]) * page_size + key % page_size;",
        "static_cast<long long>(pages[(key > 0 ? key - 1 : 0) / page_size]) * page_size + key % page_size;",
        "tree_attention",
        "the first row of every page but the first comes from the page before it",
    ),
    Plant(
        "mask-word",  # [h] shift by the whole index
        "if (word) atomicOr(&seen[w], word);",
        "if (word) atomicOr(&seen[0], word);",
        "tree_attention",
        "visible keys of the later words are never loaded",
    ),
)


# An address that nobody has: on a GPU every later call of the process fails too, on the emulator the process ends. Not one of PLANTS: it is the
# campaign that is tested, which has to go on in a new worker and to blame nothing else (gpu_trials.sticky).
WILD = Plant(
    "wild-address",  # [k] an index that was not checked
    "const float* row = table + static_cast<long long>(id < 0 ? 0 : id) * width;",
    "const float* row = table + static_cast<long long>(id < 0 ? 0 : id) * width + (id == 2 ? 1ll << 40 : 0);",
    "embed",
    "row 2 of a table is read four terabytes behind it",
)


@dataclass(frozen=True)
class HostPlant:
    """A bug in the code around the kernels (host/session.cpp), compiled in by `build.PLANTED` and chosen by PARITREE_CUDA_PLANT. It acts where a
    graph is replayed, and nowhere else. `taps`: where a judge first finds it, the
    earliest that the engine shows."""

    name: str
    taps: tuple[str, ...]
    kind: str


HOST_PLANTS: tuple[HostPlant, ...] = (
    # [k] the three things that serving engines forget to refresh between two replays
    HostPlant(
        "graph-stale-mask", ("scores", "o_latent"), "the mask is made once, beside the graph: replays see the tree that was captured"
    ),
    HostPlant(
        "graph-stale-length",
        ("scores", "o_latent"),
        "the length of the prefix is an argument of the launches: replays keep the captured one",
    ),
    HostPlant("graph-stale-pages", ("scores", "o_latent"), "page tables are copied up to the first replay only"),
)


@dataclass(frozen=True)
class SwitchPlant:
    """A bug in the host code that acts under one switch of the model, `override`, and nowhere else; chosen as a HostPlant. `tap`: where a judge finds it."""

    name: str
    override: tuple[str, int | str]
    tap: str
    kind: str


SWITCH_PLANTS: tuple[SwitchPlant, ...] = (
    SwitchPlant("window-inclusive", ("window", 3), "o_latent", "[h] the key at position p - window is seen, too"),
    SwitchPlant("bias-forgotten", ("attention_bias", 1), "attn_out", "[c] the bias of the output projection is not added"),
    SwitchPlant(
        "cache-unrounded",
        ("cache_format", "float16"),
        "latent",
        "[j] rows enter the cache as they are, and the format is that of the memory",
    ),
)


def named(name: str) -> Plant:
    """Raises LookupError for an unknown name."""
    for plant in (*PLANTS, WILD):
        if plant.name == name:
            return plant
    raise LookupError(f"there is no plant {name!r}: choose one of {', '.join(plant.name for plant in PLANTS)}")


def mutated(plant: Plant) -> str:
    """The device code with the bug. Raises ValueError unless its text occurs exactly once."""
    source = expanded()
    count = source.count(plant.find)
    if count != 1:
        raise ValueError(f"plant {plant.name}: its text occurs {count} times in the device code, but must occur once")
    return source.replace(plant.find, plant.replace)

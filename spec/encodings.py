"""What ports exchange about a tree, as pure pairs: encode from the canonical form, decode back to it (rules C3-C6, K4).

Canonical: `parents` [M] with the root first, and `visible`, bool [M, P + M], True where a row sees a key (spec.tree.visibility).
M = rows with the root, P = prefix_len, W = rows of a fixed-width batch. A decoder refuses what its format does not say
unambiguously, with the rule that is broken; an encoder refuses what its format cannot say. Facts about the formats come from
the engines' sources, read 2026-11; no engine is imported.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec.tree import Bool, Int, TreeError, check_path, check_structure

Bytes = NDArray[np.uint8]
BITPACKED_ROWS_MAX = 32  # SGLang's packed rows are at most 4 bytes (DDTREE section 6, row 46)
GGML_PAD = 32  # of rows, in older ggml and its forks; 64 and 1 exist as well
SEQUENCES_MAX = 256  # LLAMA_MAX_SEQ; 64 before 2025


# ---- first child, next sibling (SGLang retrive_*) ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Links:
    """Three int32 [W] of one request. `index[i]`: flat row of node i in the batch, request * W + i; `next_token`: first child, `next_sibling`:
    the following child of the same parent, -1 where there is none. Padding nodes are in nobody's chain."""

    index: Int
    next_token: Int
    next_sibling: Int


def encode_links(parents: Sequence[int] | Int, request: int = 0, width: int | None = None) -> Links:
    """Siblings in ascending order, as SGLang's builder links them. Raises TreeError (T6, C4) for a bad tree or one wider than `width`."""
    check_structure(parents)
    rows = len(parents)
    width = rows if width is None else width
    if width < rows:
        raise TreeError("C4", f"the tree has {rows} rows, but the buffers hold {width}: they need B + 1")
    child = np.full(width, -1, np.int32)
    sibling = np.full(width, -1, np.int32)
    for node in range(rows - 1, 0, -1):  # backwards, so that the first child ends up in front
        parent = int(parents[node])
        sibling[node] = child[parent]
        child[parent] = node
    return Links(np.arange(request * width, (request + 1) * width, dtype=np.int32), child, sibling)


def decode_links(links: Links, request: int = 0) -> list[int]:
    """Parents of the nodes that are reached from the root. Raises TreeError (T6) for a node that is reached twice or out of range, a child before
    its parent, or a node beyond a gap; (C6) for indices of another request."""
    width = len(links.next_token)
    expected = np.arange(request * width, (request + 1) * width)
    if not np.array_equal(links.index, expected):
        raise TreeError(
            "C6", f"index is {links.index.tolist()}, but request {request} of width {width} has rows {expected[0]}..{expected[-1]}"
        )
    parents: dict[int, int] = {0: -1}
    waiting = [0]
    while waiting:
        parent = waiting.pop()
        child = int(links.next_token[parent])
        while child != -1:
            if not 0 <= child < width:
                raise TreeError(
                    "T6", f"a chain below node {parent} leads to {child}, but must stay between 0 and {width - 1}, or end with -1"
                )
            if child in parents:
                raise TreeError("T6", f"node {child} is reached twice: from {parents[child]} and from {parent}")
            parents[child] = parent
            waiting.append(child)
            child = int(links.next_sibling[child])
    missing = next((node for node in range(len(parents)) if node not in parents), None)
    if missing is not None:
        raise TreeError("T6", f"node {missing} is not reached from the root, but node {max(parents)} is: padding comes last")
    out = [parents[node] for node in range(len(parents))]
    check_structure(out)
    return out


def link_children(links: Links, node: int) -> Iterator[int]:
    """The children of a node in sibling order, as a kernel walks them."""
    child = int(links.next_token[node])
    while child != -1:
        yield child
        child = int(links.next_sibling[child])


# ---- masks of a batch --------------------------------------------------------------------------------------------------------------


def encode_full_mask(visibles: Sequence[Bool]) -> Bool:
    """SGLang FULL_MASK: rows of all requests one after the other, each as long as its own P + M, flat."""
    return np.concatenate([visible.reshape(-1) for visible in visibles]) if visibles else np.zeros(0, np.bool_)


def decode_full_mask(flat: Bool, prefix_lens: Sequence[int], rows: Sequence[int]) -> list[Bool]:
    """Raises TreeError (C6) where the length does not fit: an offset taken from another request's length reads garbage."""
    sizes = [count * (prefix_len + count) for prefix_len, count in zip(prefix_lens, rows, strict=True)]
    if len(flat) != sum(sizes):
        raise TreeError("C6", f"the mask has {len(flat)} entries, but requests of these lengths need {sum(sizes)}")
    ends = np.cumsum([0, *sizes])
    return [
        flat[start:stop].reshape(count, prefix_len + count).copy()
        for (start, stop), prefix_len, count in zip(itertools.pairwise(ends), prefix_lens, rows, strict=True)
    ]


def encode_tree_mask(visibles: Sequence[Bool]) -> Bool:
    """SGLang QLEN_ONLY: the tree's own columns, flat [requests * M * M]. The prefix is understood to be visible.

    Raises TreeError (C3) for a row that does not see the whole prefix, (C6) for requests of different M.
    """
    parts = [_tree_part(visible) for visible in visibles]
    _one_width(parts)
    return np.concatenate([part.reshape(-1) for part in parts]) if parts else np.zeros(0, np.bool_)


def decode_tree_mask(flat: Bool, prefix_lens: Sequence[int], rows: int) -> list[Bool]:
    if len(flat) != len(prefix_lens) * rows * rows:
        raise TreeError(
            "C6", f"the mask has {len(flat)} entries, but {len(prefix_lens)} requests of {rows} rows need {len(prefix_lens) * rows * rows}"
        )
    return [_with_prefix(part, prefix_len) for part, prefix_len in zip(flat.reshape(-1, rows, rows), prefix_lens, strict=True)]


def bitpacked_row_bytes(rows: int) -> int:
    """1, 2 or 4 bytes a row. Raises TreeError (C5) above 32 rows: there is no wider row."""
    if rows > BITPACKED_ROWS_MAX:
        raise TreeError("C5", f"the tree has {rows} rows, but a packed row holds {BITPACKED_ROWS_MAX} bits: use the unpacked mask")
    return 1 if rows <= 8 else 2 if rows <= 16 else 4


def encode_bitpacked(visibles: Sequence[Bool], row_bytes: int | None = None) -> Bytes:
    """SGLang QLEN_ONLY_BITPACKING: uint8 [requests, M, row_bytes]; key j of a row is bit j % 8, from the least significant, of byte j // 8.

    `row_bytes` None: SGLang's own, at most 32 rows. Raises TreeError as `encode_tree_mask` and `bitpacked_row_bytes`.
    """
    parts = [_tree_part(visible) for visible in visibles]
    rows = _one_width(parts)
    width = bitpacked_row_bytes(rows) if row_bytes is None else row_bytes
    if rows > 8 * width:
        raise TreeError("C5", f"the tree has {rows} rows, but {width} bytes hold {8 * width} bits")
    out = np.zeros((len(parts), rows, width), np.uint8)
    for request, part in enumerate(parts):
        packed = np.packbits(part, axis=1, bitorder="little")
        out[request, :, : packed.shape[1]] = packed
    return out


def decode_bitpacked(packed: Bytes, prefix_lens: Sequence[int]) -> list[Bool]:
    """Raises TreeError (C5) for a bit beyond the last row: it would be a key of nobody."""
    rows = packed.shape[1]
    bits = np.unpackbits(packed, axis=2, bitorder="little").astype(np.bool_)
    if bits[:, :, rows:].any():
        request, row, key = (int(i) for i in np.argwhere(bits[:, :, rows:])[0])
        raise TreeError("C5", f"request {request}, row {row} sees key {rows + key}, but the tree has {rows} rows")
    return [_with_prefix(part, prefix_len) for part, prefix_len in zip(bits[:, :, :rows], prefix_lens, strict=True)]


def encode_segments(visibles: Sequence[Bool]) -> tuple[Bytes, NDArray[np.int64]]:
    """FlashInfer packed_custom_mask: each request's [M, P + M] as one run of bits from the least significant, padded to a byte of its own; and
    where each begins, in bytes (not in bits or elements: DDTREE section 6, row 29), [requests + 1]."""
    parts = [np.packbits(visible.reshape(-1), bitorder="little") for visible in visibles]
    starts = np.cumsum([0, *(len(part) for part in parts)]).astype(np.int64)
    return (np.concatenate(parts) if parts else np.zeros(0, np.uint8)), starts


def decode_segments(packed: Bytes, starts: NDArray[np.int64], prefix_lens: Sequence[int], rows: Sequence[int]) -> list[Bool]:
    """Raises TreeError (C5) where `starts` are not the byte offsets of these requests."""
    sizes = [count * (prefix_len + count) for prefix_len, count in zip(prefix_lens, rows, strict=True)]
    expected = np.cumsum([0, *((size + 7) // 8 for size in sizes)])
    if not np.array_equal(starts, expected) or len(packed) != expected[-1]:
        raise TreeError("C5", f"segments start at {starts.tolist()} in {len(packed)} bytes, but should at bytes {expected.tolist()}")
    out = []
    for start, size, prefix_len, count in zip(expected.tolist(), sizes, prefix_lens, rows, strict=False):
        bits = np.unpackbits(packed[start : start + (size + 7) // 8], bitorder="little")[:size]
        out.append(bits.astype(np.bool_).reshape(count, prefix_len + count))
    return out


def encode_qq_bias(visibles: Sequence[Bool], width: int | None = None) -> NDArray[np.float32]:
    """vLLM qq_bias: float32 [requests, W, W] added to query-query scores on top of the causal mask over slots, 0 or -inf.

    Padding rows see themselves only, so that no softmax is empty (C4). Raises TreeError (C3) for a windowed prefix, (C6) for a key after its query,
    which the causal mask would hide, (C4) for a tree wider than `width`.
    """
    parts = [_tree_part(visible) for visible in visibles]
    width = max((len(part) for part in parts), default=0) if width is None else width
    out = np.full((len(parts), width, width), -np.inf, np.float32)
    out[:, np.arange(width), np.arange(width)] = 0.0
    for request, part in enumerate(parts):
        rows = len(part)
        if rows > width:
            raise TreeError("C4", f"request {request} has {rows} rows, but the bias holds {width}")
        if np.triu(part, 1).any():
            row, key = (int(i) for i in np.argwhere(np.triu(part, 1))[0])
            raise TreeError("C6", f"request {request}, row {row} sees key {key}, but the causal mask over slots hides later keys")
        out[request, :rows, :rows] = np.where(part, 0.0, -np.inf)
    return out


def decode_qq_bias(bias: NDArray[np.float32], prefix_lens: Sequence[int], rows: Sequence[int]) -> list[Bool]:
    """Raises TreeError (C5) for a value that is neither 0 nor -inf, (C4) where a real row sees padding."""
    if not ((bias == 0) | (bias == -np.inf)).all():
        raise TreeError("C5", "a query-query bias is 0 (seen) or -inf (not seen)")
    out = []
    for request, (prefix_len, count) in enumerate(zip(prefix_lens, rows, strict=True)):
        seen = np.tril(bias[request] == 0)
        if seen[:count, count:].any() or seen[count:, :count].any():
            raise TreeError("C4", f"request {request}: padding rows and real rows see each other")
        out.append(_with_prefix(seen[:count, :count], prefix_len))
    return out


def encode_ggml_mask(visible: Bool, row_pad: int = GGML_PAD, key_pad: int = 1) -> NDArray[np.float16]:
    """ggml KQ mask: float16 [rows padded, keys padded], 0 seen, -inf not; row-major, that is ne = (keys, rows). Everything padded is -inf."""
    rows, keys = visible.shape
    out = np.full((_padded(rows, row_pad), _padded(keys, key_pad)), -np.inf, np.float16)
    out[:rows, :keys] = np.where(visible, 0.0, -np.inf)
    return out


def decode_ggml_mask(mask: NDArray[np.float16], rows: int, keys: int) -> Bool:
    """Raises TreeError (C5) for a value that is neither 0 nor -inf, (C4) where padding is seen: zeros are visible keys in this format."""
    if not ((mask == 0) | (mask == -np.inf)).all():
        raise TreeError("C5", "an additive mask is 0 (seen) or -inf (not seen); finite lows are not masks in float16")
    seen: Bool = mask == 0
    if seen[:, keys:].any():
        raise TreeError("C4", f"a key from {keys} on is seen, but there are {keys}: padding is -inf, not 0")
    return seen[:rows, :keys].copy()


# ---- visibility to parents ------------------------------------------------------------------------------------------------------------


def parents_of(visible: Bool) -> list[int]:
    """The tree whose visibility this is, P = columns - rows. Raises TreeError (C3) for a mask that is no tree's: not closed under ancestors, a row that
    does not see itself, or sees a later row; windowed masks among them."""
    rows, keys = visible.shape
    prefix_len = keys - rows
    if not visible[:, :prefix_len].all():
        row, key = (int(i) for i in np.argwhere(~visible[:, :prefix_len])[0])
        raise TreeError("C3", f"row {row} does not see key {key} of the prefix: a window, or no tree's mask")
    tree = visible[:, prefix_len:]
    parents = []
    for row in range(rows):
        seen = np.flatnonzero(tree[row]).tolist()
        if not seen or seen[-1] != row:
            raise TreeError("C3", f"row {row} sees {seen} of the tree, but must see itself and no later row")
        parents.append(seen[-2] if len(seen) > 1 else -1)
    for row, parent in enumerate(parents):
        above = tree[parent] if parent >= 0 else np.zeros(rows, np.bool_)
        if not np.array_equal(np.flatnonzero(tree[row])[:-1], np.flatnonzero(above)):
            raise TreeError("C3", f"row {row} does not see what its parent {parent} sees")
    check_structure(parents)
    return parents


def _tree_part(visible: Bool) -> Bool:
    rows, keys = visible.shape
    if not visible[:, : keys - rows].all():
        raise TreeError("C3", "a row does not see the whole prefix: this format cannot say so")
    return visible[:, keys - rows :]


def _with_prefix(tree: Bool, prefix_len: int) -> Bool:
    return np.concatenate([np.ones((len(tree), prefix_len), np.bool_), tree.astype(np.bool_)], axis=1)


def _one_width(parts: Sequence[Bool]) -> int:
    widths = {len(part) for part in parts}
    if len(widths) > 1:
        raise TreeError("C6", f"requests have {sorted(widths)} rows, but this format has one width: pad them")
    return widths.pop() if widths else 0


def _padded(count: int, multiple: int) -> int:
    return math.ceil(count / multiple) * multiple


# ---- pages --------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pages:
    """The paged cache of one request: logical slot s lies in page `table[s // page_size]`, at s % page_size. `length` slots are in use."""

    page_size: int
    table: Int
    length: int


def encode_pages(slots: Sequence[int] | Int, page_size: int) -> Pages:
    """From the physical slot of each logical one. Raises TreeError (K4) where these are no pages: a page that is not whole and aligned, or used twice."""
    physical = np.asarray(slots, np.int64)
    logical = np.arange(len(physical))
    wrong = np.flatnonzero((physical - logical) % page_size != 0)
    table = physical[::page_size] // page_size
    if not len(wrong):
        wrong = np.flatnonzero(physical // page_size != np.repeat(table, page_size)[: len(physical)])
    if len(wrong):
        raise TreeError(
            "K4", f"logical slot {int(wrong[0])} lies at {int(physical[wrong[0]])}, which is not its place in a page of {page_size}"
        )
    if len(set(table.tolist())) < len(table):
        raise TreeError("K4", f"pages are {table.tolist()}, but none may stand twice in one request")
    return Pages(page_size, table.astype(np.int32), len(physical))


def decode_pages(pages: Pages) -> Int:
    """The physical slot of each logical one, int32 [length]. Raises TreeError (K4) for a table that is too short."""
    if pages.page_size < 1 or len(pages.table) < math.ceil(pages.length / pages.page_size):
        raise TreeError("K4", f"{len(pages.table)} pages of {pages.page_size} do not hold {pages.length} slots")
    logical = np.arange(pages.length)
    return (pages.table[logical // pages.page_size] * pages.page_size + logical % pages.page_size).astype(np.int32)


def encode_page_ranges(requests: Sequence[Pages]) -> tuple[Int, Int, Int]:
    """FlashInfer: (indptr [requests + 1], page indices, slots in use of each last page). A request without slots has no page and 0."""
    used = [math.ceil(pages.length / pages.page_size) for pages in requests]
    last = [pages.length - (count - 1) * pages.page_size if count else 0 for pages, count in zip(requests, used, strict=True)]
    indices = [pages.table[:count] for pages, count in zip(requests, used, strict=True)]
    return np.cumsum([0, *used]).astype(np.int32), np.concatenate([np.zeros(0, np.int32), *indices]), np.array(last, np.int32)


def decode_page_ranges(indptr: Int, indices: Int, last: Int, page_size: int) -> list[Pages]:
    """Raises TreeError (K4) for a last page that holds nothing, or more than a page."""
    out = []
    for request, (start, stop) in enumerate(itertools.pairwise(indptr.tolist())):
        count, tail = stop - start, int(last[request])
        if count < 0 or not (1 <= tail <= page_size if count else tail == 0):
            raise TreeError("K4", f"request {request} has {count} pages and {tail} slots in the last one, page size {page_size}")
        out.append(Pages(page_size, indices[start:stop].copy(), max(0, count - 1) * page_size + tail))
    return out


def compaction_moves(pages: Pages, prefix_len: int, path: Sequence[int] | Int) -> list[tuple[int, int]]:
    """(from, to) in physical slots, in an order that is safe one after the other (K1, K4); rows that stay are left out."""
    check_path(path, pages.length - prefix_len)
    physical = decode_pages(pages).tolist()
    moves = [(physical[prefix_len + int(row)], physical[prefix_len + j]) for j, row in enumerate(path)]
    return [(source, target) for source, target in moves if source != target]


# ---- sequence ids (llama.cpp) ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SequenceSets:
    """One set of sequence ids per node, ascending, and the positions. A row sees the cells that hold its *first* id at positions up to its own."""

    ids: tuple[tuple[int, ...], ...]
    positions: tuple[int, ...]


def encode_sequence_ids(parents: Sequence[int] | Int, prefix_len: int, first: int = 0, sequences_max: int = SEQUENCES_MAX) -> SequenceSets:
    """One id per leaf, from `first` on, in leaf order; a node is in the sequences of all leaves below it, the prefix in all of them.

    Raises TreeError (C5) for more leaves than there are ids.
    """
    depths = check_structure(parents)
    inner = {int(parent) for parent in parents}
    leaves = [node for node in range(len(parents)) if node not in inner]
    if first + len(leaves) > sequences_max:
        raise TreeError(
            "C5", f"the tree has {len(leaves)} leaves, but ids {first} to {sequences_max - 1} are {sequences_max - first} sequences"
        )
    sets: list[list[int]] = [[] for _ in depths]
    for name, leaf in enumerate(leaves, first):
        node = leaf
        while node >= 0:
            sets[node].append(name)
            node = int(parents[node])
    return SequenceSets(tuple(map(tuple, sets)), tuple(prefix_len + depth for depth in depths))


def decode_sequence_ids(sets: SequenceSets, prefix_len: int) -> Bool:
    """The visibility [M, P + M] that llama.cpp makes of them. Raises TreeError (C5) for a node without an id, (C2) for one inside the prefix."""
    rows = len(sets.ids)
    tree = np.zeros((rows, rows), np.bool_)
    for row, (ids, position) in enumerate(zip(sets.ids, sets.positions, strict=True)):
        if not ids:
            raise TreeError("C5", f"node {row} is in no sequence")
        if position < prefix_len:
            raise TreeError("C2", f"node {row} has position {position}, but the prefix ends at {prefix_len - 1}")
        tree[row] = [ids[0] in other and at <= position for other, at in zip(sets.ids, sets.positions, strict=True)]
    return _with_prefix(tree, prefix_len)

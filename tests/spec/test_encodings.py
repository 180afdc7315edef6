"""Round trips at the widths where packed rows, pages and pads end; examples that a person can check; and what each decoder refuses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec import encodings as enc
from spec.encodings import Links, Pages, SequenceSets
from spec.tree import Bool, TreeError, compact, visibility
from spec.weights import philox

many = settings(deadline=None, max_examples=60, derandomize=True)
WIDTHS = (1, 2, 7, 8, 9, 15, 16, 17, *range(31, 66))
BRANCHED = [-1, 0, 0, 1, 1, 2]  # root; 1 and 2; children 3 and 4 of 1; child 5 of 2


def random_parents(rows: int, seed: int = 0, back: int = 6) -> list[int]:
    """A bushy tree: the parent of node i is one of the `back` nodes before it."""
    draws = philox("encodings", rows, seed)
    return [-1, *(int(draws.integers(max(0, i - back), i)) for i in range(1, rows))]


trees = st.builds(random_parents, st.integers(1, 70), st.integers(0, 1000), st.sampled_from([1, 2, 6, 70]))
batches = st.lists(st.tuples(trees, st.integers(0, 9)), min_size=1, max_size=4)


def masks_of(batch: Sequence[tuple[list[int], int]]) -> list[Bool]:
    return [visibility(parents, prefix_len) for parents, prefix_len in batch]


def same(decoded: Sequence[Bool], masks: Sequence[Bool]) -> bool:
    return len(decoded) == len(masks) and all(a.dtype == np.bool_ and np.array_equal(a, b) for a, b in zip(decoded, masks, strict=True))


def refuses(rule: str, text: str = "") -> pytest.RaisesExc[TreeError]:
    return pytest.raises(TreeError, match=f"{rule}: .*{text}")


# Links


@many
@given(parents=trees, request=st.integers(0, 3), spare=st.integers(0, 3))
def test_links_round_trip_with_padding(parents: list[int], request: int, spare: int) -> None:
    links = enc.encode_links(parents, request, len(parents) + spare)
    assert enc.decode_links(links, request) == parents
    for node in range(len(parents)):
        assert list(enc.link_children(links, node)) == [i for i, parent in enumerate(parents) if parent == node]


def test_links_by_hand() -> None:
    """The example of SGLang's own test: 0 -> 1, 3; 1 -> 2; 3 -> 4; 4 -> 5."""
    links = enc.encode_links([-1, 0, 1, 0, 3, 4], request=1)
    assert links.index.tolist() == [6, 7, 8, 9, 10, 11]
    assert links.next_token.tolist() == [1, 2, -1, 4, 5, -1]
    assert links.next_sibling.tolist() == [-1, 3, -1, -1, -1, -1]


@pytest.mark.parametrize(
    ("next_token", "next_sibling", "rule", "text"),
    [
        ([1, 0, -1], [-1, -1, -1], "T6", "node 0 is reached twice"),
        ([1, -1, -1], [-1, 2, 1], "T6", "node 1 is reached twice"),
        ([1, -1, -1], [-1, 7, -1], "T6", "leads to 7"),
        ([2, -1, -1], [-1, -1, -1], "T6", "node 1 is not reached"),
        ([2, -1, 1], [-1, -1, -1], "T6", "parents.1. is 2"),
    ],
)
def test_links_that_are_no_tree_are_refused(next_token: list[int], next_sibling: list[int], rule: str, text: str) -> None:
    """DDTREE section 6, row 45: walks that do not end, or read the next request."""
    with refuses(rule, text):
        enc.decode_links(Links(np.arange(3, dtype=np.int32), np.array(next_token, np.int32), np.array(next_sibling, np.int32)))


def test_links_of_another_request_are_refused() -> None:
    with refuses("C6", "request 1 of width 2 has rows 2..3"):
        enc.decode_links(enc.encode_links([-1, 0], request=0), request=1)


def test_buffers_without_room_for_the_root_are_refused() -> None:
    with refuses("C4", "the tree has 6 rows, but the buffers hold 5"):
        enc.encode_links(BRANCHED, width=5)


# Masks


@many
@given(batch=batches)
def test_masks_of_unequal_requests_round_trip(batch: list[tuple[list[int], int]]) -> None:
    masks = masks_of(batch)
    lens, rows = [prefix_len for _, prefix_len in batch], [len(parents) for parents, _ in batch]
    assert same(enc.decode_full_mask(enc.encode_full_mask(masks), lens, rows), masks)
    packed, starts = enc.encode_segments(masks)
    assert same(enc.decode_segments(packed, starts, lens, rows), masks)
    assert same(enc.decode_qq_bias(enc.encode_qq_bias(masks), lens, rows), masks)
    for mask in masks:
        assert np.array_equal(enc.decode_ggml_mask(enc.encode_ggml_mask(mask, 32, 64), *mask.shape), mask)


@pytest.mark.parametrize("rows", WIDTHS)
def test_masks_of_one_width_round_trip(rows: int) -> None:
    batch = [(random_parents(rows, seed), prefix_len) for seed, prefix_len in enumerate((0, 3, 7))]
    masks, lens = masks_of(batch), [0, 3, 7]
    assert same(enc.decode_tree_mask(enc.encode_tree_mask(masks), lens, rows), masks)
    packed = enc.encode_bitpacked(masks, row_bytes=(rows + 7) // 8)
    assert same(enc.decode_bitpacked(packed, lens), masks)
    if rows <= 32:
        own = enc.encode_bitpacked(masks)
        assert own.shape == (3, rows, 1 if rows <= 8 else 2 if rows <= 16 else 4)
        assert same(enc.decode_bitpacked(own, lens), masks)
    else:
        with refuses("C5", f"the tree has {rows} rows, but a packed row holds 32"):
            enc.encode_bitpacked(masks)


def test_masks_by_hand() -> None:
    """Root, two children, P = 1 and P = 0."""
    masks = masks_of([([-1, 0, 0], 1), ([-1, 0, 0], 0)])
    first = [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    second = [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    assert enc.encode_full_mask(masks).astype(int).tolist() == [*itertools.chain(*first), *itertools.chain(*second)]
    assert enc.encode_tree_mask(masks).astype(int).tolist() == [*itertools.chain(*second)] * 2
    assert enc.encode_bitpacked(masks).tolist() == [[[0b001], [0b011], [0b101]]] * 2
    packed, starts = enc.encode_segments(masks)
    assert packed.tolist() == [0b01110011, 0b1011, 0b01011001, 0b1]  # bits of the flat lists from the least significant
    assert starts.tolist() == [0, 2, 4]
    bias = enc.encode_qq_bias(masks, width=4)[0]
    assert (bias == 0).astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]
    ggml = enc.encode_ggml_mask(masks[0])
    assert ggml.dtype == np.float16
    assert ggml.shape == (32, 4)
    assert (ggml[:3] == 0).astype(int).tolist() == first
    assert (ggml[3:] == -np.inf).all()


def test_key_8_is_the_first_bit_of_the_second_byte() -> None:
    chain = visibility(list(range(-1, 8)), 0)
    assert enc.encode_bitpacked([chain])[0, 8].tolist() == [0xFF, 0x01]
    assert enc.encode_bitpacked([chain])[0, 7].tolist() == [0xFF, 0x00]


def test_formats_without_the_prefix_refuse_a_window() -> None:
    windowed = visibility([-1, 0, 1], 4, window=2)
    for encode in (enc.encode_tree_mask, enc.encode_bitpacked, enc.encode_qq_bias):
        with refuses("C3", "does not see the whole prefix"):
            encode([windowed])
    assert same(enc.decode_full_mask(enc.encode_full_mask([windowed]), [4], [3]), [windowed])


def test_formats_of_one_width_refuse_two() -> None:
    masks = masks_of([([-1], 0), ([-1, 0], 0)])
    for encode in (enc.encode_tree_mask, enc.encode_bitpacked):
        with refuses("C6", r"requests have \[1, 2\] rows"):
            encode(masks)


def test_bytes_of_another_request_are_refused() -> None:
    """Row 29: starts in bits, or in entries, instead of bytes; row 14: a length of another request."""
    masks = masks_of([([-1, 0, 0], 1), ([-1, 0, 0], 0)])
    packed, starts = enc.encode_segments(masks)
    for wrong in (starts * 8, np.array([0, 12, 21])):
        with refuses("C5", "segments start at"):
            enc.decode_segments(packed, wrong, [1, 0], [3, 3])
    with refuses("C6", "the mask has 21 entries, but requests of these lengths need 24"):
        enc.decode_full_mask(enc.encode_full_mask(masks), [1, 1], [3, 3])
    with refuses("C6", "the mask has 18 entries"):
        enc.decode_tree_mask(enc.encode_tree_mask(masks), [1, 0], 4)


def test_values_that_are_no_mask_are_refused() -> None:
    """Row 15: an additive mask where 1.0 means seen; finfo.min is no -inf; zeros in the padding are visible keys."""
    mask = visibility(BRANCHED, 2)
    ggml = enc.encode_ggml_mask(mask, key_pad=16)
    with refuses("C5", "0 .seen. or -inf"):
        enc.decode_ggml_mask(mask.astype(np.float16), 6, 8)
    with refuses("C5", "finite lows"):
        enc.decode_ggml_mask(np.maximum(ggml, np.finfo(np.float16).min), 6, 8)
    ggml[0, 9] = 0
    with refuses("C4", "a key from 8 on is seen"):
        enc.decode_ggml_mask(ggml, 6, 8)
    bias = enc.encode_qq_bias([mask], width=8)
    for place, rule, value in (((0, 7, 2), "C4", 0.0), ((0, 0, 0), "C5", 1.0)):
        broken = bias.copy()
        broken[place] = value
        with refuses(rule):
            enc.decode_qq_bias(broken, [2], [6])
    with refuses("C4", "request 0 has 6 rows, but the bias holds 5"):
        enc.encode_qq_bias([mask], width=5)
    packed = enc.encode_bitpacked([mask])
    packed[0, 3, 0] |= 1 << 7
    with refuses("C5", "request 0, row 3 sees key 7"):
        enc.decode_bitpacked(packed, [2])
    with refuses("C5", "4 bytes hold 32 bits"):
        enc.encode_bitpacked([visibility(random_parents(33), 0)], row_bytes=4)


def test_the_causal_mask_hides_later_keys_from_a_bias() -> None:
    order = [0, 2, 1]  # a child numbered before its parent
    mask = visibility([-1, 0, 1], 0)[np.ix_(order, order)]
    with refuses("C6", "row 1 sees key 2"):
        enc.encode_qq_bias([mask])


# Visibility and parents


@many
@given(parents=trees, prefix_len=st.integers(0, 5))
def test_a_tree_is_read_back_from_its_mask(parents: list[int], prefix_len: int) -> None:
    assert enc.parents_of(visibility(parents, prefix_len)) == parents


@many
@given(parents=trees, prefix_len=st.integers(0, 5), data=st.data())
def test_one_flipped_bit_is_another_tree_or_none(parents: list[int], prefix_len: int, data: st.DataObject) -> None:
    mask = visibility(parents, prefix_len)
    place = data.draw(st.tuples(st.integers(0, mask.shape[0] - 1), st.integers(0, mask.shape[1] - 1)))
    mask[place] = not mask[place]
    try:
        assert enc.parents_of(mask) != parents
    except TreeError as problem:
        assert problem.rule in ("C3", "T6")


# Pages


@many
@given(
    page_size=st.integers(1, 65),
    length=st.integers(0, 200),
    seed=st.integers(0, 99),
    edge=st.sampled_from([None, -1, 0, 1]),
)
def test_pages_round_trip_at_their_boundaries(page_size: int, length: int, seed: int, edge: int | None) -> None:
    length = length if edge is None else max(0, length // page_size * page_size + edge)
    count = -(-length // page_size)
    table = philox("pages", seed).permutation(count + 3)[:count].astype(np.int32)
    pages = Pages(page_size, table, length)
    slots = enc.decode_pages(pages)
    assert slots.tolist() == [int(table[s // page_size]) * page_size + s % page_size for s in range(length)]
    again = enc.encode_pages(slots, page_size)
    assert (again.page_size, again.length, again.table.tolist()) == (page_size, length, table.tolist())


@many
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5), page_size=st.integers(1, 9))
def test_page_ranges_round_trip(sizes: list[int], page_size: int) -> None:
    requests, first = [], 0
    for size in sizes:
        count = -(-size // page_size)
        requests.append(Pages(page_size, np.arange(first, first + count, dtype=np.int32)[::-1].copy(), size))
        first += count
    again = enc.decode_page_ranges(*enc.encode_page_ranges(requests), page_size)
    assert [(p.table.tolist(), p.length) for p in again] == [(p.table.tolist(), p.length) for p in requests]


def test_pages_by_hand() -> None:
    pages = enc.encode_pages([12, 13, 14, 15, 4, 5], 4)
    assert (pages.table.tolist(), pages.length) == ([3, 1], 6)
    indptr, indices, last = enc.encode_page_ranges([pages, Pages(4, np.array([7], np.int32), 4)])
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0, 2, 3], [3, 1, 7], [2, 4])


@pytest.mark.parametrize(
    ("slots", "text"),
    [([1, 2], "logical slot 0 lies at 1"), ([0, 1, 2, 3, 8, 9, 6], "logical slot 6"), ([0, 1, 2, 3, 0, 1], "none may stand twice")],
)
def test_slots_that_are_no_pages_are_refused(slots: list[int], text: str) -> None:
    with refuses("K4", text):
        enc.encode_pages(slots, 4)


def test_tables_that_do_not_fit_are_refused() -> None:
    with refuses("K4", "1 pages of 4 do not hold 5 slots"):
        enc.decode_pages(Pages(4, np.array([0], np.int32), 5))
    with refuses("K4", "request 0 has 1 pages and 5 slots"):
        enc.decode_page_ranges(np.array([0, 1], np.int32), np.array([0], np.int32), np.array([5], np.int32), 4)


@many
@given(parents=trees, page_size=st.integers(1, 9), prefix_len=st.integers(0, 20), seed=st.integers(0, 50))
def test_moves_in_pages_are_the_compaction(parents: list[int], page_size: int, prefix_len: int, seed: int) -> None:
    """K1, K4: moving slots one after the other in the pool leaves, in logical order, the compacted rows; other pages stay."""
    rows = len(parents)
    draws = philox("moves", rows, page_size, prefix_len, seed)
    path = [0]
    while children := [i for i, parent in enumerate(parents) if parent == path[-1]]:
        path.append(int(draws.choice(children)))
    count = -(-(prefix_len + rows) // page_size)
    pages = Pages(page_size, draws.permutation(count + 2)[:count].astype(np.int32), prefix_len + rows)
    pool = np.arange((count + 2) * page_size) + 1000
    slots = enc.decode_pages(pages)
    expected = compact(pool[slots], prefix_len, path)
    before = pool.copy()
    for source, target in enc.compaction_moves(pages, prefix_len, path):
        pool[target] = pool[source]
    assert np.array_equal(pool[slots[: prefix_len + len(path)]], expected)
    others = np.setdiff1d(np.arange(len(pool)), slots)
    assert np.array_equal(pool[others], before[others])


def test_page_moves_by_hand() -> None:
    """P = 3, pages 2 and 0 of 4 slots: rows 0, 2, 3 of the tree lie at logical 3, 5, 6."""
    pages = Pages(4, np.array([2, 0], np.int32), 8)
    assert enc.compaction_moves(pages, 3, [0, 2, 3]) == [(1, 0), (2, 1)]
    with refuses("K1"):
        enc.compaction_moves(pages, 3, [2, 0])


# Sequence ids


@many
@given(parents=trees, prefix_len=st.integers(0, 9), first=st.integers(0, 3))
def test_sequence_ids_say_the_same_visibility(parents: list[int], prefix_len: int, first: int) -> None:
    sets = enc.encode_sequence_ids(parents, prefix_len, first)
    assert np.array_equal(enc.decode_sequence_ids(sets, prefix_len), visibility(parents, prefix_len))


def test_sequence_ids_by_hand() -> None:
    """Leaves 3, 4, 5 are sequences 0, 1, 2."""
    sets = enc.encode_sequence_ids(BRANCHED, 10)
    assert sets.ids == ((0, 1, 2), (0, 1), (2,), (0,), (1,), (2,))
    assert sets.positions == (10, 11, 11, 12, 12, 12)


def test_sequence_ids_that_cannot_be_are_refused() -> None:
    with refuses("C5", "the tree has 3 leaves, but ids 0 to 1 are 2 sequences"):
        enc.encode_sequence_ids(BRANCHED, 0, sequences_max=2)
    with refuses("C5", "node 1 is in no sequence"):
        enc.decode_sequence_ids(SequenceSets(((0,), ()), (4, 5)), 4)
    with refuses("C2", "node 0 has position 3"):
        enc.decode_sequence_ids(SequenceSets(((0,),), (3,)), 4)

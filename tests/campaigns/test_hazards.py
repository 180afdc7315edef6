"""Hazards change how numbers lie in memory and nothing else; guards see every stray write."""

from __future__ import annotations

import ctypes
from typing import Any

import bad_engines
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaigns import hazards
from campaigns.hazards import HAZARDS, guarded_output, placed, poison, spoil, unwritten
from campaigns.isolation.execute import run_call
from spec.script import OpCall

DTYPES = ("float32", "int32", "uint8")


def sample(shape: tuple[int, ...], dtype: str) -> Any:
    return (np.arange(int(np.prod(shape))) % 200).astype(dtype).reshape(shape)


def add_call(*active: str, trigger: int = 0) -> OpCall:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    return OpCall("add", {"a": a, "b": a + 1}, {"trigger": trigger}, {"out": ((3, 4), "float32")}, frozenset(active))


@given(
    st.sets(st.sampled_from(sorted(HAZARDS))),
    st.lists(st.integers(0, 5), min_size=0, max_size=4),
    st.sampled_from(DTYPES),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_placed_input_has_the_values_of_its_source(
    active: set[str], shape: list[int], dtype: str, index: int, contiguous_only: bool
) -> None:
    source = sample(tuple(shape), dtype)
    copy = placed(source, frozenset(active), index, contiguous_only=contiguous_only)
    assert copy.dtype == source.dtype and copy.shape == source.shape
    assert copy.tobytes() == source.tobytes()
    assert not copy.flags.writeable and not np.shares_memory(copy, source)
    assert copy.flags.c_contiguous or not contiguous_only


def test_views_are_strided_for_python_and_off_alignment_for_contiguous_engines() -> None:
    source = sample((4, 6), "float32")
    layouts = [placed(source, frozenset({"views"}), index) for index in range(3)]
    assert len({copy.strides for copy in layouts}) == 3
    assert not any(copy.flags.c_contiguous for copy in layouts)
    packed = placed(source, frozenset({"views"}), contiguous_only=True)
    assert packed.flags.c_contiguous and packed.ctypes.data % 16 == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_around_a_poisoned_input_lies_poison(dtype: str) -> None:
    source = sample((5,), dtype)
    copy = placed(source, frozenset({"poison"}))
    around = np.frombuffer((ctypes.c_char * source.itemsize).from_address(copy.ctypes.data + copy.nbytes), dtype)
    before = np.frombuffer((ctypes.c_char * source.itemsize).from_address(copy.ctypes.data - source.itemsize), dtype)
    assert unwritten(around).all() and unwritten(before).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("active", [(), ("views",), ("guard",), ("guard", "views")])
def test_an_output_is_poisoned_and_its_fences_are_whole(dtype: str, active: tuple[str, ...]) -> None:
    output = guarded_output((3, 5), dtype, frozenset(active))
    assert unwritten(output.array).all() and output.violation() is None
    output.array[...] = 7
    assert output.violation() is None
    assert (output.read() == 7).all() and not unwritten(output.read()).any()


@pytest.mark.parametrize("active", [(), ("views",), ("guard",)])
@pytest.mark.parametrize("shape", [(3, 5), (0,), ()])
def test_every_stray_byte_next_to_an_output_is_seen(active: tuple[str, ...], shape: tuple[int, ...]) -> None:
    for offset in (-64, -1, 0, 63):
        output = guarded_output(shape, "float32", frozenset(active))
        at = output.stop + offset if offset >= 0 else output.start + offset
        output.buffer[at] ^= 1
        found = output.violation()
        assert found == (f"byte {offset} past its end" if offset >= 0 else f"byte {-offset} before its start")


def test_wide_guards_see_a_tile_that_the_narrow_ones_cannot_hold() -> None:
    wide = guarded_output((4,), "float32", frozenset({"guard"}))
    assert len(wide.buffer) - wide.stop >= 4 * 64 * 64
    wide.buffer[wide.stop + 4 * 64 * 63] ^= 1
    assert wide.violation() is not None


def test_an_output_is_read_from_its_buffer_whatever_became_of_the_array() -> None:
    output = guarded_output((2, 3), "float32")
    output.array[...] = 1
    output.array.shape = (6,)
    assert output.read().shape == (2, 3)


def test_a_spoiled_input_holds_poison_only() -> None:
    copy = placed(sample((4, 4), "float32"), frozenset({"views"}))
    spoil(copy)
    assert unwritten(copy).all()


def test_poison_is_told_from_a_computed_nan() -> None:
    values = np.zeros(3, np.float32)
    poison(values)
    values[1] = np.float32("nan")
    assert unwritten(values).tolist() == [True, False, True] and np.isnan(values).all()


@pytest.mark.parametrize("name", sorted(HAZARDS))
def test_a_right_engine_gives_the_same_bits_under_every_hazard(name: str) -> None:
    plain, under = run_call(bad_engines.Adder(), add_call()), run_call(bad_engines.Adder(), add_call(name))
    assert under.failure is None
    assert under.outputs["out"].tobytes() == plain.outputs["out"].tobytes()


def outcome(engine: Any, call: OpCall) -> str:
    """ "right", "wrong", or the kind of the failure."""
    answer = run_call(engine, call)
    if answer.failure is not None:
        return answer.failure.kind
    return "right" if np.array_equal(answer.outputs["out"], call.inputs["a"] + call.inputs["b"]) else "wrong"


def test_a_read_past_the_end_is_seen_under_poison() -> None:
    answer = run_call(bad_engines.ReadsPastEnd(), add_call("poison"))
    assert np.isnan(answer.outputs["out"][0, 0])


def test_an_engine_that_ignores_strides_is_seen_under_views_only() -> None:
    assert outcome(bad_engines.IgnoresStrides(), add_call()) == "right"
    assert outcome(bad_engines.IgnoresStrides(), add_call("views")) == "wrong"


def test_an_engine_that_keeps_a_reference_is_seen_under_freed_only() -> None:
    for active, second in (((), "right"), (("freed",), "wrong")):
        engine = bad_engines.KeepsReference()
        assert outcome(engine, add_call(*active)) == "right"
        assert outcome(engine, add_call(*active)) == second


def test_an_engine_that_differs_from_call_to_call_is_flaky_under_repeat_only() -> None:
    assert run_call(bad_engines.Counts(), add_call()).failure is None
    failure = run_call(bad_engines.Counts(), add_call("repeat")).failure
    assert failure is not None and failure.kind == "flaky"
    assert failure.message == "two equal calls gave out[0, 0] = 1.0, then 2.0"


def test_names_of_other_rooms_are_ignored() -> None:
    assert outcome(bad_engines.Adder(), add_call("fork", "neighbours")) == "right"
    assert "fork" not in hazards.HAZARDS

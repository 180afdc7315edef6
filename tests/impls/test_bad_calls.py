"""Calls that break the contract of paritree.h, made past the adapter, against every engine of ours behind the C ABI: the same status in the same words.

The other side of bad_abi/: there libraries break the contract, here their caller does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from impls.cuda import build as cuda_build
from impls.native import abi, tensors
from impls.native import build as native_build
from impls.native.adapter import Library, LibraryEngine
from impls.native.session import LibrarySession
from spec.config import as_parameters, preset
from spec.weights import random_weights

CONFIG = preset("tiny")
HIDDEN = np.zeros((1, CONFIG.hidden + 1), np.float32)
NO_WEIGHT, NO_TAP, NO_DRAFT, NO_EMIT = abi.WeightFn(), abi.TapFn(), abi.DraftFn(), abi.EmitFn()


class Opened:
    """An engine of ours with a session on it; the handle is what a caller in C holds."""

    def __init__(self, path: str) -> None:
        self.library = Library(path)
        self.session: LibrarySession = LibraryEngine(self.library).open(CONFIG, random_weights(CONFIG, 0))
        self.handle = self.session._open_handle()


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Opened]]:
    try:
        paths = {"native": native_build.library(), "cuda": cuda_build.library(emulated=True)}
    except native_build.NoCompiler as reason:
        pytest.skip(str(reason))
    opened = {name: Opened(str(path)) for name, path in paths.items()}
    yield opened
    for one in opened.values():
        one.session.close()


def forward_args(**changed: Any) -> tuple[Any, list[Any]]:
    """One row of sequence 0 that wants logits, and what it points into."""
    zero, minus = np.zeros(1, np.int32), np.full(1, -1, np.int32)
    want, logits = np.ones(1, np.uint8), np.zeros((1, CONFIG.vocab), np.float32)
    tensor, owners = tensors.whole_tensor("logits", logits)
    args = abi.ForwardArgs(
        ctypes.sizeof(abi.ForwardArgs), 1, 1, tensors.address(zero), tensors.address(zero), tensors.address(zero), tensors.address(minus),
        tensors.address(want), ctypes.pointer(tensor), b"", NO_TAP, None, 0, None, None,
    )  # fmt: skip
    for name, value in changed.items():
        setattr(args, name, value)
    return args, [zero, minus, want, logits, tensor, owners]


def forward(**changed: Any) -> Call:
    def call(opened: Opened) -> int:
        args, owners = forward_args(**changed)
        status: int = opened.library.function("paritree_forward")(opened.handle, ctypes.byref(args))
        del owners
        return status

    return call


def forward_hidden(opened: Opened) -> int:
    tensor, owners = tensors.whole_tensor("hidden", HIDDEN)
    args, more = forward_args(hidden=ctypes.pointer(tensor))
    status: int = opened.library.function("paritree_forward")(opened.handle, ctypes.byref(args))
    del owners, more
    return status


def forward_device(opened: Opened) -> int:
    args, owners = forward_args()
    args.logits.contents.device.device_type = 2
    status: int = opened.library.function("paritree_forward")(opened.handle, ctypes.byref(args))
    del owners
    return status


def open_with(config: dict[str, int | float] | None = None, **changed: Any) -> Call:
    def call(opened: Opened) -> int:
        pairs, owners = tensors.parameters(config or {})
        lend = abi.WeightFn(lambda user, name, tensor: abi.FAILED)
        args = abi.OpenArgs(ctypes.sizeof(abi.OpenArgs), 0, pairs, lend, None, None, abi.Device(abi.CPU, 0), None)
        for name, value in changed.items():
            setattr(args, name, value)
        handle = ctypes.c_void_p()
        status: int = opened.library.function("paritree_open")(ctypes.byref(args), ctypes.byref(handle))
        del owners
        return status

    return call


def generate(**changed: Any) -> Call:
    def call(opened: Opened) -> int:
        prompt = np.array([1, 2], np.int32)
        pointers, lengths = (ctypes.c_void_p * 1)(tensors.address(prompt)), (ctypes.c_int64 * 1)(2)
        draft, emit = abi.DraftFn(lambda *_: abi.OK), abi.EmitFn(lambda *_: abi.OK)
        args = abi.GenerateArgs(
            ctypes.sizeof(abi.GenerateArgs), 0, 1, pointers, lengths, draft, None, 2, 4, 3, None, 0, emit, None, None, abi.Params(None, 0)
        )
        for name, value in changed.items():
            setattr(args, name, value)
        status: int = opened.library.function("paritree_generate")(opened.handle, ctypes.byref(args))
        return status

    return call


def run_op(**changed: Any) -> Call:
    def call(opened: Opened) -> int:
        arrays = {name: np.ones((2, 3), np.float32) for name in ("a", "b", "out")}
        named = {name: tensors.whole_tensor(name, array) for name, array in arrays.items()}
        inputs = (abi.NamedTensor * 2)(*(abi.NamedTensor(name.encode(), named[name][0]) for name in ("a", "b")))
        outputs = (abi.NamedTensor * 1)(abi.NamedTensor(b"out", named["out"][0]))
        args = abi.OpCall(
            ctypes.sizeof(abi.OpCall), 1, b"add", inputs, 2, abi.Params(None, 0), outputs, 1, None, 0, abi.Device(abi.CPU, 0), None
        )
        for name, value in changed.items():
            setattr(args, name, value)
        status: int = opened.library.function("paritree_run_op")(ctypes.byref(args))
        return status

    return call


def of(symbol: str, *arguments: Any) -> Call:
    return lambda opened: opened.library.function(symbol)(opened.handle, *arguments)


def without_session(symbol: str, *arguments: Any) -> Call:
    return lambda opened: opened.library.function(symbol)(None, *arguments)


Call = Callable[[Opened], int]
INVALID, UNSUPPORTED, FAILED = abi.INVALID, abi.UNSUPPORTED, abi.FAILED
COUNT = ctypes.byref(ctypes.c_int64())
TINY = as_parameters(CONFIG)

CASES: dict[str, tuple[Call, int, str]] = {
    "describe nothing": (lambda o: o.library.function("paritree_describe")(None), INVALID, "description is null"),
    "describe an old struct": (
        lambda o: o.library.function("paritree_describe")(ctypes.byref(abi.DescriptionStruct(8))), INVALID, "description has struct_size 8, but this engine (ABI 1) needs",
    ),
    "open nothing": (lambda o: o.library.function("paritree_open")(None, None), INVALID, "args is null"),
    "open an old struct": (open_with(struct_size=4), INVALID, "args has struct_size 4"),
    "open on a device": (open_with(device=abi.Device(2, 0)), UNSUPPORTED, "device type is 2, but this engine takes tensors in host memory (1)"),
    "open a path": (open_with(weight=NO_WEIGHT), UNSUPPORTED, "does not load weights_path"),
    "open without a configuration": (open_with(), INVALID, "parameter vocab is missing"),
    "open with an unknown key": (open_with(TINY | {"colour": 3}), UNSUPPORTED, "parameter colour is unknown"),
    "open with a wrong size": (open_with(TINY | {"heads": 0}), INVALID, "heads is 0, but must be at least 1"),
    "open with a number for a size": (open_with(TINY | {"heads": 3.5}), INVALID, "parameter heads is the double 3.5, but must be an integer"),
    "open without slots": (open_with(TINY | {"cache_slots": 0}), INVALID, "cache_slots is 0, but must be at least 1"),
    "open without weights": (open_with(TINY), FAILED, "the weight callback answered 3 for embed; expected float32 [96, 48]"),
    "forward without a session": (without_session("paritree_forward", ctypes.byref(abi.ForwardArgs(ctypes.sizeof(abi.ForwardArgs)))), INVALID, "session is null"),
    "forward nothing": (of("paritree_forward", None), INVALID, "args is null"),
    "forward an old struct": (forward(struct_size=16), INVALID, "args has struct_size 16"),
    "forward a negative count": (forward(row_count=-1), INVALID, "sequence has count -1, but counts are not negative"),
    "forward without tokens": (forward(token=None), INVALID, "token is null"),
    "forward without a target": (forward(logits=None), INVALID, "logits is null, but 1 rows want logits"),
    "forward to another device": (forward_device, UNSUPPORTED, "logits is on device type 2, but this engine takes tensors in host memory (1)"),
    "forward from a hidden row of another width": (forward_hidden, INVALID, "hidden has shape [1, 49], but must be [1, 48]"),
    "forward with an unknown tap": (forward(taps=b"embed,aura"), UNSUPPORTED, "there is no tap 'aura' here"),
    "forward with taps for nobody": (forward(taps=b"embed"), INVALID, "taps are asked for, but the tap callback is null"),
    "commit without a path": (of("paritree_commit", 0, None, 2), INVALID, "path is null"),
    "commit of an unknown sequence": (of("paritree_commit", 7, None, 0), INVALID, "sequence 7 is unknown"),
    "cache rows without a count": (of("paritree_cache_rows", 0, 0, None, None), INVALID, "row_count is null"),
    "cache rows of a layer that is none": (of("paritree_cache_rows", 0, 9, None, COUNT), INVALID, "layer is 9, but must be between 0 and 1"),
    "cache rows of an unknown sequence": (of("paritree_cache_rows", 7, 0, None, COUNT), INVALID, "sequence 7 is unknown: a sequence exists from its first row on"),
    "evict an unknown sequence": (of("paritree_evict", 7), INVALID, "sequence 7 is unknown"),
    "fork an unknown sequence": (of("paritree_fork", 7, 8), INVALID, "sequence 7 is unknown"),
    "free slots without a place": (of("paritree_free_slots", None), INVALID, "slots is null"),
    "generate nothing": (of("paritree_generate", None), INVALID, "args is null"),
    "generate without a session": (without_session("paritree_generate", None), INVALID, "session is null"),
    "generate an old struct": (generate(struct_size=32), INVALID, "args has struct_size 32"),
    "generate without prompts": (generate(prompts=None), INVALID, "prompt_count is 1, but prompts or prompt_lengths is null"),
    "generate a negative prompt": (generate(prompt_lengths=(ctypes.c_int64 * 1)(-2)), INVALID, "prompt has count -2, but counts are not negative"),
    "generate from an empty prompt": (generate(prompt_lengths=(ctypes.c_int64 * 1)(0)), INVALID, "prompt 0 has no tokens"),
    "generate minus one": (generate(max_new=-1), INVALID, "max_new is -1, but must not be negative"),
    "generate with stops nowhere": (generate(stop_count=2), INVALID, "stop_tokens is null"),
    "generate with too large a tree": (generate(budget=1 << 20), INVALID, "T5: budget is 1048576"),
    "generate with a negative depth": (generate(block_len=-1), INVALID, "block_len is -1, but must not be negative"),
    "generate for nobody": (generate(emit=NO_EMIT), INVALID, "emit is null"),
    "generate for one who refuses": (generate(emit=abi.EmitFn(lambda *_: abi.FAILED), draft=NO_DRAFT), FAILED, "the emit callback answered 3 for prompt 0"),
    "generate from one who refuses": (generate(draft=abi.DraftFn(lambda *_: abi.FAILED)), FAILED, "the draft callback answered 3 for prompt 0"),
    "run nothing": (lambda o: o.library.function("paritree_run_op")(None), INVALID, "call is null"),
    "run an old struct": (run_op(struct_size=8), INVALID, "call has struct_size 8"),
    "run on a device": (run_op(device=abi.Device(2, 0)), UNSUPPORTED, "device type is 2, but this engine takes tensors in host memory (1)"),
    "run no operation": (run_op(op=None), INVALID, "op is null"),
    "run an operation that is none": (run_op(op=b"levitate"), UNSUPPORTED, "there is no operation 'levitate' here; this engine has embed,rms_norm"),
    "run with inputs nowhere": (run_op(inputs=None), INVALID, "add: input_count is 2, but inputs is null"),
    "run without an input": (run_op(input_count=1), INVALID, "add: input b is missing"),
    "run without an output": (run_op(output_count=0), INVALID, "add: output out is missing"),
    "run with a parameter missing": (run_op(op=b"rms_norm"), INVALID, "rms_norm: input x is missing"),
    "size without a place": (lambda o: o.library.function("paritree_run_op_workspace")(ctypes.byref(abi.OpCall(ctypes.sizeof(abi.OpCall), 1, b"add")), None), INVALID, "bytes is null"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_bad_call_is_refused_in_the_same_words(engines: dict[str, Opened], name: str) -> None:
    call, status, words = CASES[name]
    answers = {engine: (call(opened), opened.library.last_error()) for engine, opened in engines.items()}
    assert answers["native"][0] == status
    assert words in answers["native"][1]
    assert answers["cuda"] == answers["native"]


def test_after_every_refusal_an_honest_call_works(engines: dict[str, Opened]) -> None:
    for opened in engines.values():
        assert forward()(opened) == abi.OK
        assert generate(draft=NO_DRAFT)(opened) == abi.OK

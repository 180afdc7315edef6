"""The adapter against small C libraries (bad_abi/), each of which breaks the contract of paritree.h in one way."""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from impls.native import EngineLoadError, LibrarySession, build, load_library
from impls.native import abi as abi_module
from spec.config import preset
from spec.engine import EngineError, Limits, Rows, Unsupported
from spec.weights import WeightError, random_weights

FOLDER = Path(__file__).parent / "bad_abi"
INCLUDE = Path(abi_module.__file__).parent / "include"
CONFIG = preset("tiny")
WEIGHTS = random_weights(CONFIG, 0)
ALL_TAPS = frozenset({"embed", "attn_norm", "q"})

Compile = Callable[[str], Path]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """The library of one file of bad_abi/, compiled as strict C99: the header must be clean C."""
    try:
        compiler = build.find_compiler()
    except build.NoCompiler as problem:
        pytest.skip(str(problem))
    folder = tmp_path_factory.mktemp("bad_abi")

    def library(name: str) -> Path:
        target = folder / f"{name}.so"
        if not target.exists():
            flags = ["-x", "c", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{INCLUDE}"]
            subprocess.run([*compiler, *flags, str(FOLDER / f"{name}.c"), "-o", str(target)], check=True)
        return target

    return library


@pytest.fixture
def session(compiled: Compile) -> LibrarySession:
    return load_library(compiled("sessions")).open(CONFIG, WEIGHTS)


def rows(token: int) -> tuple[Rows, np.ndarray]:
    one = np.array([token], np.int32)
    return Rows(np.zeros(1, np.int32), one, np.zeros(1, np.int32), np.full(1, -1, np.int32)), np.ones(1, np.bool_)


# ---- libraries that are refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        ("no_version", "symbol paritree_abi_version is missing", "every engine exports it"),
        ("wrong_version", f"speaks ABI {abi_module.ABI_VERSION + 1}", f"speaks ABI {abi_module.ABI_VERSION}"),
        ("null_name", "name of the description is NULL", "must be a string"),
        ("long_description", f"wrote past the {abi_module.ctypes.sizeof(abi_module.DescriptionStruct)} bytes", "those fields only"),
        ("describe_fails", "returned status 3 (no licence found)", "must return 0"),
        ("unknown_capability", "the capability 'teleport'", "there are only run_op, forward"),
        ("claims_forward", "the capability 'forward'", "does not export paritree_open"),
        ("unknown_profile", "its profile has 'exp_upl'", "exp_ulp"),
        ("per_op_misspelt", "its profile has 'matmul.exp_upl'", "exp_ulp"),
        ("per_op_nowhere", "its profile has 'levitate.u_input'", "'levitate' is no operation and no tap"),
    ],
)
def test_a_library_that_cannot_be_an_engine_is_refused_with_a_reason(compiled: Compile, name: str, found: str, expected: str) -> None:
    path = compiled(name)
    with pytest.raises(EngineLoadError) as caught:
        load_library(path)
    assert found in caught.value.found
    assert expected in caught.value.expected
    assert str(path) in str(caught.value)
    assert caught.value.remedy in str(caught.value)


def test_a_missing_file_and_a_text_file_are_no_libraries(tmp_path: Path) -> None:
    with pytest.raises(EngineLoadError, match="no such file"):
        load_library(tmp_path / "libengine.so")
    text = tmp_path / "notes.so"
    text.write_text("not an ELF file")
    with pytest.raises(EngineLoadError, match="the loader says"):
        load_library(text)


def test_a_load_error_survives_pickling() -> None:
    error = EngineLoadError("a.so", "this", "that", "do so")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.found, again.remedy) == (str(error), "this", "do so")


# ---- a subset of the ABI --------------------------------------------------------------------------------------------


def test_an_engine_of_one_operation_is_an_engine(compiled: Compile) -> None:
    engine = load_library(compiled("only_add"))
    description = engine.describe()
    assert (description.name, description.version, description.ops) == ("minimal", "3", {"add", "argmax"})
    profile = description.profile
    assert (profile.name, profile.u_input, profile.height) == ("tf32", 2.0**-10, "blocked:128")
    assert (profile.exp_ulp, profile.batch_invariant) == (2.5, True)
    a, out = np.array([[1, 2]], np.float32), np.full((1, 2), np.nan, np.float32)
    engine.run_op("add", {"a": a, "b": a}, {}, {"out": out})
    np.testing.assert_array_equal(out, [[2, 4]])


def test_a_profile_may_differ_by_operation(compiled: Compile) -> None:
    profile = load_library(compiled("per_op_profile")).describe().profile
    assert (profile.exp_ulp, profile.u_input, profile.height) == (2.0, 0.0, "any")
    assert profile.at("matmul").u_input == 2.0**-10
    assert profile.at("scores").height == "blocked:8"


def test_what_a_library_does_not_export_is_unsupported(compiled: Compile) -> None:
    engine = load_library(compiled("only_add"))
    with pytest.raises(Unsupported, match="does not export paritree_open"):
        engine.open(CONFIG, WEIGHTS)
    out = np.zeros((1, 1), np.float32)
    with pytest.raises(Unsupported, match="no message"):
        engine.run_op("swiglu", {"gate": out, "up": out}, {}, {"out": out})
    session = load_library(compiled("sessions")).open(CONFIG, WEIGHTS)
    for call in (
        lambda: session.commit(0, np.zeros(1, np.int32)),
        lambda: session.evict(0),
        lambda: session.fork(0, 1),
        session.free_slots,
    ):
        with pytest.raises(Unsupported, match="does not export paritree_"):
            call()


def test_a_status_that_is_none_is_an_error(compiled: Compile) -> None:
    logits, ids = np.zeros((1, 2), np.float32), np.zeros(1, np.int32)
    with pytest.raises(EngineError, match="returned status 9, but a status is 0, 1, 2 or 3"):
        load_library(compiled("only_add")).run_op("argmax", {"logits": logits}, {}, {"ids": ids})


def test_a_name_can_be_given(compiled: Compile) -> None:
    assert load_library(compiled("only_add"), name="native:z").describe().name == "native:z"


# ---- arrays and parameters ------------------------------------------------------------------------------------------


def test_dtypes_and_strides_that_cannot_cross_are_refused(compiled: Compile) -> None:
    engine = load_library(compiled("only_add"))
    out = np.zeros((2, 2), np.float32)
    swapped = np.zeros((2, 2), np.dtype(">f4"))
    with pytest.raises(EngineError, match="a has dtype >f4"):
        engine.run_op("add", {"a": swapped, "b": out}, {}, {"out": out})
    odd = np.zeros(40, np.uint8)[:36].view(np.float32).reshape(3, 3)
    torn = np.lib.stride_tricks.as_strided(odd, (2, 2), (6, 4))
    with pytest.raises(EngineError, match="not whole elements"):
        engine.run_op("add", {"a": torn, "b": out}, {}, {"out": out})
    frozen = out.copy()
    frozen.flags.writeable = False
    with pytest.raises(EngineError, match="output out is read-only"):
        engine.run_op("add", {"a": out, "b": out}, {}, {"out": frozen})
    with pytest.raises(EngineError, match="parameter eps is 'small'"):
        engine.run_op("add", {"a": out, "b": out}, {"eps": "small"}, {"out": out})  # type: ignore[dict-item]


def test_the_workspace_is_poisoned_before_every_call(compiled: Compile) -> None:
    engine = load_library(compiled("workspace"))
    for _ in range(3):
        out = np.zeros((1, 1), np.float32)
        engine.run_op("add", {"a": out, "b": out}, {}, {"out": out})
        assert out[0, 0] == 1


def test_a_write_past_the_workspace_is_noticed_every_time(compiled: Compile) -> None:
    engine = load_library(compiled("workspace"))
    out = np.zeros((1, 1), np.float32)
    for _ in range(2):
        with pytest.raises(EngineError, match="wrote past the end of its workspace of 16 bytes"):
            engine.run_op("matmul", {"x": out, "w": out}, {}, {"out": out})


# ---- weights --------------------------------------------------------------------------------------------------------


def test_an_exception_of_the_weight_provider_comes_out_unchanged(compiled: Compile) -> None:
    class Gone(RuntimeError):
        pass

    def provider(name: str) -> np.ndarray:
        raise Gone(name)

    with pytest.raises(Gone, match="embed"):
        load_library(compiled("sessions")).open(CONFIG, provider)


def test_an_unusable_weight_is_named(compiled: Compile) -> None:
    engine = load_library(compiled("sessions"))
    with pytest.raises(WeightError, match=r"weight 'embed' has shape \[2, 2\]"):
        engine.open(CONFIG, lambda name: np.zeros((2, 2), np.float32))
    with pytest.raises(WeightError, match="weight 'embed' is missing"):
        engine.open(CONFIG, {})
    with pytest.raises(WeightError, match="asks for weight 'embedding'"):
        engine.open(CONFIG, WEIGHTS, options={"ask_for_unknown": 1})


def test_ok_without_a_session_is_an_error(compiled: Compile) -> None:
    with pytest.raises(EngineError, match="returned OK, but no session"):
        load_library(compiled("sessions")).open(CONFIG, WEIGHTS, options={"no_session": 1})


def test_a_kept_weight_pointer_shows_as_nan(session: LibrarySession) -> None:
    logits = session.forward(*rows(0), frozenset(), lambda *tap: None)
    assert np.isnan(logits[0, 0])


def test_a_closed_session_says_so(session: LibrarySession) -> None:
    session.close()
    session.close()
    with pytest.raises(EngineError, match="this session is closed"):
        session.forward(*rows(0), frozenset(), lambda *tap: None)


# ---- taps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (1, "pushed tap 'o_heads', which was not asked for"),
        (2, "a tap has struct_size 8, but must have at least 96"),
        (3, "tap 'embed' of layer 0 has dtype code 2, 64 bits"),
        (7, r"has shape \[2, 3\] and no data"),
        (9, r"has shape \[-1, 3\]"),
    ],
)
def test_a_malformed_tap_is_an_error(session: LibrarySession, behaviour: int, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        session.forward(*rows(behaviour), ALL_TAPS, lambda *tap: None)


@pytest.mark.parametrize(("behaviour", "value"), [(0, [[0, 1, 2], [3, 4, 5]]), (4, [[0, 2, 4], [1, 3, 5]]), (8, [[1, 2, 3]])])
def test_a_tap_is_copied_with_its_strides_and_offset(session: LibrarySession, behaviour: int, value: list[list[float]]) -> None:
    taps: list[tuple[str, int, np.ndarray]] = []
    session.forward(*rows(behaviour), ALL_TAPS, lambda *tap: taps.append(tap))
    ((name, layer, array),) = taps
    assert (name, layer, array.dtype) == ("embed", 0, np.float32)
    np.testing.assert_array_equal(array, value)


@pytest.mark.parametrize("behaviour", [5, 6])
def test_a_copy_that_the_next_operation_did_not_consume_and_a_shard_are_kept_back(session: LibrarySession, behaviour: int) -> None:
    taps: list[object] = []
    session.forward(*rows(behaviour), ALL_TAPS, lambda *tap: taps.append(tap))
    assert taps == []


def test_an_exception_of_the_tap_sink_comes_out_unchanged_and_the_sink_is_not_called_again(session: LibrarySession) -> None:
    calls: list[str] = []

    def sink(name: str, layer: int, array: np.ndarray) -> None:
        calls.append(name)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.forward(*rows(0), ALL_TAPS, sink)
    assert calls == ["embed"]


def test_taps_that_the_engine_does_not_have_are_unsupported(session: LibrarySession) -> None:
    with pytest.raises(Unsupported, match="minimal has no tap 'logits'"):
        session.forward(*rows(0), frozenset({"logits"}), lambda *tap: None)


def test_a_batch_of_unequal_columns_is_refused(session: LibrarySession) -> None:
    batch, want = rows(0)
    with pytest.raises(EngineError, match=r"parent has shape \[2\], but must have shape \[1\]"):
        session.forward(Rows(batch.sequence, batch.token, batch.position, np.zeros(2, np.int32)), want, frozenset(), lambda *tap: None)
    with pytest.raises(EngineError, match=r"want_logits has shape \[3\]"):
        session.forward(batch, np.ones(3, np.bool_), frozenset(), lambda *tap: None)


# ---- cache and loop -------------------------------------------------------------------------------------------------


def test_cache_row_counts_are_checked(session: LibrarySession) -> None:
    assert session.cache_rows(0, 0).shape == (2, CONFIG.cache_dim)
    assert np.isnan(session.cache_rows(0, 0)).all()  # the library wrote nothing into the poisoned rows
    with pytest.raises(EngineError, match="must set the number of committed rows"):
        session.cache_rows(1, 0)
    with pytest.raises(EngineError, match="first said 2 rows, then 3"):
        session.cache_rows(2, 0)


class ThreeRows:
    block_len = 3

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = logits

    def draft(self, sequence: int, history: np.ndarray) -> np.ndarray:
        assert history.tolist() == [7, 8]
        return self.logits


PROMPTS = [np.array([7, 8], np.int32)]


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [(1, "is of sequence 1, but there are 1 prompts"), (2, "has token_count -1"), (3, "an emission has struct_size 4")],
)
def test_a_malformed_emission_is_an_error(session: LibrarySession, behaviour: int, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        session.generate(PROMPTS, None, 0, Limits(behaviour))


def test_an_honest_emission_arrives(session: LibrarySession) -> None:
    drafter = ThreeRows(np.zeros((3, CONFIG.vocab), np.float32))
    (generation,) = session.generate(PROMPTS, drafter, 4, Limits(10))
    assert (generation.tokens, generation.rounds) == ((4, 5), ())


def test_an_exception_or_a_wrong_answer_of_the_drafter_comes_out_of_generate(session: LibrarySession) -> None:
    class Lost(ThreeRows):
        def draft(self, sequence: int, history: np.ndarray) -> np.ndarray:
            raise LookupError("no draft model")

    with pytest.raises(LookupError, match="no draft model"):
        session.generate(PROMPTS, Lost(np.zeros(0)), 4, Limits(10))
    with pytest.raises(EngineError, match=rf"the drafter answered float32 \[2, 2\], but float32 \[3, {CONFIG.vocab}\] is needed"):
        session.generate(PROMPTS, ThreeRows(np.zeros((2, 2), np.float32)), 4, Limits(10))


# ---- layouts --------------------------------------------------------------------------------------------------------


def test_struct_sizes_are_those_of_the_c_compiler(compiled: Compile, tmp_path: Path) -> None:
    names = {
        "paritree_description": abi_module.DescriptionStruct,
        "paritree_op_call": abi_module.OpCall,
        "paritree_open_args": abi_module.OpenArgs,
        "paritree_tap": abi_module.Tap,
        "paritree_forward_args": abi_module.ForwardArgs,
        "paritree_emission": abi_module.Emission,
        "paritree_generate_args": abi_module.GenerateArgs,
        "paritree_named_tensor": abi_module.NamedTensor,
        "paritree_param": abi_module.Param,
        "DLTensor": abi_module.Tensor,
    }
    offsets = [
        f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));' for name, struct in names.items() for field, _ in struct._fields_
    ]
    sizes = [f'printf("{name} %zu\\n", sizeof({name}));' for name in names]
    source = tmp_path / "sizes.c"
    source.write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "paritree.h"\nint main(void) {\n'
        + "\n".join(offsets + sizes)
        + "\nreturn 0;\n}\n"
    )
    program = tmp_path / "sizes"
    subprocess.run([*build.find_compiler(), "-x", "c", "-std=c99", f"-I{INCLUDE}", str(source), "-o", str(program)], check=True)
    lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    expected = [f"{name}.{field} {getattr(struct, field).offset}" for name, struct in names.items() for field, _ in struct._fields_]
    expected += [f"{name} {abi_module.ctypes.sizeof(struct)}" for name, struct in names.items()]
    assert lines == expected

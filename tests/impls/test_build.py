"""The compile-at-first-use cache, with a compiler that only writes down what it was asked: real compilations are in test_native.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from impls.native import build, header
from impls.planted.fresh import FRESH
from impls.planted.native_plants import PLANTS
from spec.ops import OPS
from spec.taps import all_tap_names

FAKE = """#!{python}
import os, sys
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("fake", os.environ.get("FAKE_VERSION", "1")); sys.exit()
with open({log!r}, "a") as log:
    log.write(" ".join(arguments) + "\\n")
if "broken" in open(arguments[arguments.index("-c") + 1]).read() if "-c" in arguments else False:
    print("error: this source is broken", file=sys.stderr); sys.exit(1)
with open(arguments[arguments.index("-o") + 1], "w") as out:
    out.write("made")
if "FAKE_EDITS" in os.environ and "-c" in arguments:  # somebody saves a header while the compiler runs
    with open(os.environ["FAKE_EDITS"], "a") as header:
        header.write("// edited\\n")
"""


class Bench:
    """A folder of sources, a cache, and a fake compiler."""

    def __init__(self, folder: Path) -> None:
        self.sources, self.cache, self.log = folder / "sources", folder / "cache", folder / "log"
        self.sources.mkdir()
        (self.sources / "shared.hpp").write_text("// shared\n")
        (self.sources / "one.cpp").write_text('#include "shared.hpp"\n')
        (self.sources / "two.cpp").write_text("#ifdef PARITREE_PLANT_TWO_SIDED\n#endif\n")
        self.compiler = folder / "fake-c++"
        self.compiler.write_text(FAKE.format(python=sys.executable, log=str(self.log)))
        self.compiler.chmod(0o755)

    def commands(self) -> list[str]:
        """What was compiled and linked since the last call."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [" ".join(Path(word).name for word in line.split() if word.endswith(".cpp")) or "link" for line in lines]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(tmp_path)
    monkeypatch.setattr(build, "SOURCES", made.sources)
    monkeypatch.setenv("PARITREE_CACHE", str(made.cache))
    monkeypatch.setenv("PARITREE_CXX", str(made.compiler))
    build.compiler_version.cache_clear()
    return made


def test_the_second_call_compiles_nothing(bench: Bench) -> None:
    path = build.library()
    assert path.read_text() == "made"
    assert sorted(bench.commands()) == ["link", "one.cpp", "two.cpp"]
    assert build.library() == path
    assert bench.commands() == []


def test_an_edited_header_recompiles_the_sources_that_include_it(bench: Bench) -> None:
    path = build.library()
    bench.commands()
    (bench.sources / "shared.hpp").write_text("// edited\n")
    assert build.library() != path
    assert sorted(bench.commands()) == ["link", "one.cpp"]


def test_an_object_whose_sources_changed_under_the_compiler_is_not_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be linked, for ever, into every library of the text that it was not made from."""
    monkeypatch.setenv("FAKE_EDITS", str(bench.sources / "shared.hpp"))
    with pytest.raises(build.BuildError, match=r"one.cpp, or a header that it includes, changed while it was compiled: build again"):
        build.library()
    assert list(bench.cache.rglob("one-*.o")) == []
    monkeypatch.delenv("FAKE_EDITS")
    assert build.library().exists()


def test_another_compiler_version_and_other_flags_recompile_everything(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {build.library()}
    monkeypatch.setenv("FAKE_VERSION", "2")
    build.compiler_version.cache_clear()
    paths.add(build.library())
    monkeypatch.setenv("PARITREE_CXXFLAGS", "-Wno-error")
    paths.add(build.library())
    paths.add(build.library(sanitize=True))
    assert len(paths) == 4
    assert sorted(bench.commands()) == ["link"] * 4 + ["one.cpp"] * 4 + ["two.cpp"] * 4


def test_a_plant_recompiles_the_sources_that_mention_it(bench: Bench) -> None:
    honest = build.library()
    bench.commands()
    assert build.plant_names() == ("two-sided",)
    planted = build.library(plant="two-sided")
    assert planted != honest
    assert "-DPARITREE_PLANT_TWO_SIDED" in bench.log.read_text()
    assert sorted(bench.commands()) == ["link", "two.cpp"]
    with pytest.raises(build.UnknownPlant, match="there is no plant 'one' of the native engine: choose one of two-sided"):
        build.library(plant="one")


def test_a_refused_source_publishes_nothing_and_shows_what_the_compiler_said(bench: Bench) -> None:
    (bench.sources / "two.cpp").write_text("broken\n")
    with pytest.raises(build.BuildError, match="this source is broken") as caught:
        build.library()
    assert "two.cpp" in str(caught.value)
    assert list(bench.cache.rglob("*.so")) == []
    assert list(bench.cache.rglob(".making-*")) == []
    (bench.sources / "two.cpp").write_text("mended\n")
    assert build.library().exists()


def test_many_processes_at_once_compile_each_source_once(bench: Bench) -> None:
    code = f"from pathlib import Path; from impls.native import build; build.SOURCES = Path({str(bench.sources)!r}); print(build.library())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert len(answers) == 1 and Path(answers.pop()).read_text() == "made"
    assert sorted(bench.commands()) == ["link", "one.cpp", "two.cpp"]


def test_the_compiler_is_that_of_the_environment(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "other-c++")
    assert build.find_compiler() == (str(bench.compiler),)
    monkeypatch.delenv("PARITREE_CXX")
    with pytest.raises(build.NoCompiler, match="CXX is 'other-c\\+\\+', but there is no such program"):
        build.find_compiler()
    monkeypatch.setenv("CXX", f"{bench.compiler} -pipe")
    assert build.find_compiler() == (str(bench.compiler), "-pipe")


def test_without_a_compiler_the_message_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("PARITREE_CXX", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.NoCompiler, match="apt-get install g\\+\\+"):
        build.find_compiler()


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARITREE_CACHE", str(tmp_path / "a"))
    assert build.cache_folder() == tmp_path / "a" / "native"
    monkeypatch.delenv("PARITREE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert build.cache_folder() == tmp_path / "b" / "paritree" / "native"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert build.cache_folder() == tmp_path / "c" / ".cache" / "paritree" / "native"


def test_every_plant_of_the_sources_is_declared_and_the_other_way_round() -> None:
    assert set(build.plant_names()) == {*PLANTS, *(name for name, plant in FRESH.items() if plant.kind == "native")}
    for plant in PLANTS.values():
        assert (plant.kind, plant.engine) == ("native", f"native:{plant.name}")


# ---- the header -----------------------------------------------------------------------------------------------------


def test_the_header_lists_the_operations_and_taps_of_the_specification() -> None:
    text = header.HEADER.read_text()
    assert header.with_block(text) == text, "run `python -m impls.native.header --write`"
    block = "".join(part for line in header.generated_block().splitlines() for part in line.split('"')[1::2])
    assert block == ",".join(OPS) + ",".join(all_tap_names())


def test_the_header_stays_small() -> None:
    assert len(header.HEADER.read_text().splitlines()) <= 250  # DESIGN section 5: one sitting to read


def test_a_header_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="has no lines"):
        header.with_block("int x;\n")


def test_the_header_can_be_included_after_dlpack(tmp_path: Path) -> None:
    """With DLPack's own include guard set, our copy of DLTensor must step aside."""
    try:
        compiler = build.find_compiler()
    except build.NoCompiler as problem:
        pytest.skip(str(problem))
    own = header.HEADER.read_text()
    start, stop = (
        own.index("#ifndef DLPACK_DLPACK_H_\n") + len("#ifndef DLPACK_DLPACK_H_\n"),
        own.index("#endif\n\ntypedef int32_t paritree_status"),
    )
    (tmp_path / "dlpack.h").write_text(
        f"#ifndef DLPACK_DLPACK_H_\n#define DLPACK_DLPACK_H_\n#include <stdint.h>\n{own[start:stop]}#endif\n"
    )
    for name, language in (("a.c", ("-x", "c", "-std=c99")), ("a.cpp", ("-std=c++17",))):
        source = tmp_path / name
        source.write_text('#include "dlpack.h"\n#include "paritree.h"\nint32_t size = (int32_t)sizeof(DLTensor);\n')
        flags = ["-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{header.HEADER.parent}"]
        subprocess.run([*compiler, *language, *flags, str(source)], check=True)


def test_a_cache_that_cannot_be_written_is_named_with_the_variable_that_moves_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITREE_CACHE", "/proc")  # a folder in which nobody can make a file
    with pytest.raises(build.BuildError, match=r"the cache /proc/native cannot be written .*: set PARITREE_CACHE"):
        build.library()

"""Every plant of the blocked engine is real: on its trigger it answers otherwise than the honest engine, and no two are the same."""

from __future__ import annotations

import ast
import faulthandler
import inspect
import itertools
import os
import re
import resource
import signal
import textwrap
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from campaigns.case import SessionCase
from impls.blocked import engine
from impls.blocked.points import HONEST, PointError, with_overrides
from impls.planted.mutants import OVERRIDES, PLANTS, REGIONS
from tests.impls.blocked_judging import judged_session
from tests.impls.blocked_probes import PROBES, Answers, same

# The known trigger of each plant: a probe of blocked_probes.py.
TRIGGERS = {
    "one token": "H02",
    "equal lengths": "tree44 E03 E01 E15 F18",
    "unequal batch": "B18 tree29 E11 H14 first-key-lost short-prefix",
    "star": "Z01 Z02 A06 A14 K13 Z03 Z04 A02 A09 A10 yarn-off Z08 C01 sibling-visible Z07 tree20 C06 Z11 B07 B09 H01 H17 H19 Z05 H15 B13 Z06"
    " A17 H12 H07 A13 H04 Z37 Z22 Z23 Z25 E17 E09 Z24 latent-not-moved Z26 tree40 tree36 E05 K7-below Z34 H05 Z32 G03 G02 G13 Z35 F24 F27 Z38"
    " shared-dropped Z31 F10 H16 D14",
    "groups": "A03 Z28 F23 next-row-mask",
    "softmax routing": "tree24 tree30 move-order Z40 F21",
    "betas": "yarn-betas tuned-late",
    "fork and evict": "tree23 Z39 K2-short E04 E08 longest-plan",
    "stop in a path": "Z19",
    "stop and limit": "D07 stop-exclusive C08",
    "limit in a path": "tree57 E02",
    "mask token": "tree55",
    "far below": "Z09",
    "empty first row": "Z12",
    "empty sixth row": "Z10 A18 A19",
    "last row elsewhere": "B12",
    "rising scores": "no-rescale split-bf16",
    "route ties": "top-k-last",
    "route near ties": "F11 F07 F08 F25",
    "route zeros": "bias-dropped Z29 F05",
    "route negative": "Z27 F22",
    "route large bias": "Z30 F17",
    "moe of five": "Z33 G07 F15 F16 F12",
    "int4 group": "A22",
    "window": "B11",
    "argmax ties": "Z20",
    "argmax near ties": "D05",
    "argmax of nothing": "D15",
    "table": "C07 tree07 D08",
    "table of everything": "tree11",
    "table ties": "top-k-ties",
    "table near ties": "tree08 logz-bf16 tree18",
    "table with holes": "tree09",
    "tree fifo": "tree01 Z13",
    "tree early": "tree06",
    "tree bonus": "tree05",
    "tree fast path": "Z16 tree04",
    "tree chain seed": "tree03",
    "tree deep": "tree02 C11 jetspec-eager bfs-numbers depth-cap parent-off",
    "tree one layer": "Z15 C02",
    "tree short": "tree12 token-off",
    "tree of 40": "tree47",
    "accept siblings": "Z14",
    "accept zero": "tree13",
    "accept one": "D11",
    "accept none": "tree31 bonus-last-row",
    "accept gap": "tree28 Z17 last-draft-lost Z18",
    "operand slice": "K04",
    "rows of five": "stray-write F14",
    "rows of seven": "Z36 G06 bf16-sum tf32-unsaid",
    "long terms": "H20",
    "4096 terms": "tf32-large",
    "mask of 40": "A11 B17 C03 tree15 tree46 bit-order B03 H22",
    "repeated": "race",
    "sampled": "tree17 tree50 path-unseen Z21 level-shortcut",
}
# They need a relation's second run, or a hazard, to show themselves: tests/campaigns/test_alone.py.
ALONE = ["all-accepted", "table-of-three", "lane-before", "lanes-behind", "far-tile", "kept-plan", "dense-rows"]
TRIGGER_OF = {name: probe for probe, names in TRIGGERS.items() for name in names.split()}

HANGS = 1.0  # seconds of real time after which a probe that takes a millisecond is given up
PATIENCE = 60.0  # the same where an answer, or the end of the process, is sure to come
FATAL = {
    "segfault": ("rows of seven", signal.SIGSEGV),
    "K11": ("session", signal.SIGSEGV),
    "J07": ("argmax of nothing", signal.SIGSEGV),
    "J09": ("prompt of 34", signal.SIGABRT),
    "exits": ("argmax of three", None),
    "hang": ("rows of five", signal.SIGALRM),
    "J01": ("table with holes", signal.SIGALRM),
    "J03": ("empty sixth row", signal.SIGALRM),
}


@lru_cache(maxsize=128)
def honest_answers(probe: str) -> Answers:
    return PROBES[probe](engine())


def answers(name: str, probe: str) -> Answers:
    with np.errstate(all="ignore"):
        return PROBES[probe](engine(name))


TREES = ((((0, 0), (1, 1), (2, 1), (0, 1)), ((0, 1),)), (((0, 1), (0, 0), (1, 1), (0, 0)), ((0, 0),)), ((), ()))
BRANCHING = SessionCase("tiny", (), 1, "ordinary", ((5, 1), (9, 2)), TREES)


@pytest.mark.parametrize(
    "name",
    [
        "Z01",
        "Z02",
        "Z04",
        "Z08",
        "sibling-visible",
        "Z07",
        "Z22",
        "Z23",
        "Z24",
        "Z25",
        "Z29",
        "Z33",
        "Z34",
        "Z35",
        "Z36",
        "Z38",
        "Z39",
        "shared-dropped",
        "B03",
        "E17",
        "H15",
        "A13",
        "F25",
    ],
)
def test_judge_places_the_plant_where_its_record_says(name: str) -> None:
    first = judged_session(engine(name), BRANCHING)[0]
    assert {first.op, first.rule} & set(PLANTS[name].expected_ops), first


def test_every_plant_has_one_known_trigger() -> None:
    assert sorted([*TRIGGER_OF, *FATAL, *ALONE]) == sorted(PLANTS)


def test_probes_are_deterministic() -> None:
    for probe in TRIGGERS:
        assert same(honest_answers(probe), PROBES[probe](engine())), probe


@pytest.mark.parametrize("name", sorted(TRIGGER_OF))
def test_plant_differs_from_the_honest_engine_on_its_trigger(name: str) -> None:
    assert not same(honest_answers(TRIGGER_OF[name]), answers(name, TRIGGER_OF[name]))


def test_no_two_plants_are_the_same() -> None:
    """Two that answer one trigger alike (on a star, a causal mask shows siblings only) differ elsewhere."""
    elsewhere = ("session", "mask of 40", "tree of ties", "route ties", "rows of five", "accept one", "accept none", "generate")
    for probe, names in TRIGGERS.items():
        found = {name: answers(name, probe) for name in names.split()}
        for first, second in itertools.combinations(found, 2):
            if same(found[first], found[second]):
                assert any(not same(answers(first, other), answers(second, other)) for other in elsewhere), (first, second)


@pytest.mark.parametrize("name", sorted(FATAL))
def test_fatal_plant_ends_or_stops_its_process(name: str) -> None:
    probe, expected = FATAL[name]
    answered, ended_by = in_a_fork(lambda: answers(name, probe), HANGS if expected == signal.SIGALRM else PATIENCE)
    assert (answered, ended_by) == (False, expected)


@pytest.mark.parametrize("probe", sorted({probe for probe, _ in FATAL.values()}))
def test_honest_engine_survives_what_is_fatal_to_plants(probe: str) -> None:
    assert in_a_fork(lambda: PROBES[probe](engine()), PATIENCE) == (True, None)


def in_a_fork(work: Callable[[], Any], seconds: float) -> tuple[bool, signal.Signals | None]:
    """Whether `work` came back in a forked process, and the signal that ended the process; an alarm ends one that hangs."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        work()
        os.write(write, b"done")
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read, "rb") as pipe:
        answered = pipe.read() == b"done"
    return answered, signal.Signals(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else None


def test_records_name_a_public_source_and_known_regions() -> None:
    for name, record in PLANTS.items():
        assert record.name == name and record.engine == f"blocked:{name}" and record.kind == "python"
        assert re.fullmatch(
            r"(BUGZOO [A-K]\d\d|DDTREE section 6 row \d+|DDTREE [A-Z]\d), https://github\.com/[\w.-]+/[\w.-]+(/\S+)?", record.source
        ), name
        assert record.expected_ops and record.trigger and record.needs <= REGIONS.keys()
        assert record.smallest_nodes > 0 or "tree" not in record.needs


def test_the_forty_mutations_are_planted_or_said_to_be_impossible() -> None:
    missing = [name for name in (f"Z{number:02d}" for number in range(1, 41)) if name not in PLANTS]
    assert missing == []


def test_plants_are_short() -> None:
    for name, overrides in OVERRIDES.items():
        for function in overrides.values():
            node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
            assert isinstance(node, ast.FunctionDef) and node.end_lineno is not None
            assert node.end_lineno - node.lineno < 15, name


def test_replacements_take_a_site_and_then_the_arguments_of_their_point() -> None:
    for name, overrides in OVERRIDES.items():
        for point, function in overrides.items():
            honest = inspect.signature(getattr(HONEST, point)).parameters
            assert len(inspect.signature(function).parameters) == len(honest) + 1, (name, point)


def test_unknown_point_is_refused() -> None:
    with pytest.raises(PointError, match="no point 'positions'"):
        with_overrides({"positions": lambda site: None})


def test_unknown_plant_is_refused_with_the_known_names() -> None:
    with pytest.raises(LookupError, match=r"'Z99'.*Z08"):
        engine("Z99")


def test_memory_of_a_plant_ends_with_its_session() -> None:
    """A plant that remembers must not make a later session differ from a first one: cases replay in fresh workers."""
    stale = engine("Z39")
    assert same(PROBES["fork and evict"](stale), PROBES["fork and evict"](stale))

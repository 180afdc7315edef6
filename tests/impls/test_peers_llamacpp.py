"""llama.cpp: what only this engine has: cells, sequence ids, the layout check, settings that are not float32."""

from __future__ import annotations

import numpy as np
import pytest

from campaigns.case import SessionCase, from_json
from campaigns.isolation.inprocess import InProcess
from campaigns.plan import session_script
from campaigns.trial import Bench, session_judge
from impls import peers
from oracles.judgement import FINDINGS, Verdict
from spec.config import Config, preset
from spec.engine import EngineError, Rows, Unsupported
from spec.weights import random_weights

if reason := peers.unavailable("llama.cpp"):
    pytest.skip(reason, allow_module_level=True)

from impls.peers import gguf_weights
from impls.peers import llama_library as llama
from impls.peers.llamacpp_engine import VARIANTS, LlamaCppEngine, LlamaCppSession, Options
from impls.peers.sequences import spans_of

# once misjudged: every score of a small batch was positive and looked like weights; the second run stood in other cells
POSITIVE_SCORES = (
    '{"kind":"session","schema":1,"generator":1,"preset":"tiny","overrides":[],"weights_seed":0,"regime":"hot-expert",'
    '"prompts":[[2,319],[1,671]],"rounds":[[[],[]],[[[0,1],[1,1],[1,0],[2,0]],[[0,0]]]],"chunk":1,"mixed":true,"generate":null,"hazards":["repeat"]}'
)


@pytest.fixture(scope="module")
def engine() -> LlamaCppEngine:
    return LlamaCppEngine()


def config(**changes: object) -> Config:
    return preset("tiny", denominator_clamp=gguf_weights.CLAMP, **changes)


def opened(engine: LlamaCppEngine) -> LlamaCppSession:
    return engine.open(config(), random_weights(config(), 0).__getitem__)


def rows(*values: tuple[int, ...]) -> Rows:
    return Rows(*(np.array(column, np.int32) for column in values))


def run(session: LlamaCppSession, batch: Rows) -> None:
    session.forward(batch, np.ones(len(batch), np.bool_), frozenset({"probs"}), lambda name, layer, array: None)


def test_positive_scores_and_a_second_run_are_no_finding(engine: LlamaCppEngine) -> None:
    outcome = Bench(InProcess(engine)).outcome(from_json(POSITIVE_SCORES))
    assert not [j.message for j in outcome.judgements if j.verdict in FINDINGS]


def test_weight_on_a_cell_of_another_sequence_is_not_hidden_by_the_reordering(engine: LlamaCppEngine) -> None:
    session = opened(engine)
    batch = rows((0, 0, 1), (3, 4, 5), (0, 1, 0), (-1, 0, -1))
    run(session, batch)
    spans = spans_of(config(), batch)
    weights = session._recorder.arrays["probs", 1].copy()
    assert session._by_key(spans, weights, is_weight=True).shape == (3, 3, 2)
    weights[2, 0, session._sequences[0].pending.cells[0]] = 0.25  # type: ignore[union-attr]
    assert session._by_key(spans, weights, is_weight=True)[2, 0].tolist() == [
        weights[2, 0, session._sequences[1].pending.cells[0]],
        0,
        0.25,
    ]  # type: ignore[union-attr]
    session.close()


def test_a_shifted_layout_is_noticed_by_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context of llama-cpp-python 0.3.36 has one pointer less before the booleans."""
    shorter = [field for field in llama.ContextParams._fields_ if field[0] != "unnamed"]
    older = type("ContextParams", (llama.c.Structure,), {"_fields_": shorter})
    library = llama.load()
    function = library.llama_context_default_params
    monkeypatch.setattr(function, "restype", older)
    with pytest.raises(llama.LibraryMismatch, match=r"ContextParams\.\w+ reads as"):
        llama._check_defaults(library)


def test_trees_without_a_unified_cache_do_not_pass_the_start_up_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a shifted `kv_unified` would do."""
    plain = LlamaCppSession._context_parameters

    def apart(self: LlamaCppSession) -> object:
        parameters = plain(self)
        parameters.kv_unified = False
        return parameters

    monkeypatch.setattr(LlamaCppSession, "_context_parameters", apart)
    with pytest.raises((EngineError, Unsupported)):
        LlamaCppEngine()


def test_positions_with_a_gap_and_paths_that_leave_out_an_ancestor_are_refused(engine: LlamaCppEngine) -> None:
    session = opened(engine)
    with pytest.raises(Unsupported, match="without gaps"):
        run(session, rows((0, 0), (1, 2), (0, 2), (-1, 0)))
    run(session, rows((0, 0, 0), (1, 2, 3), (0, 1, 2), (-1, 0, 1)))
    with pytest.raises(Unsupported, match="leaves out ancestors of row 2"):
        session.commit(0, np.array([0, 2], np.int32))
    session.close()


@pytest.mark.parametrize("name", ["flash-attention", "f16-cache"])
def test_settings_that_are_not_float32_are_found(name: str) -> None:
    """The judge says where: the region of attention with flash attention, the scores themselves with a float16 cache."""
    case = SessionCase("tiny", (), 0, "ordinary", ((9, 1),), ((((0, 1), (1, 0)),),))
    engine = LlamaCppEngine(VARIANTS[name], name=name)
    script = session_script(case, engine.describe().departures)
    with InProcess(engine) as worker:
        trace = worker.script(script)
    defects = [j for j in session_judge(script.config, script.weights).judge(script, trace) if j.verdict is Verdict.DEFECT]
    assert defects[0].layer == 0
    assert defects[0].tap == ("scores" if name == "f16-cache" else "attn_out")


def test_more_leaves_than_sequence_ids_are_refused(engine: LlamaCppEngine) -> None:
    session = opened(engine)
    count = 130
    with pytest.raises(Unsupported, match="more than 128 sequences and leaves"):
        run(session, rows((0,) * count, (1,) * count, (0, *[1] * (count - 1)), (-1, *[0] * (count - 1))))
    session.close()


def test_options_leave_one_thread_and_an_exact_cache_by_default() -> None:
    assert (Options().type_k, Options().flash_attention, Options().threads) == (llama.TYPE_F32, llama.FLASH_OFF, 1)

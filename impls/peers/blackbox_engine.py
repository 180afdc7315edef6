"""A server behind a URL, of which only tokens and log-probabilities can be seen: the OpenAI completions API as vLLM speaks it.

    http://host:8000/v1#checkpoint-folder

The server has its own weights; the fragment names the checkpoint that it was started with (Hugging Face layout), and a session is opened only
for a configuration and weights that are those of the folder. `forward` is one completion of one token per row that wants logits, its prompt the
tokens of the row's path; it needs a server that returns the whole vocabulary (vLLM: max_logprobs=-1). What comes back are log-probabilities, which
the capability `log_probs` says; with them nothing is provable and the judge holds them against its statistical bound.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.checkpoint import Checkpoint
from impls.peers.sequences import check_path, spans_of
from spec.config import Config, as_parameters
from spec.engine import Description, Drafter, EngineError, Float, Generation, Int, Limits, Profile, Rows, TapSink, Unsupported
from spec.weights import Provider, weight_shapes

REQUEST_S = 60.0
ANSWER_BYTES_MAX = 64 << 20
TOKEN_PREFIX = "token_id:"  # how vLLM writes a token that is not to be decoded
CAPABILITIES = frozenset({"forward", "commit", "fork", "evict", "generate", "log_probs"})


class BlackBoxEngine:
    """`spec.engine.Engine`. Raises EngineError where no server answers."""

    def __init__(self, url: str) -> None:
        self._base, _, folder = url.partition("#")
        self._base = self._base.rstrip("/")
        self._folder = folder
        models = self._ask("models", None).get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict):
            raise EngineError(f"{self._base}/models lists no model: is it an OpenAI-compatible server?")
        self._model = str(models[0].get("id"))

    def describe(self) -> Description:
        return Description("black box", self._model, Profile("float32-any-order"), CAPABILITIES)

    def run_op(
        self, op: str, inputs: Mapping[str, NDArray[Any]], params: Mapping[str, int | float], outputs: Mapping[str, NDArray[Any]]
    ) -> None:
        raise Unsupported("a server offers tokens and log-probabilities only")

    def open(self, config: Config, weights: Provider) -> BlackBoxSession:
        """Raises Unsupported unless the checkpoint named in the URL is this very model."""
        self._check_weights(config, weights)
        return BlackBoxSession(self, config)

    def _check_weights(self, config: Config, weights: Provider) -> None:
        if not self._folder:
            raise Unsupported("a server cannot be given weights: name the checkpoint that it was started with, http://host:port/v1#FOLDER")
        held = Checkpoint(Path(urllib.parse.unquote(self._folder)))
        asked, given = as_parameters(config), as_parameters(held.config)
        for name, value in asked.items():
            if given.get(name) != value:
                raise Unsupported(f"the server's checkpoint has {name} = {given.get(name)}, this case {value}")
        for name in weight_shapes(config):
            if not np.array_equal(held.tensor(name), weights(name)):
                raise Unsupported(f"the server's checkpoint has another {name!r} than this case")

    def complete(self, prompt: Sequence[int], count: int, log_probs: int) -> list[tuple[int, Mapping[int, float]]]:
        """(token, log-probabilities by token) of `count` greedy tokens."""
        answer = self._ask(
            "completions",
            {
                "model": self._model, "prompt": list(prompt), "max_tokens": count, "temperature": 0, "logprobs": log_probs, "ignore_eos": True,
                "return_tokens_as_token_ids": True,
            },
        )  # fmt: skip
        try:
            found = answer["choices"][0]["logprobs"]
            tokens = [_number(token) for token in found["tokens"]]
            tables = [{_number(token): float(value) for token, value in table.items()} for table in found["top_logprobs"]]
            return list(zip(tokens, tables, strict=True))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as problem:
            raise EngineError(f"completions answered without readable logprobs: {type(problem).__name__}: {problem}") from None

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._base}/{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_S) as response:
                answer = json.loads(response.read(ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as problem:
            raise EngineError(f"{self._base}/{path} answered {problem.code}: {problem.read(300).decode('utf-8', 'replace')}") from None
        except (OSError, ValueError) as problem:
            raise EngineError(f"{self._base}/{path}: {problem}") from None
        if not isinstance(answer, dict):
            raise EngineError(f"{self._base}/{path} answered {type(answer).__name__}, but must answer an object")
        return answer


@dataclass(eq=False)
class _Sequence:
    tokens: list[int] = field(default_factory=list)  # committed
    pending: list[list[int]] = field(default_factory=list)  # per row of the last batch: the tokens of its path, its own last


class BlackBoxSession:
    """`spec.engine.Session`: the server keeps nothing between requests, so that sequences are token lists here."""

    def __init__(self, engine: BlackBoxEngine, config: Config) -> None:
        self._engine, self._config = engine, config
        self._sequences: dict[int, _Sequence] = {}

    def forward(self, rows: Rows, want_logits: NDArray[np.bool_], taps: frozenset[str], sink: TapSink) -> Float:
        """Log-probabilities [wanted, V]. Raises Unsupported where positions are not those of a fresh prompt, or the server shows only some tokens."""
        paths: dict[int, list[int]] = {}
        for span in spans_of(self._config, rows):
            own = self._sequences.setdefault(span.sequence, _Sequence())
            own.pending = []
            for node, (row, parent) in enumerate(zip(span.rows.tolist(), span.parents, strict=True)):
                path = [*(own.pending[parent] if parent >= 0 else ()), int(span.tokens[node])]
                if span.positions[node] != len(own.tokens) + len(path) - 1:
                    raise Unsupported("a server counts positions from 0 without gaps")
                own.pending.append(path)
                paths[row] = own.tokens + path
        wanted = [paths[row] for row in np.flatnonzero(want_logits).tolist()]
        return np.stack([self._row(path) for path in wanted]) if wanted else np.zeros((0, self._config.vocab), np.float32)

    def _row(self, prompt: list[int]) -> Float:
        vocab = self._config.vocab
        ((_, table),) = self._engine.complete(prompt, 1, vocab)
        if len(table) < vocab:
            raise Unsupported(f"the server returns {len(table)} of {vocab} log-probabilities; allow the whole vocabulary")
        if sorted(table) != list(range(vocab)):
            raise EngineError(f"the server returned log-probabilities of tokens outside the vocabulary of {vocab}")
        return np.array([table[token] for token in range(vocab)], np.float32)

    def commit(self, sequence: int, path: Int) -> None:
        own = self._known(sequence)
        check_path(path.tolist(), len(own.pending))
        kept = [own.pending[node][-1] for node in path.tolist()]
        if kept and kept != own.pending[int(path[-1])]:
            raise Unsupported("a server sees whole paths only; this one leaves out ancestors")
        own.tokens += kept
        own.pending = []

    def cache_rows(self, sequence: int, layer: int) -> Float:
        raise Unsupported("a server does not show its cache")

    def evict(self, sequence: int) -> None:
        self._known(sequence)
        del self._sequences[sequence]

    def fork(self, source: int, target: int) -> None:
        if target in self._sequences:
            raise EngineError(f"sequence {target} exists: evict it before it becomes a fork of {source}")
        self._sequences[target] = _Sequence(list(self._known(source).tokens))

    def generate(self, prompts: Sequence[Int], drafter: Drafter | None, budget: int, limits: Limits) -> list[Generation]:
        """Greedy decoding by the server's own loop, cut at the first stop token (A4)."""
        if drafter is not None:
            raise Unsupported("a server cannot be given drafts")
        out = []
        for prompt in prompts:
            tokens = [token for token, _ in self._engine.complete(prompt.tolist(), limits.max_new, 1)] if limits.max_new > 0 else []
            ends = [place for place, token in enumerate(tokens) if token in limits.stop_tokens]
            out.append(Generation(tuple(tokens[: ends[0] + 1] if ends else tokens)))
        return out

    def close(self) -> None:
        self._sequences.clear()

    def _known(self, sequence: int) -> _Sequence:
        if sequence not in self._sequences:
            raise EngineError(f"there is no sequence {sequence}; there are {sorted(self._sequences)}")
        return self._sequences[sequence]


def _number(token: str) -> int:
    """`token_id:17` -> 17. Raises ValueError for a token as text: its number would be a guess."""
    if not token.startswith(TOKEN_PREFIX):
        raise ValueError(f"token {token!r} is text; the server must return tokens as ids (vLLM: return_tokens_as_token_ids)")
    return int(token.removeprefix(TOKEN_PREFIX))

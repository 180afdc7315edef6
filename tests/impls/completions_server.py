"""A small OpenAI-compatible completions server over the specification: what the black-box engine is tested against. stdlib only."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from spec.loops import prefill_rows
from spec.model import GoldenModel


@contextmanager
def serving(model: GoldenModel, *, shown: int = 1 << 30, wrong: float = 0.0) -> Iterator[str]:
    """The base URL of a server. `shown`: log-probabilities per token at most; `wrong` is added to the logit of token 0."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"object": "list", "data": [{"id": "golden", "object": "model"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            tokens, tables, history = [], [], list(asked["prompt"])
            for _ in range(asked["max_tokens"]):
                logits = last_logits(model, history).astype(np.float64)
                logits[0] += wrong
                log_probs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
                best = np.argsort(-log_probs, kind="stable")[: min(shown, asked["logprobs"])]
                tables.append({f"token_id:{t}": float(log_probs[t]) for t in best.tolist()})
                history.append(int(best[0]))
                tokens.append(f"token_id:{history[-1]}")
            self._answer({"choices": [{"text": "", "logprobs": {"tokens": tokens, "top_logprobs": tables}}]})

        def _answer(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def last_logits(model: GoldenModel, history: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    rows, want = prefill_rows([np.array(history, np.int32)])
    return model.open().forward(rows, want, frozenset(), lambda name, layer, array: None)[0]

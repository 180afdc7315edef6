"""A sample server of the line protocol: any engine by name, behind stdin and stdout. `python -m impls.peers.subprocess_server blocked`.

Shows what an engine in another language has to do (docs/subprocess-protocol.md): read a line and a payload, do it, answer. Standard output belongs
to the protocol, so everything else goes to standard error.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from impls.peers import messages
from spec.config import Config, Yarn
from spec.engine import Engine, Float, Generation, Int, Limits, Rows, Session, Unsupported

Arrays = Mapping[str, NDArray[Any]]
_NUMPY = {"F32": np.float32, "I32": np.int32, "U8": np.uint8}


def serve(engine: Engine, requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer until the requests end."""
    server = _Server(engine, requests, answers)
    while True:
        try:
            request, arrays = messages.read(requests)
        except messages.Ended:
            return
        number = request.get("id")
        try:
            answer, found = server.do(request, arrays)
            messages.write(answers, {"id": number, **answer}, found)
        except Unsupported as reason:
            messages.write(answers, {"id": number, "unsupported": str(reason)})
        except Exception as problem:
            messages.write(answers, {"id": number, "error": f"{type(problem).__name__}: {problem}"})


class _Server:
    def __init__(self, engine: Engine, requests: IO[bytes], answers: IO[bytes]) -> None:
        self._engine, self._requests, self._answers = engine, requests, answers
        self._sessions: dict[int, Session] = {}
        self._opened = 0

    def do(self, request: Mapping[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        """(fields, arrays) of the answer."""
        what = request["do"]
        if what == "describe":
            return self._describe(), {}
        if what == "run_op":
            outputs = {name: np.zeros(due["shape"], _NUMPY[due["dtype"]]) for name, due in request["outputs"].items()}
            self._engine.run_op(request["op"], arrays, request["params"], outputs)
            return {}, outputs
        if what == "open":
            tensors = load_file(request["weights"])
            self._opened += 1
            self._sessions[self._opened] = self._engine.open(config_of(request["parameters"]), tensors.__getitem__)
            return {"session": self._opened}, {}
        session = self._sessions[request["session"]]
        if what == "forward":
            return {}, self._forward(session, frozenset(request["taps"]), arrays)
        if what == "commit":
            session.commit(request["sequence"], np.array(request["path"], np.int32))
        elif what == "cache_rows":
            return {}, {"rows": session.cache_rows(request["sequence"], request["layer"])}
        elif what == "evict":
            session.evict(request["sequence"])
        elif what == "fork":
            session.fork(request["source"], request["target"])
        elif what == "generate":
            return {"generations": [_plain(one) for one in self._generate(session, request)]}, {}
        elif what == "close":
            self._sessions.pop(request["session"]).close()
        else:
            raise Unsupported(f"there is no request {what!r}")
        return {}, {}

    def _describe(self) -> dict[str, Any]:
        d = self._engine.describe()
        return {
            "protocol": messages.VERSION, "name": d.name, "version": d.version, "profile": vars(d.profile), "ops": sorted(d.ops), "taps": sorted(d.taps),
            "capabilities": sorted(d.capabilities), "departures": [[x.field, x.value, x.reason] for x in d.departures],
        }  # fmt: skip

    def _forward(self, session: Session, taps: frozenset[str], arrays: Arrays) -> Arrays:
        found: dict[str, NDArray[Any]] = {}
        rows = Rows(arrays["sequence"], arrays["token"], arrays["position"], arrays["parent"])
        logits = session.forward(
            rows,
            arrays["want_logits"].astype(np.bool_),
            taps,
            lambda name, layer, array: found.update({f"tap/{name}/{layer}": array.copy()}),
        )
        return {"logits": logits, **found}

    def _generate(self, session: Session, request: Mapping[str, Any]) -> list[Generation]:
        drafter = _RemoteDrafter(self, request["id"], request["block_len"]) if request["block_len"] else None
        limits = Limits(request["max_new"], tuple(request["stop_tokens"]))
        return session.generate([np.array(prompt, np.int32) for prompt in request["prompts"]], drafter, request["budget"], limits)

    def draft(self, number: int, sequence: int, history: Int) -> Float:
        """Ask the other side, in the middle of a request."""
        messages.write(self._answers, {"id": number, "draft": {"sequence": sequence, "history": history.tolist()}})
        _, arrays = messages.read(self._requests)
        return arrays["logits"]


class _RemoteDrafter:
    """`spec.engine.Drafter` at the other end of the pipe."""

    def __init__(self, server: _Server, number: int, block_len: int) -> None:
        self._server, self._number, self.block_len = server, number, block_len

    def draft(self, sequence: int, history: Int) -> Float:
        return self._server.draft(self._number, sequence, history)


def _plain(generation: Generation) -> dict[str, Any]:
    return {
        "tokens": list(generation.tokens),
        "rounds": [[list(r.tokens), list(r.parents), list(r.path), r.bonus] for r in generation.rounds],
    }


def config_of(parameters: Mapping[str, Any]) -> Config:
    """The inverse of spec.config.as_parameters, up to `softmax_scale`, which follows from the rest."""
    fields: dict[str, Any] = {}
    for item in dataclasses.fields(Config):
        words = item.metadata.get("values", ())
        key = f"{item.name}_{words[1]}" if len(words) == 2 else item.name
        if key not in parameters or item.name == "yarn":
            continue
        value = parameters[key]
        fields[item.name] = words[int(value)] if words else bool(value) if isinstance(item.default, bool) else value
    yarn = {name.removeprefix("yarn_"): value for name, value in parameters.items() if name.startswith("yarn_")}
    return Config(**fields, yarn=Yarn(**yarn) if yarn else None)


def main() -> None:
    from impls.registry import resolve

    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # what an engine prints must not break the protocol
    serve(resolve(sys.argv[1] if len(sys.argv) > 1 else "golden"), sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()

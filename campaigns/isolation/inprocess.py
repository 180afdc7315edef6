"""The supervisor's interface without a process: for a debugger, a sanitizer, and a user's own tests. A crash is a crash of everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from campaigns.isolation.chain import TreeJob
from campaigns.isolation.execute import Answering, Sessions, WeightsProvider, describe, run_calls, run_tree
from spec.config import Config
from spec.script import Answer, OpCall, Script, Trace, WeightsKey
from spec.weights import Array


def default_weights(config: Config, key: WeightsKey) -> Mapping[str, Array]:
    """The campaign's weights, imported on first use: an engine that runs operations only needs none."""
    from campaigns.weights import weights_for

    return weights_for(config, key)


class InProcess:
    """An engine object behind the interface of `Supervisor`. No deadline: a hang hangs."""

    def __init__(self, engine: Answering, *, weights: WeightsProvider = default_weights) -> None:
        self.description = describe(engine)
        self._engine = engine
        self._weights = weights
        self._sessions: Sessions | None = None

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def calls(self, calls: Sequence[OpCall]) -> list[Answer]:
        return run_calls(self._engine, calls)

    def script(self, script: Script) -> Trace:
        if self._sessions is None:
            self._sessions = Sessions(self._engine, self._weights)
        return self._sessions.run(script)

    def tree(self, job: TreeJob) -> list[tuple[OpCall, Answer]]:
        return run_tree(self._engine, job)

    def trees(self, jobs: Sequence[TreeJob]) -> list[list[tuple[OpCall, Answer]]]:
        return [self.tree(job) for job in jobs]

    def restart(self) -> None:
        """Close the sessions; the state of the engine itself stays."""
        self.close()

    def close(self) -> None:
        if self._sessions is not None:
            self._sessions.close()
            self._sessions = None

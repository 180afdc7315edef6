"""Engines in supervised workers: a crash, a hang or nonsense from an engine is an answer, never an accident of the runner.

`Supervisor(engine)` runs calls, scripts and tree cases in a process of its own; `InProcess(engine)` has the same interface without one.
"""

from campaigns.isolation.chain import TreeJob
from campaigns.isolation.deadline import Deadline
from campaigns.isolation.errors import EngineLoadError, UnknownEngine
from campaigns.isolation.execute import describe, run_calls, run_script, run_tree
from campaigns.isolation.inprocess import InProcess
from campaigns.isolation.supervisor import Supervisor
from campaigns.isolation.zygote import IsolationError, Zygote

__all__ = [
    "Deadline",
    "EngineLoadError",
    "InProcess",
    "IsolationError",
    "Supervisor",
    "TreeJob",
    "UnknownEngine",
    "Zygote",
    "describe",
    "run_calls",
    "run_script",
    "run_tree",
]

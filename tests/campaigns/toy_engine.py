"""A third-party engine that knows nothing of paritree: one operation, right or wrong by a file, so that a defect can be fixed between runs."""

import os
import time

SWITCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "wrong")


class Refused(Exception):
    pass


class Engine:
    """`add`; wrong in the last column where the file `wrong` exists beside this module, and flaky where it says so."""

    def __init__(self):
        self.calls = 0

    def describe(self):
        from spec.engine import Description  # a campaign has it; repro.py never asks

        return Description("toy", "1", capabilities=frozenset({"run_op"}), ops=frozenset({"add"}))

    def run_op(self, op, inputs, params, outputs):
        if op != "add":
            raise Refused(op)
        self.calls += 1
        outputs["out"][...] = inputs["a"] + inputs["b"]
        mode = ""
        if os.path.exists(SWITCH):
            with open(SWITCH) as switch:
                mode = switch.read().strip()
        narrow = outputs["out"].shape[-1] < 5
        if mode == "wrong" or (mode.startswith("second call") and self.calls > 1) or (mode == "second call, or narrow" and narrow):
            outputs["out"][..., -1] += 1
        if mode == "crash":
            os.abort()
        if mode == "hang":
            time.sleep(3600)

    def open(self, config, weights):
        raise Refused("no sessions")

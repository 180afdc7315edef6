"""The CUDA engine behind the seam: `run_op` for every operation of spec/ops, on CuPy or on the emulator.

cuda             CuPy on the first CUDA device
cuda:plain       the same with the first version of every kernel
cuda:bf16        tree attention on bfloat16 operands
cuda:streams     what comes from the host is produced late, on a stream of its own (impls/cuda/device.py: DelayedDevice)
cuda:emulated    the same device code on the CPU (impls/cuda/emulate.py)

and the names of impls/cuda/plants.py, also behind `cuda:emulated:`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.cuda import plants
from impls.cuda.device import Array, CupyDevice, DelayedDevice, Device
from impls.cuda.kernels import Kernels
from spec.config import Config
from spec.engine import Description, EngineError, Profile, Session, Unsupported
from spec.ops import OPS
from spec.ops.sample import history_of, sampling_of
from spec.weights import Provider

HostArrays = Mapping[str, NDArray[Any]]
DeviceArrays = Mapping[str, Array]
Params = Mapping[str, int | float]
Outputs = dict[str, Array]

# expf, exp2f: 2 ulp; logf: 1 ulp; rsqrtf: 2 ulp; division rounds to nearest (no fast-math option is given). CUDA C++ Programming Guide,
# "Mathematical Functions". A sigmoid is e / (1 + e): its exponential keeps subnormals, a product of subnormals may not.
PROFILE = Profile(
    "cuda-float32",
    exp_ulp=2.0,
    log_ulp=1.0,
    rsqrt_ulp=2.0,
    online_softmax=True,
    exp2_folding=True,
    flush_to_zero=True,
    batch_invariant=False,
)
# tree attention on bfloat16 operands and weights; sums in float32, on tensor cores without IEEE rounding of each addition
PROFILE_BF16 = replace(
    PROFILE, name="cuda-bf16", per_op=(("tree_attention", "u_input", 2.0**-8), ("tree_attention", "u_accumulate", 2.0**-22))
)
# bits of a status word: common.cuh
STATUS = {
    1: "T8: a logit or log-probability is NaN or +inf",
    2: "T4: log-probabilities ascend along a row",
    4: "T2: a path score has more than 106 bits, and these kernels do not guess",
    8: "T6: parents must ascend from one root at index 0",
    16: "T6: a token occurs twice under one parent",
    32: "S1: a row of logits is no distribution: NaN, +inf, or nothing finite after penalties and temperature",
    64: "S3: two numbers agree to about 85 bits, and these kernels do not guess",
}
GIVEN_UP = 4 | 64  # not wrong, but beyond these kernels


class CudaEngine:
    """`spec.engine.Engine`. Buffers of `run_op` are poisoned and guarded if the device checks."""

    def __init__(self, device: Device | None = None, *, forms: str = "fast", name: str = "cuda", profile: Profile = PROFILE) -> None:
        self.device = CupyDevice(checking=True) if device is None else device
        self.kernels = Kernels(self.device, forms)
        self._narrow = profile is PROFILE_BF16
        self._description = Description(
            name=name,
            version="1",
            profile=profile,
            capabilities=frozenset({"run_op"}),
            ops=frozenset(OPS) & frozenset(_OPS),
            taps=frozenset(),
        )

    def describe(self) -> Description:
        return self._description

    def run_op(self, op: str, inputs: HostArrays, params: Params, outputs: Mapping[str, NDArray[Any]]) -> None:
        """Fill `outputs`. Raises Unsupported for sizes beyond a kernel's, EngineError for inputs outside the op's rules."""
        if op not in _OPS:
            raise Unsupported(f"there is no op {op!r}")
        _check_ids(op, inputs)
        call = _Call(self.kernels, inputs, {name: self.device.upload(value) for name, value in inputs.items()}, params, self._narrow)
        found = _OPS[op](call)
        call.check_status()
        for name, value in found.items():
            target = outputs[name]
            if tuple(value.shape) != target.shape:
                raise EngineError(f"{op}: output {name} is {list(target.shape)}, but the result is {list(value.shape)}")
            target[...] = self.device.download(value)
        check_guards = getattr(self.device, "check_guards", None)
        if check_guards is not None:
            check_guards()

    def open(self, config: Config, weights: Provider) -> Session:
        raise Unsupported("this engine has operations only; sessions: impls/cuda/session.py")


def engine(variant: str | None = None) -> CudaEngine:
    """The engine of a name in the module's docstring. Raises LookupError for another name, Unsupported without a device."""
    if variant is None:
        return CudaEngine()
    if variant == "plain":
        return CudaEngine(forms="plain", name="cuda:plain")
    if variant == "bf16":
        return CudaEngine(name="cuda:bf16", profile=PROFILE_BF16)
    if variant == "streams":
        return CudaEngine(DelayedDevice(), name="cuda:streams")
    name, _, plant_name = variant.partition(":")
    if name == "emulated":
        return emulated(plant_name or None)
    plant = plants.named(variant)
    return CudaEngine(CupyDevice(checking=True, source=plants.mutated(plant)), forms=plant.forms, name=f"cuda:{variant}")


def emulated(plant: str | None = None, *, forms: str = "fast", seed: int = 0) -> CudaEngine:
    """On the CPU, threads in order (seed 0) or shuffled. Raises LookupError, or BuildError without a C++ compiler."""
    from impls.cuda.emulate import EmulatedDevice

    source = None if plant is None else plants.mutated(plants.named(plant))
    return CudaEngine(EmulatedDevice(seed=seed, source=source), forms=forms, name=f"cuda:emulated{f':{plant}' if plant else ''}")


class _Call:
    """The operands of one run_op: `host` as given, `on` the device, `params`, and a status word that kernels may set."""

    def __init__(self, kernels: Kernels, host: HostArrays, on: DeviceArrays, params: Params, narrow: bool) -> None:
        self.kernels = kernels
        self.narrow = narrow
        self.host = host
        self.on = on
        self.params = params
        self._status: Array | None = None

    @property
    def status(self) -> Array:
        if self._status is None:
            self._status = self.kernels.device.zeros((1,), np.int32)
        return self._status

    def check_status(self) -> None:
        if self._status is None:
            return
        found = int(self.kernels.device.download(self._status)[0])
        if found:
            text = "; ".join(meaning for bit, meaning in STATUS.items() if found & bit)
            raise (EngineError if found & ~GIVEN_UP else Unsupported)(text)

    def integer(self, name: str) -> int:
        return int(self.params[name])


def _check_ids(op: str, inputs: HostArrays) -> None:
    """Ids are addresses on the device: they are checked before anything is launched. Raises EngineError."""
    limits = {"embed": "table", "moe": "gate"}
    if op in limits and inputs["ids"].size:
        ids, limit = inputs["ids"], len(inputs[limits[op]])
        if ids.min() < 0 or ids.max() >= limit:
            raise EngineError(f"{op}: ids lie between {ids.min()} and {ids.max()}, but must be between 0 and {limit - 1}")
    if op == "sample" and inputs["history"].size:
        history, limit = inputs["history"], inputs["logits"].shape[1]
        if history.min() < -1 or history.max() >= limit:
            raise EngineError(f"{op}: history names tokens between {history.min()} and {history.max()}, but the vocabulary has {limit}")
    if op == "compact" and len(inputs["path"]):
        steps = np.diff(inputs["path"], prepend=-1)
        if (steps <= 0).any():
            raise EngineError(f"K1: path {inputs['path'].tolist()} must ascend strictly")


def _budget(call: _Call) -> int:
    budget = call.integer("budget")
    if budget < 0:
        raise EngineError(f"T5: budget is {budget}, but must not be negative")
    return budget


def _tree_attention(call: _Call) -> Outputs:
    """Any visibility: no prefix, one bit for each key."""
    on = call.on
    bits, seen = call.kernels.pack_mask(on["visible"])
    q, cache = on["q"], on["cache"]
    if call.narrow:
        q, cache = call.kernels.cast_bf16(q), call.kernels.cast_bf16(cache)
    return {"out": call.kernels.tree_attention(q, cache, bits, 0, len(cache), call.integer("kv_rank"), _scale(call), seen=seen)}


def _route(call: _Call) -> Outputs:
    ids, weights = call.kernels.route(
        call.on["scores"], call.on["bias"], top_k=call.integer("top_k"), groups=call.integer("groups"), top_groups=call.integer("top_groups"),
        group_score_max=bool(call.params["group_score_max"]), norm_top_k=bool(call.params["norm_top_k"]),
        routed_scale=float(call.params["routed_scale"]), denominator_eps=float(call.params["denominator_eps"]),
        group_fill_zero=bool(call.params.get("group_fill_zero", 0)), denominator_clamp=float(call.params.get("denominator_clamp", 0.0)),
    )  # fmt: skip
    return {"ids": ids, "weights": weights}


def _sample(call: _Call) -> Outputs:
    """One stream a row; -1 ends a history."""
    histories = [history_of(row, call.host["logits"].shape[1]) for row in call.host["history"]]
    prompt_lens = [min(call.integer("prompt_len"), len(history)) for history in histories]
    draws = call.kernels.draws(sampling_of(call.params), histories, prompt_lens, call.host["sequences"].tolist())
    return {"ids": call.kernels.sample(call.on["logits"], draws, call.status)}


def _draft_table(call: _Call) -> Outputs:
    width = min(_budget(call), call.host["logits"].shape[1])
    ids, log_probs = call.kernels.draft_table(call.on["logits"], width, call.status)
    return {"ids": ids, "log_probs": log_probs}


def _best_first_tree(call: _Call) -> Outputs:
    tokens, parents, depths, count = call.kernels.best_first_tree(
        call.on["ids"], call.on["log_probs"], _budget(call), call.integer("root"), call.status
    )
    return {"tokens": tokens, "parents": parents, "depths": depths, "count": count}


def _tree_mask(call: _Call) -> Outputs:
    positions, _, visible = call.kernels.tree_mask(call.on["parents"], call.integer("prefix_len"), call.status)
    return {"positions": positions, "visible": visible}


def _accept(call: _Call) -> Outputs:
    path, length, bonus = call.kernels.accept(call.on["tokens"], call.on["parents"], call.on["target"], call.status)
    return {"path": path, "length": length, "bonus": bonus}


def _compact(call: _Call) -> Outputs:
    """Out of place by the plain form; else in place on a copy of the cache as one layer, as a session does it."""
    kernels, prefix_len, path = call.kernels, call.integer("prefix_len"), call.host["path"]
    pending = len(call.host["cache"]) - prefix_len
    if pending < 0 or (len(path) and path[-1] >= pending):
        raise EngineError(f"K1: path must stay below the {pending} pending rows")
    if kernels.plain:
        return {"out": kernels.compact_copy(call.on["cache"], call.on["path"], prefix_len)}
    kept = kernels.device.upload(np.array([len(path)], np.int32))
    store = call.on["cache"].reshape(1, *call.host["cache"].shape)
    if store.size:
        kernels.compact_layers(store, call.on["path"], kept, prefix_len)
    return {"out": call.on["cache"][: prefix_len + len(path)]}


def _scale(call: _Call) -> float:
    return float(np.float32(call.params["scale"]))


_OPS: dict[str, Callable[[_Call], Outputs]] = {
    "embed": lambda c: {"out": c.kernels.embed(c.on["table"], c.on["ids"])},
    "rms_norm": lambda c: {"out": c.kernels.rms_norm(c.on["x"], c.on["gain"], float(c.params["eps"]))},
    "matmul": lambda c: {"out": c.kernels.matmul(c.on["x"], c.on["w"])},
    "int4_matmul": lambda c: {"out": c.kernels.matmul_int4(c.on["x"], c.on["packed"], c.on["scales"])},
    "rope": lambda c: {"out": c.kernels.rope(c.on["x"], c.on["cos"], c.on["sin"], bool(c.params["half_layout"]))},
    "q_absorb": lambda c: {"out": c.kernels.per_head(c.on["q_nope"], c.on["w_kc"])},
    "scores": lambda c: {"out": c.kernels.scores(c.on["q"], c.on["keys"], _scale(c))},
    "softmax": lambda c: {"out": c.kernels.softmax(c.on["scores"], c.on["visible"])},
    "o_latent": lambda c: {"out": c.kernels.o_latent(c.on["probs"], c.on["latent"])},
    "o_heads": lambda c: {"out": c.kernels.per_head(c.on["o_latent"], c.on["w_vc"])},
    "tree_attention": _tree_attention,
    "router_scores": lambda c: {"out": c.kernels.router_scores(c.on["logits"], bool(c.params["softmax"]))},
    "route": _route,
    "swiglu": lambda c: {"out": c.kernels.swiglu(c.on["gate"], c.on["up"])},
    "moe": lambda c: {"out": c.kernels.experts(c.on["x"], c.on["ids"], c.on["gate"], c.on["up"], c.on["down"])["out"]},
    "combine": lambda c: {"out": c.kernels.combine(c.on["weights"], c.on["experts"], c.on["shared"])},
    "add": lambda c: {"out": c.kernels.add(c.on["a"], c.on["b"])},
    "argmax": lambda c: {"ids": c.kernels.argmax(c.on["logits"])},
    "sample": _sample,
    "draft_table": _draft_table,
    "best_first_tree": _best_first_tree,
    "tree_mask": _tree_mask,
    "accept": _accept,
    "compact": _compact,
}

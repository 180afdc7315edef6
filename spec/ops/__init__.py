"""The operations by name, in the order in which a forward pass and a tree round meet them.

Every module of this folder that defines RECORD is registered; one that ORDER does not name comes last, by name.
"""

from __future__ import annotations

import importlib
import pkgutil

from spec.record import Op

ORDER = (
    "embed",
    "rms_norm",
    "matmul",
    "rope",
    "q_absorb",
    "scores",
    "softmax",
    "o_latent",
    "o_heads",
    "tree_attention",
    "router_scores",
    "route",
    "swiglu",
    "moe",
    "int4_matmul",
    "combine",
    "add",
    "argmax",
    "sample",
    "draft_table",
    "best_first_tree",
    "tree_mask",
    "accept",
    "compact",
)


def _discover() -> dict[str, Op]:
    names = {module.name for module in pkgutil.iter_modules(__path__)}
    ordered = [name for name in ORDER if name in names] + sorted(names - set(ORDER))
    return {name: importlib.import_module(f"{__name__}.{name}").RECORD for name in ordered}


OPS: dict[str, Op] = _discover()

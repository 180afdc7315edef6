"""All plants of the blocked engine: their records, and their functions by name.

What BUGZOO and DDTREE list and this engine cannot express is in NOT_EXPRESSED, with the reason.
"""

from __future__ import annotations

from impls.planted import (
    blocked_alone,
    blocked_attention,
    blocked_cache,
    blocked_layers,
    blocked_process,
    blocked_profile,
    blocked_sampling,
    blocked_tree,
)
from impls.planted.planting import OVERRIDES, PLANTS, REGIONS

__all__ = ["NOT_EXPRESSED", "OVERRIDES", "PLANTS", "REGIONS"]

_FILES = (
    blocked_attention,
    blocked_cache,
    blocked_layers,
    blocked_process,
    blocked_profile,
    blocked_sampling,
    blocked_tree,
    blocked_alone,
)  # importing them registers their plants

NOT_EXPRESSED = {
    "A12": "a session has one softmax scale, so a second call with another scale does not exist",
    "A20": "NumPy carries the strides with the array; a kernel's own stride arguments do not exist here",
    "A21 G01 G10 G11 G12 G16 G18": "no quantised activations",
    "A23 B10 G14": "planted in the native engine",
    "B06 H06 H23 H25 H26 H27": "the same narrowed offset as H04, H05 and Z37",
    "B16": "a causal mask AND a tree mask is the tree mask: parents come before their children",
    "B19 G08 G09": "bugs of a comparator, not of an engine",
    "C09 C10 E07": "the same rows as Z22 under the seam",
    "D02 D16 E16 E18": "state of a drafter, which is plain data here",
    "D03 D04 D09 D10 D17": "sampling",
    "F28": "the seam gives the router its number of groups explicitly",
    "K01 K02 K05 K07 K08 K09 K10 K12": "lifetimes and streams of native memory: see the plants of the native engine",
}

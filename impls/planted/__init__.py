"""Engines that are wrong on purpose, and engines that only look it: what the judge is measured with.

A plant is one known bug, as a record of what it is and what a judge should say; where it lives is its engine's business:
named points of the blocked engine (mutants.py), a build flavour of the native one. Benign variants (benign.py) round
differently within the profile that they declare, and must never be flagged.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Plant"]


@dataclass(frozen=True)
class Plant:
    """One bug planted on purpose.

    `bug_class` is a letter of BUGZOO section 1 with its words. `expected_ops` are the op names and rule ids that count as the
    right location. `smallest_nodes`: nodes of the smallest known tree, root not counted; 0: an op, a prefill or plain
    decoding shows it. `needs`: what a case must have to show it at all, in words
    of mutants.REGIONS.
    """

    name: str
    source: str
    bug_class: str
    expected_ops: tuple[str, ...]
    trigger: str
    smallest_nodes: int
    engine: str  # registry string, such as "blocked:Z08"
    kind: str  # "python" or "native"
    needs: frozenset[str] = frozenset()

"""The blocked engine: an honest float32 NumPy engine of real engines' shape, and the carrier of plants and benign variants.

Paged latent cache, tiled softmax with merged parts, experts grouped by expert, its own tree builder and loops. Every place
where a known bug lives is a named point (points.py). Not a specification: it may round differently from spec/ within the
certified bounds, and is judged like any other engine.
"""

from __future__ import annotations

from impls.blocked.engine import BlockedEngine
from impls.blocked.points import Overrides, Points, Site

__all__ = ["BlockedEngine", "Overrides", "Points", "Site", "engine"]


def engine(name: str | None = None) -> BlockedEngine:
    """The honest engine (None), or the one with the named plant or benign variant. Raises LookupError for an unknown name."""
    if name is None:
        return BlockedEngine()
    import impls.planted.benign as benign  # they import this package
    import impls.planted.fresh as fresh
    import impls.planted.mutants as mutants

    if name in mutants.OVERRIDES:
        return BlockedEngine(mutants.OVERRIDES[name], name=f"blocked:{name}")
    if name in fresh.OVERRIDES:
        return BlockedEngine(fresh.OVERRIDES[name], name=f"blocked:{name}")
    if name in benign.VARIANTS:
        variant = benign.VARIANTS[name]
        return BlockedEngine(
            variant.points,
            name=f"blocked:{name}",
            profile=variant.profile,
            hidden_taps=variant.hidden_taps,
            hidden_ops=variant.hidden_ops,
        )
    known = ", ".join([*mutants.OVERRIDES, *fresh.OVERRIDES, *benign.VARIANTS])
    raise LookupError(f"there is no plant or variant {name!r} of the blocked engine: choose one of {known}")

"""python -m benchmarks.plants [--trials 1500] [--store DIR] [--only NAME ...] [--part 0/4]: the mutation score of the shipped plants.

Each plant is checked as a user's engine would be: the frozen mix until the first finding, minimised, capsule replayed in a fresh
process. Prints one line per plant and the totals; benign variants afterwards count false alarms.
"""

from __future__ import annotations

import argparse
import json
import sys

from campaigns.mutation import Score, campaign
from campaigns.runner import Options
from impls.planted import Plant
from impls.planted.benign import VARIANTS
from impls.planted.mutants import PLANTS
from impls.planted.native_plants import PLANTS as NATIVE_PLANTS


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=1500)
    parser.add_argument("--benign-trials", type=int, default=300)
    parser.add_argument("--store", default="plants-out")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--part", default="0/1", help="i/n: every n-th plant, for job arrays")
    parser.add_argument("--no-native", action="store_true")
    parser.add_argument("--no-benign", action="store_true")
    options = parser.parse_args()
    plants: list[Plant] = [*PLANTS.values(), *([] if options.no_native else NATIVE_PLANTS.values())]
    part, parts = (int(word) for word in options.part.split("/"))
    chosen = [plant for plant in plants if plant.name in options.only] if options.only else plants[part::parts]
    settings = Options(
        store=options.store, trials=options.trials, command=" ".join(["python -m benchmarks.plants", *sys.argv[1:]]), minimise_seconds=30.0
    )
    scores = campaign(chosen, [], settings, say=lambda text: print(text, flush=True))
    benign: list[Score] = []
    if not options.no_benign and not options.only:
        variants = [(name, f"blocked:{name}") for name in list(VARIANTS)[part::parts]]
        benign = campaign(
            [], variants, Options(store=options.store, trials=options.benign_trials), say=lambda text: print(text, flush=True)
        )
    print(json.dumps(totals(scores, benign)))
    return 0


def totals(scores: list[Score], benign: list[Score]) -> dict[str, int]:
    return {
        "plants": len(scores),
        "found": sum(s.found for s in scores),
        "localised": sum(s.localised for s in scores),
        "reproduced": sum(s.reproduced for s in scores),
        "minimal_at_most_stated": sum(s.found and 0 <= s.minimal_nodes <= max(s.stated_nodes, 0) for s in scores),
        "benign": len(benign),
        "false_alarms": sum(s.found for s in benign),
    }


if __name__ == "__main__":
    sys.exit(main())

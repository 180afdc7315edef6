"""python -m spec.switches --check | --write: the table of docs/switches.md, from the switches of spec.config.Config."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from spec.config import SWITCHES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "switches.md"
HEAD = """# Switches

Where real engines disagree, the configuration has a field, bound to a function once when a model is built. An engine that departs by
design declares it (`Description.departures`) and is judged against what it really computes. A top-k tie is no switch: the lower index
wins (N5), and a profile may say `ties="any"`. Made by `python -m spec.switches --write`; do not edit.

| field | default | values | meaning | who uses which |
|---|---|---|---|---|
"""


def page() -> str:
    rows = []
    for name, switch in SWITCHES.items():
        words = ", ".join(switch.metadata["values"]) or type(switch.default).__name__.replace("NoneType", "float or none")
        default = "none" if switch.default is None else str(switch.default).lower() if isinstance(switch.default, bool) else switch.default
        rows.append(f"| `{name}` | {default} | {words} | {switch.metadata['meaning']} | {switch.metadata['users']} |\n")
    return HEAD + "".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m spec.switches", description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="exit with 1 if the page is out of date")
    mode.add_argument("--write", action="store_true")
    chosen = parser.parse_args(arguments)
    if chosen.write:
        PAGE.write_text(page(), "utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text("utf-8") != page():
        print(f"{PAGE} is out of date: run `python -m spec.switches --write`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

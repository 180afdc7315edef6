"""python -m impls.native.header --check | --write: the generated block of include/paritree.h, from spec/ops and spec/taps.py."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from spec.ops import OPS
from spec.taps import all_tap_names

HEADER = Path(__file__).resolve().parent / "include" / "paritree.h"
BEGIN = "/* BEGIN GENERATED"
END = "/* END GENERATED */"
WIDTH = 130  # columns of a wrapped list


def generated_block() -> str:
    """The lines between BEGIN and END."""
    return _names("PARITREE_OP_NAMES", tuple(OPS)) + _names("PARITREE_TAP_NAMES", all_tap_names())


def with_block(header: str) -> str:
    """`header` with its generated block made anew. Raises ValueError where the markers are missing."""
    parts = re.fullmatch(rf"(.*?^{re.escape(BEGIN)}[^\n]*\n)(.*?)(^{re.escape(END)}\n.*)", header, re.DOTALL | re.MULTILINE)
    if parts is None:
        raise ValueError(f"{HEADER.name} has no lines '{BEGIN} ...' and '{END}': restore them")
    return parts[1] + generated_block() + parts[3]


def _names(macro: str, names: Sequence[str]) -> str:
    """A string macro, comma-separated, wrapped."""
    lines = [""]
    for index, name in enumerate(names):
        item = name + ("," if index + 1 < len(names) else "")
        if len(lines[-1]) + len(item) > WIDTH:
            lines.append("")
        lines[-1] += item
    return f"#define {macro} \\\n" + " \\\n".join(f'  "{line}"' for line in lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m impls.native.header", description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="exit with 1 if the header is out of date")
    mode.add_argument("--write", action="store_true")
    chosen = parser.parse_args(arguments)
    header = HEADER.read_text()
    fresh = with_block(header)
    if chosen.write:
        HEADER.write_text(fresh)
    elif fresh != header:
        print(f"{HEADER} is out of date: run `python -m impls.native.header --write`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

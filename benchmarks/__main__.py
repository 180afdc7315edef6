"""`python -m benchmarks`: every benchmark that needs no accelerator and no peer, one after the other; results in benchmarks/results/.

A target that is missed does not end the run. Exit 1 where a benchmark ended with an error, or one that checks a claim found it false.
"""

from __future__ import annotations

import subprocess
import sys

MODULES = ("start", "canonical", "judge", "trees", "isolation", "report", "throughput", "lossless", "full_width", "check")


def main() -> int:
    failed = []
    for module in MODULES:
        print(f"== benchmarks.{module}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{module}"]).returncode:
            failed.append(module)
    print(f"failed: {', '.join(failed)}" if failed else "all ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""python -m reports STORE -o report.html

Makes the page of a store; --junit, --summary and --annotations add the forms for machines. Exit codes: 0 written, 2 usage or no store.
"""

from __future__ import annotations

import argparse
import sys

from reports import page, summaries
from reports.errors import StoreError
from reports.schema import to_markdown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reports", description="The page of a store, and the same for machines.")
    parser.add_argument("store", nargs="?", help="folder that a campaign wrote")
    parser.add_argument("-o", "--out", metavar="HTML", help="write the page here")
    parser.add_argument("--junit", metavar="XML", help="write JUnit XML here")
    parser.add_argument("--summary", metavar="MD", help="append a Markdown job summary here ($GITHUB_STEP_SUMMARY)")
    parser.add_argument("--annotations", action="store_true", help="print workflow annotations on standard output")
    parser.add_argument("--schema", action="store_true", help="print the tables of docs/store.md and stop")
    options = parser.parse_args(arguments)
    if options.schema:
        sys.stdout.write(to_markdown())
        return 0
    if options.store is None:
        parser.error("name the folder of a store")
    try:
        data = summaries.page_of(options.store)
        if options.out:
            print(page.write_page(data, options.out))
        if options.junit:
            summaries.write_text(options.junit, summaries.junit(data))
        if options.summary:
            summaries.write_text(options.summary, summaries.github_summary(data), append=True)
        if options.annotations:
            print("\n".join(summaries.workflow_commands(data)))
    except StoreError as problem:
        print(problem, file=sys.stderr)
        return 2
    summaries.show(data, sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The benchmarks of stowax, and the page of results.

    python -m benchmarks                     lists them
    python -m benchmarks NAME [options]      runs one; NAME --help has its options
    python -m benchmarks page                makes docs/results/README.md and its charts

A benchmark writes docs/results/NAME.jsonl, cell by cell, and NAME.md from it. Cells
that are there are skipped; `--fresh` makes them again.
"""

import argparse
import importlib
import os
import pathlib
import shlex
import sys

from benchmarks import _record
from benchmarks._registry import BENCHMARKS

COMMAND = "python -m benchmarks"


def listed() -> str:
    """All benchmarks, a line each."""
    rows = [
        f"  {name:13}{one.status:11}{one.takes:18}{one.what}"
        for name, one in BENCHMARKS.items()
    ]
    return "\n".join([(__doc__ or "").strip(), "", *rows])


def run(name: str, given: list[str]) -> int:
    """Runs one benchmark with the options `given`, and writes its table."""
    found = BENCHMARKS[name]
    if name != "gpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    module = importlib.import_module(f"benchmarks.{found.module}")
    parser = argparse.ArgumentParser(
        prog=f"{COMMAND} {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fresh", action="store_true", help="do what is there again")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        metavar="FILE",
        help=f"records; by default docs/results/{name}.jsonl",
    )
    module.options(parser)
    asked = parser.parse_args(given)
    records = _record.Records(
        *(name, found.status, asked.output),
        command=f"{COMMAND} {shlex.join([name, *_without_output(given)])}",
        fresh=asked.fresh,
    )
    code = 0
    try:
        if not asked.table:
            code = module.run(asked, records) or 0
    finally:
        records.settle()
    if hasattr(module, "page") and records.lines:
        records.path.with_suffix(".md").write_text(module.page(records))
    return code


def _without_output(given: list[str]) -> list[str]:
    """What was asked for, but not where on this machine the records go."""
    if "--output" not in given:
        return given
    at = given.index("--output")
    return given[:at] + given[at + 2 :]


def main(given: list[str]) -> int:
    """The command line; 2: no such benchmark."""
    if not given or given[0] in ("-h", "--help"):
        print(listed())
        return 0
    name, *options = given
    if name == "page":
        from benchmarks import _page

        return _page.main(options)
    if name not in BENCHMARKS:
        print(f"{name}: not one of page, {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    return run(name, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

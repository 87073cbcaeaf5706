"""`stowax audit`: a user's script, run unchanged, and what its loop does beside it."""

import json
import os
import sys
from typing import Any

import click

from .._files import check_writable, write_whole
from .._streams import only_result_on_stdout
from ._base import COULD_NOT_RUN, FINE, FOUND, INTERRUPTED, command, json_option

_AS_IT_IS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command(
    context_settings=_AS_IT_IS, short_help="Run a script and find its transfers."
)
@click.option(
    "--steps",
    type=int,
    default=200,
    metavar="N",
    help="Report after N steps; the script goes on (default: 200).",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="KIND[:FILE]",
    help="Findings that are meant so, in all files or in one. Repeatable.",
)
@click.option("-o", "output", metavar="AUDIT.json", help="Write the findings as JSON.")
@json_option
@click.argument("script", metavar="SCRIPT.py")
@click.argument("words", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
@command
def audit(
    script: str,
    words: tuple[str, ...],
    steps: int,
    allow: tuple[str, ...],
    output: str | None,
    as_json: bool,
) -> int:
    """Run SCRIPT.py with its ARGS, and report the transfers and stalls of its loop.

    What stands after SCRIPT.py is the script's, except for one --json at the end. Its
    output stays its own; with --json it goes to stderr, and stdout has the result. The
    exit code is 1 where something was found, 0 where nothing was, and 2 where the
    script failed before.

    A line that means it says so: `# stowax: allow host-read`.

    \b
    Examples:
      stowax audit train.py --epochs 1
      stowax audit --steps 50 --allow host-read:logging.py train.py
      stowax audit --json train.py > audit.json
    """  # noqa: D301
    if words[-1:] == ("--json",) and not as_json:
        words, as_json = words[:-1], True
    if output is not None:
        check_writable(output, "-o")
    from ._run_script import compiled_script

    code = compiled_script(script)
    if as_json:
        with only_result_on_stdout():
            found, error = _audited(code, words, steps, allow, lambda _: None)
        click.echo(json.dumps(found.to_json(), indent=1))
    else:
        found, error = _audited(code, words, steps, allow, click.echo)
    if output is not None:
        write_whole(output, json.dumps(found.to_json(), indent=1), "-o")
    if isinstance(error, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    if found.findings:
        return FOUND
    ended = error is None or (isinstance(error, SystemExit) and not error.code)
    return FINE if ended else COULD_NOT_RUN


def _audited(
    code: Any, words: tuple[str, ...], steps: int, allow: tuple[str, ...], say: Any
) -> tuple[Any, BaseException | None]:
    """The audit of a script, said as soon as it has seen its steps, and the error."""
    import stowax

    from ._run_script import run_script

    found = stowax.audit(steps=steps, allow=allow)
    said: list[Any] = []

    def tell() -> None:
        if said != [found.record]:
            said[:] = [found.record]
            sys.stdout.flush()
            say(f"\n{found}")

    name = os.path.basename(code.co_filename)
    click.echo(f"stowax: auditing {name}, at most {steps} steps", err=True)
    found.when_full(tell)
    found.__enter__()
    error = run_script(code, words)
    found.close(error)
    tell()
    return found, error

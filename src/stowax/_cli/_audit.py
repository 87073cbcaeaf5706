"""`stowax audit`: a user's script, run unchanged, and what its loop does beside it."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from .._files import check_writable, write_whole
from .._streams import only_result_on_stdout
from ._base import (
    AS_IT_IS,
    COULD_NOT_RUN,
    FINE,
    FOUND,
    INTERRUPTED,
    Writes,
    command,
    hand_over,
    json_option,
    module_option,
    script_arguments,
)


@click.command(
    context_settings=AS_IT_IS, short_help="Run a script and find its transfers."
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
@module_option
@click.option(
    "--html", metavar="PAGE.html", help="Write the findings as a page for a browser."
)
@click.option("-o", "output", metavar="AUDIT.json", help="Write the findings as JSON.")
@json_option
@script_arguments
@command
def audit(
    script: str,
    words: tuple[str, ...],
    steps: int,
    allow: tuple[str, ...],
    output: str | None,
    html: str | None,
    is_module: bool,
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
      stowax audit --html audit.html -m package.train
    """  # noqa: D301
    if words[-1:] == ("--json",) and not as_json:
        words, as_json = words[:-1], True
    for option, path in (("-o", output), ("--html", html)):
        if path is not None:
            check_writable(path, option)
    from ._run_script import module_named, script_at

    program = module_named(script) if is_module else script_at(script)
    with contextlib.ExitStack() as quiet:
        if as_json:
            quiet.enter_context(only_result_on_stdout())
        watched = _Watched(steps, allow, sys.stdout, silent=as_json)

        def finish(error: BaseException | None) -> int:
            found = watched.end(error)
            quiet.close()
            text = json.dumps(found.to_json(), indent=1)
            files: dict[str, Writes] = {
                "-o": (output, lambda path: write_whole(path, text)),
                "--html": (html, lambda path: write_whole(path, _page(found))),
            }
            hand_over(text if as_json else None, files)
            return _code(found, error)

        return watched.run(program, words, finish)


def _page(found: Any) -> str:
    from ..report import audit_page

    return audit_page(found)


def _code(found: Any, error: BaseException | None) -> int:
    if isinstance(error, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    if found.findings:
        return FOUND
    from ._run_script import exit_code

    return COULD_NOT_RUN if exit_code(error) else FINE


class _Watched:
    """A script under an audit, which is reported as soon as it has seen its steps."""

    def __init__(self, steps: int, allow: tuple[str, ...], out: Any, silent: bool):
        import stowax

        self._found = stowax.audit(steps=steps, allow=allow)
        self._steps, self._out, self._silent = steps, out, silent
        self._said: Any = None

    def run(
        self, program: Any, words: tuple[str, ...], finish: Callable[[Any], int]
    ) -> int:
        """Runs it; `finish` is called with what ended it, and gives the exit code."""
        from ._run_script import exit_code, run_program

        name = os.path.basename(program.code.co_filename)
        click.echo(f"stowax: auditing {name}, at most {self._steps} steps", err=True)
        process = os.getpid()
        self._found.when_full(self._tell)
        self._found.__enter__()
        error = run_program(program, words, lambda code: finish(SystemExit(code)))
        if os.getpid() != process:
            return exit_code(error)  # a copy that the script made of this process
        return finish(error)

    def end(self, error: BaseException | None) -> Any:
        """The record of what ran, and of what was not looked at; it is told, too."""
        from ._run_script import processes

        self._found.close(error)
        self._tell()
        record = self._found.record
        if processes:
            note = (
                f"The script started other processes ({len(processes)}): those that "
                "run JAX were not looked at."
            )
            self._say(f"\nnote: {note}")
            record = dataclasses.replace(record, notes=(*record.notes, note))
        return record

    def _tell(self) -> None:
        if self._said is not self._found.record:
            self._said = self._found.record
            self._say(f"\n{self._found}")

    def _say(self, text: str) -> None:
        """Where stdout was when the script began, if somebody reads that."""
        if not self._silent:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            try:
                click.echo(text, file=self._out)
            except (OSError, ValueError):
                click.echo(text, err=True)

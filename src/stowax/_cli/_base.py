"""What every command of `stowax` shares: exit codes, errors in one line, options.

A command is a function that returns its exit code. The guard around it turns what goes
wrong into one message on stderr, with the arguments named as they are typed.
"""

import functools
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import click

from .._errors import ArgumentError, StowaxError
from .._streams import import_jax_quietly, nowhere_for_stdout
from ._interrupts import INTERRUPTED as INTERRUPTED
from ._interrupts import ends_at_once
from ._user_file import where_it_failed

FINE, FOUND, COULD_NOT_RUN = 0, 1, 2


def progress_to_stderr() -> Callable[[str], None]:
    """What prints a line of progress, faintly, where no result is."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False)
    return lambda line: console.print(line, style="dim", soft_wrap=True)


def _fail(message: str, error: BaseException, whole: bool) -> NoReturn:
    if whole:
        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    click.echo(f"error: {message}", err=True)
    raise click.exceptions.Exit(COULD_NOT_RUN)


def command(run: Callable[..., int]) -> Callable[..., None]:
    """A command that returns its exit code and fails with one clear message."""

    @click.option(
        "--traceback",
        "whole",
        is_flag=True,
        help="Show the whole traceback of an error.",
    )
    @functools.wraps(run)
    def guarded(*args: Any, whole: bool, **options: Any) -> None:
        try:
            with ends_at_once():
                import_jax_quietly()
                from .._jax_targets import discover_plugins

                discover_plugins()  # as JAX itself would, aloud
                code = run(*args, **options)
        except StowaxError as error:
            _fail(_named_as_typed(error), error, whole)
        except BrokenPipeError:  # `| head`: nobody reads on
            nowhere_for_stdout()
            raise click.exceptions.Exit(COULD_NOT_RUN) from None
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None
        except click.exceptions.ClickException:
            raise
        except Exception as error:
            hint = "" if whole else "\nThe whole traceback: --traceback"
            _fail(where_it_failed(error) + hint, error, whole)
        raise click.exceptions.Exit(code)

    return guarded


def _named_as_typed(error: StowaxError) -> str:
    """The message, the argument named as it is typed here: `--host-budget`."""
    options = (
        "budget",
        "budgets",
        "cache",
        "compiles",
        "host_budget",
        "host_reserve",
        "multiple_of",
        "target",
        "pin",
        "forbid",
        "steps",
        "allow",
        "reference",
    )
    if isinstance(error, ArgumentError) and error.argument in options:
        typed = {"budgets": "budget"}.get(error.argument, error.argument)
        option = f"--{typed.replace('_', '-')}"
        return f"{option}: got {error.got}. {error.instead}"
    return str(error)


Writes = tuple[str | None, Callable[[str], object]]
"""A path, if one was asked for, and what writes there."""


def hand_over(text: str | None, files: Mapping[str, Writes]) -> None:
    """Prints a result and writes its files: none of it is lost where one file fails.

    **Arguments:** `files` has them by the option that asks for each.

    **Raises:** the first file's error, at the end.
    """
    failed: list[StowaxError] = []
    for option, (path, write) in files.items():
        if path is None:
            continue
        try:
            write(path)
        except ArgumentError as error:
            failed.append(ArgumentError(option, error.got, error.instead))
        except StowaxError as error:
            failed.append(error)
        else:
            click.echo(f"saved {path}", err=True)
    if text is not None:
        click.echo(text)
    if failed:
        raise failed[0]


def script_arguments(run: Callable[..., Any]) -> Callable[..., Any]:
    """A script and its own arguments, which nobody else reads."""
    words = click.argument(
        "words", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED
    )
    return click.argument("script", metavar="SCRIPT.py")(words(run))


AS_IT_IS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Settings of a command with `script_arguments`."""

module_option = click.option(
    "-m",
    "is_module",
    is_flag=True,
    help="SCRIPT.py is the name of a module, as in python -m.",
)
_host_budget_option = click.option(
    "--host-budget", metavar="BYTES", help="Host memory per device."
)
_host_reserve_option = click.option(
    "--host-reserve",
    metavar="BYTES",
    help="What others need of it, such as checkpoints while they are saved.",
)


def host_options(run: Callable[..., Any]) -> Callable[..., Any]:
    """How much host memory a plan may use."""
    return _host_budget_option(_host_reserve_option(run))


function_argument = click.argument("where", metavar="FILE.py:FUNCTION")
target_option = click.option(
    "--target",
    metavar="NAME",
    help="Machine, such as v5p-8 (default: the attached one).",
)
cache_option = click.option(
    "--cache",
    metavar="FOLDER",
    help="Keep compiled programs here: what is planned again compiles nothing twice.",
)
save_option = click.option("-o", "output", metavar="PLAN.json", help="Save the plan.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

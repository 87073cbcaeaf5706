"""`stowax run`: a user's script, unchanged, with its training step under a plan."""

import os
from typing import Any

import click

from .._errors import ArgumentError
from .._files import check_writable
from ._base import (
    AS_IT_IS,
    INTERRUPTED,
    command,
    hand_over,
    host_options,
    module_option,
    progress_to_stderr,
    save_option,
    script_arguments,
    target_option,
)


@click.command(
    context_settings=AS_IT_IS, short_help="Run a script, its training step planned."
)
@click.option(
    "--budget",
    metavar="BYTES",
    help="Device memory per device, such as 16GiB, or 60% of what the step takes.",
)
@host_options
@target_option
@click.option("--plan", "plan", metavar="PLAN.json", help="A plan made before.")
@click.option(
    "--cache",
    metavar="FOLDER",
    help="Keep plans here (else in the user's cache), and the programs compiled.",
)
@save_option
@module_option
@script_arguments
@command
def run(
    script: str,
    words: tuple[str, ...],
    budget: str | None,
    host_budget: str | None,
    host_reserve: str | None,
    target: str | None,
    plan: str | None,
    cache: str | None,
    output: str | None,
    is_module: bool,
) -> int:
    """Run SCRIPT.py with its ARGS, and what it differentiates under a plan.

    Every function that the script gives to jax.jit, nnx.jit or eqx.filter_jit, and that
    differentiates, is planned when it is first called. The plans are shown at the end,
    on stderr, unless the script fails. The exit code is the script's.

    \b
    Examples:
      stowax run --budget 16GiB train.py --epochs 1
      stowax run --plan plan.json train.py
      stowax run --budget 70% -o plan.json -m package.train
    """  # noqa: D301
    if output is not None:
        check_writable(output, "-o")
    import stowax

    from ._run_script import module_named, run_program, script_at

    program = module_named(script) if is_module else script_at(script)
    wishes: dict[str, Any] = {
        "budget": budget,
        "host_budget": host_budget,
        "host_reserve": host_reserve,
        "target": target,
        "cache": cache,
    }
    process = os.getpid()
    with stowax.planning(plan=plan, progress=progress_to_stderr(), **wishes) as session:
        told: list[bool] = []

        def tell(*, failed: bool) -> None:
            if os.getpid() == process and not told:
                told.append(True)
                _report(session, output, failed=failed)

        def finish(error: BaseException | None) -> int:
            tell(failed=False)
            return _code(error)

        def fail(error: BaseException) -> None:
            session.explain(error)
            tell(failed=True)

        ended = run_program(program, words, lambda code: finish(SystemExit(code)), fail)
        return finish(ended)


def _report(session: Any, output: str | None, *, failed: bool) -> None:
    """What was planned. Of a script that failed its traceback is what matters."""
    for note in session.notes:
        click.echo(f"stowax: {note}", err=True)
    plans = session.plans
    if not plans and not session.refused and not failed:
        why = "" if session.notes else ": no jitted function differentiates"
        click.echo(f"stowax: nothing was planned{why}", err=True)
    for made in plans.values() if not failed else ():
        click.echo(f"\n{made}", err=True)
    if output is None or not plans:
        return
    if len(plans) > 1:
        raise ArgumentError(
            "-o",
            f"{output!r}, and {len(plans)} plans ({', '.join(plans)})",
            "Plan the one you want with stowax.jit, and save its .plan.",
        )
    (made,) = plans.values()
    hand_over(None, {"-o": (output, made.save)})


def _code(error: BaseException | None) -> int:
    from ._run_script import exit_code

    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else exit_code(error)

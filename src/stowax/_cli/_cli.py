"""The `stowax` command: plan, inspect, verify, run, audit, calibrate, targets, demo.

The result goes to stdout and everything else to stderr, so that `--json` can be piped:
while the user's file runs and the solver works, file descriptor 1 itself points to
stderr, because compilers and solvers print from C. Exit codes: 0 fine, 1 ran and found
a problem (the plan does not fit, the program has hazards, the planned step is wrong), 2
could not run.

Finding the user's function, and saying what went wrong in it, is `_user_file`'s work.
"""

import io
import json
import platform
import sys
from typing import Any, NoReturn

import click

from .._errors import ArgumentError
from .._files import check_writable
from .._records._stages import DECISIONS
from .._streams import nowhere_for_stdout, only_result_on_stdout
from .._versions import versions
from ._audit import audit
from ._base import (
    FINE,
    FOUND,
    Writes,
    cache_option,
    command,
    function_argument,
    hand_over,
    host_options,
    json_option,
    progress_to_stderr,
    save_option,
    target_option,
)
from ._fit import fit
from ._inspect import inspect
from ._run import run
from ._user_file import load_step

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 88}


def _version_line() -> str:
    """Versions that an issue needs: "stowax 0.1.0 (jax 0.10.2, …) on Linux"."""
    found = versions()
    own = found.pop("stowax", "")
    others = ", ".join(f"{name} {version}" for name, version in found.items())
    return f"stowax {own} ({others}) on {platform.system()} {platform.machine()}"


@click.group(context_settings=_SETTINGS)
@click.version_option(message="%(version)s", version=_version_line())
def main() -> None:
    """Plan where the arrays of a JAX training step go: device, host, or nowhere.

    \b
    Examples:
      stowax demo
      stowax targets
      stowax calibrate
      stowax plan train.py:make --budget 16GiB --target v5p-8 -o plan.json
      stowax fit train.py:make_of_batch --budget 16GiB
      stowax inspect train.py:make plan.json
      stowax verify train.py:make plan.json
      stowax run --budget 16GiB train.py
      stowax audit train.py

    In FILE.py:FUNCTION the function takes no argument and returns (step, args): the
    training step, and a tuple of its arguments, arrays or jax.ShapeDtypeStruct. For
    fit it takes the batch size.

    Exit code: 0 fine, 1 ran and found a problem, 2 could not run.
    """  # noqa: D301
    if sys.stdout is None:  # closed, as by `>&-`
        nowhere_for_stdout()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that has no × shows ? instead of a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _pins(texts: tuple[str, ...]) -> dict[str, str] | None:
    pins = {}
    for text in texts:
        pattern, equals, decision = text.rpartition("=")
        if not equals or not pattern or decision not in DECISIONS:
            raise ArgumentError(
                "--pin",
                repr(text),
                "Write PATTERN=DECISION, such as '*attention*=keep'; DECISION is one "
                f"of {', '.join(DECISIONS)}.",
            )
        pins[pattern] = decision
    return pins or None


@main.command(short_help="Decide what is kept, offloaded and recomputed.")
@function_argument
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    metavar="BYTES",
    help="Device memory per device, such as 16GiB. Repeated: a table, a line for each.",
)
@host_options
@target_option
@click.option(
    "--pin",
    "pins",
    multiple=True,
    metavar="PATTERN=DECISION",
    help="Decide for matching values, such as '*attention*=keep'. Repeatable.",
)
@click.option(
    "--forbid",
    multiple=True,
    metavar="DECISION[:PATTERN]",
    help="Do not offload, or recompute, at all or what matches; or no 'host update', "
    "no 'tile'. Repeatable.",
)
@click.option(
    "--keep-checkpoint",
    is_flag=True,
    help="Leave jax.checkpoint in the model as it is.",
)
@click.option(
    "--compiles",
    type=int,
    metavar="N",
    help="Programs compiled at most, 4 or more; more find faster plans (default: until "
    "one fits, and one more; on a TPU then the best with other compiler options).",
)
@cache_option
@save_option
@json_option
@command
def plan(
    where: str,
    budgets: tuple[str, ...],
    host_budget: str | None,
    host_reserve: str | None,
    target: str | None,
    pins: tuple[str, ...],
    forbid: tuple[str, ...],
    keep_checkpoint: bool,
    compiles: int | None,
    cache: str | None,
    output: str | None,
    as_json: bool,
) -> int:
    """Decide what stays on the device, what goes to the host, what is computed again.

    Prints the plan, or a table of plans for several budgets. The exit code is 1 where
    one does not fit its budget.

    \b
    Examples:
      stowax plan train.py:make --budget 16GiB
      stowax plan train.py:make --target v5p-8 -o plan.json
      stowax plan train.py:make --budget 16GiB --budget 24GiB --cache programs
      stowax plan train.py:make --target h200 --budget 80GiB --host-budget 200GiB
      stowax plan train.py:make --pin '*attention*=keep' --forbid offload --json
    """  # noqa: D301
    import stowax
    from stowax.report import budgets_text

    pinned = _pins(pins)
    if output is not None and len(budgets) > 1:
        raise ArgumentError(
            "-o",
            f"{output!r}, and {len(budgets)} plans",
            "Save the one you want by its own --budget; with --cache it compiles "
            "nothing again.",
        )
    if output is not None:
        check_writable(output, "-o")
    files: dict[str, Writes] = {}
    with only_result_on_stdout():
        step, args = load_step(where)
        options: dict[str, Any] = {
            "host_budget": host_budget,
            "host_reserve": host_reserve,
            "target": target,
            "pin": pinned,
            "forbid": forbid,
            "keep_checkpoint": keep_checkpoint,
            "compiles": compiles,
            "cache": cache,
            "progress": progress_to_stderr(),
        }
        if len(budgets) > 1:
            several = stowax.plans(step, *args, budgets=budgets, **options)
            data: Any = [made.to_json() for made in several]
            text = json.dumps(data, indent=1) if as_json else budgets_text(several)
            fits = all(made.fits for made in several)
        else:
            budget = budgets[0] if budgets else None
            made = stowax.plan(step, *args, budget=budget, **options)
            files["-o"] = output, made.save
            text = json.dumps(made.to_json(), indent=1) if as_json else str(made)
            fits = made.fits
    hand_over(text, files)
    return FINE if fits else FOUND


main.add_command(fit)
main.add_command(inspect)
main.add_command(run)
main.add_command(audit)


@main.command(short_help="Run a step with its plan and without, and compare.")
@function_argument
@click.argument("plan_path", metavar="PLAN.json")
@click.option(
    "--steps", type=int, default=10, metavar="N", help="Steps in a row (default: 10)."
)
@click.option(
    "--reference",
    default="device",
    metavar="device|cpu",
    help="What runs the plain step; cpu where it does not fit on the device.",
)
@json_option
@command
def verify(
    where: str, plan_path: str, steps: int, reference: Any, as_json: bool
) -> int:
    """Run the step with PLAN.json and without it, and compare everything it returns.

    To be run before a long training run, on the machine that is to do it. FUNCTION has
    to return arrays, with numbers in them. The exit code is 1 where the two differ by
    more than rounding; then the decision to blame is looked for.

    \b
    Examples:
      stowax verify train.py:make plan.json
      stowax verify train.py:make plan.json --steps 20 --reference cpu
      stowax verify train.py:make plan.json --json
    """  # noqa: D301
    import stowax

    with only_result_on_stdout():
        made = stowax.load_plan(plan_path)
        step, args = load_step(where)
        found = stowax.verify(
            step,
            made,
            *args,
            steps=steps,
            reference=reference,
            progress=progress_to_stderr(),
        )
        text = found.to_json() if as_json else str(found)
    click.echo(text)
    return FINE if found.passed else FOUND


@main.command(short_help="List the machines that can be planned for.")
@click.argument("name", required=False)
@json_option
@command
def targets(name: str | None, as_json: bool) -> int:
    """List the machines that can be planned for, with their figures and sources.

    With NAME, every figure of that one machine.

    \b
    Examples:
      stowax targets
      stowax targets v5p-8
      stowax targets --json
    """  # noqa: D301
    from .._target._target import targets_table
    from ..report import target_text, targets_text

    with only_result_on_stdout():
        rows = targets_table()
        if name is not None:
            rows = [row for row in rows if name in row.names] or _no_target(name, rows)
        if as_json:
            text = json.dumps([_row_as_json(row) for row in rows], indent=1)
        else:
            text = targets_text(rows) if name is None else target_text(rows[0])
    click.echo(text)
    return FINE


def _no_target(name: str, rows: list[Any]) -> NoReturn:
    from .._target._target import nearest

    near = nearest(name, [known for row in rows for known in row.names])
    raise ArgumentError("NAME", repr(name), f"{near}See: stowax targets")


def _row_as_json(row: Any) -> dict[str, Any]:
    import dataclasses

    figures = {name: dataclasses.asdict(f) for name, f in row.chip.figures()}
    return {
        "chip": row.chip.key,
        "title": row.chip.title,
        "platform": row.chip.platform,
        "names": list(row.names),
        "attached": row.attached,
        "chips_per_host": row.chip.chips_per_host,
        "devices_per_chip": row.chip.devices_per_chip,
        "figures": figures,
        "measured": {name: found.to_json() for name, found in row.measured},
        "notes": row.notes,
    }


@main.command(short_help="Measure the attached devices, for better plans.")
@click.option(
    "--target",
    metavar="cpu|gpu|tpu",
    help="Platform to measure (default: the one that JAX uses).",
)
@json_option
@command
def calibrate(target: Any, as_json: bool) -> int:
    """Measure what the attached devices and their host reach, all busy at once.

    Takes under two minutes, and needs the devices to itself. The result is kept in the
    user's cache (or in the file that STOWAX_CALIBRATION names), shown by `stowax
    targets`, and used for plans on this machine; delete the file to plan by the makers'
    figures again. The exit code is 1 where the link to the host could not be measured.

    \b
    Examples:
      stowax calibrate
      stowax calibrate --target cpu --json
    """  # noqa: D301
    import stowax

    with only_result_on_stdout():
        found = stowax.calibrate(target, progress=progress_to_stderr())
        text = json.dumps(found.to_json(), indent=1) if as_json else str(found)
    click.echo(text)
    return FINE if found.link is not None else FOUND


@main.command(short_help="Train and plan a small GPT.")
@command
def demo() -> int:
    """Train a small GPT plain and under a plan, then plan a large one.

    Takes under four minutes on two cores. It needs the extra [demo]; planning for the
    TPU and the GPU needs [tpu] and [cuda], and is skipped, and said so, without.

    \b
    Example:
      stowax demo
    """  # noqa: D301
    from ._demo import run_demo

    return run_demo(click.echo, progress_to_stderr())

"""`stowax inspect`: of a step, or of an inspection that was saved, as text, data, page.

Paths that cannot be written are refused before anything is compiled.
"""

import json
import pathlib
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from .._errors import ArgumentError
from .._files import check_writable, write_whole
from .._records import _perfetto
from .._streams import only_result_on_stdout
from ._base import (
    FINE,
    FOUND,
    Writes,
    command,
    hand_over,
    json_option,
    target_option,
)
from ._user_file import load_step


@click.command(short_help="Show what a compiled step really does.")
@click.argument("where", metavar="FILE.py:FUNCTION", required=False)
@click.argument("plan_path", metavar="[PLAN.json]", required=False)
@target_option
@click.option(
    "--html",
    metavar="REPORT.html",
    help="Write a page for a browser, in one file (needs stowax[report]).",
)
@click.option(
    "--audit",
    "audited",
    metavar="AUDIT.json",
    help="Show on the page what stowax audit found in the loop around the step.",
)
@click.option(
    "--compare",
    nargs=2,
    metavar="A.json B.json",
    help="Show two saved inspections side by side; nothing is compiled.",
)
@click.option(
    "--perfetto",
    metavar="TRACE.json",
    help="Write timeline and memory for https://ui.perfetto.dev.",
)
@click.option(
    "--measure",
    "measured",
    is_flag=True,
    help="Run the step here as well, and show both times side by side.",
)
@json_option
@command
def inspect(
    where: str | None,
    plan_path: str | None,
    target: str | None,
    html: str | None,
    audited: str | None,
    compare: tuple[str, str] | None,
    perfetto: str | None,
    measured: bool,
    as_json: bool,
) -> int:
    """Compile the step and show what the program does: memory, copies, hazards.

    Without PLAN.json the step is compiled as it is, with it under that plan, for the
    machine that the plan was made for. In place of FILE.py:FUNCTION stands what --json
    printed, to see it again. The exit code is 1 where hazards were found, or where the
    step does not fit.

    \b
    Examples:
      stowax inspect train.py:make --target v5p-8
      stowax inspect train.py:make plan.json --html report.html
      stowax inspect train.py:make plan.json --json > found.json
      stowax inspect found.json --html report.html
      stowax inspect --compare plain.json planned.json --html both.html
      stowax inspect train.py:make plan.json --perfetto trace.json
      stowax inspect train.py:make --measure
      stowax inspect train.py:make --audit audit.json --html report.html
    """  # noqa: D301
    import stowax

    from ..report import comparison_text, inspection_text

    _check_outputs(html, perfetto)
    around = _audit_of(audited, html)
    if compare is not None:
        others = {
            "--perfetto": perfetto,
            "--json": as_json,
            "--target": target,
            "--measure": measured,
            "--audit": audited,
            "FILE.py:FUNCTION": where,
        }
        return _compared(compare, html, others)
    if where is None:
        raise ArgumentError(
            "FILE.py:FUNCTION",
            "none",
            "Name the step, or write --compare A.json B.json.",
        )
    saved = where.endswith(".json")
    if saved and (measured or target):
        raise ArgumentError(
            "--measure" if measured else "--target",
            f"it beside {where}, an inspection that was saved",
            "Leave it out, or give FILE.py:FUNCTION.",
        )
    with only_result_on_stdout():
        made = None if plan_path is None else stowax.load_plan(plan_path)
        if saved:
            found, jitted, real = stowax.load_inspection(where), None, None
        else:
            found, jitted, real = _inspected(where, made, plan_path, target)
        timelines = {"simulated": found.timeline}
        text = found.to_json() if as_json else inspection_text(found)
        if measured:
            ran = timelines["measured"] = _measured(
                jitted, made, real, target or (made.target if made else None)
            )
            text = (
                json.dumps(json.loads(text) | {"measured": asdict(ran)}, indent=1)
                if as_json
                else f"{text}\n\n{comparison_text(found.timeline, ran)}"
            )
    files: dict[str, Writes] = {
        "--perfetto": (
            perfetto,
            lambda path: _perfetto.write(timelines, path, found.memory_timeline),
        ),
        "--html": (html, lambda path: found.to_html(path, made, around)),
    }
    hand_over(text, files)
    return FOUND if found.hazards or found.fits is False else FINE


def _audit_of(path: str | None, html: str | None) -> Any:
    """The audit that was saved at `path`, for the page."""
    if path is None:
        return None
    from .._record_json import json_of, record_of
    from .._records._audit import AuditRecord

    if html is None:
        raise ArgumentError("--audit", path, "Name a page for it: --html report.html.")
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
        return record_of(AuditRecord, json_of(text))
    except (OSError, ValueError) as error:
        raise ArgumentError(
            "--audit",
            f"{path}, {error}",
            "Write what `stowax audit -o audit.json SCRIPT.py` saved.",
        ) from None


def _compared(
    paths: tuple[str, str], html: str | None, others: Mapping[str, Any]
) -> int:
    """Two saved inspections, in the terminal and on a page."""
    import stowax

    from ..report import differences_page, differences_text

    if given := [name for name, value in others.items() if value]:
        raise ArgumentError(
            given[0],
            "it beside --compare",
            "Leave it out: --compare reads what is saved.",
        )
    first, second = (stowax.load_inspection(path) for path in paths)
    names = _names(paths)
    write = lambda path: write_whole(path, differences_page(first, second, names))
    hand_over(differences_text(first, second, names), {"--html": (html, write)})
    return FINE


def _names(paths: tuple[str, str]) -> tuple[str, str]:
    """What to call two files: their names, or more of the path where those agree."""
    one, other = (pathlib.Path(path) for path in paths)
    if one.stem != other.stem:
        return one.stem, other.stem
    return (paths[0], paths[1]) if paths[0] != paths[1] else ("first", "second")


def _check_outputs(html: str | None, perfetto: str | None) -> None:
    """What would fail after minutes of compiling fails before."""
    for option, path in (("--html", html), ("--perfetto", perfetto)):
        if path is not None:
            check_writable(path, option)
    if html is not None:
        from ..report import check_page_library

        check_page_library()


def _inspected(
    where: str, made: Any, plan_path: str | None, target: str | None
) -> tuple[Any, Any, Any]:
    """The inspection of the user's step, what was jitted, and the user's arguments."""
    import stowax

    from .._calling._calling import as_jax_takes_it
    from .._calling._objects import together

    step, args = load_step(where)
    real = args
    if made is not None and target not in (None, made.target):
        raise ArgumentError(
            "--target",
            f"{target}, and {plan_path} was made for {made.target}",
            "Leave --target out, or plan for it.",
        )
    if made is not None:
        with warnings.catch_warnings():  # that it does not fit is what we show
            warnings.simplefilter("ignore", UserWarning)
            jitted, args = made.apply(step), made.specs(*args)
        args = args if isinstance(args, tuple) else (args,)
        target = target or made.target
    else:
        with together():
            jitted, args = as_jax_takes_it(step, args, {})
            return stowax.inspect(jitted, *args, target=target), jitted, args
    return stowax.inspect(jitted, *args, target=target), jitted, real


def _measured(jitted: Any, made: Any, args: Any, target: str | None) -> Any:
    """The timeline of a real run, with the user's own arrays."""
    import stowax

    if target is not None and stowax.target(target).compile_only:
        raise ArgumentError(
            "--measure",
            f"the target {target}, which is not attached",
            "Leave out --target, or --measure.",
        )
    if made is not None:
        args = made.place(*args)
        args = args if isinstance(args, tuple) else (args,)
    return stowax.measure(jitted, *args)

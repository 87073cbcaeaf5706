"""`stowax fit`: the largest batch for a budget, and batch size against step time."""

import click

from .._errors import ArgumentError
from .._files import check_writable
from .._streams import only_result_on_stdout
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
    target_option,
)
from ._interrupts import told_when_interrupted
from ._user_file import load_step_of_batch


@click.command(short_help="Find the largest batch for a budget, and what sizes cost.")
@function_argument
@click.option(
    "--budget", metavar="BYTES", help="Device memory per device, such as 16GiB."
)
@host_options
@target_option
@click.option(
    "--batch",
    "batches",
    type=int,
    multiple=True,
    metavar="N",
    help="A size to look at. Repeatable (default: the largest are looked for).",
)
@click.option(
    "--multiple-of",
    type=int,
    default=1,
    metavar="N",
    help="Sizes are multiples of it, such as the number of devices or of "
    "microbatches (default: 1).",
)
@click.option(
    "--compiles",
    type=int,
    metavar="N",
    help="Programs compiled for a plan at most, 4 or more.",
)
@cache_option
@click.option("-o", "output", metavar="PLAN.json", help="Save the largest's plan.")
@click.option(
    "--html",
    metavar="FRONT.html",
    help="Write a page with a picture, in one file (needs stowax[report]).",
)
@json_option
@command
def fit(
    where: str,
    budget: str | None,
    host_budget: str | None,
    host_reserve: str | None,
    target: str | None,
    batches: tuple[int, ...],
    multiple_of: int,
    compiles: int | None,
    cache: str | None,
    output: str | None,
    html: str | None,
    as_json: bool,
) -> int:
    """Find the largest batch as the step is written and under a plan.

    FUNCTION takes the batch size and returns (step, args). A few sizes are predicted
    to bracket the largest, then compiled; each has its memory, step time and items a
    second. The exit code is 1 where no batch fits.

    \b
    Examples:
      stowax fit train.py:make_of_batch --target v5p-8
      stowax fit train.py:make_of_batch --budget 16GiB --multiple-of 8 -o plan.json
      stowax fit train.py:make_of_batch --batch 64 --batch 128 --html front.html
    """  # noqa: D301
    from .._fit._fit import Fitting
    from ..report import check_page_library, fit_text

    for option, path in (("-o", output), ("--html", html)):
        if path is not None:
            check_writable(path, option)
    if html is not None:
        check_page_library()
    wishes = {
        "host_budget": host_budget,
        "host_reserve": host_reserve,
        "target": target,
        "compiles": compiles,
        "cache": cache,
    }
    with only_result_on_stdout():
        try:
            fitting = Fitting(
                load_step_of_batch(where),
                budget,
                batches or None,
                multiple_of,
                progress_to_stderr(),
                wishes,
            )

            def so_far() -> str:
                known = fitting.so_far()
                return "" if known is None else fit_text(known, so_far=True)

            with told_when_interrupted(so_far):
                found = fitting.finished()
        except ArgumentError as error:
            if error.argument != "batches":
                raise
            raise ArgumentError("--batch", error.got, error.instead) from None
        text = found.to_json() if as_json else str(found)
    files: dict[str, Writes] = {"--html": (html, found.to_html)}
    if found.largest:
        files["-o"] = output, found.plans[found.largest].save
    hand_over(text, files)
    return FINE if found.largest else FOUND

"""`stowax calibrate`: measures the attached devices, and keeps what it found."""

import json
from typing import Any

import click

from .._streams import only_result_on_stdout
from ._base import FINE, FOUND, command, json_option, progress_to_stderr


@click.command(short_help="Measure the attached devices, for better plans.")
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

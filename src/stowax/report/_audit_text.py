"""An audit for a terminal: what, where, how much a step, and what to write instead."""

import linecache
import os
import textwrap

from .._records._audit import AuditRecord, Finding
from .._units import format_bytes, format_seconds
from ._layout import count_of, cut, text_width


def audit_text(record: AuditRecord, width: int | None = None) -> str:
    """The findings of an audit, each with its line and the remedy.

    **Arguments:** `width` in characters (default: the terminal's).

    **Returns:** text, its last line without a newline.
    """
    columns = text_width(width)
    lines = textwrap.wrap(_head(record), columns)
    for finding in record.findings:
        lines += ["", *_finding(finding, record.steps, columns)]
    if record.allowed:
        kinds = ", ".join(sorted({finding.kind for finding in record.allowed}))
        lines += ["", f"{len(record.allowed)} allowed: {kinds}"]
    for note in record.notes:
        lines += ["", *textwrap.wrap(f"note: {note}", columns)]
    return "\n".join(lines)


def _head(record: AuditRecord) -> str:
    found = count_of(len(record.findings), "finding")
    if not record.steps:
        return f"{found}."
    return (
        f"{found} in {count_of(record.steps, 'step')} of "
        f"{_path(record.step_file)}:{record.step_line}. A step takes "
        f"{format_seconds(record.step_seconds)}, with {transfers_of(record)}."
    )


def transfers_of(record: AuditRecord) -> str:
    """How many values cross between host and device in a step: `2 transfers`."""
    return count_of(round(record.transfers, 1), "transfer")


def _path(file: str) -> str:
    """As short as it can be found from here."""
    if not os.path.isabs(file):
        return file
    return min(file, os.path.relpath(file), key=len)


def _finding(finding: Finding, steps: int, width: int) -> list[str]:
    figures = [f"{finding.count:.2g} a step"]
    often = finding.count >= 1 or not steps
    if not often:
        figures = [f"{round(finding.count * steps)} in {count_of(steps, 'step')}"]
    if finding.bytes:
        figures.append(format_bytes(finding.bytes))
    if finding.seconds:
        figures.append(format_seconds(finding.seconds))
    if len(figures) > 1 and not often:
        figures[-1] += " a step"
    lines = [
        f"{_path(finding.file)}:{finding.line}: {finding.kind} ({', '.join(figures)})"
    ]
    if source := linecache.getline(finding.file, finding.line).strip():
        lines.append(cut(f"    | {source}", width))
    lines += _indented("what   ", finding.what, width)
    return lines + _indented("remedy ", finding.remedy, width)


def _indented(name: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=f"  {name} ", subsequent_indent=" " * 10
    )

"""What an audit found in the loop around the step: a table, and a page of its own."""

import os

from .._records._audit import AuditRecord
from .._units import format_seconds
from ._audit_text import transfers_of
from ._layout import count_of
from ._page_html import (
    Columns,
    asset,
    document,
    escaped,
    facts_html,
    section,
    sortable,
)
from ._page_tables import bytes_cell, number_cell, seconds_cell, text_cell


def audit_page(record: AuditRecord) -> str:
    """A page of its own: the loop that was audited, what was found, and what to do."""
    found = count_of(len(record.findings), "finding")
    of = f" in {_place(record.step_file, record.step_line)}" if record.steps else ""
    facts = facts_html(
        [
            ("steps seen", f"{record.steps}"),
            ("time a step", format_seconds(record.step_seconds)),
            ("transfers a step", f"{round(record.transfers, 1):g}"),
        ]
    )
    allowed = "".join(
        f"<p>{escaped(_place(f.file, f.line))}: {escaped(f.kind)}</p>"
        for f in record.allowed
    )
    body = [
        f"<h1>{escaped(found)}{escaped(of)}</h1>",
        '<p class="soft">Transfers and stalls of the loop around the step, while it '
        "ran.</p>",
        facts if record.steps else "",
        section("The loop around the step", audit_table(record)),
        section("Meant so", allowed),
    ]
    ready = 'document.documentElement.dataset.ready = "yes";'
    scripts = [asset("page.js"), f"sortTables(); {ready}"]
    return document(f"{found}{of}", "\n".join(part for part in body if part), scripts)


def audit_table(record: AuditRecord) -> str:
    """The findings, the costliest first, below a line on the loop they are of."""
    columns: Columns = (
        ("kind", "text", lambda f: text_cell(f.kind)),
        ("what", "long", lambda f: text_cell(f.what)),
        ("where", "long", lambda f: text_cell(_place(f.file, f.line))),
        ("times a step", "number", lambda f: number_cell(round(f.count, 2))),
        ("bytes a step", "number", lambda f: bytes_cell(f.bytes)),
        ("time a step", "number", lambda f: seconds_cell(f.seconds)),
        ("what to do", "long", lambda f: text_cell(f.remedy)),
    )
    loop = (
        f"{count_of(record.steps, 'step')} of "
        f"{_place(record.step_file, record.step_line)}, with {transfers_of(record)} a "
        "step."
    )
    lines = [loop if record.steps else "", *record.notes]
    found = record.findings
    table = sortable(count_of(len(found), "finding"), columns, found, name="audit")
    text = "".join(f"<p>{escaped(line)}</p>" for line in lines if line)
    return text + (table or "<p>Nothing found.</p>")


def _place(file: str, line: int) -> str:
    return f"{os.path.basename(file)}:{line}"

"""Pieces of HTML: escaped text, tables that sort, the frame that they stand in.

Everything that a program or a user named is text in here, never markup: names of values
come from source code and may hold anything, `</script>` too. Scripts get their data as
base64, or as JSON without a `<`.
"""

import base64
import gzip
import html
import importlib.resources
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from ._layout import short_source
from ._looks import swatch

MOST_ROWS = 1000
"""Rows of a table: more are no table that a person reads. What is left out is said."""

_LONGEST = 60  # characters of a path of scopes

Cell = tuple[Any, str]
"""What a column is sorted by, and the text that is shown."""

Columns = Sequence[
    tuple[str, Literal["text", "long", "number", "role"], Callable[[Any], Cell]]
]
"""Of each column of a table its head, what it holds, and the cell of a record; long
texts break anywhere, a role has its colour beside it."""

# The browser itself refuses every request, whatever a library may try.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; font-src data:"
)


def escaped(text: Any) -> str:
    """`text` for a place between tags or within a quoted attribute.

    >>> escaped('<b a="1">')
    '&lt;b a=&quot;1&quot;&gt;'
    """
    return html.escape(str(text), quote=True)


def json_in_script(value: Any) -> str:
    """JSON that may stand inside of a script: nothing in it ends the script.

    >>> "<" in json_in_script("</script>")
    False
    """
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def packed(value: Any) -> str:
    """`value` as JSON, compressed, in base64: what `unpack` of page.js reads."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def asset(name: str) -> str:
    """The text of a file that lies beside this one."""
    folder = importlib.resources.files(__spec__.parent)
    return (folder / name).read_text(encoding="utf-8")


def sortable(
    title: str,
    columns: Columns,
    records: Sequence[Any],
    *,
    name: str,
    seen: bool = True,
) -> str:
    """A table with a button over each column that sorts by it.

    **Arguments:** `records` have a row each, `name` is unique in the page. A title that
    the heading above says already need not be `seen`. A table without rows is nothing
    at all.
    """
    if not records:
        return ""
    heads = "".join(
        f'<th scope="col" class="{kind}"><button type="button">{escaped(head)}'
        '<span class="way" aria-hidden="true"></span></button></th>'
        for head, kind, _ in columns
    )
    body = "\n".join(_row(record, columns) for record in records[:MOST_ROWS])
    more = len(records) - MOST_ROWS
    hidden = "" if seen else ' class="unseen"'
    rest = f"<p>The first {MOST_ROWS}; {more} more are not listed.</p>" * (more > 0)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(title)}">'
        f'<table id="{escaped(name)}" class="sortable">'
        f"<caption{hidden}>{escaped(title)}</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>\n{body}\n</tbody></table></div>{rest}"
    )


def _row(record: Any, columns: Columns) -> str:
    cells = "".join(
        f'<td class="{kind}" data-sort="{escaped(key)}"{_whole(key, text)}>'
        f"{swatch(text) if kind == 'role' else ''}{escaped(text)}</td>"
        for _, kind, cell in columns
        for key, text in [cell(record)]
    )
    return f"<tr>{cells}</tr>"


def _whole(key: Any, text: str) -> str:
    """What was cut, for the pointer to show."""
    cut = isinstance(key, str) and key != text
    return f' title="{escaped(key)}"' if cut else ""


def path_cell(path: str) -> Cell:
    """A name of scopes by its end, which says most."""
    short = path if len(path) <= _LONGEST else f"…{path[1 - _LONGEST :]}"
    return path, short


def source_cell(source: str) -> Cell:
    """A source line by its file; the folder stands in what it is sorted by."""
    return source, short_source(source)


def facts_html(pairs: Iterable[tuple[str, str]]) -> str:
    """Figures with their names, as a list of definitions."""
    items = "".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(text)}</dd></div>"
        for name, text in pairs
    )
    return f'<dl class="facts">{items}</dl>' if items else ""


def section(title: str, *parts: str) -> str:
    """A section with its heading; nothing where no part has anything in it."""
    inner = "\n".join(part for part in parts if part)
    return f"<section><h2>{escaped(title)}</h2>\n{inner}\n</section>" if inner else ""


def document(title: str, body: str, scripts: Iterable[str]) -> str:
    """A whole page that asks nobody for anything."""
    inline = "\n".join(f"<script>\n{script}\n</script>" for script in scripts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escaped(title)}</title>
<style>
{asset("page.css")}
</style>
</head>
<body>
<main>
{body}
</main>
{inline}
</body>
</html>
"""

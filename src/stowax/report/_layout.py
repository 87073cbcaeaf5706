"""Tables and paragraphs at a fixed width: the only file that knows rich.

rich is imported inside the functions: `import stowax` does not pay for it. Cells are
plain text (no markup), because names of values carry brackets (`split[0]`) that markup
would swallow without a word.
"""

import io
import itertools
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

NARROWEST, WIDEST = 60, 160
"""Narrower than this no table holds together; wider, no line can be followed."""

Align = Literal["left", "right"]

_TURNS = 3  # parameters, moments; then which moment


def text_width(width: int | None) -> int:
    """The width to lay text out for: as asked, or the terminal's, within reason.

    >>> text_width(1000)
    160
    """
    wanted = shutil.get_terminal_size((80, 24)).columns if width is None else width
    return max(NARROWEST, min(WIDEST, wanted))


def lines_of(part: Any, width: int) -> list[str]:
    """The lines that a rich renderable (or text, which is wrapped) fills."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
        _environ={},
    )
    with console.capture() as capture:
        console.print(part)
    return [line.rstrip() for line in capture.get().rstrip("\n").split("\n")]


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    align: Sequence[Align] = (),
    *,
    without: Collection[str] = (),
    flexible: int | None = None,
    indent: int = 0,
) -> Any:
    """A rich table without lines around it.

    **Arguments:** `align` has one entry per column (default: the first one left, others
    right); columns whose headers are in `without` are left out. Only the column
    numbered `flexible` may wrap, the others keep their widest cell. A table whose
    headers are all empty has no header line.
    """
    from rich.table import Table

    drawn = Table(
        box=None,
        show_header=any(headers),
        show_edge=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        collapse_padding=True,
    )
    if indent:
        drawn.add_column(width=indent - 2 if indent > 2 else 0)
    shown = [n for n, header in enumerate(headers) if header not in without]
    for n in shown:
        drawn.add_column(
            headers[n],
            justify=align[n] if align else "right" if n else "left",
            no_wrap=n != flexible,
            overflow="fold",
            vertical="top",
        )
    for row in rows:
        drawn.add_row(*([""] if indent else []), *(row[n] for n in shown))
    return drawn


def facts(pairs: Iterable[tuple[str, str]], width: int) -> list[str]:
    """Lines of `name   text`, the text wrapped in a column of its own."""
    pairs = list(pairs)
    if not pairs:
        return []
    return lines_of(table(("", ""), pairs, ("left", "left"), flexible=1), width)


def short_source(source: str) -> str:
    """`file.py:12` of a whole path; empty stays empty.

    >>> short_source("/home/me/train/model.py:41")
    'model.py:41'
    """
    return os.path.basename(source)


def cut(text: str, width: int) -> str:
    """`text` in at most `width` characters, the end marked where some is missing.

    >>> cut("attention", 5)
    'atte…'
    """
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"


def cut_path(text: str, width: int) -> str:
    """`text` in at most `width` characters; of a path, what is behind its start goes.

    >>> cut_path("args[1]['opt_state'][0]['mu']['head']['kernel'].value", 42)
    "args[1]…[0]['mu']['head']['kernel'].value"
    """
    parts = _parts(text)
    if "[" not in text or len(text) <= width or len(parts) < 4:
        return cut(text, width)
    return _without_middle("".join(parts[:2]), parts[2:], width)


def cut_paths(texts: Sequence[str], width: int) -> list[str]:
    """Each as `cut_path` has it; those that would look alike keep where they differ.

    >>> paths = [f"args[0].{name}['block']['dense']['kernel']" for name in ("m", "v")]
    >>> cut_paths([path.replace(".", ".opt[0].") for path in paths], 32)
    ["args[0]….m…['dense']['kernel']", "args[0]….v…['dense']['kernel']"]
    """
    found = [cut_path(text, width) for text in texts]
    for _ in range(_TURNS):
        for short in {text for text in found if found.count(text) > 1}:
            alike = [i for i, each in enumerate(found) if each == short]
            parts = [_parts(texts[i]) for i in alike]
            columns = enumerate(itertools.zip_longest(*parts))
            first = next((k for k, column in columns if len({*column}) > 1), 0)
            for i, own in zip(alike, parts, strict=True):
                if 2 <= first < len(own):
                    start = f"{''.join(own[:2])}{'…' if first > 2 else ''}{own[first]}"
                    found[i] = _without_middle(start, own[first + 1 :], width)
    return found


def _parts(path: str) -> list[str]:
    return re.findall(r"\[[^\]]*\]|\.?[^.\[]+", path)


def _without_middle(start: str, rest: list[str], width: int) -> str:
    """A path's start and as much of its end as there is room for."""
    whole = len(rest)
    while len(rest) > 1 and len(start) + 1 + sum(map(len, rest)) > width:
        rest = rest[1:]
    return cut(f"{start}{'…' if len(rest) < whole else ''}{''.join(rest)}", width)


def or_dash(form: Callable[[Any], str], value: Any) -> str:
    """`value` as `form` writes it, and a dash for none."""
    return form(value) if value else "–"


def count_of(number: float, noun: str) -> str:
    """A number with its noun: `1 copy`, `3 copies`.

    >>> count_of(2, "value"), count_of(1, "copy"), count_of(0, "copy")
    ('2 values', '1 copy', '0 copies')
    """
    if number != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:g} {noun}"

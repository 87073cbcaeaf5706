"""Two inspections side by side, for a terminal: memory, time, copies, hazards."""

from .._records._inspection import Inspection
from ._differences import Difference, differences
from ._layout import cut, facts, lines_of, table, text_width

_NARROWEST_TITLE = 16
_WIDEST_NAME = 12


def differences_text(
    first: Inspection,
    second: Inspection,
    names: tuple[str, str] = ("first", "second"),
    width: int | None = None,
) -> str:
    """Two inspections side by side, as text of at most `width` columns.

    **Arguments:** `names` are what to call them; the difference is what the second has
    more. `width` in columns, by default the terminal's; kept between 60 and 160.

    >>> x = jax.ShapeDtypeStruct((1024, 1024), "float32")
    >>> one = stowax.inspect(jax.jit(lambda x: x @ x), x, target="v5e-4")
    >>> two = stowax.inspect(jax.jit(lambda x: x @ x @ x), x, target="v5e-4")
    >>> print(differences_text(one, two, width=80).splitlines()[3])
    memory per device    first   second       difference
    """
    columns = text_width(width)
    who = [
        (name, f"{each.program} on {each.target}")
        for name, each in zip(names, (first, second), strict=True)
    ]
    parts = [facts(who, columns)]
    for title, rows in differences(first, second):
        heads = (title, *_short(names), "difference")
        room = max(_NARROWEST_TITLE, columns - 51)
        cells = [_cells(row, room) for row in rows]
        parts.append(lines_of(table(heads, cells), columns))
    return "\n\n".join("\n".join(part) for part in parts)


def _short(names: tuple[str, str]) -> tuple[str, str]:
    """Both names in a column's width, told apart by their ends if they start alike."""
    one, other = (cut(name, _WIDEST_NAME) for name in names)
    if one == other and names[0] != names[1]:
        one, other = (f"…{name[1 - _WIDEST_NAME :]}" for name in names)
    return one, other


def _cells(row: Difference, room: int) -> tuple[str, ...]:
    return (
        cut(row.title, room),
        row.text(row.first),
        row.text(row.second),
        row.change,
    )

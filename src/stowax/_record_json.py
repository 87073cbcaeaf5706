"""Records from JSON types: what `dataclasses.asdict` wrote, read back and checked.

The types that the records declare say what has to be there. A number where a name is
expected, a field too many or too few is an error that says where; nothing is guessed.
"""

import contextlib
import dataclasses
import functools
import json
import math
import re
import types
import typing
from typing import Any


def json_of(text: str | bytes) -> Any:
    """What JSON text says.

    **Raises:** `ValueError`, also for text that is nested too deep to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


class NotSuchARecord(ValueError):
    """What was read does not fit the record; the text says where and why."""


def record_of(kind: type, value: Any, where: str = "") -> Any:
    """The record of type `kind` that `value` (of JSON types) describes.

    **Arguments:** `where` is the path to `value`, for errors.

    **Raises:** `NotSuchARecord`.
    """
    if not isinstance(value, dict):
        raise NotSuchARecord(f"{where or kind.__name__} is no record")
    expected = _types_of(kind)
    if unknown := sorted(value.keys() - expected.keys()):
        raise NotSuchARecord(f"{_below(where, unknown[0])} is not known")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    found = {}
    for name, wanted in expected.items():
        if name in value:
            found[name] = _value_of(wanted, value[name], _below(where, name))
        elif _has_no_default(fields[name]):
            raise NotSuchARecord(f"{_below(where, name)} is missing")
    return kind(**found)


@functools.cache
def _types_of(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


# What a terminal obeys, and what is no text: never in what we write. Lines may break.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_MOST = 1 << 63
"""Bytes and counts stay below it; so does all that C can take."""


def _is_plain(value: int | str) -> bool:
    return not _CONTROL.search(value) if isinstance(value, str) else _is_number(value)


def _is_number(value: float) -> bool:
    return value in (math.inf, -math.inf) or -_MOST < value < _MOST


def _has_no_default(field: Any) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _below(where: str, name: str | int) -> str:
    return f"{where}.{name}" if where else str(name)


def _value_of(wanted: Any, value: Any, where: str) -> Any:
    origin, inside = typing.get_origin(wanted), typing.get_args(wanted)
    if dataclasses.is_dataclass(wanted):
        assert isinstance(wanted, type)
        return record_of(wanted, value, where)
    if origin is tuple and isinstance(value, list):
        kinds = inside[:1] * len(value) if inside[-1] is ... else inside
        if len(kinds) == len(value):
            return tuple(
                _value_of(kind, item, _below(where, k))
                for k, (kind, item) in enumerate(zip(kinds, value, strict=True))
            )
    elif origin is dict and isinstance(value, dict):
        return {
            _key_of(inside[0], key, where): _value_of(
                inside[1], item, _below(where, key)
            )
            for key, item in value.items()
        }
    elif origin in (types.UnionType, typing.Union):
        return _one_of(inside, value, where)
    elif origin is typing.Literal and value in inside:
        return value
    elif wanted is float and type(value) in (int, float) and _is_number(value):
        return float(value)
    elif wanted in (int, str, bool) and type(value) is wanted and _is_plain(value):
        return value
    raise NotSuchARecord(f"{where} is {_told(value)}")


def _told(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except RecursionError:
        return "nested too deep"


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    *others, last = (kind for kind in kinds if kind is not type(None))
    for kind in others:
        with contextlib.suppress(NotSuchARecord):
            return _value_of(kind, value, where)
    return _value_of(last, value, where)


def _key_of(wanted: Any, key: str, where: str) -> Any:
    """A key of a dict, which JSON has as a name."""
    if wanted is not int:
        return key
    try:
        return int(key)
    except ValueError:
        raise NotSuchARecord(f"{where} has the key {key!r:.60}") from None

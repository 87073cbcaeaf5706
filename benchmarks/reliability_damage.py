"""Damage to files, from a seed: what disks, editors and people who mean harm do."""

import contextlib
import copy
import gzip
import json
import random
from typing import Any

_HOSTILE: tuple[Any, ...] = (
    *(None, True, False, "", " ", [], {}, [[]], 0, -1, 1, 1.5, -0.0, 1e308, 5e-324),
    *(2**31, 2**63, 2**64 - 1, -(2**63), 10**400, float("inf"), float("nan")),
    *("x\nimport os", "x\r\x0b\x85\u2028y", "\x1b]0;t\x07\x1b[31m", "\x00", "\ud800"),
    *("</script><script>alert(1)</script>", "../../etc/passwd", "x" * 100_000),
    *("\u202egnp.exe", "{x!r}", "%s%n", "__import__('os')", "cpu", "h200", "keep"),
)


def damaged(data: bytes, draw: random.Random) -> bytes:
    """A file's content, damaged once; JSON keeps its form in three of four cases."""
    if draw.random() < 0.75:
        try:
            found = json.loads(data)
        except ValueError:
            pass
        else:
            with contextlib.suppress(RecursionError):
                for _ in range(draw.choice((1, 1, 1, 2, 4))):
                    found = _changed(found, draw)
                return json.dumps(found, indent=draw.choice((None, 1))).encode()
    return _broken(data, draw)


def _broken(data: bytes, draw: random.Random) -> bytes:
    """What a disk, a transfer or an editor may make of bytes."""
    at, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    noise = draw.randbytes(draw.choice((1, 4, 64)))
    kinds = (
        lambda: data[:at],
        lambda: data[:at] + bytes(len(data) - at),
        lambda: data[:at] + data[end:],
        lambda: data[:at] + noise + data[at:],
        lambda: data[:at] + noise + data[at + len(noise) :],
        lambda: data[:at] + data[:end] + data[at:],
        lambda: _flipped(data, draw),
        lambda: b"",
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data.decode("latin-1").encode("utf-16"),
        lambda: gzip.compress(data, mtime=0),
        lambda: data * 2,
        lambda: b"[" * 100_000 + data,
    )
    return draw.choice(kinds)()


def _flipped(data: bytes, draw: random.Random) -> bytes:
    flipped = bytearray(data or b"x")
    for _ in range(draw.choice((1, 1, 8))):
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def _changed(found: Any, draw: random.Random) -> Any:
    """JSON with one place changed; in half of the cases to something of its type."""
    places = [*_places(found)]
    if not places:
        return draw.choice(_HOSTILE)
    parent, key = draw.choice(places)
    value = parent[key]
    if draw.random() < 0.5:
        alike = [p[k] for p, k in places if type(p[k]) is type(value)]
        parent[key] = _alike(value, copy.deepcopy(draw.choice(alike)), draw)
        return found
    kind = draw.randrange(5)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[f"{key}x"] = parent.pop(key)
    elif kind == 2 and isinstance(parent, list):
        parent.insert(key, value)
    elif kind == 3:
        parent[key] = _nested(draw.choice((3, 50, 200)))
    else:
        parent[key] = copy.deepcopy(draw.choice(_HOSTILE))
    return found


def _alike(value: Any, other: Any, draw: random.Random) -> Any:
    """A value of the same type: another's, or this one a little off."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        near = (value + 1, value - 1, -value, value * 1000, 2**62, 2**40, 0)
        return type(value)(draw.choice((*near, other)))
    if isinstance(value, str):
        return draw.choice((other, value + other, value[:-1], value + "\n#"))
    if isinstance(value, list):
        return draw.choice((other, value[1:], value[::-1], value + value))
    return other


def _places(found: Any) -> Any:
    keys = range(len(found)) if isinstance(found, list) else found
    for key in keys if isinstance(found, list | dict) else ():
        yield found, key
        yield from _places(found[key])


def _nested(depth: int) -> Any:
    made: Any = 1
    for _ in range(depth):
        made = [made]
    return made

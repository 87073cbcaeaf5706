"""A failing program made simpler, part by part, as long as it fails alike.

Hypothesis does this by itself for what it drew; the campaign's programs come from
seeds, and are simplified here.
"""

import dataclasses

from .programs import Program, Wishes, settled


def _simpler(thing, plain):
    """The same with one part less, the largest steps first."""
    for field in dataclasses.fields(thing):
        value, usual = getattr(thing, field.name), getattr(plain, field.name)
        if value != usual:
            yield dataclasses.replace(thing, **{field.name: usual})
    for name in ("layer", "other", "pin"):
        parts = getattr(thing, name, ())
        if len(parts) > 1:
            for k in range(len(parts)):
                less = (*parts[:k], *parts[k + 1 :])
                yield dataclasses.replace(thing, **{name: less})


def candidates(program, wishes):
    """Pairs that are simpler by one part."""
    for less in _simpler(wishes, Wishes()):
        yield program, less
    for less in _simpler(program, Program()):
        yield settled(less), wishes


def shrunk(program, wishes, fails, most=60):
    """The simplest pair for which `fails(program, wishes)` is still true.

    **Arguments:** `most` is how many pairs are tried.
    """
    seen, again = {(program, wishes)}, True
    while again:
        again = False
        for pair in list(candidates(program, wishes)):
            if pair in seen or len(seen) > most:
                continue
            seen.add(pair)
            if fails(*pair):
                (program, wishes), again = pair, True
                break
    return program, wishes

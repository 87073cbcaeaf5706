"""Plans with some fields changed, whichever part of the plan they are in."""

import dataclasses

PARTS = ("program", "proof", "search")


def changed(plan, **fields):
    """`plan` with these fields, each in the part that has it.

    >>> changed(plan, fits=False, binding=())  # doctest: +SKIP
    """
    own = {"decisions": fields.pop("decisions", plan.decisions)}
    for part in PARTS:
        record = getattr(plan, part)
        names = {f.name for f in dataclasses.fields(record)} & fields.keys()
        new = {name: fields.pop(name) for name in names}
        own[part] = dataclasses.replace(record, **new)
    assert not fields, f"no part of a plan has {sorted(fields)}"
    return dataclasses.replace(plan, **own)

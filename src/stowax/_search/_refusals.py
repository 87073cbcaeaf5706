"""What becomes of a search whose program the compiler refuses.

A compiler may refuse a program for other reasons than memory: a layout that it has no
copy for, a slice of a kind that it does not know. That is not the user's error, and no
reason to have no plan. The value that the compiler's words name stays on the device; if
they name none, or that does not help, more stays, and at last everything. So it goes
where the compiler leaves copies out (two like passes that it makes one of, say).
"""

import dataclasses
import re
from collections.abc import Callable, Iterator

from .._errors import OffloadVanishedError, StowaxError
from .._records._stages import Body, Value
from .._survey._held import holding
from .._survey._survey import Survey
from ._as_written import anew
from ._loop import Search

# Named scopes of copies: of state and gradients by argument, of layers' values.
_STATE = re.compile(r"stowax\.(?:state|gradient)\.(\d+)")
_LAYER = re.compile(r"stowax\.(?:offload|fetch)\.([^/()\"\s]+)\.(\d+)")

Stays = Callable[[Body, Value], bool]


def narrower(search: Search, error: StowaxError) -> Iterator[Search]:
    """Searches that offload less than `search`, each less than the one before.

    That goes for what was pinned to host memory, too: a pin holds for what it is
    possible for, and the plan's notes say what it is not.
    """
    survey = search.survey
    vanished = isinstance(error, OffloadVanishedError)
    words = " ".join((str(error), *(error.scopes if vanished else ())))
    named = _named(survey, words)
    ways: tuple[tuple[str, Stays], ...] = (
        ("what it names", lambda b, v: (b.name, v.index) in named),
        ("parameters", lambda b, v: v.role == "parameter"),
        ("state", lambda b, v: b.phase == "update"),
        ("everything", lambda b, v: True),
    )
    done: list[Stays] = []
    for what, stays in ways:
        done.append(stays)
        own = _keeping(survey, done)
        if own.bodies == survey.bodies:
            continue
        why = "left copies out of" if vanished else "refused"
        note = (
            f"{what} may not be offloaded: the compiler {why} the program "
            f"({_first_line(error)})"
        )
        refused = (*survey.refused, note)
        free = _keeping(search.free, done)
        survey = dataclasses.replace(own, refused=refused)
        yield anew(search, survey=survey, free=free, log=[], plain={})


def _keeping(survey: Survey, ways: list[Stays]) -> Survey:
    """The survey with what any of `ways` names on the device, or computed again."""
    held = lambda body, value: any(stays(body, value) for stays in ways)
    bodies = holding(survey.bodies, held, "the compiler refused")
    return dataclasses.replace(survey, bodies=bodies)


def _named(survey: Survey, message: str) -> set[tuple[str, int]]:
    """The values whose copies the compiler's words name."""
    found = {(m[1], int(m[2])) for m in _LAYER.finditer(message)}
    leaves = {int(m[1]) for m in _STATE.finditer(message)}
    if survey.state is not None:
        found |= {
            (survey.state.body.name, index)
            for index, own in enumerate(survey.state.leaves)
            if not leaves.isdisjoint(own)
        }
    return found


def _first_line(error: StowaxError) -> str:
    return str(error).splitlines()[0][:300]

"""Searches beside the first one: the same wishes, another form of the step.

`AsWritten` has the layers of a Python loop as they are written; what a user asks for
decides whether that is a plan at all (`asks_for_more`). `Returned` returns gradients in
host memory, where their parameters are.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from .._records._stages import Value
from .._state._state import search_state
from .._step._trace import trace_step
from .._survey._preferences import Preferences
from .._survey._survey import Survey, take_survey
from .._update._record import Streamed
from ._lessons import Lessons
from ._loop import Search

_NOT_DONATED = "it is updated in its place in host memory, which donate=False forbids"


@dataclasses.dataclass(slots=True, kw_only=True)
class AsWritten:
    """Makes the search for the step with its layers as they are written."""

    rolled: Search
    pin: Mapping[str, str]
    forbid: Collection[str]

    def __call__(self) -> Search | None:
        """The search, `None` if the user wants something done to the rolled layers."""
        rolled = self.rolled.survey
        if asks_for_more(
            self.rolled.free, rolled, lambda v: v.role != "optimizer state"
        ):
            return None
        options = dataclasses.replace(rolled.options, roll=False)
        step, specs = rolled.function, rolled.specs
        traced = trace_step(rolled.step.recording, specs, options)
        free = take_survey(
            step, specs, traced, rolled.target, options, rolled.least_bytes
        )
        return beside(self.rolled, free, self.pin, self.forbid)


@dataclasses.dataclass(slots=True, kw_only=True)
class Returned:
    """Makes the search for the step that returns gradients in host memory.

    Those of parameters that it only reads and that the host holds. By themselves they
    come on the device: what computes with them next would refuse host memory. So this
    is for steps that do not fit otherwise.
    """

    rolled: Search
    pin: Mapping[str, str]
    forbid: Collection[str]

    def __call__(self) -> Search | None:
        """The search, `None` if the step returns no such gradients."""
        rolled = self.rolled.survey
        if rolled.state is None or not rolled.state.read_only:
            return None
        step, specs, least = rolled.step, rolled.specs, rolled.least_bytes
        found = search_state(
            step, jax.tree.leaves(specs), rolled.target, least, returned=True
        )
        if found.feeds.gradients.keys().isdisjoint(_outputs(found)):
            return None
        target, options = rolled.target, rolled.options
        free = take_survey(
            rolled.function,
            specs,
            step,
            target,
            options,
            least,
            gradients_on_host=True,
        )
        return beside(self.rolled, free, self.pin, self.forbid)


def _outputs(found: Streamed) -> set[int]:
    return {number for number in found.program.outputs if isinstance(number, int)}


def beside(
    rolled: Search, free: Survey, pin: Mapping[str, str], forbid: Collection[str]
) -> Search:
    """A search for another form of the step, with the same wishes and the same log."""
    if rolled.donate is False:
        free = without_donation(free)
    # Patterns that meet nothing here have met something in the rolled layers.
    preferences = Preferences(pin=pin, forbid=forbid)
    return anew(rolled, survey=narrowed(free, preferences), free=free, plain={})


def anew(search: Search, **changes: Any) -> Search:
    """The same search before it compiled or learned anything, with `changes`."""
    nothing = {
        "attempts": [],
        "charges": {},
        "windows": {},
        "nearly": None,
        "lessons": Lessons(),
        "proposed": {},
        "least": set(),
    }
    return dataclasses.replace(search, **{**nothing, **changes})


def narrowed(survey: Survey, preferences: Preferences) -> Survey:
    """The survey with what the user wants decided."""
    return dataclasses.replace(survey, bodies=preferences.narrow(survey.bodies))


def without_donation(survey: Survey) -> Survey:
    """State in host memory is updated where it lies: its buffers have to be donated.

    Those of what is only read need not be.
    """
    if survey.state is None:
        return survey
    read_only = survey.state.read_only
    state, *layers = survey.bodies
    values = tuple(
        value
        if value.index in read_only
        else dataclasses.replace(
            value, allowed=frozenset({"keep"}), stays=value.stays or _NOT_DONATED
        )
        for value in state.values
    )
    bodies = (dataclasses.replace(state, values=values), *layers)
    return dataclasses.replace(survey, bodies=bodies)


def asks_for_more(
    free: Survey, survey: Survey, counts: Callable[[Value], bool]
) -> bool:
    """Whether the user wants something moved that could stay as it is.

    The step as it is written does not do that, even where it fits. `counts` says which
    values are meant.
    """
    return any(
        value.needed and "keep" in value.allowed and "keep" not in narrowed.allowed
        for body, wanted in zip(free.bodies, survey.bodies, strict=True)
        for value, narrowed in zip(body.values, wanted.values, strict=True)
        if not value.available and counts(value)
    )

"""The step with its layers as they are written: a search beside the rolled layers'.

What a user asks for decides whether that is a plan at all (`asks_for_more`).
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping

from .._records._stages import Value
from .._step._trace import trace_step
from .._survey._preferences import Preferences
from .._survey._survey import Survey, take_survey
from ._lessons import Lessons
from ._loop import Search

_NOT_DONATED = "it is updated in its place in host memory, which donate=False forbids"


@dataclasses.dataclass(slots=True, kw_only=True)
class AsWritten:
    """Makes the search for the step with its layers as they are written.

    `free` is the survey before pins and prohibitions.
    """

    rolled: Search
    free: Survey
    pin: Mapping[str, str]
    forbid: Collection[str]

    def __call__(self) -> Search | None:
        """The search, `None` if the user wants something done to the rolled layers."""
        rolled = self.rolled.survey
        if asks_for_more(self.free, rolled, lambda v: v.role != "optimizer state"):
            return None
        options = dataclasses.replace(rolled.options, roll=False)
        step, specs = rolled.function, rolled.specs
        traced = trace_step(step, specs, options)
        self.free = take_survey(
            step, specs, traced, rolled.target, options, rolled.least_bytes
        )
        if self.rolled.donate is False:
            self.free = without_donation(self.free)
        # Patterns that meet nothing here have met something in the rolled layers.
        preferences = Preferences(pin=self.pin, forbid=self.forbid)
        return dataclasses.replace(
            self.rolled,
            survey=narrowed(self.free, preferences),
            attempts=[],
            charges={},
            lessons=Lessons(),
            proposed={},
            least=set(),
            plain={},
        )


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

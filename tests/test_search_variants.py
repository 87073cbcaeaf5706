"""Which of several variants is compiled, by what is expected of each."""

import dataclasses
import types

import pytest

from planner_problems import chain
from stand_in_search import Predicted, searching, space, surveyed
from stowax._search import _loop, _variants

BODY = chain(count=10, bytes=8, needed=(1, 2, 3), forward_seconds=3.0)
BUDGET = 250


def test_variants_are_opened_only_where_nothing_is_expected_to_fit(monkeypatch):
    search, _ = searching(monkeypatch, BODY, 30)
    opened = []

    def variant(space, budget):
        opened.append(budget)
        return None

    search.unopened = [variant, variant]
    search.run()
    assert opened == [30, 30]
    search, _ = searching(monkeypatch, BODY, BUDGET)
    search.unopened = [variant]
    search.run()
    assert opened == [30, 30]
    assert search.unopened


class Half(Predicted):
    """Predictions of a variant that needs half of what the others do."""

    def predicted(self, decisions):
        return super().predicted(decisions) // 2


def test_smaller_arrays_leave_what_needs_the_least_too(monkeypatch):
    """Not only loops: what is left of those may be much more."""
    asked = []
    finer = lambda known, budget: asked.append(known.name)
    monkeypatch.setattr(_loop, "finer", finer)
    search, _ = searching(monkeypatch, BODY, 30)
    half = space(surveyed(BODY), 30, search.asked, memory=Half)
    half = dataclasses.replace(half, name="half")
    search.unopened = [lambda rolled, budget: half, finer]
    search.run()
    assert asked == ["rolled", "half"]


def expecting(monkeypatch, *proposals):
    """A search in which variants propose what is said: bytes, seconds, left alone."""
    search, _ = searching(monkeypatch, BODY, BUDGET)
    made = {}
    for size, seconds, alone in proposals:
        other = space(surveyed(BODY), BUDGET, search.asked)
        made[id(other)] = types.SimpleNamespace(
            space=other, bytes=size, seconds=seconds, left_alone=alone
        )
        search.spaces.append(other)
    search.propose = types.SimpleNamespace(settled=lambda s, *_, **__: made[id(s)])
    return search


@pytest.mark.parametrize(
    ("proposals", "taken"),
    [
        ([(225, 2.0, False), (240, 1.9, False)], 1),
        # 5 % more than there is, and 5 % faster: predictions err by as much.
        ([(225, 2.0, False), (260, 1.8, False)], 1),
        ([(225, 2.0, False), (265, 1.8, False)], 0),
        ([(225, 2.0, False), (260, 1.95, False)], 0),
        # What is left alone has to be beaten clearly.
        ([(225, 2.0, True), (225, 1.95, False)], 0),
        ([(225, 2.0, True), (225, 1.85, False)], 1),
        ([(260, 1.0, False)], None),
    ],
)
def test_the_fastest_that_should_fit_is_compiled(monkeypatch, proposals, taken):
    search = expecting(monkeypatch, *proposals)
    found = search._fastest(search.spaces, 0.0)
    expected = None if taken is None else search.spaces[taken]
    assert (found and found.space) is expected


@pytest.mark.parametrize("decisions", ["keep recompute", "keep offload recompute"])
def test_copies_are_waited_for_only_where_there_may_be_some(monkeypatch, decisions):
    allowed = frozenset(decisions.split())
    values = (dataclasses.replace(v, allowed=v.allowed & allowed) for v in BODY.values)
    body = dataclasses.replace(BODY, values=tuple(values))
    search, _ = searching(monkeypatch, body, BUDGET)
    survey = search.rolled.survey
    found = _variants._sparing(search.rolled, "copies waited for", survey, survey)
    assert (found is not None) == ("offload" in allowed)

"""Random optimizers give the same numbers with all of their state in host memory.

And what the proof accepts gives the same numbers, whatever was done to the schedule:
steps are swapped, dropped and doubled, writes too, and the rules that keep old values
until they were read are switched off. Operation by operation the results are the same
bits.
"""

import dataclasses
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from random_updates import Recipe, arrays, recipes
from stowax._errors import InternalError
from stowax._update import _find, _groups, _levels, _order, _run
from stowax._update._proof import prove
from stowax._update._record import Group, Streamed
from updates import StreamedStep, streamed_step

pytestmark = pytest.mark.usefixtures("usual_promotion")

FEW = settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def found(recipe: Recipe) -> StreamedStep:
    state, batch = arrays(recipe.leaves, 0), arrays(recipe.leaves, 1)
    return streamed_step(recipe.step, (), state, batch)


def check_numbers(recipe: Recipe, step: StreamedStep) -> None:
    args = (), arrays(recipe.leaves, 0), arrays(recipe.leaves, 1)
    with jax.disable_jit():
        expected, got = recipe.step(*args), step.run(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
@FEW
@given(recipe=recipes())
def test_random_optimizers_give_the_same_numbers(recipe):
    step = found(recipe)
    # No leaf had to be given up: the schedule was right at the first attempt.
    ways = {leaf.reason for leaf in step.leaves}
    assert all(not why or "as a whole" in why or "returned" in why for why in ways)
    check_numbers(recipe, step)


def without_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules as if nobody had thought of old values, and none of them refused."""

    def made(question: Any, member: Any, value: Any, written: Any) -> Any:
        return {leaf: value[number] for leaf, number in question.results.items()}

    monkeypatch.setattr(_levels, "_written", made)
    monkeypatch.setattr(_order, "readers_before", lambda groups: {})
    monkeypatch.setattr(_groups, "needed_together", lambda groups: [])
    monkeypatch.setattr(_find, "prove", lambda streamed: [])


def stale(leaves: int) -> tuple[Recipe, ...]:
    """Recipes that read old state after its new value is there, by `without_rules`."""
    state, gradient, made = range(leaves), range(leaves, 2 * leaves), 2 * leaves
    return (
        # A clipped momentum step: the old momentum once more, after the new one's norm.
        Recipe(
            leaves=leaves,
            operations=(
                ("mean", state[0], gradient[0]),
                ("normed", state[0], made),
            ),
            results=(made, made + 1, *state[2:]),
            returned=(),
        ),
        # Two leaves become each other.
        Recipe(
            leaves=leaves,
            operations=(("decay", state[0], state[0]),),
            results=(state[1], state[0], *state[2:]),
            returned=(made,),
        ),
        # The parameters before this step are kept, and pull at the new ones.
        Recipe(
            leaves=leaves,
            operations=(
                ("mean", state[0], gradient[0]),
                ("normed", made, state[1]),
                ("mean", made + 1, state[1]),
            ),
            results=(made + 2, state[0], *state[2:]),
            returned=(),
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", stale(2))
def test_schedules_without_the_rules_are_wrong_and_not_proven(recipe, monkeypatch):
    check_numbers(recipe, found(recipe))
    with monkeypatch.context() as patched:
        without_rules(patched)
        step = found(recipe)
    unproven = prove(step.found)
    assert any("reads its old value" in one.reason for one in unproven)
    args = (), arrays(2, 0), arrays(2, 1)
    with pytest.raises(InternalError, match=r"flat argument [01]: .* its old value"):
        step.run(*args)
    # That is what the proof stands in the way of.
    monkeypatch.setattr(_run, "prove", lambda streamed, on_host: [])
    with pytest.raises(AssertionError):
        check_numbers(recipe, step)


@pytest.mark.slow
@FEW
@given(recipe=recipes())
def test_what_is_proven_is_right_without_the_rules(recipe):
    with pytest.MonkeyPatch.context() as patched:
        without_rules(patched)
        step = found(recipe)
    if not prove(step.found):
        check_numbers(recipe, step)


def changed(draw: Any, streamed: Streamed) -> Streamed:
    """The schedule with one thing wrong, perhaps: some changes make no difference."""
    schedule = list(streamed.schedule)
    if not schedule:
        return streamed
    place = st.integers(0, len(schedule) - 1)
    what = draw(st.sampled_from(("swap", "drop", "repeat", "write", "give", "value")))
    i, j = draw(place), draw(place)
    if what == "swap":
        schedule[i], schedule[j] = schedule[j], schedule[i]
    elif what == "drop":
        del schedule[i]
    elif what == "repeat":
        schedule.insert(j, schedule[i])
    groups = [k for k, item in enumerate(schedule) if isinstance(item, Group)]
    if what in ("write", "give", "value") and groups:
        k = draw(st.sampled_from(groups))
        group = schedule[k]
        assert isinstance(group, Group)
        if what == "write":
            group = dataclasses.replace(group, writes=group.writes[1:])
        elif what == "give":
            group = dataclasses.replace(group, gives=group.gives[1:])
        else:
            program = streamed.program
            every = [o for p in group.nodes for o in program.nodes[p].outputs]
            every += [*group.reads, *group.sliced]
            leaves = [leaf for _, leaf in group.writes]
            values = st.sampled_from(every)
            writes = tuple((draw(values), leaf) for leaf in leaves)
            group = dataclasses.replace(group, writes=writes)
        schedule[k] = group
    return dataclasses.replace(streamed, schedule=tuple(schedule))


@pytest.mark.slow
@FEW
@given(recipe=recipes(), data=st.data())
def test_what_is_proven_is_right_after_any_change(recipe, data):
    step = found(recipe)
    step = dataclasses.replace(step, found=changed(data.draw, step.found))
    if not prove(step.found):
        check_numbers(recipe, step)

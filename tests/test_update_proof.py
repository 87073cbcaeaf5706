"""The proof finds what is wrong with a schedule, whatever it is.

Good schedules are proven by every other test that runs one. Here each test breaks one
in one way, and the proof has to name the leaf and say what is wrong.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
import stowax._state._stream
from stowax._errors import InternalError
from stowax._update import _find
from stowax._update._blocks import Cut
from stowax._update._proof import Unproven, not_proven, prove
from stowax._update._record import Group, Streamed, copying
from updates import streamed_step

pytestmark = pytest.mark.usefixtures("usual_promotion")

SHAPE = (64, 128)
MOMENT, AVERAGE, KEPT = 1, 2, 3  # flat positions of the state, after the parameter


def norm(a: Any) -> Any:
    return jnp.sqrt(jnp.sum(a * a))


def step(params: Any, state: Any, batch: Any) -> Any:
    """Two levels: the norm of the new moment comes before the average is updated."""
    moment, average, kept = state
    new = 0.9 * moment + batch
    pulled = average + (new - moment) / norm(new)
    return params - jnp.cumsum(average, axis=0), (new, pulled, kept * jnp.exp(batch[0]))


@pytest.fixture
def good() -> Streamed:
    arrays = [jnp.ones(SHAPE)] * 5
    found = streamed_step(step, arrays[0], tuple(arrays[1:4]), arrays[4]).found
    assert prove(found) == []
    return found


def reasons(streamed: Streamed) -> dict[int | None, list[str]]:
    found: dict[int | None, list[str]] = {}
    for one in prove(streamed):
        found.setdefault(one.leaf, []).append(one.reason)
    return found


def writing(streamed: Streamed, leaf: int) -> int:
    """The place in the schedule of the loop that writes a leaf."""
    (place,) = [
        k
        for k, item in enumerate(streamed.schedule)
        if isinstance(item, Group) and leaf in dict(map(reversed, item.writes))
    ]
    return place


def with_schedule(streamed: Streamed, schedule: list[Any]) -> Streamed:
    return dataclasses.replace(streamed, schedule=tuple(schedule))


def changed(
    streamed: Streamed, leaf: int, change: Callable[[Group], dict[str, Any]]
) -> Streamed:
    """`streamed`, the loop that writes a leaf with other fields."""
    schedule, k = list(streamed.schedule), writing(streamed, leaf)
    schedule[k] = dataclasses.replace(schedule[k], **change(schedule[k]))
    return with_schedule(streamed, schedule)


def test_a_loop_that_reads_too_late(good):
    schedule, last = list(good.schedule), writing(good, AVERAGE)
    schedule.insert(0, schedule.pop(last))  # the average is needed whole, too
    found = reasons(with_schedule(good, schedule))
    stale = "a loop reads its old value after the new one has taken its place"
    assert stale in found[AVERAGE]


def test_a_leaf_that_is_fetched_whole_too_late(good):
    schedule = list(good.schedule)
    (fetch,) = [
        k
        for k, item in enumerate(schedule)
        if isinstance(item, Group) and not item.nodes and item.reads == (AVERAGE,)
    ]
    schedule.append(schedule.pop(fetch))
    found = reasons(with_schedule(good, schedule))
    assert any(reason.startswith("a loop reads its old") for reason in found[AVERAGE])
    assert any("cumsum" in reason for reason in found[AVERAGE])


@pytest.mark.parametrize("leaf", [MOMENT, AVERAGE, KEPT])
def test_a_write_that_is_missing(good, leaf):
    def without(group: Group) -> dict[str, Any]:
        return {"writes": tuple(w for w in group.writes if w[1] != leaf)}

    assert reasons(changed(good, leaf, without)) == {
        leaf: ["its new value is not written"]
    }


def test_the_new_value_of_another_leaf(good):
    def other(group: Group) -> dict[str, Any]:
        leaves = [leaf for _, leaf in group.writes]
        return {"writes": tuple((group.reads[0], leaf) for leaf in leaves)}

    found = reasons(changed(good, KEPT, other))
    assert "its new value is not written" in found[KEPT]


def test_a_value_that_is_written_before_it_is_made(good):
    later = good.schedule[writing(good, AVERAGE)]
    assert isinstance(later, Group)
    value = next(number for number, leaf in later.writes if leaf == AVERAGE)
    found = reasons(
        changed(good, KEPT, lambda group: {"writes": (*group.writes, (value, KEPT))})
    )
    assert "its new value is written where it was not made" in found[KEPT]
    assert "two values are written to it in one loop" in found[KEPT]


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (Cut(view=((128,), (64,)), block=(16, 64)), "it is not cut as its loop is"),
        (Cut(view=((64,), (128,)), block=(24, 128)), "do not make up the whole"),
        (
            Cut(view=((64,), (128,)), block=(16, 128), order=(0, 1)),
            "its axes lie otherwise",
        ),
    ],
)
def test_another_cut(good, cut, said):
    found = reasons(changed(good, KEPT, lambda group: {"cut": cut}))
    assert any(said in reason for reason in found[KEPT])


def test_equations_in_another_order(good):
    found = reasons(changed(good, MOMENT, lambda g: {"nodes": g.nodes[::-1]}))
    assert "a value that is not there yet" in str(found)


def test_an_equation_that_is_no_arithmetic_of_elements(good):
    nodes = good.program.nodes
    (whole,) = [k for k, n in enumerate(nodes) if n.equation.primitive.name == "cumsum"]
    found = reasons(
        changed(good, AVERAGE, lambda g: {"nodes": tuple(sorted({*g.nodes, whole}))})
    )
    assert "cumsum" in str(found)


def test_an_operand_that_nothing_brings(good):
    for field in ("reads", "sliced", "others", "spread"):
        for place in (MOMENT, AVERAGE, KEPT):
            group = good.schedule[writing(good, place)]
            if not getattr(group, field):
                continue
            found = reasons(changed(good, place, lambda g, f=field: {f: ()}))
            assert "reads in a loop a value that is not there yet" in str(found)


def test_a_result_that_a_loop_does_not_give(good):
    schedule = list(good.schedule)
    for k, item in enumerate(schedule):
        if isinstance(item, Group) and item.gives:
            less = [*schedule]
            less[k] = dataclasses.replace(item, gives=())
            assert "on the device, where it is not" in str(
                reasons(with_schedule(good, less))
            )


def test_a_result_in_the_place_of_what_is_read_elsewhere(good):
    def placed(group: Group) -> dict[str, Any]:
        number = group.writes[0][0]
        return {"gives": ((number, MOMENT),)}

    found = reasons(changed(good, KEPT, placed))
    assert "a loop's result takes the place of another array" in found[KEPT]


def test_a_node_that_is_missing(good):
    plain = [k for k, item in enumerate(good.schedule) if isinstance(item, int)]
    for k in plain:
        schedule = list(good.schedule)
        del schedule[k]
        assert prove(with_schedule(good, schedule))


def test_two_results_in_the_place_of_one(good):
    outputs = dict.fromkeys(good.host_outputs, MOMENT)
    found = reasons(dataclasses.replace(good, host_outputs=outputs))
    assert found[None] == ["two results take the place of one array"]


# ------------------------------------------------- loops of layers, totals, gradients


@pytest.fixture(scope="module")
def fed() -> Any:
    """A schedule with parameters that the layers' loops fetch, and their gradients."""
    kept: list[Streamed] = []
    real = stowax._state._stream.run_streamed

    def keeping(streamed: Streamed, *args: Any, **options: Any) -> Any:
        kept.append(streamed)
        return real(streamed, *args, **options)

    @stowax.stow
    def loss(w, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    def train(state, x):
        w, moment = state
        gradient = jax.grad(loss)(w, x)
        size = jnp.sqrt(jnp.sum(gradient * gradient))
        moment = 0.9 * moment + gradient
        return w - 0.1 * moment / (1 + size), moment

    state = jnp.full((4, 64, 64), 0.01), jnp.zeros((4, 64, 64))
    x = jnp.ones((16, 64))
    plan = stowax.plan(
        train,
        state,
        x,
        target="h200",
        budget="150KiB",
        pin={"parameter": "offload", "optimizer state": "offload"},
        progress=False,
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stowax._state._stream, "run_streamed", keeping)
        plan.apply(train)(plan.place(state), x)
    found = kept[-1]
    assert found.feeds.served
    assert any(group.totals for group in found.groups)
    assert any(group.gradients for group in found.groups)
    assert prove(found) == []
    return found


@pytest.mark.slow
def test_a_layers_loop_that_fetches_too_late(fed):
    schedule = list(fed.schedule)
    k = max(k for k, item in enumerate(schedule) if item in fed.feeds.served)
    schedule.append(schedule.pop(k))
    stale = "reads its old value after the new one has taken its place"
    assert any(stale in reason for reason in reasons(with_schedule(fed, schedule))[0])


def test_a_total_that_its_own_loop_reads(fed):
    (k,) = [
        k
        for k, item in enumerate(fed.schedule)
        if isinstance(item, Group) and item.totals
    ]
    schedule, program = list(fed.schedule), fed.program
    group = schedule[k]
    assert isinstance(group, Group)
    readers = {k for k, n in enumerate(program.nodes) if group.totals[0] in n.inputs}
    nodes = tuple(sorted({*group.nodes, *readers}))
    schedule[k] = dataclasses.replace(group, nodes=nodes)
    found = reasons(with_schedule(fed, schedule))
    assert "reads in a loop a sum that the loop has not finished" in str(found)


def test_a_gradient_of_another_leaf_or_layer(fed):
    (number,) = fed.feeds.gradients
    value = fed.feeds.gradients[number]
    for other in (
        dataclasses.replace(value, index=1),
        dataclasses.replace(value, leaf=1),
        dataclasses.replace(value, made=value.made + 1),
    ):
        schedule = [
            dataclasses.replace(item, gradients=(other,))
            if isinstance(item, Group) and item.gradients
            else item
            for item in fed.schedule
        ]
        feeds = dataclasses.replace(fed.feeds, gradients={number: other})
        broken = dataclasses.replace(with_schedule(fed, schedule), feeds=feeds)
        assert any("its gradient" in one.reason for one in prove(broken))


def test_a_chain_that_leads_elsewhere(fed):
    (number,) = {n for n, (leaf, _) in fed.feeds.chains.items() if leaf == 0}
    feeds = dataclasses.replace(fed.feeds, chains={**fed.feeds.chains, number: (1, ())})
    found = reasons(dataclasses.replace(fed, feeds=feeds))
    assert "the layers' loop fetches another value" in found[1]


# ------------------------------------------------------- what becomes of the unproven


def test_an_unproven_leaf_goes_whole_and_then_stays(monkeypatch, good):
    """Where nothing can be proven of a leaf, it ends on the device, with the reason."""
    asked = []

    def suspicious(streamed: Streamed) -> list[Unproven]:
        (leaf,) = [leaf for leaf in streamed.leaves if leaf.input == MOMENT]
        asked.append(leaf.way)
        if leaf.way == "device":
            return prove(streamed)
        return [Unproven(leaf=MOMENT, reason="it is a test's")]

    monkeypatch.setattr(_find, "prove", suspicious)
    arrays = [jnp.arange(64 * 128.0).reshape(SHAPE) / 8192 + k for k in range(5)]
    args = arrays[0], tuple(arrays[1:4]), arrays[4]
    found = streamed_step(step, *args)
    assert asked == ["streamed", "whole", "device"]
    ways = {leaf.input: (leaf.way, leaf.reason) for leaf in found.leaves}
    assert ways[MOMENT] == ("device", "it is a test's")
    assert ways[KEPT] == ("streamed", "")
    got, expected = found.compiled(*args), step(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("leaf", [MOMENT, AVERAGE, KEPT])
def test_a_leaf_that_goes_whole_gives_the_same_numbers(monkeypatch, leaf):
    def suspicious(streamed: Streamed) -> list[Unproven]:
        (mine,) = [one for one in streamed.leaves if one.input == leaf]
        if mine.way == "whole" and mine.reason == "it is a test's":
            return prove(streamed)
        return [Unproven(leaf=leaf, reason="it is a test's")]

    monkeypatch.setattr(_find, "prove", suspicious)
    arrays = [jnp.arange(64 * 128.0).reshape(SHAPE) / 8192 + k for k in range(5)]
    args = arrays[0], tuple(arrays[1:4]), arrays[4]
    found = streamed_step(step, *args)
    with jax.disable_jit():
        got, expected = found.run(*args), step(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_what_names_no_leaf_keeps_all_of_them(monkeypatch):
    def suspicious(streamed: Streamed) -> list[Unproven]:
        found = Unproven(leaf=None, reason="it is a test's")
        return [found] if streamed.host_inputs else prove(streamed)

    monkeypatch.setattr(_find, "prove", suspicious)
    arrays = [jnp.ones(SHAPE)] * 5
    found = streamed_step(step, arrays[0], tuple(arrays[1:4]), arrays[4])
    assert {(leaf.way, leaf.reason) for leaf in found.leaves} == {
        ("device", "it is a test's")
    }


def test_what_cannot_be_proven_at_all_is_an_error(monkeypatch):
    never = [Unproven(leaf=MOMENT, reason="it is a test's")]
    monkeypatch.setattr(_find, "prove", lambda streamed: never)
    arrays = [jnp.ones(SHAPE)] * 5
    with pytest.raises(InternalError, match="flat argument 1: it is a test's"):
        streamed_step(step, arrays[0], tuple(arrays[1:4]), arrays[4])


def test_an_unproven_schedule_never_runs(good):
    arrays = [jnp.ones(SHAPE)] * 5
    found = streamed_step(step, arrays[0], tuple(arrays[1:4]), arrays[4])
    schedule = list(good.schedule)
    del schedule[writing(good, KEPT)]
    broken = dataclasses.replace(found, found=with_schedule(good, schedule))
    with pytest.raises(InternalError, match=r"is not written.*Please report it"):
        broken.run(arrays[0], tuple(arrays[1:4]), arrays[4])


def test_the_error_counts_what_else_is_wrong():
    many = [Unproven(leaf=None, reason=f"reason {k}") for k in range(3)]
    assert "numbers: reason 0 (and 2 more)." in str(not_proven(many))


def test_a_copy_of_a_leaf_that_was_written(good):
    """One leaf becomes another one's old value, which is gone."""
    group = good.schedule[writing(good, AVERAGE)]
    assert isinstance(group, Group)
    copy = copying(group.cut, KEPT, AVERAGE, made_on_host=True)
    found = reasons(with_schedule(good, [*good.schedule, copy]))
    assert "a loop reads its old value" in str(found[AVERAGE])
    assert found[KEPT] == ["its new value is written over"]

"""Layers that run as two parts, each with decisions of its own.

Numbers are of the CPU, bytes of programs compiled for chips that are not there.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import stowax
from layered import WEIGHTS, WIDTH, X, gradient_step, layer, run_layers
from planned_models import arguments, compiled_total, numbers, plan, train
from planned_steps import assert_close, check, counts
from report_records import PLAN
from stowax._inspect._ledger import copies_of, serving
from stowax._layers._rewrite import Options
from stowax._layers._stack import can_run_as_parts, parts_of
from stowax._mark import stow
from stowax._records._program import Transfer
from stowax._search import _parts
from stowax._search._forms import Found
from stowax._step._trace import trace_step

LAYERS = 5
MANY = jax.tree.map(lambda w: jnp.concatenate([w, 2 * w[: LAYERS - 3]]), WEIGHTS)


def divided(step, args, first_part):
    """Options with which every stack of a step runs as two parts."""
    names = {n.rpartition("-")[0] for n in trace_step(step, args, Options()).stacks}
    return Options(parts=tuple((name, first_part) for name in sorted(names)))


def looped(body, x, weights):
    for k in range(LAYERS):
        x = body(x, jax.tree.map(lambda w, k=k: w[k], weights))
    return x


@pytest.mark.slow
@pytest.mark.parametrize("first_part", [1, 3, LAYERS - 1])
@pytest.mark.parametrize("run", [run_layers, looped], ids=["scan", "loop"])
def test_two_parts_compute_what_one_stack_does(run, first_part):
    def loss(weights, x, scale):
        return jnp.mean(run(lambda x, p: scale[None, :] * layer(x, p), x, weights) ** 2)

    def step(weights, x, scale):
        return jax.value_and_grad(stow(loss), argnums=(0, 1, 2))(weights, x, scale)

    args = MANY, X, jnp.full((WIDTH,), 1.5)
    options = divided(step, args, first_part)
    check(
        step,
        args,
        [first_part, LAYERS - first_part],
        seeds=(0, 1, 2),
        options=options,
        exact=run is run_layers,
    )


def test_weights_that_are_read_outside_of_the_layers_too():
    def loss(weights, x):
        y = run_layers(layer, x, weights)
        return (
            jnp.mean(y**2) + jnp.sum(weights["w"] ** 2) + jnp.sum(y @ weights["w"][0])
        )

    step = gradient_step(loss)
    check(step, (MANY, X), [2, 3], options=divided(step, (MANY, X), 2), exact=False)


def test_only_some_inputs_are_differentiated():
    def loss(trained, frozen, x):
        def body(x, p):
            w, b = p
            return x + jnp.tanh(x @ w + b[None, :]), None

        return jnp.mean(lax.scan(body, x, (frozen, trained))[0] ** 2)

    def step(trained, frozen, x):
        return jax.value_and_grad(stow(loss))(trained, frozen, x)

    args = MANY["b"], MANY["w"], X
    check(step, args, [2, 3], options=divided(step, args, 2))


def test_what_only_the_first_part_feeds_has_no_gradient_from_the_second():
    """Layers that the loss does not depend on have zeros for gradients."""

    def loss(weights, x):
        def body(carry, p):
            x, seen = carry
            x = layer(x, p)
            return (x, jnp.where(p["late"], seen, x)), None

        weights = weights | {"late": jnp.arange(LAYERS) >= 2}
        return jnp.mean(lax.scan(body, (x, x), weights)[0][1] ** 2)

    step = gradient_step(loss)
    check(step, (MANY, X), [2, 3], options=divided(step, (MANY, X), 2))


def test_microbatches_and_a_mark_used_twice():
    @stow
    def loss(weights, x):
        return jnp.mean(run_layers(layer, x, weights) ** 2)

    def step(weights, batches):
        def accumulate(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, x)), None

        start = jax.tree.map(jnp.zeros_like, weights)
        return lax.scan(accumulate, start, batches)[0]

    args = MANY, jnp.stack([X, 2 * X])
    check(step, args, [2, 3], options=divided(step, args, 2), exact=None)


def outputs_of_every_layer(weights, x):
    def body(x, p):
        x = layer(x, p)
        return x, jnp.sum(x)

    x, sums = lax.scan(body, x, weights)
    return jnp.mean(x**2) + jnp.mean(sums)


def from_the_end(weights, x):
    def body(x, p):
        return layer(x, p), None

    return jnp.mean(lax.scan(body, x, weights, reverse=True)[0] ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [outputs_of_every_layer, from_the_end])
def test_what_cannot_be_divided_stays_whole(loss):
    step = gradient_step(loss)
    options = divided(step, (MANY, X), 2)
    traced = check(step, (MANY, X), [LAYERS], options=options)
    (found,) = traced.stacks.values()
    assert not can_run_as_parts(found.stack)


def test_parts_say_where_they_are():
    step = gradient_step(lambda weights, x: jnp.mean(run_layers(layer, x, weights)))
    (whole,) = trace_step(step, (MANY, X), Options()).stacks.values()
    traced = trace_step(step, (MANY, X), divided(step, (MANY, X), 2))
    assert counts(traced) == [2, 3]
    first, second = (found.stack for found in traced.stacks.values())
    assert first.source == f"{whole.stack.source} (1 to 2 of 5)"
    assert second.source == f"{whole.stack.source} (3 to 5 of 5)"
    mine = dataclasses.replace(whole.stack, name="layers")
    assert [part.name for part in parts_of(mine, 2)] == ["layers_1", "layers_2"]


# --- plans ----------------------------------------------------------------------------

FILLED = {"layers": 8, "width": 512, "rows": 16384}
"""A layer's products and what is made of them are 128 MiB each, all of them 1 GiB."""


@functools.cache
def divided_plan(unrolled=False):
    """A plan for a budget that one more value of every layer does not fit into."""
    args = arguments(**FILLED, unrolled=unrolled)
    return args, plan(train, *args, budget=1750 * 2**20)


@pytest.mark.slow
@pytest.mark.parametrize("unrolled", [False, True], ids=["scan", "loop"])
def test_parts_fill_what_one_more_value_of_every_layer_does_not_fit_into(unrolled):
    args, found = divided_plan(unrolled)
    assert found.fits
    assert list(found.parts) == [stack.name.split("-")[0] for stack in found.stacks[:1]]
    first, second = found.stacks
    assert first.count == next(iter(found.parts.values()))
    assert first.count + second.count == FILLED["layers"]
    assert first.stored != second.stored
    # The trials are those of the whole stack first.
    whole = next(t for t in found.trials if t.compiled_bytes <= found.budget_bytes)
    assert found.device_bytes > whole.compiled_bytes
    assert found.step_seconds < 0.99 * whole.step_seconds
    assert compiled_total(found, train, *args) == found.device_bytes


@pytest.mark.slow
def test_parts_begin_with_what_the_whole_taught(monkeypatch):
    make, inherited, taught = _parts.InParts.__call__, _parts._inherited, []

    def makes(self, search, name, first_part):
        search.windows = {name: (1.0, 2.0)}
        search.nearly = search.attempts[-1]  # of other bodies: nothing for the parts
        other = make(self, search, name, first_part)
        assert other.nearly is None
        return other

    def inherits(other, search, best):
        found = inherited(other, search, best)
        taught.append((set(search.windows), dict(other.windows)))
        return found

    monkeypatch.setattr(_parts.InParts, "__call__", makes)
    monkeypatch.setattr(_parts, "_inherited", inherits)
    divided_plan.__wrapped__()  # not what other tests are given
    for (name,), windows in taught:
        assert windows == {f"{name}_1": (1.0, 2.0), f"{name}_2": (1.0, 2.0)}
    assert taught


@pytest.mark.parametrize(
    ("unfinished", "compiled", "most", "asked"),
    [(True, 3, 4, False), (False, 3, 4, True), (True, 2, 4, True), (True, 3, 6, True)],
)
def test_the_last_compile_is_for_what_the_whole_stack_still_wants(
    unfinished, compiled, most, asked, monkeypatch
):
    asks = []
    monkeypatch.setattr(_parts, "_most_promising", lambda *given: asks.append(given))
    best = types.SimpleNamespace(decisions=("keep",))
    survey = types.SimpleNamespace(tight=False, gradients_on_host=False, refused=())
    search = types.SimpleNamespace(
        survey=survey,
        fits=lambda attempt: True,
        log=[best] * compiled,
        is_unfinished=lambda: unfinished,
    )
    found = Found(search=search, best=best, rolled=search)
    assert _parts.in_parts(found, None, most) is found
    assert bool(asks) == asked


def test_copies_of_a_value_are_counted_for_the_part_that_makes_them():
    def copy(stack, trips, direction, what):
        return Transfer(
            direction=direction,
            bytes=10,
            trips=trips,
            asynchronous=True,
            start="",
            done="",
            computation="",
            op_name=f"jit(step)/while/body/stowax.{what}.{stack}.0/slice",
            source="",
        )

    parts = {"layers_1": 4, "layers_2": 12}
    transfers = [
        copy(stack, trips, direction, what)
        for stack, trips in parts.items()
        for direction, what in (
            ("device-to-host", "offload"),
            ("host-to-device", "fetch"),
        )
    ]
    decision = next(d for d in PLAN.decisions if d.decision == "offload")
    decisions = tuple(
        dataclasses.replace(decision, stack=stack, value=0, bytes=10, count=count)
        for stack, count in parts.items()
    )
    plan = dataclasses.replace(PLAN, decisions=decisions)
    found = copies_of(serving(transfers, plan), plan)
    assert [check.out_bytes for check in found] == [40, 120]
    assert [check.in_bytes for check in found] == [40, 120]
    assert all(check.as_planned for check in found)


@pytest.mark.slow
def test_a_plan_with_parts_says_so():
    _, found = divided_plan()
    text = str(found)
    assert "the layers run as two parts" in " ".join(text.split())
    assert "no plan with layers divided so is predicted below" in text
    for record in found.decisions:
        if record.role == "parameter":
            assert record.decision == "keep"
            assert "its layers run as two parts, which read one array" in record.reason


@pytest.mark.slow
def test_a_plan_with_parts_is_kept_in_a_file_and_computes_the_same(tmp_path):
    args = numbers(arguments(layers=8, rows=4096))
    found = plan(train, *args, target="cpu", budget=237 * 2**20, forbid=["offload"])
    assert found.parts
    found.save(tmp_path / "plan.json")
    loaded = stowax.load_plan(tmp_path / "plan.json")
    assert loaded.parts == found.parts
    expected = jax.jit(train)(*args)
    assert_close(loaded.apply(train)(*args), expected)
